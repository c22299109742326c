"""The short convolution's GPU kernels: interpreted in fp32 on a CPU, compiled for sm_90, and run on a GPU."""

from itertools import accumulate

import pytest
import torch

from triax.errors import UnsupportedError
from triax.kernels.short_conv import reference

ON_GPU = torch.cuda.is_available()


@pytest.fixture(scope="module")
def fused():
    pytest.importorskip("triton", reason="Triton is installed on x86 Linux only")
    from triax.kernels.short_conv import fused

    return fused


def outcome(path, hidden, weight, window, lengths, dtype):
    leaves = [t.detach().to(dtype or t.dtype).requires_grad_() for t in (hidden, weight)]
    output, after = path(*leaves, window.to(dtype or window.dtype), tuple(accumulate(lengths, initial=0)))
    upstream = torch.randn(output.shape, generator=torch.Generator().manual_seed(1)).to(hidden.dtype)
    return [output, after, *torch.autograd.grad(output, leaves, upstream.to(output.device, output.dtype))]


def largest_error(fused, lengths, channels, taps, dtype=torch.float32, device="cpu"):
    tokens, past = sum(lengths), taps - 1
    hidden = torch.randn(tokens, channels + 3)[:, :channels].to(device, dtype)  # rows further apart than they are long
    weight, window = torch.randn(channels, taps).to(device), torch.randn(len(lengths), past, channels).to(device, dtype)
    found = outcome(fused.short_conv, hidden, weight, window, lengths, None)
    expected = outcome(reference.short_conv, hidden, weight, window, lengths, torch.float64)
    return max(
        ((a.double() - b).norm() / b.norm().clamp_min(1e-3)).item() for a, b in zip(found, expected, strict=True)
    )


@pytest.mark.kernel
@pytest.mark.skipif(ON_GPU, reason="the gpu tests run the compiled kernels")
@pytest.mark.parametrize(("lengths", "channels", "taps"), [((5, 0, 1, 2, 70), 20, 4), ((300,), 130, 4), ((3, 3), 8, 2)])
def test_interpreted_kernels_give_outputs_windows_and_every_gradient(fused, lengths, channels, taps):
    assert largest_error(fused, lengths, channels, taps) < 2e-6


def test_a_window_that_wants_a_gradient_is_refused_by_name(fused):
    window = torch.zeros(1, 3, 4, requires_grad=True)
    with pytest.raises(UnsupportedError, match="a window that wants a gradient"):
        fused.short_conv(torch.zeros(2, 4), torch.zeros(4, 4), window, (0, 2))


@pytest.mark.kernel
def test_kernels_compile_for_hopper_without_spills(hopper):
    types = dict.fromkeys(("x", "window", "y", "upstream", "to_sum", "to_x"), "*bf16")
    types |= dict.fromkeys(("weight", "to_weight"), "*fp32") | dict.fromkeys(("rows", "ages", "lefts"), "*i32")
    types |= {"T": "i32u", "C": "i32", "x_row": "i32"}
    constants = {"BT": 32, "BC": 128, "TAPS": 4}
    wanted = [
        {"module": "triax.kernels.short_conv.fused", "kernel": name, "types": types, "constants": constants | more,
         "options": {"num_warps": warps}}
        for name, more, warps in (("forward", {}, 4), ("backward_sums", {"SPAN": 256}, 8), ("backward_inputs", {}, 4))
    ]  # fmt: skip
    for compiled in hopper(wanted):
        assert compiled.stack == 0


@pytest.mark.gpu
@pytest.mark.parametrize("lengths", [(300, 0, 1, 700), (2, 3), (1,) * 40])
def test_errors_on_a_gpu_stay_near_the_rounding_of_bf16(fused, lengths):
    assert largest_error(fused, lengths, 384, 4, torch.bfloat16, "cuda") < 6e-3
    assert largest_error(fused, lengths, 100, 4, torch.float32, "cuda") < 1e-5
