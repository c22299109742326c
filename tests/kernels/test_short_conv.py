"""The shifted convolution against its definition, for every length around the window."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from triax.kernels.short_conv import reference, shifted


def inputs(lengths, num_taps, dtype=torch.float64, seed=0):
    noise = torch.Generator().manual_seed(seed)

    def draw(*shape):
        return torch.randn(*shape, generator=noise, dtype=torch.float64).to(dtype).requires_grad_()

    starts = [sum(lengths[:i]) for i in range(len(lengths) + 1)]
    return draw(starts[-1], 3), draw(3, num_taps), draw(len(lengths), num_taps - 1, 3), starts


@given(
    lengths=st.lists(st.integers(0, 6), min_size=1, max_size=4),
    num_taps=st.integers(1, 5),
    seed=st.integers(0, 2**16),
    dtype=st.sampled_from([torch.float64, torch.float32]),  # on a CPU fp32 goes another way than fp64
)
@settings(max_examples=40)
def test_values_windows_and_gradients_equal_the_definition(lengths, num_taps, seed, dtype):
    results = []
    for path, kind in ((reference, torch.float64), (shifted, dtype)):
        hidden, weight, window, starts = inputs(lengths, num_taps, kind, seed)
        output, following = path.short_conv(hidden, weight, window, starts)
        total = (output * torch.arange(output.numel()).view_as(output)).sum() + following.sin().sum()
        gradients = torch.autograd.grad(total, (hidden, weight, window), materialize_grads=True)
        results.append([x.double() for x in (output, following, *gradients)])
    tolerance = 1e-10 if dtype is torch.float64 else 1e-4
    torch.testing.assert_close(results[1], results[0], rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize(("num_channels", "num_taps"), [(3, 4), (16, 4), (5, 6)])
def test_a_cpu_gives_in_fp32_what_the_definition_gives_also_under_autocast(num_channels, num_taps, autocast):
    starts, leaves = (0, 40, 41, 60), []
    for shape in ((60, num_channels), (num_channels, num_taps), (3, num_taps - 1, num_channels)):
        leaves.append(torch.randn(shape, requires_grad=True))
    upstream, results = torch.randn(60, num_channels), []
    for path, kind in ((reference, torch.float64), (shifted, torch.float32)):
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            output, _ = path.short_conv(*(leaf.to(kind) for leaf in leaves), starts)
            results.append([output.double(), *torch.autograd.grad(output, leaves, upstream.to(kind))])
    torch.testing.assert_close(results[1], results[0], rtol=1e-5, atol=1e-4)


def test_what_stands_in_another_sequence_cannot_leak_not_even_infinity():
    hidden, weight, window, starts = inputs([4, 5], 4)
    with torch.no_grad():
        hidden[:4] = torch.inf
        output, _ = shifted.short_conv(hidden, weight, torch.zeros_like(window), starts)
        alone, _ = shifted.short_conv(hidden[4:], weight, torch.zeros_like(window[:1]), [0, 5])
    assert torch.equal(output[4:], alone)


def test_sums_are_fp32_for_bf16_inputs():
    hidden, weight, window, starts = inputs([9], 4, torch.bfloat16)
    exact, _ = reference.short_conv(hidden.double(), weight.double(), window.double(), starts)
    output, _ = shifted.short_conv(hidden, weight, window, starts)
    assert output.dtype is torch.bfloat16
    torch.testing.assert_close(output.double(), exact, rtol=2**-8, atol=1e-4)
