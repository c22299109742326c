"""The symmetric product's GPU kernel: interpreted in fp32 on a CPU, compiled for sm_90, and run on a GPU."""

import pytest
import torch

from triax.kernels.newton_schulz import orthogonalize, reference

ON_GPU = torch.cuda.is_available()


@pytest.fixture(scope="module")
def symmetric():
    pytest.importorskip("triton", reason="Triton is installed on x86 Linux only")
    from triax.kernels.newton_schulz import symmetric

    return symmetric


@pytest.mark.kernel
@pytest.mark.skipif(ON_GPU, reason="the gpu tests run the compiled kernel")
@pytest.mark.parametrize(("batch", "rows", "columns"), [(2, 132, 72), (1, 300, 36), (2, 8, 200), (0, 4, 4)])
def test_the_interpreted_kernel_fills_both_triangles(symmetric, batch, rows, columns):
    x, add = torch.randn(batch, rows, columns), torch.randn(batch, rows, rows)
    add = add + add.mT
    torch.testing.assert_close(symmetric.product(x), x @ x.mT, rtol=1e-4, atol=1e-3)
    torch.testing.assert_close(symmetric.product(x, 2.0, add, 0.5), 2 * x @ x.mT + 0.5 * add, rtol=1e-4, atol=1e-3)


@pytest.mark.kernel
def test_the_kernel_compiles_for_hopper_to_its_matrix_instructions_without_spills(hopper):
    types = {"x": "tensordesc<bf16[1, 128, 64]>", "add": "*bf16", "result": "*bf16", "R": "i32", "C": "i32"}
    types |= {"alpha": "fp32", "beta": "fp32"}
    constants = {"BM": 128, "BK": 64, "PRECISION": "tf32"}
    [compiled] = hopper([{"module": "triax.kernels.newton_schulz.symmetric", "kernel": "triangle", "types": types,
                          "constants": constants, "options": {"num_warps": 8, "num_stages": 4}}])  # fmt: skip
    assert compiled.stack == 0
    assert "HGMMA" in compiled.sass
    assert " HMMA" not in compiled.sass


@pytest.mark.gpu
@pytest.mark.parametrize(("rows", "columns"), [(1000, 704), (512, 3000), (640, 640)])
def test_products_on_a_gpu_are_bf16_products(symmetric, rows, columns):
    x = torch.randn(3, rows, columns, device="cuda").bfloat16()
    expected = x.double() @ x.double().mT
    found = symmetric.product(x)
    assert ((found.double() - expected).norm() / expected.norm()).item() < 4e-3
    assert torch.equal(found, found.mT)


@pytest.mark.gpu
@pytest.mark.parametrize(("rows", "columns"), [(1024, 1500), (1500, 1024)])
def test_orthogonalising_on_a_gpu_pushes_singular_values_towards_one(rows, columns):
    matrices = torch.randn(2, rows, columns, device="cuda")
    found = orthogonalize(matrices)
    for matrix, result in zip(matrices, found, strict=True):
        expected = reference.orthogonalize(matrix.double(), 5)
        assert ((result.double() - expected).norm() / expected.norm()).item() < 5e-2
        singular = torch.linalg.svdvals(result.float())
        assert singular.max() < 1.3
