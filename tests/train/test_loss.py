"""The chunked loss equals the plain one and never holds all logits."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from triax.train import loss as module
from triax.train.loss import cross_entropy


def inputs(T, D, V, seed=0, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(T, D, generator=generator, dtype=dtype).requires_grad_()
    weight = torch.randn(V, D, generator=generator, dtype=dtype).requires_grad_()
    targets = torch.randint(V, (T,), generator=generator)
    targets[torch.rand(T, generator=generator) < 0.3] = -100
    return hidden, weight, targets


def plain(hidden, weight, targets):
    return F.cross_entropy(hidden @ weight.T, targets, reduction="sum", ignore_index=-100)


@settings(max_examples=25)
@given(T=st.integers(0, 23), V=st.integers(1, 17), per_chunk=st.integers(1, 60), seed=st.integers(0, 2**16))
def test_values_and_gradients_equal_the_plain_loss_for_any_chunk(T, V, per_chunk, seed):
    hidden, weight, targets = inputs(T, 5, V, seed)
    expected = plain(hidden, weight, targets)
    gradients = torch.autograd.grad(3 * expected, (hidden, weight))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "CHUNK_LOGITS", per_chunk)
        actual = cross_entropy(hidden, weight, targets)
    torch.testing.assert_close(actual, expected)
    torch.testing.assert_close(torch.autograd.grad(3 * actual, (hidden, weight)), gradients)


def test_gradient_matches_finite_differences(monkeypatch):
    monkeypatch.setattr(module, "CHUNK_LOGITS", 21)
    hidden, weight, targets = inputs(8, 4, 7)
    assert torch.autograd.gradcheck(lambda h, w: cross_entropy(h, w, targets), (hidden, weight))


def test_a_stream_without_trained_tokens_costs_nothing_and_has_zero_gradients():
    hidden, weight, targets = inputs(6, 4, 9)
    total = cross_entropy(hidden, weight, torch.full_like(targets, -100))
    gradients = torch.autograd.grad(total, (hidden, weight))
    assert total.item() == 0
    assert all(not g.any() for g in gradients)


def test_autocast_runs_products_in_bf16_and_statistics_in_fp32():
    hidden, weight, targets = inputs(64, 32, 50, dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        actual = cross_entropy(hidden, weight, targets)
    expected = plain(hidden.bfloat16().float(), weight.bfloat16().float(), targets)
    assert actual.dtype == torch.float32
    torch.testing.assert_close(actual, expected, rtol=4e-3, atol=0)
    assert actual.item() != plain(hidden, weight, targets).item()
    for got, want in zip(
        torch.autograd.grad(actual, (hidden, weight)),
        torch.autograd.grad(plain(hidden, weight, targets), (hidden, weight)),
        strict=True,
    ):
        assert got.dtype == torch.float32
        assert (got - want).norm() < 0.02 * want.norm()


@pytest.mark.parametrize("frozen", [0, 1])
def test_a_frozen_input_gets_no_gradient(frozen):
    hidden, weight, targets = inputs(6, 4, 9)
    (hidden, weight)[frozen].requires_grad_(False)
    cross_entropy(hidden, weight, targets).backward()
    assert ((hidden, weight)[frozen]).grad is None
    assert ((hidden, weight)[1 - frozen]).grad is not None


class _Largest(TorchDispatchMode):
    """Notes the most elements of any tensor that an operation returns."""

    elements = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **kwargs or {})
        for tensor in result if isinstance(result, tuple | list) else (result,):
            if isinstance(tensor, torch.Tensor):
                self.elements = max(self.elements, tensor.numel())
        return result


def test_no_tensor_ever_has_tokens_times_vocabulary_elements(monkeypatch):
    T, D, V = 256, 4, 300
    monkeypatch.setattr(module, "CHUNK_LOGITS", 16 * V)
    hidden, weight, targets = inputs(T, D, V, dtype=torch.float32)
    with _Largest() as largest:
        cross_entropy(hidden, weight, targets).backward()
    assert largest.elements == 16 * V


def test_evaluation_keeps_no_gradients():
    hidden, weight, targets = inputs(6, 4, 9)
    with torch.no_grad():
        total = cross_entropy(hidden, weight, targets)
    assert not total.requires_grad
    torch.testing.assert_close(total, plain(hidden, weight, targets).detach())
