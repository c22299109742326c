"""Products of a matrix with its own transpose on a GPU: one triangle of tiles is computed, the other is its mirror."""

from typing import no_type_check

import torch
import triton
import triton.language as tl
from jaxtyping import Float
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from triax.kernels.device import launch

ROWS, DEPTH, WARPS, STAGES = 128, 64, 8, 4


@triton.jit
@no_type_check
def triangle(x, add, result, R, C, alpha, beta, BM: tl.constexpr, BK: tl.constexpr, PRECISION: tl.constexpr):
    """Write result = alpha x x^T + beta add of each matrix; `x` is a descriptor, `add` symmetric or None."""
    tile = tl.program_id(0)
    down = ((tl.sqrt(8.0 * tile + 1.0) - 1.0) * 0.5).to(tl.int32)
    # the square root may be off by one either way
    down = tl.where(down * (down + 1) // 2 > tile, down - 1, down)
    down = tl.where((down + 1) * (down + 2) // 2 <= tile, down + 1, down)
    across = tile - down * (down + 1) // 2
    matrix = tl.program_id(1)
    total = tl.zeros((BM, BM), tl.float32)
    for first in range(0, C, BK):
        a = x.load([matrix, down * BM, first]).reshape(BM, BK)
        b = x.load([matrix, across * BM, first]).reshape(BM, BK)
        total = tl.dot(a, b.T, total, input_precision=PRECISION)
    total *= alpha
    rows, columns = down * BM + tl.arange(0, BM), across * BM + tl.arange(0, BM)
    within = (rows[:, None] < R) & (columns[None, :] < R)
    here = matrix.to(tl.int64) * R * R
    place = here + rows.to(tl.int64)[:, None] * R + columns[None, :]
    if add is not None:
        total += beta * tl.load(add + place, mask=within, other=0.0).to(tl.float32)
    rounded = total.to(result.dtype.element_ty)
    tl.store(result + place, rounded, mask=within)
    if down != across:
        mirrored = here + columns.to(tl.int64)[:, None] * R + rows[None, :]
        tl.store(result + mirrored, tl.trans(rounded), mask=(columns[:, None] < R) & (rows[None, :] < R))


def product(
    x: Float[Tensor, "B R C"], alpha: float = 1.0, add: Float[Tensor, "B R R"] | None = None, beta: float = 0.0
) -> Float[Tensor, "B R R"]:
    """Return `alpha x x^T + beta add` of each matrix, exactly symmetric off the diagonal tiles.

    Args:
        x: Matrices with columns side by side and rows that begin at multiples of 16 bytes.
        alpha: Times the product.
        add: Symmetric matrices to add.
        beta: Times those.
    """
    batch, rows, columns = x.shape
    result = x.new_empty(batch, rows, rows)
    exact = x.dtype == torch.float32
    depth = DEPTH // 2 if exact else DEPTH
    high = -(-rows // ROWS)
    if result.numel():
        launch(
            triangle, (high * (high + 1) // 2, batch), TensorDescriptor.from_tensor(x, [1, ROWS, depth]), add, result,
            rows, columns, alpha, beta, ROWS, depth, "ieee" if exact else "tf32", num_warps=WARPS, num_stages=STAGES,
        )  # fmt: skip
    return result
