"""The gated activations on a GPU: one pass forward, one pass backward, nothing kept but the two inputs."""

from typing import Any, no_type_check

import torch
import triton
import triton.language as tl
from jaxtyping import Float
from torch import Tensor
from torch.autograd.function import once_differentiable

from triax.errors import UnsupportedError
from triax.kernels.device import glu as glu_values
from triax.kernels.device import glu_gradient, launch

TILE = 4096  # numbers a program works on
WARPS = 8
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


@triton.jit
@no_type_check
def forward(gate, up, value, gate_row, up_row, R, F, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
            GATE_CAP: tl.constexpr, UP_CAP: tl.constexpr, FAST: tl.constexpr):  # fmt: skip
    """Write value [R, F], contiguous; gate and up have rows of their own strides."""
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)[:, None]
    column = (tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS))[None, :]
    inside = (row < R) & (column < F)
    opening = tl.load(gate + row * gate_row + column, mask=inside, other=0.0).to(tl.float32)
    passing = tl.load(up + row * up_row + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(value + row * F + column, glu_values(opening, passing, GATE_CAP, UP_CAP, FAST), mask=inside)


@triton.jit
@no_type_check
def backward(upstream, gate, up, to_gate, to_up, gate_row, up_row, R, F, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
             GATE_CAP: tl.constexpr, UP_CAP: tl.constexpr, FAST: tl.constexpr):  # fmt: skip
    """Write both gradients, contiguous."""
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)[:, None]
    column = (tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS))[None, :]
    inside = (row < R) & (column < F)
    opening = tl.load(gate + row * gate_row + column, mask=inside, other=0.0).to(tl.float32)
    passing = tl.load(up + row * up_row + column, mask=inside, other=0.0).to(tl.float32)
    above = tl.load(upstream + row * F + column, mask=inside, other=0.0).to(tl.float32)
    _, of_gate, of_up = glu_gradient(above, opening, passing, GATE_CAP, UP_CAP, FAST)
    tl.store(to_gate + row * F + column, of_gate, mask=inside)
    tl.store(to_up + row * F + column, of_up, mask=inside)


def unsupported(gate: Tensor, up: Tensor) -> str | None:
    """Say what of these inputs the kernel cannot take, if anything."""
    if gate.dtype not in DTYPES or up.dtype is not gate.dtype:
        return f"dtypes `{gate.dtype}` and `{up.dtype}`"
    return None


def glu(
    gate: Float[Tensor, "*rows F"], up: Float[Tensor, "*rows F"], gate_cap: float | None, up_cap: float | None
) -> Float[Tensor, "*rows F"]:
    """Compute `reference.glu` with the GPU kernel or not at all.

    Raises:
        UnsupportedError: The kernel has no form for these dtypes.
    """
    reason = unsupported(gate, up)
    if reason is not None:
        raise UnsupportedError(
            f"kernels.situ_glu.fused: no kernel for {reason}; use one of bf16, fp16 and fp32 for both"
        )
    return _Glu.apply(gate, up, gate_cap, up_cap)


def _rows(x: Tensor) -> Tensor:
    """Return [R, F] with columns side by side, a view where rows are evenly spaced."""
    flat = x.reshape(-1, x.shape[-1])
    return flat if flat.stride(-1) == 1 or flat.shape[-1] <= 1 else flat.contiguous()


def _tiles(rows: int, columns: int) -> tuple[tuple[int, int], int, int]:
    wide = min((1 << max(columns - 1, 0).bit_length()), 1024)
    tall = TILE // wide
    return (-(-rows // tall), -(-columns // wide)), tall, wide


def gradient(
    upstream: Float[Tensor, "*rows F"],
    gate: Float[Tensor, "*rows F"],
    up: Float[Tensor, "*rows F"],
    gate_cap: float | None,
    up_cap: float | None,
) -> tuple[Float[Tensor, "*rows F"], Float[Tensor, "*rows F"]]:
    """Return the gradients of gate and up, in their dtype, for `upstream` on the value."""
    to_gate, to_up = gate.new_empty(gate.shape), up.new_empty(up.shape)
    opening, passing = _rows(gate), _rows(up)
    grid, tall, wide = _tiles(*opening.shape)
    launch(
        backward, grid, upstream.contiguous(), opening, passing, to_gate, to_up, opening.stride(0), passing.stride(0),
        *opening.shape, tall, wide, gate_cap, up_cap, _is_fast(gate), num_warps=WARPS,
    )  # fmt: skip
    return to_gate, to_up


def _is_fast(x: Tensor) -> bool:
    return x.is_cuda and x.dtype is not torch.float32


class _Glu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor, gate_cap: float | None, up_cap: float | None) -> Tensor:
        ctx.save_for_backward(gate, up)
        ctx.caps = gate_cap, up_cap
        value = gate.new_empty(gate.shape)
        opening, passing = _rows(gate), _rows(up)
        grid, tall, wide = _tiles(*opening.shape)
        launch(
            forward, grid, opening, passing, value, opening.stride(0), passing.stride(0), *opening.shape, tall, wide,
            gate_cap, up_cap, _is_fast(gate), num_warps=WARPS,
        )  # fmt: skip
        return value

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor, Tensor, None, None]:
        return *gradient(grads[0], *ctx.saved_tensors, *ctx.caps), None, None
