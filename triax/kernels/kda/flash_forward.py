"""The forward kernels of the flash form: prepare every chunk, then walk each sequence with its state in registers.

A chunk is 64 rows in tiles of ANCHORED rows. With c the log decay summed inside a tile up to a row, t its sum over the
tile: anchored at the middle of the tile, e^(c - t/2) and e^(t/2 - c) stay inside the range of bf16 while no step of 32
is below -5.4, or no step of 16 below -10.8, so a tile's products are one matrix product. What crosses a border between
halves of the chunk, of a half and so on, is anchored at that border: factors there are never above 1.
A middle knows of gates that come after a row, which then move its last bits. CAUSAL tiles have half as many rows and
are anchored where they start; a power of two centres e^c and e^-c on 1, so that they stay in the same range.
A gate without a bound has tiles of 16 or 8 and is held at `LOWEST`: of a channel that forgets more, e^-10 remains,
4.5e-5. In fp32 it has tiles of 1: the products are summed over halvings of the chunk, and nothing remains.

`no_type_check` keeps the tests' shape hook off: wrapped by it, interpreted kernels do not find each other.
"""

from typing import no_type_check

import triton
import triton.language as tl

LOWEST = tl.constexpr(-14.4375)
"""The log decay to base 2 at which unbounded gates of bf16 products are held; a sum of two bf16 numbers."""
BALANCE = tl.constexpr(58.0)
"""Log to base 2 of what centres the factors of causal tiles on 1: half of 16 steps of -5, or of 8 of -10."""


@triton.jit
@no_type_check
def halves(x):
    """Split fp32 numbers in two bf16 terms; together they keep 16 bits."""
    high = (x.to(tl.int32, bitcast=True) & -65536).to(tl.float32, bitcast=True)
    return high.to(tl.bfloat16), (x - high).to(tl.bfloat16)


@triton.jit
@no_type_check
def add_rows(ones, x, EXACT: tl.constexpr):
    """Multiply rows x [64, K] with a matrix of ones and zeros, which is exact in bf16."""
    if EXACT:
        return tl.dot(ones, x, input_precision="tf32x3")
    ones = ones.to(tl.bfloat16)
    high, low = halves(x)
    return tl.dot(ones, high, tl.dot(ones, low))


@triton.jit
@no_type_check
def binary_gates(g, ANCHORED: tl.constexpr, CAUSAL: tl.constexpr, EXACT: tl.constexpr):
    """Log decays to base 2, rounded to what `add_rows` adds without error."""
    gates = g.to(tl.float32) * 1.4426950408889634
    if (8 if CAUSAL else 16) == ANCHORED:
        gates = tl.maximum(gates, LOWEST)
    if not EXACT:
        gates = (gates.to(tl.int32, bitcast=True) & -256).to(tl.float32, bitcast=True)
    return gates


@triton.jit
@no_type_check
def since_tile(gates, EXACT: tl.constexpr):
    """Sum the gates of a tile of 32 rows up to each row."""
    r = tl.arange(0, 64)
    t = r[:, None]
    i = r[None, :]
    return add_rows(tl.where((t // 32 == i // 32) & (t >= i), 1.0, 0.0), gates, EXACT)


@triton.jit
@no_type_check
def until_tile(gates, since, tile_sum, ANCHORED: tl.constexpr, EXACT: tl.constexpr):
    """Sum the gates of a tile of 32 rows after each row; a difference would cancel where one gate is huge."""
    if ANCHORED == 1:
        r = tl.arange(0, 64)
        t = r[:, None]
        i = r[None, :]
        return add_rows(tl.where((t // 32 == i // 32) & (t < i), 1.0, 0.0), gates, EXACT)
    return tile_sum - since


@triton.jit
@no_type_check
def since_anchor(gates, ANCHORED: tl.constexpr, CAUSAL: tl.constexpr, EXACT: tl.constexpr):
    """Sum the gates of a tile of ANCHORED rows up to each row: balanced, or less half of their sum."""
    r = tl.arange(0, 64)
    t = r[:, None]
    i = r[None, :]
    same = t // ANCHORED == i // ANCHORED
    if CAUSAL:
        return add_rows(tl.where(same & (t >= i), 1.0, 0.0), gates, EXACT) + BALANCE
    return add_rows(tl.where(same, tl.where(t >= i, 0.5, -0.5), 0.0), gates, EXACT)


@triton.jit
@no_type_check
def is_below(r, i, level: tl.constexpr):
    """Say whether row and column lie in the second and the first half of one block of 2 << level rows."""
    return (r > i) & (((r >> level) ^ (i >> level)) == 1)


@triton.jit
@no_type_check
def crossing(gates, WIDTH: tl.constexpr, EXACT: tl.constexpr):
    """Sum the gates between each row and the border in the middle of its block of 2 WIDTH rows."""
    r = tl.arange(0, 64)
    t = r[:, None]
    i = r[None, :]
    block = (t // (2 * WIDTH)) == (i // (2 * WIDTH))
    in_second = (i // WIDTH) % 2 == 1
    take = tl.where((t // WIDTH) % 2 == 1, in_second & (i <= t), (i > t) & (i % (2 * WIDTH) < WIDTH))
    return add_rows(tl.where(block & take, 1.0, 0.0), gates, EXACT)


@triton.jit
@no_type_check
def unit_lower_inverse(A, EXACT: tl.constexpr):
    """Inverse of I + A for strictly lower A [64, 64]: from blocks of 1 to blocks of 64, nothing grows on the way."""
    r = tl.arange(0, 64)
    t = r[:, None]
    i = r[None, :]
    X = tl.where(t == i, 1.0, tl.where((t ^ i) == 1, -A, 0.0))
    if EXACT:
        for level in tl.static_range(1, 6):
            all_below = tl.dot(X, tl.dot(A, X, input_precision="tf32x3"), input_precision="tf32x3")
            X -= tl.where(((t >> level) ^ (i >> level)) == 1, all_below, 0.0)
    else:
        A_high, A_low = halves(A)
        for level in tl.static_range(1, 6):
            # Left factors keep 16 bits, right factors 8: measured as good as exact products for near-equal keys.
            high, low = halves(X)
            right = X.to(tl.bfloat16)
            below = tl.dot(A_high, right, tl.dot(A_low, right)).to(tl.bfloat16)
            X -= tl.where(((t >> level) ^ (i >> level)) == 1, tl.dot(high, below, tl.dot(low, below)), 0.0)
    return X


@triton.jit
@no_type_check
def prepare(
    q, k, g, beta, first, count, Kt, Qt, Kh, M, X, decay,
    qt, qh, kt, kh, gt, gh, bt, bh,
    H, K: tl.constexpr, BK: tl.constexpr, ANCHORED: tl.constexpr, CAUSAL: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Everything of a chunk that does not depend on the state: one program a chunk and head, BK channels at a time."""
    slot = tl.program_id(0).to(tl.int64)
    n = slot // H
    h = slot % H
    start = tl.load(first + n).to(tl.int64)
    length = tl.load(count + n)
    E: tl.constexpr = Kt.dtype.element_ty
    EXACT: tl.constexpr = tl.float32 == E
    r = tl.arange(0, 64)
    i = r[None, :]
    live = r < length
    on = live[:, None]
    second = (r >= 32)[:, None]
    b = tl.load(beta + start * bt + h * bh + r * bt, mask=live, other=0.0).to(tl.float32)[:, None]
    A = tl.zeros((64, 64), tl.float32)
    R = tl.zeros((64, 64), tl.float32)
    c = tl.arange(0, BK)
    decay += slot * K
    g += start * gt + h * gh
    k += start * kt + h * kh
    q += start * qt + h * qh
    Kt += slot * 64 * K
    Qt += slot * 64 * K
    Kh += slot * 64 * K
    M += slot * 64 * 64
    X += slot * 64 * 64
    place = r[:, None] * K + c[None, :]
    for piece in range(0, K, BK):
        gates = tl.load(g + (r[:, None] * gt + (piece + c)[None, :]), mask=on, other=0.0)
        gates = binary_gates(gates, ANCHORED, CAUSAL, EXACT)
        key = tl.load(k + (r[:, None] * kt + (piece + c)[None, :]), mask=on, other=0.0).to(tl.float32)
        first_sum = tl.sum(tl.where(second, 0.0, gates), axis=0)
        second_sum = tl.sum(tl.where(second, gates, 0.0), axis=0)
        tl.store(decay + piece + c, tl.exp2(first_sum + second_sum))
        since = since_tile(gates, EXACT)
        tile_sum = tl.where(second, second_sum[None, :], first_sum[None, :])
        fall = tl.exp2(until_tile(gates, since, tile_sum, ANCHORED, EXACT)) * key
        tl.store(Kh + (place + piece), (fall * tl.where(second, 1.0, tl.exp2(second_sum)[None, :])).to(E))
        # The border between the tiles: rows of the second against columns of the first.
        column = tl.trans(tl.where(second, 0.0, fall).to(E))
        rise = tl.exp2(since)
        from_start = tl.where(second, tl.exp2(first_sum)[None, :], 1.0)
        scaled = rise * key
        tl.store(Kt + (place + piece), (b * from_start * scaled).to(E))
        A = tl.dot(tl.where(second, scaled, 0.0).to(E), column, A, input_precision=PRECISION)
        query = tl.load(q + (r[:, None] * qt + (piece + c)[None, :]), mask=on, other=0.0).to(tl.float32)
        scaled = rise * query
        tl.store(Qt + (place + piece), (from_start * scaled).to(E))
        R = tl.dot(tl.where(second, scaled, 0.0).to(E), column, R, input_precision=PRECISION)
        if ANCHORED == 32:
            # Above the diagonal a product may be infinite, so what is not wanted there is selected away at the end;
            # below it zeros leave it out.
            since -= 0.5 * tile_sum
            down = tl.exp2(-since) * key
            up = tl.exp2(since)
            column = tl.trans(down.to(E))
            row = tl.where(second, 0.0, up)
            A = tl.dot((key * row).to(E), column, A, input_precision=PRECISION)
            R = tl.dot((query * row).to(E), column, R, input_precision=PRECISION)
            column = tl.trans(tl.where(second, down, 0.0).to(E))
            row = tl.where(second, up, 0.0)
            A = tl.dot((key * row).to(E), column, A, input_precision=PRECISION)
            R = tl.dot((query * row).to(E), column, R, input_precision=PRECISION)
        else:
            for level in tl.static_range(4 if ANCHORED == 16 else 3 if ANCHORED == 8 else 0, 5):
                x = tl.exp2(crossing(gates, 1 << level, EXACT))
                near = is_below(r[:, None], i, level)
                scaled = (key * x).to(E)
                column = tl.trans(scaled)
                A += tl.where(near, tl.dot(scaled, column, input_precision=PRECISION), 0.0)
                R += tl.where(near, tl.dot((query * x).to(E), column, input_precision=PRECISION), 0.0)
            if ANCHORED > 1:
                # Above the diagonal a product may be infinite here too.
                since = since_anchor(gates, ANCHORED, CAUSAL, EXACT)
                near = (r[:, None] > i) & (r[:, None] // ANCHORED == i // ANCHORED)
                column = tl.trans((key * tl.exp2(-since)).to(E))
                up = tl.exp2(since)
                A += tl.where(near, tl.dot((key * up).to(E), column, input_precision=PRECISION), 0.0)
                R += tl.where(near, tl.dot((query * up).to(E), column, input_precision=PRECISION), 0.0)
            R += tl.where(r[:, None] == i, tl.sum(query * key, axis=1)[:, None], 0.0)
    square = r[:, None] * 64 + i
    tl.store(M + square, tl.where(r[:, None] >= i, R, 0.0).to(E))
    tl.store(X + square, unit_lower_inverse(tl.where(r[:, None] > i, A * b, 0.0), EXACT).to(E))


@triton.jit
@no_type_check
def ahead(place, WHOLE: tl.constexpr):
    """Read what a walk multiplies with a whole state before its products begin; with pieces of one `at_use` reads."""
    return tl.load(place) if WHOLE else place


@triton.jit
@no_type_check
def at_use(x, WHOLE: tl.constexpr):
    """Return what `ahead` has read, or read it now: all pieces at once would wait in registers."""
    return x if WHOLE else tl.load(x)


@triton.jit
@no_type_check
def scan(
    v, beta, state, runs, run_first, run_tokens, run_chunk, run_slot, Kt, Qt, Kh, M, X, decay, out, states, Us, ends,
    vt, vh, bt, bh, rt, rh,
    H, K: tl.constexpr, BK: tl.constexpr, V: tl.constexpr, BV: tl.constexpr, PRECISION: tl.constexpr,
    KEEP: tl.constexpr,
):  # fmt: skip
    """Walk one head of one sequence; the transposed state stays in registers, in pieces [BV, BK]: left operands."""
    program = tl.program_id(0)
    column = program % (V // BV) * BV + tl.arange(0, BV)
    owner = (program // (V // BV)).to(tl.int64)
    s = owner // H
    h = owner % H
    E: tl.constexpr = Kt.dtype.element_ty
    WHOLE: tl.constexpr = K == BK
    c = tl.arange(0, BK)
    r = tl.arange(0, 64)
    cell = column[:, None] + c[None, :] * V
    S = ()
    for p in tl.static_range(0, K, BK):
        S += (tl.load(state + owner * (K * V) + (cell + p * V)),)
    rows = r[:, None] * K + c[None, :]
    square = r[:, None] * 64 + r[None, :]
    begin = tl.load(runs + s)
    end = tl.load(runs + s + 1)
    if begin == end:
        for p in tl.static_range(0, K, BK):
            tl.store(ends + owner * (K * V) + (cell + p * V), S[p // BK])
    for run in range(begin, end):
        start = tl.load(run_first + run).to(tl.int64)
        tokens = tl.load(run_tokens + run)
        chunk = tl.load(run_chunk + run).to(tl.int64)
        for j in range(0, tl.cdiv(tokens, 64)):
            n = (chunk + j) * H + h
            t = start + j * 64
            on = r < tokens - j * 64
            value = tl.load(v + t * vt + h * vh + (r[None, :] * vt + column[:, None]), mask=on[None, :], other=0.0).to(
                tl.float32
            )
            b = tl.load(beta + t * bt + h * bh + r * bt, mask=on, other=0.0).to(tl.float32)
            keys = ()
            queries = ()
            writes = ()
            kept = ()
            Se = ()
            for p in tl.static_range(0, K, BK):
                keys += (ahead(Kt + n * (64 * K) + (rows + p), WHOLE),)
                queries += (ahead(Qt + n * (64 * K) + (rows + p), WHOLE),)
            inverse = ahead(X + n * (64 * 64) + square, WHOLE)
            reads = ahead(M + n * (64 * 64) + square, WHOLE)
            for p in tl.static_range(0, K, BK):
                writes += (ahead(Kh + n * (64 * K) + (rows + p), WHOLE),)
                kept += (ahead(decay + n * K + (p + c), WHOLE),)
                Se += (S[p // BK].to(E),)
                if KEEP:
                    tl.store(states + n * (K * V) + (column[:, None] * K + (p + c)[None, :]), Se[p // BK])
            error = tl.zeros((BV, 64), tl.float32)
            o = tl.zeros((BV, 64), tl.float32)
            for p in tl.static_range(0, K, BK):
                error = tl.dot(Se[p // BK], tl.trans(at_use(keys[p // BK], WHOLE)), error, input_precision=PRECISION)
                if not WHOLE:  # while this piece is an operand
                    o = tl.dot(Se[p // BK], tl.trans(at_use(queries[p // BK], WHOLE)), o, input_precision=PRECISION)
            error = b[None, :] * value - error
            U = tl.dot(error.to(E), tl.trans(at_use(inverse, WHOLE)), input_precision=PRECISION).to(E)
            if WHOLE:
                o = tl.dot(Se[0], tl.trans(queries[0]), o, input_precision=PRECISION)
            before = S
            S = ()
            for p in tl.static_range(0, K, BK):
                faded = before[p // BK] * at_use(kept[p // BK], WHOLE)[None, :]
                S += (tl.dot(U, at_use(writes[p // BK], WHOLE), faded, input_precision=PRECISION),)
            o = tl.dot(U, tl.trans(at_use(reads, WHOLE)), o, input_precision=PRECISION)
            if KEEP:
                tl.store(Us + n * (64 * V) + (r[None, :] * V + column[:, None]), U)
            place = out + t * rt + h * rh + (r[None, :] * rt + column[:, None])
            tl.store(place, o.to(out.dtype.element_ty), mask=on[None, :])
        where = tl.load(run_slot + run).to(tl.int64)
        for p in tl.static_range(0, K, BK):
            tl.store(ends + (where * H + h) * (K * V) + (cell + p * V), S[p // BK])
