import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.optim._muon import _zeropower_via_newtonschulz as torch_newton_schulz

from triax.kernels.newton_schulz import batched, orthogonalize, reference

SHAPES = st.tuples(st.integers(1, 5), st.integers(1, 12), st.integers(1, 40))


def random(*shape, seed=0, dtype=torch.float64):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


@given(shape=SHAPES, seed=st.integers(0, 2**16), steps=st.integers(0, 5))
def test_both_forms_equal_the_definition_for_tall_and_wide_matrices(shape, seed, steps):
    matrices = random(*shape, seed=seed)
    expected = torch.stack([reference.orthogonalize(matrix, steps) for matrix in matrices])
    torch.testing.assert_close(batched.orthogonalize(matrices, steps, torch.float64), expected)
    torch.testing.assert_close(batched.orthogonalize(matrices.mT, steps, torch.float64), expected.mT)


@pytest.mark.parametrize("shape", [(16, 20), (16, 96), (96, 16)])
def test_fp32_stays_near_fp64_even_where_singular_values_vanish(shape):
    left, _, right = torch.linalg.svd(random(*shape), full_matrices=False)
    matrix = (left * torch.logspace(0, -8, 16, dtype=torch.float64)) @ right
    expected = reference.orthogonalize(matrix, 5)
    found = orthogonalize(matrix.float()[None])[0].double()
    assert (found - expected).norm() / expected.norm() < 2e-3  # bf16 is off by 0.1 to 0.3 here


@pytest.mark.parametrize("shape", [(16, 24), (24, 16), (8, 64)])
def test_bf16_equals_torch_s_own_iteration(shape):
    matrix = random(*shape, dtype=torch.float32)
    found = orthogonalize(matrix[None], dtype=torch.bfloat16)[0]
    expected = torch_newton_schulz(matrix, reference.COEFFICIENTS, 5, reference.EPS).float()
    assert found.dtype == torch.float32
    assert (found - expected).norm() / expected.norm() < 5 * torch.finfo(torch.bfloat16).eps


@pytest.mark.parametrize("shape", [(24, 24), (24, 64)])
def test_singular_values_end_between_a_half_and_one_and_a_half(shape):
    values = torch.linalg.svdvals(orthogonalize(random(3, *shape, dtype=torch.float32)))
    assert values.min() > 0.4
    assert values.max() < 1.3


@given(shape=SHAPES, seed=st.integers(0, 2**16))
def test_scaling_one_matrix_leaves_the_others_bitwise_alone(shape, seed):
    matrices = random(*shape, seed=seed, dtype=torch.float32)
    before = orthogonalize(matrices)
    matrices[-1] *= 30
    after = orthogonalize(matrices)
    assert torch.equal(before[:-1], after[:-1])
    torch.testing.assert_close(before[-1], after[-1], rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_zero_matrix_stays_zero(dtype):
    assert not orthogonalize(torch.zeros(2, 4, 16), dtype=dtype).any()
    assert not orthogonalize(torch.zeros(2, 4, 5), dtype=dtype).any()


def test_the_definition_can_be_forced_everywhere(monkeypatch):
    matrices = random(3, 4, 20, dtype=torch.float32)
    monkeypatch.setenv("TRIAX_KERNELS", "reference")
    assert torch.equal(orthogonalize(matrices)[1], reference.orthogonalize(matrices[1], 5))
