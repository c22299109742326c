"""Products of a matrix with its own transpose on a GPU: one triangle of tiles is computed, the other is its mirror."""

from typing import no_type_check

import torch
import triton
import triton.language as tl
from jaxtyping import Float
from torch import Tensor

from triax.kernels.device import launch

ROWS, DEPTH = 128, 64


@triton.jit
@no_type_check
def triangle(x, add, result, R, C, x_batch, x_row, alpha, beta, BM: tl.constexpr, BK: tl.constexpr,
             PRECISION: tl.constexpr):  # fmt: skip
    """Write result = alpha x x^T + beta add of each matrix; `add` is symmetric, or None."""
    tile = tl.program_id(0)
    down = ((tl.sqrt(8.0 * tile + 1.0) - 1.0) * 0.5).to(tl.int32)
    # the square root may be off by one either way
    down = tl.where(down * (down + 1) // 2 > tile, down - 1, down)
    down = tl.where((down + 1) * (down + 2) // 2 <= tile, down + 1, down)
    across = tile - down * (down + 1) // 2
    matrix = tl.program_id(1).to(tl.int64)
    rows, columns = down * BM + tl.arange(0, BM), across * BM + tl.arange(0, BM)
    depth = tl.arange(0, BK)
    left = x + matrix * x_batch + rows.to(tl.int64)[:, None] * x_row + depth[None, :]
    right = x + matrix * x_batch + columns.to(tl.int64)[:, None] * x_row + depth[None, :]
    total = tl.zeros((BM, BM), tl.float32)
    for first in range(0, C, BK):
        inside = depth[None, :] < C - first
        a = tl.load(left + first, mask=(rows[:, None] < R) & inside, other=0.0)
        b = tl.load(right + first, mask=(columns[:, None] < R) & inside, other=0.0)
        total = tl.dot(a, tl.trans(b), total, input_precision=PRECISION)
    total *= alpha
    within = (rows[:, None] < R) & (columns[None, :] < R)
    place = matrix * R * R + rows.to(tl.int64)[:, None] * R + columns[None, :]
    if add is not None:
        total += beta * tl.load(add + place, mask=within, other=0.0).to(tl.float32)
    rounded = total.to(result.dtype.element_ty)
    tl.store(result + place, rounded, mask=within)
    if down != across:
        mirrored = matrix * R * R + columns.to(tl.int64)[:, None] * R + rows[None, :]
        tl.store(result + mirrored, tl.trans(rounded), mask=(columns[:, None] < R) & (rows[None, :] < R))


def product(
    x: Float[Tensor, "B R C"], alpha: float = 1.0, add: Float[Tensor, "B R R"] | None = None, beta: float = 0.0
) -> Float[Tensor, "B R R"]:
    """Return `alpha x x^T + beta add` of each matrix, exactly symmetric off the diagonal tiles.

    Args:
        x: Matrices with columns side by side.
        alpha: Times the product.
        add: Symmetric matrices to add.
        beta: Times those.
    """
    batch, rows, columns = x.shape
    result = x.new_empty(batch, rows, rows)
    if result.numel():
        high = -(-rows // ROWS)
        exact = x.dtype == torch.float32
        launch(
            triangle, (high * (high + 1) // 2, batch), x, add, result, rows, columns, x.stride(0), x.stride(1),
            alpha, beta, ROWS, 32 if exact else DEPTH, "ieee" if exact else "tf32", num_warps=8, num_stages=3 if
            exact else 4,
        )  # fmt: skip
    return result
