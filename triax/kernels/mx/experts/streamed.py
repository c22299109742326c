"""Routed experts with MXFP4 weights for few tokens on Hopper: each weight that is needed comes once from memory."""

import ctypes
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from triax.errors import UnsupportedError
from triax.kernels import nvrtc
from triax.kernels.mx.experts import work_plan
from triax.kernels.mx.mxfp4 import Mxfp4

STREAM = Path(__file__).with_name("streamed.cu")
COLUMNS, WARPS, RING = 8, 16, 4
MOST_ROWS = 7  # pairs an expert on average; beyond, experts with more than `COLUMNS` are too many


def unsupported(hidden: Tensor, expert: Tensor, gate: Mxfp4, up: Mxfp4, down: Mxfp4, activation: Any) -> str | None:
    """Say what of these inputs the kernel cannot take, if anything."""
    if reason := work_plan.unsupported(hidden, gate, up, down, activation):
        return reason
    number, inner_dim, _ = gate.packed.shape
    if any(ring_of(width) is None for width in (hidden.shape[1], inner_dim)):
        return f"widths `{hidden.shape[1]}` and `{inner_dim}`"
    if expert.numel() > MOST_ROWS * number and len(expert) > COLUMNS:
        return f"{expert.numel()} pairs over {number} experts"
    return None


def shared_bytes(width: int, ring: int) -> int:
    """Return the bytes of shared memory that a block needs: tokens of this width and their numbers, and weights."""
    return COLUMNS * (2 * width + 4) + WARPS * ring * work_plan.SLOT


def ring_of(width: int) -> int | None:
    """Return how many chunks of weights on their way find room beside tokens of this width."""
    fitting = (
        r for r in work_plan.RINGS if width // work_plan.WIDTHS % r == 0 and shared_bytes(width, r) <= work_plan.ROOM
    )
    return next(fitting, None)


def experts(
    hidden: Float[Tensor, "T L"],
    expert: Int[Tensor, "T k"],
    share: Float[Tensor, "T k"],
    gate: Mxfp4,
    up: Mxfp4,
    down: Mxfp4,
    activation: Any,
    *,
    rounded: bool,
) -> Float[Tensor, "T L"]:
    """See `triax.kernels.mx.experts.experts`; no gradient.

    Raises:
        UnsupportedError: The kernel has no form for these dtypes, widths or so many tokens.
    """
    if reason := unsupported(hidden, expert, gate, up, down, activation):
        raise UnsupportedError(
            f"kernels.mx.experts.streamed: no kernel for {reason}; it takes bf16 tokens, multiples of "
            f"{work_plan.WIDTHS} as widths, few tokens an expert, on Hopper; "
            "`triax.kernels.mx.experts` takes another form by itself"
        )
    output = torch.empty_like(hidden, memory_format=torch.contiguous_format)
    if not expert.numel():
        return output.zero_()
    number, inner_dim, _ = gate.packed.shape
    hidden, share, index = hidden.contiguous(), share.float().contiguous(), hidden.device.index
    opens, closes = work_plan.shapes(hidden.shape[1], inner_dim, activation, rounded=rounded)
    inner = hidden.new_empty(expert.numel(), inner_dim)
    returned = torch.empty(expert.numel(), hidden.shape[1], dtype=torch.float32, device=hidden.device)
    with torch.cuda.device(hidden.device):
        plan = work_plan.plan(expert, number, COLUMNS)
        weights = gate.packed, up.packed, gate.scale, up.scale
        for shape, rows, each, parts, out in (
            (opens, hidden, expert.shape[1], weights, inner),
            (closes, inner, 1, (down.packed, None, down.scale, None), returned),
        ):
            defines = macros(shape)
            shared = shared_bytes(shape.width, dict(defines)["RING"])
            function = nvrtc.load((work_plan.WEIGHTS, STREAM), "stream", defines, shared, index)
            values = [rows, ctypes.c_int(each), *parts, *plan, share, out, work_plan.caps(activation)]
            nvrtc.launch(function, (work_plan.processors(index),), WARPS * 32, shared, values)
        work_plan.add(returned, output)
    return output


def macros(shape: work_plan.Shape) -> work_plan.Defines:
    """Return what the source is compiled with."""
    return shape.macros(COLUMNS, WARPS, ring_of(shape.width) or 1, BLOCKS=1)
