"""The largest logits of all heads: the GPU kernel interpreted, compiled for sm_90, and run on a GPU."""

from itertools import accumulate

import pytest
import torch

from triax.kernels.mla import reference

pytest.importorskip("triton", reason="Triton is installed on x86 Linux only")
ON_GPU = torch.cuda.is_available()
CASES = [((5, 0, 1, 130), (0, 3, 7, 2), 2, 24), ((1,), (0,), 1, 16), ((), (), 3, 32), ((140,), (200,), 1, 192)]


@pytest.fixture(scope="module")
def largest():
    from triax.kernels.mla.largest import largest

    return largest


def case(lengths, pasts, heads, dim, device="cpu", dtype=torch.float32):
    generator = torch.Generator().manual_seed(dim)
    seen = [n + past if n else 0 for n, past in zip(lengths, pasts, strict=True)]
    query_starts, key_starts = (tuple(accumulate(counts, initial=0)) for counts in (lengths, seen))
    query, key = (torch.randn(n[-1], heads, dim + 1, generator=generator) for n in (query_starts, key_starts))
    query, key = (x.to(device, dtype)[..., :dim] for x in (query, key))
    value = torch.zeros(*key.shape[:2], 1, dtype=torch.float64, device=device)
    _, expected = reference.attend(query.double(), key.double(), value, query_starts, key_starts, 0.7)
    return (query, key, query_starts, key_starts, 0.7), expected


@pytest.mark.kernel
@pytest.mark.skipif(ON_GPU, reason="the gpu tests run the compiled kernel")
@pytest.mark.parametrize("shape", CASES)
def test_the_interpreted_kernel_finds_the_causal_maximum_of_every_head(largest, shape):
    inputs, expected = case(*shape)
    torch.testing.assert_close(largest(*inputs).double(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.kernel
def test_the_kernel_compiles_for_hopper_with_its_matrix_units_and_without_spills(hopper):
    types = {"query": "*bf16", "key": "*bf16", "tile": "*i32", "part": "*fp32", "H": "i32u"}
    types |= dict.fromkeys(("q_token", "q_head", "k_token", "k_head"), "i32")
    constants = {"K": 192, "BK": 64, "BQ": 128, "BS": 128, "PRECISION": "tf32"}
    wanted = {"module": "triax.kernels.mla.largest", "kernel": "_largest", "types": types, "constants": constants,
              "options": {"num_warps": 8}}  # fmt: skip
    (compiled,) = hopper([wanted])
    assert compiled.stack == 0
    assert "HGMMA" in compiled.sass


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [*CASES, ((3000, 1, 700), (0, 0, 400), 16, 192)])
@pytest.mark.parametrize(("dtype", "bar"), [(torch.float32, 1e-5), (torch.bfloat16, 1e-5)])
def test_a_gpu_finds_the_causal_maximum_of_every_head(largest, shape, dtype, bar):
    inputs, expected = case(*shape, "cuda", dtype)
    torch.testing.assert_close(largest(*inputs).double(), expected, rtol=bar, atol=bar)
