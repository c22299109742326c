"""What targets cost and how the cost slopes: the GPU kernel interpreted, compiled for sm_90, and run on a GPU."""

import pytest
import torch

from triax.errors import UnsupportedError
from triax.kernels.cross_entropy import nats, reference

ON_GPU = torch.cuda.is_available()
IGNORED = -100
SHAPES = [(5, 14), (1, 1), (0, 8), (3, 4096), (4, 9001)]


@pytest.fixture(scope="module")
def fused():
    pytest.importorskip("triton", reason="Triton is installed on x86 Linux only")
    from triax.kernels.cross_entropy import fused

    return fused


def case(shape, size, device="cpu", dtype=torch.float32):
    generator = torch.Generator().manual_seed(shape[1])
    logit = torch.randn(*shape, generator=generator) * size
    targets = torch.randint(0, shape[1], (shape[0],), generator=generator)
    targets[1::3] = IGNORED
    return logit.to(device, dtype), targets.to(device)


def errors(path, logit, targets):
    """Return the largest errors of costs and slopes against fp64, costs relative to their size past one nat."""
    expected = reference.nats(logit.double(), targets, IGNORED, wants_slope=True)
    cost, slope = path(logit.clone(), targets, IGNORED, wants_slope=True)
    alone, none = path(logit.clone(), targets, IGNORED, wants_slope=False)
    assert none is None
    assert torch.equal(alone, cost)
    assert (slope[targets == IGNORED] == 0).all()
    far = ((cost.double() - expected[0]).abs() / expected[0].clamp(min=1)).max().item() if len(cost) else 0.0
    return far, (slope.double() - expected[1]).abs().max().item() if len(cost) else 0.0


@pytest.mark.kernel
@pytest.mark.skipif(ON_GPU, reason="the gpu tests run the compiled kernel")
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("size", [1e-3, 5.0, 300.0])
def test_the_interpreted_kernel_gives_costs_and_slopes(fused, shape, size):
    assert max(errors(fused.nats, *case(shape, size))) < 2e-6


@pytest.mark.parametrize("shape", SHAPES)
def test_torchs_own_form_gives_costs_and_slopes(shape):
    assert max(errors(nats, *case(shape, 5.0))) < 2e-6


def test_logits_in_a_format_the_kernel_does_not_read_are_refused(fused):
    with pytest.raises(UnsupportedError, match=r"float64"):
        fused.nats(torch.zeros(1, 2).double(), torch.zeros(1).long(), IGNORED, wants_slope=True)


@pytest.mark.kernel
def test_the_kernel_compiles_for_hopper_without_spills(hopper):
    types = {"logit": "*bf16", "targets": "*i64", "cost": "*fp32", "stride": "i32", "ignored": "i32u", "V": "i32"}
    wanted = {"module": "triax.kernels.cross_entropy.fused", "kernel": "_nats", "types": types,
              "constants": {"C": 4096, "SLOPES": True}, "options": {"num_warps": 8}}  # fmt: skip
    (compiled,) = hopper([wanted])
    assert compiled.stack == 0
    assert "LDG.E.128" in compiled.sass  # sixteen bytes a load


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [*SHAPES, (70, 163_840)])
@pytest.mark.parametrize(("dtype", "bar"), [(torch.float32, 4e-6), (torch.bfloat16, 2.0**-9)])
def test_errors_on_a_gpu_are_those_of_the_format(fused, shape, dtype, bar):
    assert max(errors(fused.nats, *case(shape, 5.0, "cuda", dtype))) < bar
