import pytest
import torch

from triax.errors import UnsupportedError
from triax.kernels.kda import reference
from triax.kernels.kda.decode import Projected, Records, Slots, Weights, recur, replay, step, verify
from triax.kernels.short_conv import short_conv
from triax.model.norm import normalize

BOUNDED, SOFTPLUS = -5.0, None


def weights(H=2, K=32, V=32, lowest=BOUNDED, device="cpu"):
    normal = lambda *shape: torch.randn(*shape, device=device)  # noqa: E731
    return Weights(normal((2 * K + V) * H, 4) / 2, normal(H) / 2, normal(H * K), 1 + normal(V) / 4, 1e-5, lowest)


def tokens(*rows, H=2, K=32, V=32, dtype=torch.float32, device="cpu"):
    shapes = [(2 * K + V) * H], [H, K], [H], [H, V]
    return Projected(*(torch.randn(*rows, *shape, device=device).to(dtype) for shape in shapes))


def slots(S, H=2, K=32, V=32, dtype=torch.float32, window=torch.float32, device="cpu"):
    state = torch.randn(S, H, K, V, device=device).to(dtype)
    return Slots(state, torch.randn(S, 3, (2 * K + V) * H, device=device).to(window))


def copy(memory):
    return Slots(memory.state.clone(), memory.window.clone())


def whole_layer(inputs, w, memory, slot):
    """What the training forms of the parts make of a sequence of tokens a row."""
    N, W, H, K = inputs.decay.shape
    starts = tuple(range(0, N * W + 1, W))
    flat = Projected(*(part.flatten(0, 1) for part in inputs))
    mixed, window = short_conv(flat.mixed, w.conv, memory.window[slot], starts)
    query, key, value = mixed.split([H * K, H * K, mixed.shape[1] - 2 * H * K], -1)
    query, key, value = (x.unflatten(-1, (H, -1)) for x in (query, key, value))
    z = flat.decay + w.decay_bias.view(H, K)
    rate = w.decay_rate.exp()[:, None]
    soft = -rate * torch.nn.functional.softplus(z)
    log_decay = soft if w.lowest_log_decay is None else w.lowest_log_decay * (rate * z).sigmoid()
    query, key = normalize(query, 1e-6 / K, 1 / K), normalize(key, 1e-6 / K, K**-0.5)
    result = reference.kda(query, key, value, log_decay, flat.beta.sigmoid(), memory.state[slot], starts)
    read = normalize(result.read, w.norm_eps) * w.norm * flat.gate.sigmoid()
    return read.unflatten(0, (N, W)), result.state, window


@pytest.mark.parametrize("lowest", [BOUNDED, SOFTPLUS])
def test_steps_give_what_the_parts_of_the_layer_give_over_whole_sequences(lowest):
    w, inputs, memory, slot = weights(lowest=lowest), tokens(3, 5), slots(6), torch.tensor([4, 1, 5])
    expected, state, window = whole_layer(inputs, w, memory, slot)
    for t in range(5):
        read = step(Projected(*(part[:, t] for part in inputs)), w, memory, slot)
        torch.testing.assert_close(read, expected[:, t], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(memory.state[slot], state, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(memory.window[slot], window, rtol=0, atol=0)


@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16])
def test_verified_and_replayed_tokens_leave_the_bits_of_single_steps(stored):
    w, inputs, slot = weights(), tokens(4, 4), torch.tensor([3, 0, 1, 6])
    memory, accepted = slots(7, dtype=stored), torch.tensor([0, 4, 4, 2])
    stepped, before = copy(memory), copy(memory)
    read, records = verify(inputs, w, memory, slot)
    assert torch.equal(memory.state, before.state)
    assert torch.equal(memory.window, before.window)
    for t in range(4):
        own = Projected(*(part[:, t] for part in inputs))
        rows = (accepted > t) & (slot > 0)
        tried = copy(stepped)
        step(own, w, stepped, torch.where(rows, slot, 0))
        assert torch.equal(read[rows, t], step(own, w, tried, slot)[rows])
    assert torch.equal(read[1], torch.zeros_like(read[1]))
    replay(records, accepted, memory, slot)
    assert torch.equal(memory.state, stepped.state)
    assert torch.equal(memory.window, stepped.window)


def test_pending_tokens_are_written_before_the_next_ones_are_tried():
    w, slot, accepted = weights(), torch.tensor([2, 1, 0]), torch.tensor([3, 0, 1])
    first, second, memory = tokens(3, 3), tokens(3, 2), slots(3)
    _, records = verify(first, w, memory, slot)
    apart = copy(memory)
    replay(records, accepted, apart, slot)
    expected, _ = verify(second, w, apart, slot)
    read, _ = verify(second, w, memory, slot, pending=records, accepted=accepted)
    assert torch.equal(read, expected)
    assert torch.equal(memory.state, apart.state)
    assert torch.equal(memory.window, apart.window)


def test_a_row_has_the_same_bits_alone_and_in_a_batch():
    w, inputs, slot = weights(), tokens(5), torch.tensor([2, 4, 1, 3, 5])
    memory = slots(6)
    alone = copy(memory)
    together = step(inputs, w, memory, slot)
    for row in range(5):
        read = step(Projected(*(part[row : row + 1] for part in inputs)), w, alone, slot[row : row + 1])
        assert torch.equal(read[0], together[row])
    assert torch.equal(alone.state, memory.state)


def test_padding_rows_return_zeros_and_touch_no_slot():
    w, inputs, memory = weights(), tokens(3), slots(3)
    memory.state[0] = memory.window[0] = torch.nan
    before = copy(memory)
    read = step(inputs, w, memory, torch.tensor([0, 2, 0]))
    assert torch.equal(read[[0, 2]], torch.zeros_like(read[[0, 2]]))
    assert read[1].isfinite().all()
    assert torch.equal(memory.state[1], before.state[1])
    assert memory.state[0].isnan().all()
    assert not torch.equal(memory.state[2], before.state[2])


def test_the_recurrence_alone_is_a_step_without_convolution_and_norm():
    w, inputs, memory, slot = weights(), tokens(2), slots(3), torch.tensor([2, 1])
    H, K = inputs.decay.shape[1:]
    query, key, value = (x.unflatten(-1, (H, K)) for x in inputs.mixed.chunk(3, -1))
    log_decay = -5.0 * (w.decay_rate.exp()[:, None] * (inputs.decay + w.decay_bias.view(H, K))).sigmoid()
    query, key = normalize(query, 1e-6 / K, 1 / K), normalize(key, 1e-6 / K, K**-0.5)
    expected = reference.kda(query, key, value, log_decay, inputs.beta.sigmoid(), memory.state[slot], (0, 1, 2))
    read = recur(inputs, w, memory.state, slot)
    torch.testing.assert_close(read, expected.read, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(memory.state[slot], expected.state, rtol=1e-4, atol=1e-5)


def test_tensors_that_do_not_fit_are_refused():
    memory = slots(3)
    with pytest.raises(UnsupportedError, match=r"inputs\.mixed"):
        step(tokens(2, K=16), weights(), memory, torch.tensor([1, 2]))
    with pytest.raises(ValueError, match="belong together"):
        verify(tokens(1, 2), weights(), memory, torch.tensor([1]), pending=Records(*[torch.zeros(1)] * 4))
