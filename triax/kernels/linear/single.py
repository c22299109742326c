"""The product of one row on a GPU: nothing but reading the weight, which every program does for a few outputs."""

from typing import no_type_check

import torch
import triton
import triton.language as tl
from jaxtyping import Float
from torch import Tensor

from triax.errors import UnsupportedError
from triax.kernels.device import launch

TILE = 2048  # numbers of the weight that a program multiplies at once
WIDEST = 1024  # of them in one row
LONGEST = 16384  # inputs: the loop over them is unrolled, so that all of a program's reads are on their way together
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


@triton.jit
@no_type_check
def _multiply(row, weight, output, R, D: tl.constexpr, BR: tl.constexpr, BD: tl.constexpr):
    """Write BR outputs, each summed in one order."""
    o = tl.program_id(0) * BR + tl.arange(0, BR)[:, None]
    total = tl.zeros((BR, BD), tl.float32)
    for first in tl.static_range(0, D, BD):
        i = first + tl.arange(0, BD)[None, :]
        x = tl.load(row + i, mask=i < D, other=0.0).to(tl.float32)
        inside = (o < R) & (i < D)
        w = tl.load(weight + o.to(tl.int64) * D + i, mask=inside, other=0.0, eviction_policy="evict_first")
        total += x * w.to(tl.float32)
    own = tl.program_id(0) * BR + tl.arange(0, BR)
    tl.store(output + own, tl.sum(total, 1).to(output.dtype.element_ty), mask=own < R)


def unsupported(hidden: Tensor, weight: Tensor) -> str | None:
    """Say what of these inputs the kernel cannot take, if anything."""
    if hidden.dtype not in DTYPES or weight.dtype not in DTYPES:
        return f"dtypes `{hidden.dtype}` and `{weight.dtype}`"
    if hidden.numel() != weight.shape[1]:
        return f"{hidden.numel() // max(1, weight.shape[1])} rows"
    if not 1 <= weight.shape[1] <= LONGEST or not weight.is_contiguous():
        return f"rows of `{weight.shape[1]}` inputs"
    return None


def linear(
    hidden: Float[Tensor, "*rows I"], weight: Float[Tensor, "O I"], dtype: torch.dtype | None = None
) -> Float[Tensor, "*rows O"]:
    """Return `hidden weight^T` of one row, summed in fp32, in a format of its own or that of `hidden`; no gradient.

    Raises:
        UnsupportedError: There are more rows, or the kernel has no form for these dtypes or this width.
    """
    if reason := unsupported(hidden, weight):
        raise UnsupportedError(f"kernels.linear.single: no kernel for {reason}; use `kernels.linear.linear`")
    outputs, inputs = weight.shape
    output = hidden.new_empty(*hidden.shape[:-1], outputs, dtype=dtype or hidden.dtype)
    columns, rows = tile(inputs)
    launch(
        _multiply, (-(-outputs // rows),), hidden.contiguous(), weight, output, outputs, D=inputs, BR=rows, BD=columns,
        num_warps=4,
    )  # fmt: skip
    return output


def tile(inputs: int) -> tuple[int, int]:
    """Return columns and rows of a program's tile: a width that divides the inputs, unless that is small."""
    even = inputs & -inputs
    columns = min(WIDEST, even if even >= 128 else 1 << (inputs - 1).bit_length())
    return columns, max(1, TILE // columns)
