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


def wanted(kind, channels, side, stages):
    """What the `hopper` fixture takes to compile the kernel."""
    types = {"query": f"*{kind}", "key": f"*{kind}", "tile": "*i32", "part": "*fp32", "H": "i32u"}
    types |= dict.fromkeys(("q_token", "q_head", "k_token", "k_head"), "i32")
    precision = "ieee" if kind == "fp32" else "tf32"
    constants = {"K": channels, "BK": 64, "BQ": side, "BS": side, "PRECISION": precision}
    return {"module": "triax.kernels.mla.largest", "kernel": "_largest", "types": types, "constants": constants,
            "options": {"num_warps": 8, "num_stages": stages}}  # fmt: skip


@pytest.mark.kernel
def test_f38_tiles_of_any_width_fit_in_shared_memory_as_counted(hopper):
    from triax.kernels.mla.largest import ROOM, fitting, shared_bytes

    kinds = [("fp32", 4, 64), ("fp32", 4, 192), ("fp32", 4, 576), ("bf16", 2, 192), ("bf16", 2, 256), ("bf16", 2, 576)]
    cuts = [fitting(channels, itemsize, ROOM) for _, itemsize, channels in kinds]
    found = hopper([wanted(kind, channels, *cut) for (kind, _, channels), cut in zip(kinds, cuts, strict=True)])
    for (_, itemsize, channels), cut, kernel in zip(kinds, cuts, found, strict=True):
        assert kernel.shared <= shared_bytes(channels, itemsize, *cut) <= ROOM
        assert kernel.shared >= 0.7 * shared_bytes(channels, itemsize, *cut)
    assert cuts[3] == (128, 3)  # what is quickest for the models' own width


def test_f38_the_narrowest_tiles_are_taken_where_little_fits():
    from triax.kernels.mla.largest import fitting

    assert fitting(192, 4, 100 * 1024) == (64, 1)
    assert fitting(1024, 4, 100 * 1024)[0] < 64
    assert fitting(4096, 4, 100 * 1024) == (16, 1)


@pytest.mark.kernel
def test_the_kernel_compiles_for_hopper_with_its_matrix_units_and_without_spills(hopper):
    (compiled,) = hopper([wanted("bf16", 192, 128, 3)])
    assert compiled.stack == 0
    assert "HGMMA" in compiled.sass


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [*CASES, ((3000, 1, 700), (0, 0, 400), 16, 192)])
@pytest.mark.parametrize(("dtype", "bar"), [(torch.float32, 1e-5), (torch.bfloat16, 1e-5)])
def test_a_gpu_finds_the_causal_maximum_of_every_head(largest, shape, dtype, bar):
    inputs, expected = case(*shape, "cuda", dtype)
    torch.testing.assert_close(largest(*inputs).double(), expected, rtol=bar, atol=bar)
