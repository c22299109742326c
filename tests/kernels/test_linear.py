"""Products of bf16-rounded operands against sums in fp64, with and without bf16 instructions."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from triax import machine
from triax.kernels.dispatch import batch_invariant
from triax.kernels.linear import linear, linear_by_head, linear_fp32, operand

HALF_STEP = 2.0**-8  # bf16 keeps 8 significant bits, so rounding errs by this much of a value


def inputs(rows, width_in, width_out, seed=0, dtype=torch.float32):
    noise = torch.Generator().manual_seed(seed)
    shapes = {"hidden": (*rows, width_in), "weight": (width_out, width_in), "bias": (width_out,)}
    return {name: torch.randn(*s, generator=noise).to(dtype).requires_grad_() for name, s in shapes.items()}


def run(product, leaves, **autocast):
    with torch.autocast("cpu", torch.bfloat16, **autocast):
        output = product(*leaves.values())
    upstream = torch.randn(output.shape, generator=torch.Generator().manual_seed(1)).to(torch.bfloat16)
    return output, *torch.autograd.grad(output, list(leaves.values()), upstream.to(output.dtype))


def in_fp64(leaves):
    """The same with operands rounded to bf16 and everything after that in fp64."""
    wide = {name: leaf.detach().bfloat16().double().requires_grad_() for name, leaf in leaves.items()}
    return run(F.linear, wide, enabled=False)


@pytest.fixture
def without_bf16(monkeypatch):
    monkeypatch.setattr(machine, "has_bf16", lambda: False)


@given(
    rows=st.lists(st.integers(0, 7), min_size=1, max_size=2),
    widths=st.tuples(st.integers(1, 20), st.integers(1, 20)),
    seed=st.integers(0, 2**16),
)
@settings(max_examples=25)
def test_the_result_is_the_exact_product_of_rounded_operands_rounded_once(rows, widths, seed):
    leaves = inputs(rows, *widths, seed=seed)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(machine, "has_bf16", lambda: False)
        output, *gradients = run(linear, leaves)
    expected, *expected_gradients = in_fp64(leaves)
    assert output.dtype is torch.bfloat16
    torch.testing.assert_close(output.double(), expected.detach(), rtol=1.001 * HALF_STEP, atol=1e-5)
    for gradient, right in zip(gradients, expected_gradients, strict=True):
        assert gradient.dtype is torch.float32
        torch.testing.assert_close(gradient.double(), right, rtol=1e-5, atol=1e-4)


@pytest.mark.usefixtures("without_bf16")
def test_each_gradient_has_the_format_of_what_it_belongs_to():
    leaves = inputs([6], 5, 4)
    leaves["hidden"] = leaves["hidden"].detach().bfloat16().requires_grad_()
    _, *gradients = run(linear, leaves)
    assert [gradient.dtype for gradient in gradients] == [torch.bfloat16, torch.float32, torch.float32]


@pytest.mark.usefixtures("without_bf16")
def test_what_needs_no_gradient_gets_none_and_the_rest_is_unchanged():
    leaves = inputs([6], 5, 4)
    _, *expected = run(linear, leaves)
    for frozen in range(3):
        some = [leaf.detach().requires_grad_(i != frozen) for i, leaf in enumerate(leaves.values())]
        with torch.autocast("cpu", torch.bfloat16):
            output = linear(*some)
        upstream = torch.randn(output.shape, generator=torch.Generator().manual_seed(1)).bfloat16()
        output.backward(upstream)
        for i, leaf in enumerate(some):
            assert leaf.grad is None if i == frozen else torch.equal(leaf.grad, expected[i])


@pytest.mark.usefixtures("without_bf16")
@pytest.mark.parametrize("within", [True, False], ids=["within autocast", "after autocast"])
def test_the_backward_is_as_exact_inside_autocast_as_after_it(within):
    leaves = inputs([6], 5, 4)
    _, *expected = run(linear, leaves)
    with torch.autocast("cpu", torch.bfloat16):
        output = linear(*leaves.values())
        upstream = torch.randn(output.shape, generator=torch.Generator().manual_seed(1)).bfloat16()
        with torch.autocast("cpu", torch.bfloat16, enabled=within):
            gradients = torch.autograd.grad(output, list(leaves.values()), upstream)
    for gradient, right in zip(gradients, expected, strict=True):
        assert torch.equal(gradient, right)


@pytest.mark.parametrize(
    ("native", "dtype", "autocast"),
    [(True, torch.float32, True), (False, torch.float32, False), (False, torch.float64, True)],
    ids=["bf16 instructions", "no autocast", "fp64"],
)
def test_elsewhere_the_product_is_torchs_own_to_the_bit(native, dtype, autocast, monkeypatch):
    monkeypatch.setattr(machine, "has_bf16", lambda: native)
    leaves = inputs([6], 5, 4, dtype=dtype)
    for value, right in zip(
        run(linear, leaves, enabled=autocast), run(F.linear, leaves, enabled=autocast), strict=True
    ):
        assert value.dtype is right.dtype
        assert torch.equal(value, right)


@pytest.mark.parametrize("native", [True, False])
def test_an_operand_holds_the_rounded_numbers_in_the_format_that_is_multiplied(native, monkeypatch):
    monkeypatch.setattr(machine, "has_bf16", lambda: native)
    tensor = torch.randn(50)
    assert operand(tensor, torch.float32) is tensor
    rounded = operand(tensor, torch.bfloat16)
    assert rounded.dtype is (torch.bfloat16 if native else torch.float32)
    assert torch.equal(rounded.float(), tensor.bfloat16().float())


def test_each_head_is_multiplied_by_its_own_weight_and_alone_in_batch_invariant_mode():
    hidden, weight = torch.randn(40, 3, 16), torch.randn(3, 8, 16)
    expected = torch.stack([hidden[:, h] @ weight[h].T for h in range(3)], dim=1)
    torch.testing.assert_close(linear_by_head(hidden, weight), expected)
    with batch_invariant():
        whole, alone = linear_by_head(hidden, weight), linear_by_head(hidden[7:8], weight)
    torch.testing.assert_close(whole, expected)
    assert torch.equal(whole[7:8], alone)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_narrow_operands_give_products_that_are_not_rounded_to_their_format(dtype):
    hidden, weight = torch.randn(5, 64).to(dtype), torch.randn(6, 64).to(dtype)
    found = linear_fp32(hidden, weight)
    assert found.dtype is torch.promote_types(dtype, torch.float32)
    torch.testing.assert_close(found.double(), hidden.double() @ weight.double().T, rtol=1e-5, atol=1e-4)
