"""Products of rows with their expert's matrices on a GPU, a tile of rows and of columns at a time.

Programs stay and take one tile after another; which expert a tile of rows belongs to, and how many tiles there are, is
read from the device. Matrices are fetched by the copy engine as tiles `[1, columns, depth]` or `[1, depth, columns]` of
their stack.
"""

from typing import no_type_check

import triton
import triton.language as tl

from triax.kernels.device import glu, glu_gradient


@triton.jit
@no_type_check
def _halves(product, BM: tl.constexpr, BN: tl.constexpr):
    """Return the left and the right half of a tile: what follows a product needs few registers at a time."""
    return product.reshape(BM, 2, BN // 2).permute(0, 2, 1).split()


@triton.jit
@no_type_check
def _open(opening, passing, both, inner, share, row, column, BM: tl.constexpr, BN: tl.constexpr,
          GATE_CAP: tl.constexpr, UP_CAP: tl.constexpr, KEEPS: tl.constexpr, FAST: tl.constexpr):  # fmt: skip
    # what the products return is rounded as everywhere else
    opening = opening.to(inner.dtype)
    passing = passing.to(inner.dtype)
    if KEEPS:
        both.store([0, row, column], opening.reshape(1, BM, BN))
        both.store([1, row, column], passing.reshape(1, BM, BN))
    value = glu(opening.to(tl.float32), passing.to(tl.float32), GATE_CAP, UP_CAP, FAST) * share
    inner.store([row, column], value.to(inner.dtype))


@triton.jit
@no_type_check
def gate_up_proj(x, gate, up, both, inner, expert, used, row_share, L, F, GATE_CAP: tl.constexpr, UP_CAP: tl.constexpr,
           BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, KEEPS: tl.constexpr, FAST: tl.constexpr,
           FLATTEN: tl.constexpr, PRECISION: tl.constexpr):  # fmt: skip
    """Write inner = share act(x gate^T, x up^T), and with KEEPS the two arguments as both[0] and both[1]."""
    columns = tl.cdiv(F, BN)
    total = tl.load(used) * columns
    for tile in tl.range(tl.program_id(0), total, tl.num_programs(0), flatten=FLATTEN):
        row, column = tile // columns * BM, tile % columns * BN
        e = tl.load(expert + tile // columns)
        opening = tl.zeros((BM, BN), tl.float32)
        passing = tl.zeros((BM, BN), tl.float32)
        for k in range(0, L, BK):
            a = x.load([row, k])
            opening = tl.dot(a, gate.load([e, column, k]).reshape(BN, BK).T, opening, input_precision=PRECISION)
            passing = tl.dot(a, up.load([e, column, k]).reshape(BN, BK).T, passing, input_precision=PRECISION)
        share = tl.load(row_share + row + tl.arange(0, BM))[:, None]
        o0, o1 = _halves(opening, BM, BN)
        p0, p1 = _halves(passing, BM, BN)
        _open(o0, p0, both, inner, share, row, column, BM, BN // 2, GATE_CAP, UP_CAP, KEEPS, FAST)
        _open(o1, p1, both, inner, share, row, column + BN // 2, BM, BN // 2, GATE_CAP, UP_CAP, KEEPS, FAST)


@triton.jit
@no_type_check
def down_proj(x, matrix, result, expert, used, L, F, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
           FLATTEN: tl.constexpr, PRECISION: tl.constexpr):  # fmt: skip
    """Write result = x matrix^T for matrices [L, F]."""
    columns = tl.cdiv(L, BN)
    total = tl.load(used) * columns
    for tile in tl.range(tl.program_id(0), total, tl.num_programs(0), flatten=FLATTEN):
        row, column = tile // columns * BM, tile % columns * BN
        e = tl.load(expert + tile // columns)
        product = tl.zeros((BM, BN), tl.float32)
        for k in range(0, F, BK):
            b = matrix.load([e, column, k]).reshape(BN, BK)
            product = tl.dot(x.load([row, k]), b.T, product, input_precision=PRECISION)
        left, right = _halves(product, BM, BN)
        result.store([row, column], left.to(result.dtype))
        result.store([row, column + BN // 2], right.to(result.dtype))


@triton.jit
@no_type_check
def _reopen(back, both, to_both, weighted, share, row, column, BM: tl.constexpr, BN: tl.constexpr,
            GATE_CAP: tl.constexpr, UP_CAP: tl.constexpr, FAST: tl.constexpr):  # fmt: skip
    opening = both.load([0, row, column]).reshape(BM, BN).to(tl.float32)
    passing = both.load([1, row, column]).reshape(BM, BN).to(tl.float32)
    value, to_opening, to_passing = glu_gradient(back * share, opening, passing, GATE_CAP, UP_CAP, FAST)
    weighted.store([row, column], (value * share).to(weighted.dtype))
    to_both.store([0, row, column], to_opening.to(to_both.dtype).reshape(1, BM, BN))
    to_both.store([1, row, column], to_passing.to(to_both.dtype).reshape(1, BM, BN))
    return tl.sum(back * value, 1)


@triton.jit
@no_type_check
def down_proj_backward(above, down, both, to_both, weighted, share_part, expert, used, row_share, R, L, F,
             GATE_CAP: tl.constexpr, UP_CAP: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
             FAST: tl.constexpr, FLATTEN: tl.constexpr, PRECISION: tl.constexpr):  # fmt: skip
    """Lead gradients back to the activation.

    With back = above down and value = act(both[0], both[1]) this writes to_both, the gradients of both for share * back
    on the value; weighted = share * value; and of each tile of columns the sum of back * value, a part of the share's
    gradient.
    """
    columns = tl.cdiv(F, BN)
    total = tl.load(used) * columns
    for tile in tl.range(tl.program_id(0), total, tl.num_programs(0), flatten=FLATTEN):
        row, column = tile // columns * BM, tile % columns * BN
        e = tl.load(expert + tile // columns)
        back = tl.zeros((BM, BN), tl.float32)
        for k in range(0, L, BK):
            b = down.load([e, k, column]).reshape(BK, BN)
            back = tl.dot(above.load([row, k]), b, back, input_precision=PRECISION)
        own = row + tl.arange(0, BM)
        share = tl.load(row_share + own)[:, None]
        left, right = _halves(back, BM, BN)
        part = _reopen(left, both, to_both, weighted, share, row, column, BM, BN // 2, GATE_CAP, UP_CAP, FAST)
        part += _reopen(
            right, both, to_both, weighted, share, row, column + BN // 2, BM, BN // 2, GATE_CAP, UP_CAP, FAST
        )
        tl.store(share_part + (tile % columns).to(tl.int64) * R + own, part)


@triton.jit
@no_type_check
def gate_up_proj_backward(to_both, gate, up, result, expert, used, L, F, BM: tl.constexpr, BN: tl.constexpr,
                          BK: tl.constexpr, FLATTEN: tl.constexpr, PRECISION: tl.constexpr):  # fmt: skip
    """Write result = to_both[0] gate + to_both[1] up."""
    columns = tl.cdiv(L, BN)
    total = tl.load(used) * columns
    for tile in tl.range(tl.program_id(0), total, tl.num_programs(0), flatten=FLATTEN):
        row, column = tile // columns * BM, tile % columns * BN
        e = tl.load(expert + tile // columns)
        product = tl.zeros((BM, BN), tl.float32)
        for k in range(0, F, BK):
            a = to_both.load([0, row, k]).reshape(BM, BK)
            product = tl.dot(a, gate.load([e, k, column]).reshape(BK, BN), product, input_precision=PRECISION)
        for k in range(0, F, BK):
            a = to_both.load([1, row, k]).reshape(BM, BK)
            product = tl.dot(a, up.load([e, k, column]).reshape(BK, BN), product, input_precision=PRECISION)
        left, right = _halves(product, BM, BN)
        result.store([row, column], left.to(result.dtype))
        result.store([row, column + BN // 2], right.to(result.dtype))


@triton.jit
@no_type_check
def weight_gradient(left, right, result, first, count, E, M, N, part, BM: tl.constexpr, BN: tl.constexpr,
                    BK: tl.constexpr, ADDS: tl.constexpr, FLATTEN: tl.constexpr, PRECISION: tl.constexpr):  # fmt: skip
    """Write, or with ADDS add to, result[e] = left[part]^T right over the rows of each expert; zeros without rows."""
    high, wide = tl.cdiv(M, BM), tl.cdiv(N, BN)
    for tile in tl.range(tl.program_id(0), E * high * wide, tl.num_programs(0), flatten=FLATTEN):
        e = tile // (high * wide)
        row, column = tile % (high * wide) // wide * BM, tile % wide * BN
        start = tl.load(first + e)
        end = start + tl.cdiv(tl.load(count + e), BK) * BK
        product = tl.zeros((BM, BN), tl.float32)
        for k in range(start, end, BK):
            a = left.load([part, k, row]).reshape(BK, BM)
            product = tl.dot(a.T, right.load([k, column]), product, input_precision=PRECISION)
        lower, upper = _halves(product, BM, BN)
        if ADDS:
            lower += result.load([e, row, column]).reshape(BM, BN // 2)
            upper += result.load([e, row, column + BN // 2]).reshape(BM, BN // 2)
        result.store([e, row, column], lower.to(result.dtype).reshape(1, BM, BN // 2))
        result.store([e, row, column + BN // 2], upper.to(result.dtype).reshape(1, BM, BN // 2))
