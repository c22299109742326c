"""The chunk form against the recurrence: outputs, states and every gradient."""

import math
from itertools import accumulate, pairwise

import pytest
import torch
import torch.nn.functional as F

from triax.kernels.kda import kda, reference

TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-5}
NAMES = ("read", "state", "interior", "d_query", "d_key", "d_value", "d_log_decay", "d_beta", "d_state")


def inputs(lengths, heads=2, channels=16, width=8, dtype=torch.float64, log_decay=None, seed=0):
    """Inputs as a layer makes them; `log_decay` is a number for all, or random in (-5, 0)."""
    draw = torch.Generator().manual_seed(seed)
    tokens, num_sequences = sum(lengths), len(lengths)

    def normal(*shape):
        return torch.randn(*shape, dtype=torch.float64, generator=draw)

    gate = -5 * torch.sigmoid(2 * normal(tokens, heads, channels) - 1)
    x = {
        "query": F.normalize(normal(tokens, heads, channels), dim=-1) * channels**-0.5,
        "key": F.normalize(normal(tokens, heads, channels), dim=-1),
        "value": normal(tokens, heads, width),
        "log_decay": gate if log_decay is None else torch.full_like(gate, log_decay),
        "beta": torch.sigmoid(normal(tokens, heads)),
        "state": normal(num_sequences, heads, channels, width),
    }
    return {name: tensor.to(dtype) for name, tensor in x.items()}


def starts_of(lengths):
    return tuple(accumulate(lengths, initial=0))


def outcome(operation, x, lengths, states_at=(), weight_seed=1, **options):
    """Outputs and the gradients of a random weighting of all of them, by name."""
    leaves = {name: tensor.clone().requires_grad_() for name, tensor in x.items()}
    result = operation(*leaves.values(), starts_of(lengths), states_at=states_at, **options)
    draw = torch.Generator().manual_seed(weight_seed)
    loss = sum((y.double() * torch.randn(y.shape, dtype=torch.float64, generator=draw)).sum() for y in result)
    gradients = torch.autograd.grad(loss, list(leaves.values()), allow_unused=True, materialize_grads=True)
    return dict(zip(NAMES, (*result, *gradients), strict=True))


def errors(found, expected):
    """Largest relative error of each entry, by the norm; entries that should be nothing count absolutely."""
    return {
        name: ((found[name].double() - y).norm() / y.norm().clamp_min(1e-3)).item()
        for name, y in expected.items()
        if y.numel()
    }


def assert_matches(x, lengths, states_at=(), tolerance=None, **options):
    tolerance = tolerance or TOLERANCE[x["query"].dtype]
    expected = outcome(reference.kda, {name: t.double() for name, t in x.items()}, lengths, states_at)
    found = outcome(kda, x, lengths, states_at, **options)
    assert all(torch.isfinite(y).all() for y in found.values())
    wrong = {name: error for name, error in errors(found, expected).items() if not error < tolerance}
    assert not wrong, wrong
    return found, expected


@pytest.mark.parametrize("tokens", [0, 1, 15, 17, 33, 63, 65, 100])
@pytest.mark.parametrize("lowest_log_decay", [-5.0, -math.inf])
def test_any_number_of_tokens_equals_the_recurrence(tokens, lowest_log_decay):
    for dtype in TOLERANCE:
        assert_matches(inputs((tokens,), dtype=dtype), (tokens,), lowest_log_decay=lowest_log_decay)


@pytest.mark.parametrize("chunk", [16, 32, 64])
@pytest.mark.parametrize("lengths", [(64, 79), (79, 64), (1, 15), (0, 5, 0, 1), (33, 100, 17, 16, 1)])
def test_packed_sequences_equal_the_recurrence_one_by_one(chunk, lengths):
    for dtype, tolerance in TOLERANCE.items():
        x = inputs(lengths, channels=8, width=16, dtype=dtype, seed=chunk)
        found, expected = assert_matches(x, lengths, chunk=chunk, lowest_log_decay=-5.0)
        for first, end in pairwise(starts_of(lengths)):
            for name in ("d_key", "d_log_decay", "d_query", "d_value", "d_beta"):
                part = {name: found[name][first:end]}
                assert all(e < tolerance for e in errors(part, {name: expected[name][first:end]}).values()), name


@pytest.mark.parametrize("chunk", [16, 32, 64])
@pytest.mark.parametrize("log_decay", [-0.01, -1.0, -2.5, -3.0, -4.0, -5.0])
@pytest.mark.parametrize("lowest_log_decay", [-5.0, -math.inf])
def test_error_stays_flat_over_the_whole_gate_range(chunk, log_decay, lowest_log_decay):
    x = inputs((65,), heads=1, dtype=torch.float32, log_decay=log_decay)
    assert_matches(x, (65,), chunk=chunk, lowest_log_decay=lowest_log_decay, tolerance=3e-6)


@pytest.mark.parametrize("lowest_log_decay", [-0.5, -5.0, -7.0, -30.0, -math.inf])
def test_slow_and_fast_channels_live_side_by_side(lowest_log_decay):
    x = inputs((100, 29), dtype=torch.float32)
    slow = -torch.logspace(-5, math.log10(min(-lowest_log_decay, 60.0)), x["log_decay"].shape[2])
    x["log_decay"] = slow.expand_as(x["log_decay"])
    assert_matches(x, (100, 29), (50,), lowest_log_decay=lowest_log_decay)


def test_unbounded_gates_may_forget_at_once():
    x = inputs((90,), dtype=torch.float32)
    spread = torch.rand(x["log_decay"].shape, generator=torch.Generator().manual_seed(3))
    x["log_decay"] = torch.where(spread < 0.3, -60.0 * spread / 0.3, -0.01 * spread)
    assert_matches(x, (90,))


@pytest.mark.parametrize("chunk", [16, 64])
@pytest.mark.parametrize("cosine", [0.99, 1.0])
def test_near_equal_keys_do_not_cancel(chunk, cosine):
    x = inputs((128,), dtype=torch.float32, log_decay=-1e-3)
    one = F.normalize(torch.ones_like(x["key"]), dim=-1)
    x["key"] = F.normalize(cosine * one + (1 - cosine**2) ** 0.5 * x["key"], dim=-1)
    x["beta"] = 0.95 + 0.05 * torch.sigmoid(x["beta"])
    assert_matches(x, (128,), chunk=chunk, lowest_log_decay=-5.0, tolerance=3e-5)


@pytest.mark.parametrize("lowest_log_decay", [-5.0, -math.inf])
def test_states_inside_sequences_equal_the_recurrence(lowest_log_decay):
    lengths, places = (70, 0, 64, 35), (64, 1, 70, 134, 86, 169, 86)
    for dtype in TOLERANCE:
        assert_matches(inputs(lengths, dtype=dtype), lengths, places, lowest_log_decay=lowest_log_decay)


def test_one_token_for_each_sequence_equals_the_recurrence():
    for dtype in TOLERANCE:
        assert_matches(inputs((1,) * 5, dtype=dtype), (1,) * 5, (2, 5))
    x = inputs((1,) * 5)
    without = {**x, "state": torch.zeros_like(x["state"])}
    found = kda(*list(x.values())[:5], None, starts_of((1,) * 5))
    expected = reference.kda(*without.values(), starts_of((1,) * 5))
    torch.testing.assert_close(found.read, expected.read)
    torch.testing.assert_close(found.state, expected.state)


def test_no_state_means_empty_memory():
    x = inputs((40, 3))
    state = x.pop("state")
    none = kda(*x.values(), None, (0, 40, 43))
    zero = kda(*x.values(), torch.zeros_like(state), (0, 40, 43))
    assert torch.equal(none.read, zero.read)
    assert torch.equal(none.state, zero.state)


@pytest.mark.parametrize("lowest_log_decay", [-5.0, -math.inf])
def test_gradients_equal_finite_differences(lowest_log_decay):
    lengths = (0, 17)
    leaves = [t.requires_grad_() for t in inputs(lengths, heads=1, channels=2, width=2).values()]

    def operation(*tensors):
        return kda(*tensors, starts_of(lengths), states_at=(7,), lowest_log_decay=lowest_log_decay)

    assert torch.autograd.gradcheck(operation, leaves)


def test_half_precision_inputs_lose_only_their_own_rounding():
    x = inputs((70, 30), dtype=torch.bfloat16)
    x["state"] = x["state"].float()
    found, expected = assert_matches(x, (70, 30), (33,), lowest_log_decay=-5.0, tolerance=5e-3)
    assert found["read"].dtype == found["d_key"].dtype == torch.bfloat16
    assert found["state"].dtype == found["d_state"].dtype == torch.float32
    exact = {name: expected[name] for name in ("state", "interior", "d_state")}
    # The weights of the loss reach the read through its bf16 gradient, so d_state keeps that rounding too.
    assert errors(found, exact)["state"] < 1e-5
    assert errors(found, exact)["interior"] < 1e-5
