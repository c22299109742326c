"""The lean mix against its definition: values, weights, gradients, memory."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from triax.kernels import attention_residual
from triax.kernels.attention_residual import lean, reference


def inputs(num_sources, length, width, dtype=torch.float64, seed=0):
    noise = torch.Generator().manual_seed(seed)

    def draw(*shape):
        return torch.randn(*shape, generator=noise, dtype=torch.float64).to(dtype).requires_grad_()

    return [draw(length, width) for _ in range(num_sources)], draw(width), draw(width)


@given(num_sources=st.integers(1, 5), length=st.integers(0, 9), seed=st.integers(0, 2**16))
@settings(max_examples=15)
def test_values_and_gradients_equal_the_definition(num_sources, length, seed):
    sources, norm, query = inputs(num_sources, length, 6, seed=seed)
    probe = torch.randn(length, 6, dtype=torch.float64)
    results = []
    for path in (reference, lean):
        mixed, weight = path.mix(sources, norm, query, 1e-5)
        gradients = torch.autograd.grad((mixed * probe).sum(), [*sources, norm, query])
        results.append((mixed, weight, *gradients))
    torch.testing.assert_close(results[1], results[0], rtol=1e-10, atol=1e-10)


def test_gradients_equal_finite_differences_across_token_blocks(monkeypatch):
    monkeypatch.setattr(lean, "BLOCK_VALUES", 8)
    sources, norm, query = inputs(3, 5, 4)
    assert torch.autograd.gradcheck(lambda n, q, *s: lean.mix(s, n, q, 1e-5)[0], (norm, query, *sources))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_scores_are_computed_in_fp32_whatever_the_sources_are(dtype):
    sources, norm, query = inputs(4, 33, 64, dtype)
    exact, exact_weight = reference.mix([s.double() for s in sources], norm.double(), query.double(), 1e-5)
    for device_cast in (False, True):
        with torch.autocast("cpu", torch.bfloat16, enabled=device_cast):
            mixed, weight = lean.mix(sources, norm, query, 1e-5)
        assert mixed.dtype is dtype
        assert weight.dtype is torch.float32
        torch.testing.assert_close(weight.double(), exact_weight, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(mixed.double(), exact, rtol=4 * torch.finfo(dtype).eps, atol=1e-2)


def test_a_few_tokens_without_gradient_take_the_stacked_path_and_agree():
    sources, norm, query = inputs(3, 2, 8)
    kept, _ = lean.mix(sources, norm, query, 1e-5)
    with torch.no_grad():
        quick, _ = lean.mix(sources, norm, query, 1e-5)
    torch.testing.assert_close(quick, kept)


def test_only_references_and_scalars_are_saved():
    sources, norm, query = inputs(8, 50, 16, torch.float32)
    saved = []

    def note(tensor):
        saved.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        lean.mix(sources, norm, query, 1e-5)
    own = {source.data_ptr() for source in sources}
    extra = sum(tensor.numel() for tensor in saved if tensor.data_ptr() not in own)
    assert extra <= 3 * 8 * 50 + 4 * 16


def test_the_definition_can_be_forced(monkeypatch):
    sources, norm, query = inputs(2, 3, 4)
    fast = attention_residual.mix(sources, norm, query, 1e-5)[0]
    monkeypatch.setenv("TRIAX_KERNELS", "reference")
    assert "_Mix" in type(fast.grad_fn).__name__
    assert "_Mix" not in type(attention_residual.mix(sources, norm, query, 1e-5)[0].grad_fn).__name__
