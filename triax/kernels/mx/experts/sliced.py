"""Routed experts with MXFP4 weights for many tokens on Hopper: tokens come slice by slice while they are multiplied."""

import ctypes
from pathlib import Path
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from triax.errors import UnsupportedError
from triax.kernels import nvrtc
from triax.kernels.mx.experts import work_plan
from triax.kernels.mx.mxfp4 import Mxfp4

SLICES = Path(__file__).with_name("sliced.cu")
MOST_PAIRS = 1 << 17  # worked on at once: what experts return is kept in fp32 until it is added up


class SlicedTiling(NamedTuple):
    """How the kernel is cut."""

    columns: int
    """Tokens of a work item."""
    warps: int
    ring: int
    """Chunks of weights on their way, and chunks of a slice of tokens, at most."""
    stages: int
    """Slices of tokens on their way."""
    fullest: float
    """Pairs an expert on average up to which this is the form."""

    def shared_bytes(self) -> int:
        """Return the bytes of shared memory that a block needs at most: slices with a barrier each, and weights."""
        return self.stages * (self.ring * self.columns * 256 + 8) + self.warps * self.ring * work_plan.SLOT


FORMS = (SlicedTiling(32, 16, 2, 4, 24), SlicedTiling(64, 16, 2, 3, float("inf")))


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
        UnsupportedError: The kernel has no form for these dtypes or widths.
    """
    if reason := work_plan.unsupported(hidden, gate, up, down, activation):
        raise UnsupportedError(
            f"kernels.mx.experts.sliced: no kernel for {reason}; it takes bf16 tokens and multiples of "
            f"{work_plan.WIDTHS} as widths, on Hopper; `triax.kernels.mx.experts` takes another form by itself"
        )
    output = torch.empty_like(hidden, memory_format=torch.contiguous_format)
    if not expert.numel():
        return output.zero_()
    form = form_of(expert.numel() / len(gate.packed))
    hidden, share = hidden.contiguous(), share.float().contiguous()
    shapes = work_plan.shapes(hidden.shape[1], gate.packed.shape[1], activation, rounded=rounded)
    each = max(1, MOST_PAIRS // expert.shape[1])
    with torch.cuda.device(hidden.device):
        for first in range(0, len(hidden), each):
            part = slice(first, first + each)
            _some(hidden[part], expert[part], share[part], gate, up, down, activation, output[part], form, shapes)
    return output


def form_of(each: float) -> SlicedTiling:
    """Return the form for so many pairs an expert on average."""
    return next(form for form in FORMS if each <= form.fullest)


def _some(
    hidden: Tensor,
    expert: Tensor,
    share: Tensor,
    gate: Mxfp4,
    up: Mxfp4,
    down: Mxfp4,
    activation: Any,
    output: Tensor,
    form: SlicedTiling,
    shapes: tuple[work_plan.Shape, work_plan.Shape],
) -> None:
    number, inner_dim, _ = gate.packed.shape
    pairs, index = expert.numel(), hidden.device.index
    plan = work_plan.plan(expert, number, form.columns)
    most = work_plan.most_items(pairs, number, form.columns)
    arranged = hidden.new_empty(most * form.columns * max(hidden.shape[1], inner_dim))
    inner = hidden.new_empty(pairs, inner_dim)
    returned = torch.empty(pairs, hidden.shape[1], dtype=torch.float32, device=hidden.device)
    threads, paths = form.warps * 32, (work_plan.WEIGHTS, SLICES)
    weights = gate.packed, up.packed, gate.scale, up.scale
    for shape, rows, each, parts, out in (
        (shapes[0], hidden, expert.shape[1], weights, inner),
        (shapes[1], inner, 1, (down.packed, None, down.scale, None), returned),
    ):
        defines, shared = macros(shape, form), form.shared_bytes()
        function = nvrtc.load(paths, "arrange", defines, 0, index)
        values = [rows, ctypes.c_int(each), *plan, arranged]
        nvrtc.launch(function, (most * form.columns // 8,), threads, 0, values)
        function = nvrtc.load(paths, "multiply_slices", defines, shared, index)
        values = [arranged, *parts, *plan, share, out, work_plan.caps(activation)]
        nvrtc.launch(function, (work_plan.processors(index),), threads, shared, values)
    work_plan.add(returned, output)


def macros(shape: work_plan.Shape, form: SlicedTiling) -> work_plan.Defines:
    """Return what the source is compiled with."""
    return shape.macros(form.columns, form.warps, shape.ring(form.ring), STAGES=form.stages)
