"""What the systems above lean on: cuts, causality, isolation, memory, precision and refusals."""

import inspect
import math
from itertools import accumulate, pairwise

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from triax.errors import UnsupportedError
from triax.kernels.kda import kda, reference, segment_map
from triax.kernels.kda.chunk import kda_chunk, kda_chunk_backward
from triax.kernels.kda.tiles import unit_lower_inverse


def inputs(tokens, heads=2, channels=8, width=4, dtype=torch.float64, seed=0):
    draw = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(*shape, dtype=torch.float64, generator=draw)

    x = {
        "query": F.normalize(normal(tokens, heads, channels), dim=-1),
        "key": F.normalize(normal(tokens, heads, channels), dim=-1),
        "value": normal(tokens, heads, width),
        "log_decay": -5 * torch.sigmoid(3 * normal(tokens, heads, channels)),
        "beta": torch.sigmoid(normal(tokens, heads)),
    }
    return {name: tensor.to(dtype) for name, tensor in x.items()}


def cut(x, first, end):
    return [tensor[first:end] for tensor in x.values()]


@given(tokens=st.integers(1, 80), place=st.integers(0, 80), bounded=st.booleans(), seed=st.integers(0, 99))
def test_a_sequence_may_be_cut_anywhere(tokens, place, bounded, seed):
    place, lowest = min(place, tokens), -5.0 if bounded else -math.inf
    x = inputs(tokens, seed=seed)
    state = torch.randn(1, 2, 8, 4, dtype=torch.float64)
    whole = kda(*x.values(), state, (0, tokens), lowest_log_decay=lowest)
    head = kda(*cut(x, 0, place), state, (0, place), lowest_log_decay=lowest)
    tail = kda(*cut(x, place, tokens), head.state, (0, tokens - place), lowest_log_decay=lowest)
    torch.testing.assert_close(torch.cat((head.read, tail.read)), whole.read, rtol=1e-11, atol=1e-12)
    torch.testing.assert_close(tail.state, whole.state, rtol=1e-11, atol=1e-12)
    if place:
        marked = kda(*x.values(), state, (0, tokens), lowest_log_decay=lowest, states_at=(place,))
        torch.testing.assert_close(marked.interior, head.state, rtol=1e-11, atol=1e-12)


@given(lengths=st.lists(st.integers(0, 40), max_size=5), heads=st.integers(1, 3), seed=st.integers(0, 99))
def test_sequences_do_not_see_each_other(lengths, heads, seed):
    starts = tuple(accumulate(lengths, initial=0))
    x = inputs(starts[-1], heads=heads, seed=seed)
    state = torch.randn(len(lengths), heads, 8, 4, dtype=torch.float64)
    together = kda(*x.values(), state, starts, lowest_log_decay=-5.0)
    assert together.state.shape == state.shape
    for n, (first, end) in enumerate(pairwise(starts)):
        alone = kda(*cut(x, first, end), state[n : n + 1], (0, end - first), lowest_log_decay=-5.0)
        torch.testing.assert_close(together.read[first:end], alone.read, rtol=1e-11, atol=1e-12)
        torch.testing.assert_close(together.state[n], alone.state[0], rtol=1e-11, atol=1e-12)


@settings(max_examples=8)
@given(now=st.integers(0, 68), chunk=st.sampled_from([16, 32]), bounded=st.booleans(), seed=st.integers(0, 99))
def test_a_token_never_sees_the_future(now, chunk, bounded, seed):
    options = {"chunk": chunk, "lowest_log_decay": -5.0 if bounded else -math.inf}
    x = {name: t.requires_grad_() for name, t in inputs(70, dtype=torch.float32, seed=seed).items()}
    read = kda(*x.values(), None, (0, 70), **options).read
    future = {name: t.detach().clone() for name, t in x.items()}
    future["key"][now + 1 :].neg_()  # stays of unit norm: longer keys diverge, in the recurrence too
    for name, poison in {"query": 1e6, "value": 1e20, "log_decay": -5.0, "beta": 1.0}.items():
        future[name][now + 1 :] = poison
    assert torch.equal(kda(*future.values(), None, (0, 70), **options).read[: now + 1], read[: now + 1])
    for gradient in torch.autograd.grad(read[: now + 1].square().sum(), list(x.values())):
        assert torch.isfinite(gradient).all()
        assert not gradient[now + 1 :].any()


@pytest.mark.parametrize("tokens", [1, 15, 17, 63, 65, 100])
def test_memory_around_the_inputs_does_not_matter(tokens):
    x = inputs(tokens, channels=12, width=5, dtype=torch.float32)

    def inside_nan(tensor):
        room = torch.full([n + 3 for n in tensor.shape], float("nan"))
        view = room[tuple(slice(1, n + 1) for n in tensor.shape)]
        view.copy_(tensor)
        return view.requires_grad_()

    views = [inside_nan(t) for t in x.values()]
    plain = [t.clone().requires_grad_() for t in x.values()]
    found, expected = (kda(*leaves, None, (0, tokens), lowest_log_decay=-5.0) for leaves in (views, plain))
    assert torch.equal(found.read, expected.read)
    assert torch.equal(found.state, expected.state)
    weight = torch.randn_like(found.read)
    for a, b in zip(
        torch.autograd.grad((found.read * weight).sum() + found.state.sum(), views),
        torch.autograd.grad((expected.read * weight).sum() + expected.state.sum(), plain),
        strict=True,
    ):
        assert torch.equal(a, b)


def test_a_full_write_is_read_back_exactly():
    x = inputs(40, dtype=torch.float64)
    x["beta"] = torch.ones_like(x["beta"])
    x["query"] = x["key"]
    read = kda(*x.values(), None, (0, 40), lowest_log_decay=-5.0).read
    torch.testing.assert_close(read, x["value"], rtol=1e-10, atol=1e-10)


def test_empty_queries_and_keys_read_and_write_nothing():
    x = inputs(50, dtype=torch.float32)
    x["query"], x["key"] = torch.zeros_like(x["query"]), torch.zeros_like(x["key"])
    leaves = [t.requires_grad_() for t in x.values()]
    result = kda(*leaves, None, (0, 50), lowest_log_decay=-5.0)
    assert not result.read.any()
    assert not result.state.any()
    for gradient in torch.autograd.grad(result.read.sum() + result.state.sum(), leaves):
        assert torch.isfinite(gradient).all()


@pytest.mark.parametrize("lengths", [(), (0,), (0, 0)])
def test_a_stream_without_tokens_hands_its_states_through(lengths):
    leaves = [t.requires_grad_() for t in inputs(0).values()]
    state = torch.randn(len(lengths), 2, 8, 4, dtype=torch.float64, requires_grad=True)
    result = kda(*leaves, state, tuple(accumulate(lengths, initial=0)))
    assert result.read.shape == (0, 2, 4)
    assert torch.equal(result.state, state)
    assert torch.equal(torch.autograd.grad(result.state.sum(), state)[0], torch.ones_like(state))


def test_small_gradients_under_the_fastest_gate_keep_their_precision():
    x = inputs(40, dtype=torch.float32)
    x["log_decay"] = torch.full_like(x["log_decay"], -5.0)
    weight = torch.randn(40, 2, 4)
    for scale in (1e-12, 1e12):
        leaves = [t.clone().requires_grad_() for t in x.values()]
        exact = [t.double().requires_grad_() for t in x.values()]
        found = kda(*leaves, None, (0, 40), lowest_log_decay=-5.0).read
        expected = reference.kda(*exact, None, (0, 40)).read
        for a, b in zip(
            torch.autograd.grad((found * weight * scale).sum(), leaves),
            torch.autograd.grad((expected * weight * scale).sum(), exact),
            strict=True,
        ):
            assert (a.double() - b).norm() < 1e-5 * b.norm()


def test_autocast_changes_nothing():
    def run():
        leaves = [t.requires_grad_() for t in inputs(50, dtype=torch.float32).values()]
        result = kda(*leaves, None, (0, 20, 50), lowest_log_decay=-5.0)
        return [*result, *torch.autograd.grad(result.read.sum() + result.state.sum(), leaves)]

    plain = run()
    with torch.autocast("cpu", torch.bfloat16):
        cast = run()
    assert all(torch.equal(a, b) for a, b in zip(plain, cast, strict=True))


def test_only_inputs_and_chunk_states_are_kept_for_the_backward_pass():
    tokens, chunk = 256, 32
    leaves = [t.requires_grad_() for t in inputs(tokens, dtype=torch.float32).values()]
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t.numel()) or t, lambda t: t):
        kda(*leaves, None, (0, tokens), chunk=chunk, lowest_log_decay=-5.0)
    assert sum(kept) == sum(t.numel() for t in leaves) + (tokens // chunk + 1) * 2 * 8 * 4


class Largest(TorchDispatchMode):
    """Notes the most elements of any tensor that an operation returned."""

    numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, (tuple, list)) else [result]:
            if isinstance(tensor, torch.Tensor):
                self.numel = max(self.numel, tensor.untyped_storage().nbytes() // tensor.element_size())
        return result


@pytest.mark.parametrize("lowest_log_decay", [-5.0, -math.inf])
def test_no_tensor_holds_a_channel_for_each_pair_of_tokens(lowest_log_decay):
    tokens, channels = 64, 64
    leaves = [t.requires_grad_() for t in inputs(tokens, heads=1, channels=channels, width=64).values()]
    with Largest() as largest:
        read = kda(*leaves, None, (0, tokens), chunk=64, lowest_log_decay=lowest_log_decay).read
        torch.autograd.grad(read.sum(), leaves)
    assert largest.numel <= 2 * tokens * channels


@pytest.mark.parametrize("rows", [16, 32, 64])
def test_the_inverse_is_exact_where_powers_would_cancel(rows):
    lower = torch.full((3, rows, rows), 0.99, dtype=torch.float32).tril(-1)
    exact = torch.linalg.inv(lower.double() + torch.eye(rows, dtype=torch.float64))
    assert (unit_lower_inverse(lower).double() - exact).abs().max() < 1e-6


@given(place=st.integers(0, 50), seed=st.integers(0, 99))
def test_segments_compose(place, seed):
    x = inputs(50, seed=seed)
    state = torch.randn(1, 2, 8, 4, dtype=torch.float64)
    whole = kda(*x.values(), state, (0, 50), lowest_log_decay=-5.0).state
    del x["query"]
    first = segment_map(*cut(x, 0, place), (0, place), lowest_log_decay=-5.0)
    second = segment_map(*cut(x, place, 50), (0, 50 - place), lowest_log_decay=-5.0)
    keep, add = second.keep @ first.keep, second.keep @ first.add + second.add
    torch.testing.assert_close(keep @ state + add, whole, rtol=1e-10, atol=1e-11)


def test_the_environment_can_force_the_definition(monkeypatch):
    x = inputs(40, dtype=torch.float32)
    expected = reference.kda(*x.values(), None, (0, 40))
    assert not torch.equal(kda(*x.values(), None, (0, 40)).read, expected.read)
    monkeypatch.setenv("TRIAX_KERNELS", "reference")
    assert torch.equal(kda(*x.values(), None, (0, 40)).read, expected.read)


@pytest.mark.parametrize("tokens", [1, 40])
def test_value_heads_in_a_row_may_share_a_query_and_a_key(tokens):
    x = inputs(tokens, heads=4)
    shared = {**x, "query": x["query"][:, ::2], "key": x["key"][:, ::2]}
    repeated = {name: shared[name].repeat_interleave(2, 1) for name in ("query", "key")}
    found = kda(*shared.values(), None, (0, tokens))
    expected = kda(*{**x, **repeated}.values(), None, (0, tokens))
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
    exact = reference.kda(*shared.values(), None, (0, tokens))
    torch.testing.assert_close(found.read, exact.read, rtol=1e-9, atol=1e-10)
    maps = segment_map(*list(shared.values())[1:], (0, tokens))
    torch.testing.assert_close(maps.add, expected.state, rtol=1e-9, atol=1e-10)


def test_shapes_that_disagree_are_refused_by_name():
    unchecked = inspect.unwrap(kda)  # the shape hook of the tests would refuse first
    x = inputs(17, heads=2)
    with pytest.raises(UnsupportedError, match=r"`value` does not fit `key`.*3 heads of values and 2 of keys"):
        unchecked(*{**x, "value": torch.zeros(17, 3, 4)}.values(), None, (0, 17))
    with pytest.raises(UnsupportedError, match=r"`beta` does not fit"):
        unchecked(*{**x, "beta": torch.zeros(17, 4)}.values(), None, (0, 17))
    with pytest.raises(UnsupportedError, match=r"`state` does not fit.*1 sequences"):
        unchecked(*x.values(), torch.zeros(2, 2, 8, 4), (0, 17))
    with pytest.raises(UnsupportedError, match=r"`starts` does not cover.*17 tokens"):
        unchecked(*x.values(), None, (0, 16))


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"starts": (0, 12, 9, 17)}, "starts"),
        ({"starts": (1, 17)}, "starts"),
        ({"states_at": (18,)}, "states_at"),
        ({"states_at": (0,)}, "states_at"),
        ({"lowest_log_decay": 0.5}, "lowest_log_decay"),
        ({"lowest_log_decay": math.nan}, "lowest_log_decay"),
        ({"chunk": 24}, "chunk"),
    ],
)
def test_impossible_numbers_are_refused_by_name(options, name):
    with pytest.raises(ValueError, match=f"`{name}`"):
        kda(*inputs(17).values(), None, **{"starts": (0, 17), **options})


@pytest.mark.parametrize("states_at", [(), (20, 30, 17)])
def test_the_operators_keep_what_they_promise_to_a_compiler(states_at):
    leaves = [t.requires_grad_() for t in inputs(50, dtype=torch.float32).values()]
    state = torch.randn(3, 2, 8, 4, requires_grad=True)
    numbers = ((0, 20, 20, 50), states_at, -5.0, 16, 64)
    checks = ("test_schema", "test_faketensor", "test_autograd_registration")
    torch.library.opcheck(kda_chunk, (*leaves, state, *numbers), test_utils=checks)
    with torch.no_grad():
        *gradients, states = kda_chunk(*leaves, state, *numbers)
    plain = [t.detach() for t in leaves]
    torch.library.opcheck(kda_chunk_backward, (*plain, states, *gradients, *numbers), test_utils=checks[:2])


@pytest.mark.compiled
def test_a_compiled_model_holds_the_operation_whole():
    def read(*tensors):
        return 2 * kda(*tensors, None, (0, 20, 50), lowest_log_decay=-5.0).read

    leaves = [t.requires_grad_() for t in inputs(50, dtype=torch.float32).values()]
    compiled = torch.compile(read, fullgraph=True, backend="aot_eager")(*leaves)
    assert torch.equal(compiled, read(*leaves))
    for a, b in zip(
        torch.autograd.grad(compiled.square().sum(), leaves),
        torch.autograd.grad(read(*leaves).square().sum(), leaves),
        strict=True,
    ):
        assert torch.equal(a, b)
