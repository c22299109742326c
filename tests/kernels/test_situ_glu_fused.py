"""The gated activations' GPU kernels: interpreted in fp32 on a CPU, compiled for sm_90, and run on a GPU."""

import pytest
import torch

from triax.errors import UnsupportedError
from triax.kernels.situ_glu import SituGlu, reference

ON_GPU = torch.cuda.is_available()
CAPS = [(None, None), (4.0, 25.0), (2.0, None), (None, 3.0)]


@pytest.fixture(scope="module")
def fused():
    pytest.importorskip("triton", reason="Triton is installed on x86 Linux only")
    from triax.kernels.situ_glu import fused

    return fused


def outcome(path, both, caps, wide):
    leaf = both.detach().to(wide if wide else both.dtype).requires_grad_()
    value = path(*leaf.chunk(2, -1), *caps)
    upstream = torch.randn(value.shape, generator=torch.Generator().manual_seed(3)).to(both.dtype)
    return value, torch.autograd.grad(value, leaf, upstream.to(value.device, value.dtype))[0]


def largest_error(fused, both, caps):
    found, expected = outcome(fused.glu, both, caps, None), outcome(reference.glu, both, caps, torch.float64)
    return max(
        ((a.double() - b).norm() / b.norm().clamp_min(1e-6)).item() for a, b in zip(found, expected, strict=True)
    )


@pytest.mark.kernel
@pytest.mark.skipif(ON_GPU, reason="the gpu tests run the compiled kernels")
@pytest.mark.parametrize("caps", CAPS)
@pytest.mark.parametrize("shape", [(5, 14), (3, 2, 200), (0, 8), (3, 2500)])
@pytest.mark.parametrize("size", [1e-4, 6.0, 1e3])
@pytest.mark.filterwarnings("ignore:overflow encountered in exp:RuntimeWarning")  # 1 / (1 + inf) is the 0 that is meant
def test_interpreted_kernels_give_value_and_gradients_of_slices(fused, caps, shape, size):
    assert largest_error(fused, torch.randn(*shape) * size, caps) < 2e-6


def test_mixed_formats_are_refused_by_name(fused):
    with pytest.raises(UnsupportedError, match=r"dtypes `torch.float32` and `torch.bfloat16`"):
        fused.glu(torch.zeros(2, 4), torch.zeros(2, 4).bfloat16(), None, None)


@pytest.mark.kernel
def test_kernels_compile_for_hopper_without_spills(hopper):
    types = {name: "*bf16" for name in ("gate", "up", "value", "upstream", "to_gate", "to_up")}
    types |= {"gate_row": "i32", "up_row": "i32", "R": "i32u", "F": "i32"}
    constants = {"ROWS": 4, "COLUMNS": 1024, "GATE_CAP": 4.0, "UP_CAP": 25.0, "FAST": True}
    wanted = [
        {"module": "triax.kernels.situ_glu.fused", "kernel": name, "types": types, "constants": constants,
         "options": {"num_warps": 8}}
        for name in ("forward", "backward")
    ]  # fmt: skip
    for compiled in hopper(wanted):
        assert compiled.stack == 0
        assert "LDG.E.128" in compiled.sass  # sixteen bytes a load


@pytest.mark.gpu
@pytest.mark.parametrize("caps", CAPS)
def test_errors_on_a_gpu_stay_near_the_rounding_of_bf16(fused, caps):
    assert largest_error(fused, torch.randn(300, 1410, device="cuda").mul(5).bfloat16(), caps) < 6e-3
    assert largest_error(fused, torch.randn(7, 3, 66, device="cuda") * 5, caps) < 1e-5


@pytest.mark.gpu
def test_more_than_two_thousand_million_numbers_are_all_written(fused):
    gate = torch.ones(2**20 + 1, 2048, device="cuda", dtype=torch.bfloat16)
    value = SituGlu()(gate, gate)
    assert torch.equal(value[-1], value[0])
    assert value[-1, -1].item() == pytest.approx(0.7311, abs=2e-3)
