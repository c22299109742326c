import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.autograd import gradcheck

from triax.config.model import Situ, Swiglu
from triax.kernels.situ_glu import reference
from triax.model.situ_glu import activation_of, glu

ACTIVATIONS = [Situ(), Situ(gate_cap=1.0, up_cap=None), Situ(gate_cap=0.5, up_cap=2.0), Swiglu()]
EXTREME = torch.tensor(
    [0.0, 1e-30, -1e-30, 1e-4, -1e-4, 20.0, -20.0, 88.0, -88.0, 200.0, -200.0, 1e6, -1e6, 3e38, -3e38]
)


@pytest.mark.parametrize("activation", ACTIVATIONS, ids=repr)
def test_value_is_the_definition_also_far_out(activation):
    gate, up = (side.flatten().contiguous() for side in torch.meshgrid(EXTREME, EXTREME, indexing="ij"))
    if isinstance(activation, Swiglu) or activation.up_cap is None:
        gate, up = gate.clamp(-1e6, 1e6), up.clamp(-1e6, 1e6)
    caps = activation_of(activation)
    expected = reference.glu(gate.double(), up.double(), caps.gate_cap, caps.up_cap).float()
    torch.testing.assert_close(glu(gate, up, activation), expected, rtol=3e-6, atol=1e-37)


@pytest.mark.parametrize("activation", ACTIVATIONS, ids=repr)
def test_small_values_keep_their_relative_precision(activation):
    gate, up = torch.logspace(-8, 1, 400), -torch.logspace(-8, 1, 400)
    caps = activation_of(activation)
    expected = reference.glu(gate.double(), up.double(), caps.gate_cap, caps.up_cap).float()
    torch.testing.assert_close(glu(gate, up, activation), expected, rtol=2e-6, atol=0)


def test_situ_is_bounded_by_the_product_of_its_caps():
    gate, up = torch.randn(1000) * 1e3, torch.randn(1000) * 1e3
    value = glu(torch.cat([gate, EXTREME]), torch.cat([up, EXTREME]), Situ())
    assert value.abs().max() <= 100
    assert glu(torch.tensor([1e4]), torch.tensor([-1e4]), Situ()).item() == -100
    assert value.isfinite().all()


def test_without_caps_in_reach_situ_is_swiglu():
    gate, up = torch.randn(2, 500, dtype=torch.float64) * 3
    wide = Situ(gate_cap=1e6, up_cap=1e6)
    torch.testing.assert_close(glu(gate, up, wide), glu(gate, up, Swiglu()), rtol=1e-9, atol=1e-10)
    torch.testing.assert_close(glu(gate, up, Swiglu()), torch.nn.functional.silu(gate) * up)


@pytest.mark.parametrize("activation", ACTIVATIONS, ids=repr)
def test_gradient_is_exact(activation):
    gate, up = (torch.randn(2, 12, dtype=torch.float64) * 4).requires_grad_().unbind()
    assert gradcheck(lambda g, u: glu(g, u, activation), (gate, up))


@pytest.mark.parametrize("activation", ACTIVATIONS, ids=repr)
@given(seed=st.integers(0, 2**16))
def test_gradient_matches_the_definition_in_fp32(activation, seed):
    generator = torch.Generator().manual_seed(seed)
    gate, up = torch.randn(2, 3, 7, generator=generator) * 5
    weight = torch.randn(3, 7, generator=generator)
    caps = activation_of(activation)
    ours = [gate.clone().requires_grad_(), up.clone().requires_grad_()]
    theirs = [gate.double().requires_grad_(), up.double().requires_grad_()]
    got = torch.autograd.grad((glu(*ours, activation) * weight).sum(), ours)
    expected = torch.autograd.grad((reference.glu(*theirs, caps.gate_cap, caps.up_cap) * weight).sum(), theirs)
    for mine, right in zip(got, expected, strict=True):
        torch.testing.assert_close(mine, right.float(), rtol=2e-5, atol=2e-5)


def test_gradients_stay_finite_far_out():
    gate, up = EXTREME.clone().requires_grad_(), EXTREME.flip(0).clone().requires_grad_()
    glu(gate, up, Situ()).sum().backward()
    assert gate.grad.isfinite().all()
    assert up.grad.isfinite().all()


def test_bf16_is_computed_in_fp32_and_cast_back():
    gate, up = torch.randn(2, 200).mul(3).bfloat16()
    value = glu(gate, up, Situ())
    assert value.dtype is torch.bfloat16
    assert torch.equal(value, glu(gate.float(), up.float(), Situ()).bfloat16())


def test_only_the_two_inputs_are_kept_for_the_backward():
    gate, up = torch.randn(5, 6, requires_grad=True), torch.randn(5, 6, requires_grad=True)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        glu(gate, up, Situ())
    assert {t.data_ptr() for t in kept} == {gate.data_ptr(), up.data_ptr()}


def test_the_definition_can_be_forced(monkeypatch):
    monkeypatch.setenv("TRIAX_KERNELS", "reference")
    gate, up = torch.randn(2, 50)
    assert torch.equal(glu(gate, up, Situ()), reference.glu(gate, up, 4.0, 25.0))
