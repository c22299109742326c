"""The short convolution on a GPU: taps, borders and SiLU in one pass; two passes backward."""

from collections.abc import Sequence
from functools import lru_cache
from itertools import pairwise
from typing import Any, NamedTuple, no_type_check

import torch
import triton
import triton.language as tl
from jaxtyping import Float
from torch import Tensor
from torch.autograd.function import once_differentiable

from triax.errors import UnsupportedError
from triax.kernels.device import launch
from triax.kernels.short_conv.shifted import next_window

TOKENS, CHANNELS = 32, 128
SPAN = 256  # tokens of a program backward: each leaves a part of the weight's gradient
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


@triton.jit
@no_type_check
def _tapped(x, window, row, age, token, channel, inside, i: tl.constexpr, x_row, C, PAST: tl.constexpr):
    """Return what lies i tokens before each token: of its sequence, or of the window before that."""
    own = tl.load(x + (token - i)[:, None] * x_row + channel, mask=inside & (age >= i)[:, None], other=0.0)
    if i == 0:
        return own.to(tl.float32)
    older = (row * PAST + PAST - i + age)[:, None] * C + channel
    return own.to(tl.float32) + tl.load(window + older, mask=inside & (age < i)[:, None], other=0.0).to(tl.float32)


@triton.jit
@no_type_check
def forward(x, window, weight, rows, ages, y, T, C, x_row, BT: tl.constexpr, BC: tl.constexpr,
            TAPS: tl.constexpr):  # fmt: skip
    """Write y [T, C]; weight is [C, TAPS], window [N, TAPS - 1, C]."""
    token = tl.program_id(0).to(tl.int64) * BT + tl.arange(0, BT)
    channel = tl.program_id(1) * BC + tl.arange(0, BC)
    inside = (token[:, None] < T) & (channel[None, :] < C)
    age = tl.load(ages + token, mask=token < T, other=0)
    row = tl.load(rows + token, mask=token < T, other=0).to(tl.int64)
    total = tl.zeros((BT, BC), tl.float32)
    for i in tl.static_range(TAPS):
        tap = tl.load(weight + channel * TAPS + TAPS - 1 - i, mask=channel < C, other=0.0).to(tl.float32)
        total += tap[None, :] * _tapped(x, window, row, age, token, channel[None, :], inside, i, x_row, C, TAPS - 1)
    tl.store(y + token[:, None] * C + channel[None, :], total * tl.sigmoid(total), mask=inside)


@triton.jit
@no_type_check
def _weight(weight, channel, i: tl.constexpr, C, TAPS: tl.constexpr):
    return tl.load(weight + channel * TAPS + TAPS - 1 - i, mask=channel < C, other=0.0).to(tl.float32)[None, :]


@triton.jit
@no_type_check
def backward_sums(upstream, x, window, weight, rows, ages, to_sum, to_weight, T, C, x_row, SPAN: tl.constexpr,
                  BT: tl.constexpr, BC: tl.constexpr, TAPS: tl.constexpr):  # fmt: skip
    """Write the gradient of the weighted sums and, for each span of tokens, a part [TAPS, C] of the weight's."""
    channel = tl.program_id(1) * BC + tl.arange(0, BC)
    past: tl.constexpr = TAPS - 1
    w0, w1 = _weight(weight, channel, 0, C, TAPS), _weight(weight, channel, 1, C, TAPS)
    # sums over tokens are left to the end: a reduction in every turn would cost more than all loads
    part0, part1 = tl.zeros((BT, BC), tl.float32), tl.zeros((BT, BC), tl.float32)
    if TAPS == 4:
        w2, w3 = _weight(weight, channel, 2, C, TAPS), _weight(weight, channel, 3, C, TAPS)
        part2, part3 = tl.zeros((BT, BC), tl.float32), tl.zeros((BT, BC), tl.float32)
    for first in range(0, SPAN, BT):
        token = tl.program_id(0).to(tl.int64) * SPAN + first + tl.arange(0, BT)
        inside = (token[:, None] < T) & (channel[None, :] < C)
        age = tl.load(ages + token, mask=token < T, other=0)
        row = tl.load(rows + token, mask=token < T, other=0).to(tl.int64)
        met0 = _tapped(x, window, row, age, token, channel[None, :], inside, 0, x_row, C, past)
        met1 = _tapped(x, window, row, age, token, channel[None, :], inside, 1, x_row, C, past)
        total = w0 * met0 + w1 * met1
        if TAPS == 4:
            met2 = _tapped(x, window, row, age, token, channel[None, :], inside, 2, x_row, C, past)
            met3 = _tapped(x, window, row, age, token, channel[None, :], inside, 3, x_row, C, past)
            total += w2 * met2 + w3 * met3
        opened = tl.sigmoid(total)
        above = tl.load(upstream + token[:, None] * C + channel[None, :], mask=inside, other=0.0).to(tl.float32)
        above *= opened * (1 + total * (1 - opened))
        tl.store(to_sum + token[:, None] * C + channel[None, :], above, mask=inside)
        part0 += above * met0
        part1 += above * met1
        if TAPS == 4:
            part2 += above * met2
            part3 += above * met3
    here = to_weight + (tl.program_id(0).to(tl.int64) * TAPS + past) * C + channel
    tl.store(here, tl.sum(part0, 0), mask=channel < C)
    tl.store(here - C, tl.sum(part1, 0), mask=channel < C)
    if TAPS == 4:
        tl.store(here - 2 * C, tl.sum(part2, 0), mask=channel < C)
        tl.store(here - 3 * C, tl.sum(part3, 0), mask=channel < C)


@triton.jit
@no_type_check
def backward_inputs(to_sum, weight, lefts, to_x, T, C, BT: tl.constexpr, BC: tl.constexpr,
                    TAPS: tl.constexpr):  # fmt: skip
    """Write the gradient of the inputs: what the following tokens of the same sequence made of each."""
    token = tl.program_id(0).to(tl.int64) * BT + tl.arange(0, BT)
    channel = tl.program_id(1) * BC + tl.arange(0, BC)
    inside = (token[:, None] < T) & (channel[None, :] < C)
    left = tl.load(lefts + token, mask=token < T, other=0)
    total = tl.zeros((BT, BC), tl.float32)
    for i in tl.static_range(TAPS):
        tap = tl.load(weight + channel * TAPS + TAPS - 1 - i, mask=channel < C, other=0.0).to(tl.float32)
        later = to_sum + (token + i)[:, None] * C + channel[None, :]
        total += tap[None, :] * tl.load(later, mask=inside & (left >= i)[:, None], other=0.0).to(tl.float32)
    tl.store(to_x + token[:, None] * C + channel[None, :], total, mask=inside)


def unsupported(hidden: Tensor, weight: Tensor, window: Tensor) -> str | None:
    """Say what of these inputs the kernels cannot take, if anything."""
    if hidden.dtype not in DTYPES or weight.dtype not in DTYPES:
        return f"dtype `{hidden.dtype}`"
    if weight.shape[1] not in (2, 4):
        return f"{weight.shape[1]} taps"
    return "a window that wants a gradient" if window.requires_grad and torch.is_grad_enabled() else None


def short_conv(
    hidden: Float[Tensor, "T C"],
    weight: Float[Tensor, "C taps"],
    window: Float[Tensor, "N past C"],
    starts: Sequence[int],
    *,
    wants_window: bool = True,
) -> tuple[Float[Tensor, "T C"], Float[Tensor, "N past C"]]:
    """Compute `short_conv` with the GPU kernels or not at all; the window carries no gradient.

    Raises:
        UnsupportedError: The kernels have no form for this dtype, number of taps or a gradient of the window.
    """
    reason = unsupported(hidden, weight, window)
    if reason is not None:
        raise UnsupportedError(
            f"kernels.short_conv.fused: no kernel for {reason}; use bf16, fp16 or fp32 and two or four taps"
        )
    window = window.to(hidden.dtype)
    places = _places(tuple(starts), weight.shape[1] - 1, hidden.device)
    output = _ShortConv.apply(hidden, weight, window.contiguous(), places)
    return output, next_window(hidden, window, tuple(starts), weight.shape[1]) if wants_window else window


class _Places(NamedTuple):
    """Where each token stands in its sequence; counts stop at the window's length."""

    row: Tensor
    """Number of its sequence."""
    age: Tensor
    """Tokens before it."""
    left: Tensor
    """Tokens after it."""


@lru_cache(maxsize=8)  # every layer of a forward asks for the same one
@torch.inference_mode(False)
def _places(starts: tuple[int, ...], past: int, device: torch.device) -> _Places:
    lengths = torch.tensor([end - first for first, end in pairwise(starts)], dtype=torch.int32)
    row = torch.repeat_interleave(torch.arange(len(lengths), dtype=torch.int32), lengths)
    age = torch.arange(len(row), dtype=torch.int32) - torch.tensor(starts[:-1], dtype=torch.int32)[row]
    left = lengths[row] - 1 - age
    places = (row, age.clamp(max=past), left.clamp(max=past))
    if device.type == "cuda":  # nobody waits for what runs there
        return _Places(*(x.pin_memory().to(device, non_blocking=True) for x in places))
    return _Places(*(x.to(device) for x in places))


class _ShortConv(torch.autograd.Function):
    """Keeps its inputs only."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, window: Tensor, places: _Places) -> Tensor:
        hidden = hidden if hidden.stride(-1) == 1 else hidden.contiguous()
        output = hidden.new_empty(hidden.shape)
        grid, sizes = _tiles(hidden.shape[0], hidden.shape[1], TOKENS)
        launch(
            forward, grid, hidden, window, weight.contiguous(), places.row, places.age, output, *hidden.shape,
            hidden.stride(0), *sizes, weight.shape[1],
        )  # fmt: skip
        ctx.save_for_backward(hidden, weight, window)
        ctx.places = places
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor, Tensor, None, None]:
        hidden, weight, window = ctx.saved_tensors
        places, taps = ctx.places, weight.shape[1]
        kernel = weight.contiguous()
        to_sum, to_hidden = hidden.new_empty(hidden.shape), hidden.new_empty(hidden.shape)
        grid, sizes = _tiles(hidden.shape[0], hidden.shape[1], SPAN)
        parts = hidden.new_empty(grid[0], taps, hidden.shape[1], dtype=torch.float32)
        launch(
            backward_sums, grid, grads[0].contiguous(), hidden, window, kernel, places.row, places.age, to_sum, parts,
            *hidden.shape, hidden.stride(0), SPAN, *sizes, taps, num_warps=8,
        )  # fmt: skip
        grid, sizes = _tiles(hidden.shape[0], hidden.shape[1], TOKENS)
        launch(backward_inputs, grid, to_sum, kernel, places.left, to_hidden, *hidden.shape, *sizes, taps)
        return to_hidden, parts.sum(0).T.to(weight.dtype), None, None


def _tiles(tokens: int, channels: int, span: int) -> tuple[tuple[int, int], tuple[int, int]]:
    return (-(-tokens // span), -(-channels // CHANNELS)), (TOKENS, CHANNELS)
