import gc

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.autograd import gradcheck

from triax.kernels import moe
from triax.kernels.moe import grouped, reference
from triax.kernels.routed import ExpertWeights, Routing
from triax.kernels.situ_glu import SituGlu

SITU, SWIGLU = SituGlu(4.0, 25.0), SituGlu()
WEIGHTS = ("gate", "up", "down")
NAMES = ["hidden", "share", "gate", "up", "down"]
TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-5, torch.bfloat16: 2e-2}


def inputs(T, k, E, L, F, seed=0, dtype=torch.float32, of=None):
    """Random leaves and a choice among the first `of` experts."""
    generator = torch.Generator().manual_seed(seed)
    leaves = {
        "hidden": torch.randn(T, L, generator=generator),
        "share": torch.rand(T, k, generator=generator),
        "gate": torch.randn(E, F, L, generator=generator) / L**0.5,
        "up": torch.randn(E, F, L, generator=generator) / L**0.5,
        "down": torch.randn(E, L, F, generator=generator) / F**0.5,
    }
    expert = torch.rand(T, of or E, generator=generator).argsort(-1)[:, :k]
    return {name: leaf.to(dtype).requires_grad_() for name, leaf in leaves.items()}, expert


def run(path, leaves, expert, activation=SITU):
    if path is moe:
        routing, weights = Routing(expert, leaves["share"]), ExpertWeights(*(leaves[name] for name in WEIGHTS))
        output = moe.experts(leaves["hidden"], routing, weights, activation)
    else:
        output = path.experts(expert=expert, activation=activation, **leaves)
    weight = torch.randn(output.shape, generator=torch.Generator().manual_seed(1)).to(output.device)
    gradients = torch.autograd.grad((output.float() * weight).sum(), list(leaves.values()))
    return {"output": output.detach(), **dict(zip(leaves, gradients, strict=True))}


def assert_same(got, expected, dtype):
    for name, right in expected.items():
        size = right.abs().max().clamp(min=1).item() if right.numel() else 1.0
        torch.testing.assert_close(
            got[name].to(right.dtype),
            right,
            rtol=TOLERANCE[dtype],
            atol=TOLERANCE[dtype] * size,
            msg=lambda m, n=name: f"{n}: {m}",
        )


@pytest.mark.parametrize("activation", [SITU, SWIGLU])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("sides", [(8, 16), (5, 3)], ids=["aligned", "unaligned"])
def test_output_and_all_gradients_equal_the_definition(sides, dtype, activation):
    leaves, expert = inputs(37, 3, 6, *sides, dtype=dtype)
    assert_same(run(grouped, leaves, expert, activation), run(reference, leaves, expert, activation), dtype)


@given(
    T=st.integers(0, 12), E=st.integers(1, 6), k=st.integers(1, 6), aligned=st.booleans(), seed=st.integers(0, 2**16)
)
def test_any_choice_of_experts_gives_the_definition(T, E, k, aligned, seed):
    leaves, expert = inputs(T, min(k, E), E, *((8, 4) if aligned else (3, 2)), seed=seed)
    assert_same(run(grouped, leaves, expert), run(reference, leaves, expert), torch.float32)


def test_gradients_are_exact():
    leaves, expert = inputs(5, 2, 3, 4, 3, dtype=torch.float64)
    assert gradcheck(
        lambda *values: grouped.experts(expert=expert, activation=SITU, **dict(zip(leaves, values, strict=True))),
        tuple(leaves.values()),
    )


@pytest.mark.parametrize("sides", [(8, 16), (5, 3)], ids=["aligned", "unaligned"])
def test_experts_without_tokens_get_zero_gradients_whatever_the_memory_held(sides):
    leaves, expert = inputs(16, 2, 8, *sides, of=2)
    for _ in range(3):
        garbage = [torch.full((8, *shape), float("nan")) for shape in [sides, sides[::-1]] for _ in range(8)]
        del garbage
        gc.collect()
        got = run(grouped, leaves, expert)
        for name in ["gate", "up", "down"]:
            assert torch.equal(got[name][2:], torch.zeros_like(got[name][2:])), name
            assert (got[name][:2].flatten(1).abs().amax(1) > 0).all(), name


def test_no_tokens_give_an_empty_output_and_zero_gradients():
    leaves, expert = inputs(0, 2, 4, 8, 8)
    got = run(grouped, leaves, expert)
    assert got["output"].shape == (0, 8)
    assert all(not got[name].any() for name in ["gate", "up", "down"])


def test_two_runs_agree_bit_for_bit():
    leaves, expert = inputs(200, 4, 8, 16, 16)
    first, second = run(grouped, leaves, expert), run(grouped, leaves, expert)
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_renaming_the_experts_changes_nothing():
    leaves, expert = inputs(30, 2, 5, 8, 8)
    order = torch.tensor([3, 0, 4, 1, 2])
    renamed = {n: (t[order].detach().requires_grad_() if t.dim() == 3 else t) for n, t in leaves.items()}
    output = grouped.experts(expert=expert, activation=SITU, **leaves)
    again = grouped.experts(expert=order.argsort()[expert], activation=SITU, **renamed)
    torch.testing.assert_close(again, output)


@pytest.mark.parametrize("native", [True, False])
def test_under_autocast_products_are_cast_and_gradients_come_back_in_fp32(native, monkeypatch):
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"avx512_bf16": native})
    leaves, expert = inputs(40, 2, 4, 16, 8)
    expected = run(reference, leaves, expert)
    with torch.autocast("cpu", torch.bfloat16):
        got = run(grouped, leaves, expert)
    assert got["output"].dtype is torch.bfloat16
    assert all(got[name].dtype is torch.float32 for name in NAMES)
    assert_same(got, expected, torch.bfloat16)


def test_bf16_weights_and_input_stay_bf16():
    leaves, expert = inputs(40, 2, 4, 16, 8, dtype=torch.bfloat16)
    leaves["share"] = leaves["share"].detach().float().requires_grad_()
    got = run(grouped, leaves, expert)
    expected = run(reference, {n: t.detach().float().requires_grad_() for n, t in leaves.items()}, expert)
    assert {n: t.dtype for n, t in got.items()} == {"output": torch.bfloat16} | {n: t.dtype for n, t in leaves.items()}
    assert_same(got, expected, torch.bfloat16)


def test_frozen_weights_get_no_gradient_and_the_rest_is_unchanged():
    leaves, expert = inputs(20, 2, 4, 8, 8)
    expected = run(grouped, leaves, expert)
    for frozen in NAMES:
        some = {n: t.detach().requires_grad_(n != frozen) for n, t in leaves.items()}
        grouped.experts(expert=expert, activation=SITU, **some).backward(
            torch.randn(20, 8, generator=torch.Generator().manual_seed(1))
        )
        assert some[frozen].grad is None
        for name in set(NAMES) - {frozen}:
            torch.testing.assert_close(some[name].grad, expected[name])


def test_what_is_kept_grows_with_the_inner_width_and_not_with_gathered_inputs():
    T, k, E, L, F = 64, 4, 8, 32, 16
    leaves, expert = inputs(T, k, E, L, F)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        grouped.experts(expert=expert, activation=SITU, **leaves)
    floats = sum(t.numel() for t in kept if t.is_floating_point() and not any(t is leaf for leaf in leaves.values()))
    weights = 3 * E * F * L
    assert floats <= weights + T * L + T * k + 2 * T * k * F


def test_the_definition_can_be_forced(monkeypatch):
    leaves, expert = inputs(9, 2, 4, 8, 8)
    fast = run(moe, leaves, expert)["output"]
    monkeypatch.setenv("TRIAX_KERNELS", "reference")
    forced = run(moe, leaves, expert)["output"]
    assert torch.equal(forced, reference.experts(expert=expert, activation=SITU, **leaves).detach())
    torch.testing.assert_close(fast, forced)


@pytest.mark.gpu
def test_gpu_gives_the_definition_in_bf16():
    leaves, expert = inputs(300, 4, 16, 64, 32, dtype=torch.bfloat16, of=12)
    expected = run(reference, {n: t.detach().float().requires_grad_() for n, t in leaves.items()}, expert)
    on_gpu = {n: t.detach().cuda().requires_grad_() for n, t in leaves.items()}
    torch.full((2**24,), float("nan"), device="cuda")  # freed at once: what the products are handed is not zero
    got = {n: t.cpu() for n, t in run(grouped, on_gpu, expert.cuda()).items()}
    assert all(not got[name][12:].any() for name in ["gate", "up", "down"])
    assert_same(got, expected, torch.bfloat16)
