"""The norm on a GPU: one pass forward and one backward, weight and gate included."""

from typing import Any, no_type_check

import torch
import triton
import triton.language as tl
from jaxtyping import Float
from torch import Tensor
from torch.autograd.function import once_differentiable

from triax.errors import UnsupportedError
from triax.kernels.device import launch

TILE = 4096  # numbers a program works on at once
PROGRAMS = 4  # a multiprocessor, backward: each leaves a part of the weight's gradient
WIDEST = 16384
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


@triton.jit
@no_type_check
def forward(x, added, gate, weight, total, y, scale, R, eps, gain, x_row, gate_row, D: tl.constexpr,
            BD: tl.constexpr, ROWS: tl.constexpr):  # fmt: skip
    """Write y [R, D] and each row's scale; `gate` and `weight` may be None.

    With `added` it is the norm of a sum, which is written to `total`, and the scale is not.
    """
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    column = tl.arange(0, BD)[None, :]
    inside = (row[:, None] < R) & (column < D)
    wide = tl.load(x + row[:, None] * x_row + column, mask=inside, other=0.0).to(tl.float32)
    if added is not None:
        wide += tl.load(added + row[:, None] * D + column, mask=inside, other=0.0).to(tl.float32)
        narrow = wide.to(total.dtype.element_ty)
        tl.store(total + row[:, None] * D + column, narrow, mask=inside)
        wide = narrow.to(tl.float32)
    unit = tl.rsqrt(tl.sum(wide * wide, 1) / D + eps)
    result = wide * (unit * gain)[:, None]
    if gate is not None:
        opened = tl.sigmoid(tl.load(gate + row[:, None] * gate_row + column, mask=inside, other=0.0).to(tl.float32))
        result *= opened * tl.load(weight + column, mask=column < D, other=0.0).to(tl.float32)
    elif weight is not None:
        factor = tl.load(weight + column, mask=column < D, other=0.0).to(y.dtype.element_ty)
        result = result.to(y.dtype.element_ty) * factor
    tl.store(y + row[:, None] * D + column, result, mask=inside)
    if added is None:
        tl.store(scale + row, unit, mask=row < R)


@triton.jit
@no_type_check
def backward(upstream, x, gate, weight, scale, to_x, to_gate, to_weight, R, gain, x_row, gate_row, D: tl.constexpr,
             BD: tl.constexpr, ROWS: tl.constexpr):  # fmt: skip
    """Write the gradients of x and gate and, a row a program, a part of the weight's."""
    column = tl.arange(0, BD)[None, :]
    part = tl.zeros((ROWS, BD), tl.float32)
    if weight is not None:
        factor = tl.load(weight + column, mask=column < D, other=0.0).to(tl.float32)
        if gate is None:
            factor = factor.to(upstream.dtype.element_ty).to(tl.float32)
    for tile in range(tl.program_id(0), tl.cdiv(R, ROWS), tl.num_programs(0)):
        row = (tile * ROWS + tl.arange(0, ROWS)).to(tl.int64)
        inside = (row[:, None] < R) & (column < D)
        above = tl.load(upstream + row[:, None] * D + column, mask=inside, other=0.0).to(tl.float32)
        unit = tl.load(scale + row, mask=row < R, other=0.0)[:, None]
        normal = tl.load(x + row[:, None] * x_row + column, mask=inside, other=0.0).to(tl.float32) * unit
        if gate is not None:
            opened = tl.sigmoid(tl.load(gate + row[:, None] * gate_row + column, mask=inside, other=0.0).to(tl.float32))
            part += above * normal * opened
            closing = above * normal * factor * opened * (1 - opened)
            tl.store(to_gate + row[:, None] * D + column, closing, mask=inside)
            above *= factor * opened
        elif weight is not None:
            part += above * (normal * gain).to(upstream.dtype.element_ty).to(tl.float32)
            above *= factor
        along = tl.sum(above * normal, 1)[:, None] / D
        tl.store(to_x + row[:, None] * D + column, (above - normal * along) * (unit * gain), mask=inside)
    if weight is not None:
        total = tl.sum(part, 0)[None, :]
        tl.store(to_weight + tl.program_id(0) * D + column, total, mask=column < D)


def unsupported(x: Tensor, weight: Tensor | None) -> str | None:
    """Say what of these inputs the kernels cannot take, if anything."""
    if x.dtype not in DTYPES or (weight is not None and weight.dtype not in DTYPES):
        return f"dtype `{x.dtype}`"
    return f"width `{x.shape[-1]}`" if not 1 <= x.shape[-1] <= WIDEST else None


def rms_norm(
    x: Float[Tensor, "*rows D"], weight: Float[Tensor, " D"] | None, eps: float, gain: float, dtype: torch.dtype
) -> Float[Tensor, "*rows D"]:
    """Compute `reference.rms_norm` with the GPU kernels or not at all.

    Raises:
        UnsupportedError: The kernels have no form for this dtype or width.
    """
    _require(x, weight)
    return _Norm.apply(x, None, weight, eps, gain, dtype)


def gated(
    x: Float[Tensor, "*rows D"],
    gate: Float[Tensor, "*rows D"],
    weight: Float[Tensor, " D"],
    eps: float,
    dtype: torch.dtype,
) -> Float[Tensor, "*rows D"]:
    """Compute `reference.gated` with the GPU kernels or not at all.

    Raises:
        UnsupportedError: The kernels have no form for this dtype or width.
    """
    _require(x, weight)
    return _Norm.apply(x, gate, weight, eps, 1.0, dtype)


def of_sum(
    x: Float[Tensor, "*rows D"], added: Float[Tensor, "*rows D"], weight: Float[Tensor, " D"], eps: float
) -> tuple[Float[Tensor, "*rows D"], Float[Tensor, "*rows D"]]:
    """Compute `reference.of_sum` with the GPU kernel or not at all; no gradient.

    Raises:
        UnsupportedError: The kernel has no form for this dtype or width.
    """
    _require(x, weight)
    flat, total, y = _rows(x), x.new_empty(x.shape), x.new_empty(x.shape)
    weight = weight.contiguous()
    sizes = _sizes(x.shape[-1])
    launch(
        forward, (-(-len(flat) // sizes[2]),), flat, added.contiguous(), None, weight, total, y, None, len(flat), eps,
        1.0, flat.stride(0), 0, *sizes, num_warps=8 if sizes[1] > 256 else 4,
    )  # fmt: skip
    return total, y


def _require(x: Tensor, weight: Tensor | None) -> None:
    reason = unsupported(x, weight)
    if reason is not None:
        raise UnsupportedError(
            f"kernels.rms_norm.fused: no kernel for {reason}; use bf16, fp16 or fp32 and 1 to {WIDEST} columns"
        )


def _rows(x: Tensor) -> Tensor:
    flat = x.reshape(-1, x.shape[-1])
    return flat if flat.stride(-1) == 1 or flat.shape[-1] == 1 else flat.contiguous()


def _sizes(width: int) -> tuple[int, int, int]:
    power = 1 << (width - 1).bit_length()
    return width, power, max(1, TILE // power)


class _Norm(torch.autograd.Function):
    """Keeps the inputs and one scalar a row."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, gate: Tensor | None, weight: Tensor | None, eps: float, gain: float, dtype: torch.dtype
    ) -> Tensor:
        flat, opening = _rows(x), None if gate is None else _rows(gate)
        weight = None if weight is None else weight.contiguous()
        y, scale = x.new_empty(x.shape, dtype=dtype), x.new_empty(len(flat), dtype=torch.float32)
        sizes = _sizes(x.shape[-1])
        launch(
            forward, (-(-len(flat) // sizes[2]),), flat, None, opening, weight, None, y, scale, len(flat), eps, gain,
            flat.stride(0), 0 if opening is None else opening.stride(0), *sizes, num_warps=8 if sizes[1] > 256 else 4,
        )  # fmt: skip
        ctx.save_for_backward(x, gate, weight, scale)
        ctx.gain = gain
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, ...]:
        x, gate, weight, scale = ctx.saved_tensors
        flat, opening = _rows(x), None if gate is None else _rows(gate)
        sizes = _sizes(x.shape[-1])
        tiles = -(-len(flat) // sizes[2])
        many = torch.cuda.get_device_properties(x.device).multi_processor_count * PROGRAMS if x.is_cuda else 3
        programs = min(tiles, many) if weight is not None else tiles
        to_x = x.new_empty(x.shape)
        to_gate = None if gate is None else gate.new_empty(gate.shape)
        parts = None if weight is None else scale.new_empty(programs, x.shape[-1])
        launch(
            backward, (programs,), grads[0].contiguous(), flat, opening, weight, scale, to_x, to_gate, parts, len(flat),
            ctx.gain, flat.stride(0), 0 if opening is None else opening.stride(0), *sizes,
            num_warps=8 if sizes[1] > 256 else 4,
        )  # fmt: skip
        to_weight = None if weight is None or parts is None else parts.sum(0).to(weight.dtype)
        return to_x, to_gate, to_weight, None, None, None
