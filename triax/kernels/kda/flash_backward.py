"""The backward kernels of the flash form: walk back with the state's gradient, then all other gradients at once."""

from typing import no_type_check

import triton
import triton.language as tl

from triax.kernels.kda.flash_forward import (
    LOWEST,
    add_rows,
    ahead,
    at_use,
    binary_gates,
    crossing,
    is_below,
    since_anchor,
    since_tile,
    until_tile,
)


@triton.jit
@no_type_check
def scan_back(
    dread, dends, runs, run_first, run_tokens, run_chunk, run_slot, Kt, Qt, Kh, M, X, decay, R, dS, dstate,
    rt, rh,
    H, K: tl.constexpr, BK: tl.constexpr, V: tl.constexpr, BV: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Walk one head of one sequence backwards; keeps the gradients of each chunk's last state and of its errors."""
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
    rows = r[:, None] * K + c[None, :]
    square = r[:, None] * 64 + r[None, :]
    begin = tl.load(runs + s)
    end = tl.load(runs + s + 1)
    G = ()
    for p in tl.static_range(0, K, BK):
        piece = tl.zeros((BV, BK), tl.float32)
        if begin == end:
            piece = tl.load(dends + owner * (K * V) + (cell + p * V))
        G += (piece,)
    for back in range(0, end - begin):
        run = end - 1 - back
        where = tl.load(run_slot + run).to(tl.int64)
        after = G
        G = ()
        for p in tl.static_range(0, K, BK):
            G += (after[p // BK] + tl.load(dends + (where * H + h) * (K * V) + (cell + p * V)),)
        start = tl.load(run_first + run).to(tl.int64)
        tokens = tl.load(run_tokens + run)
        chunk = tl.load(run_chunk + run).to(tl.int64)
        num = tl.cdiv(tokens, 64)
        for i in range(0, num):
            j = num - 1 - i
            n = (chunk + j) * H + h
            t = start + j * 64
            on = r < tokens - j * 64
            place = dread + t * rt + h * rh + (r[:, None] * rt + column[None, :])
            D = tl.trans(tl.load(place, mask=on[:, None], other=0.0))
            writes = ()
            queries = ()
            keys = ()
            kept = ()
            Ge = ()
            for p in tl.static_range(0, K, BK):
                writes += (ahead(Kh + n * (64 * K) + (rows + p), WHOLE),)
            reads = ahead(M + n * (64 * 64) + square, WHOLE)
            inverse = ahead(X + n * (64 * 64) + square, WHOLE)
            for p in tl.static_range(0, K, BK):
                queries += (ahead(Qt + n * (64 * K) + (rows + p), WHOLE),)
                keys += (ahead(Kt + n * (64 * K) + (rows + p), WHOLE),)
                kept += (ahead(decay + n * K + (p + c), WHOLE),)
                Ge += (G[p // BK].to(E),)
                tl.store(dS + n * (K * V) + (column[:, None] * K + (p + c)[None, :]), Ge[p // BK])
            dU = tl.dot(D, at_use(reads, WHOLE), input_precision=PRECISION)
            for p in tl.static_range(0, K, BK):
                dU = tl.dot(Ge[p // BK], tl.trans(at_use(writes[p // BK], WHOLE)), dU, input_precision=PRECISION)
            dR = tl.dot(dU.to(E), at_use(inverse, WHOLE), input_precision=PRECISION).to(E)
            after = G
            G = ()
            for p in tl.static_range(0, K, BK):
                faded = after[p // BK] * at_use(kept[p // BK], WHOLE)[None, :]
                faded = tl.dot(D, at_use(queries[p // BK], WHOLE), faded, input_precision=PRECISION)
                G += (tl.dot(-dR, at_use(keys[p // BK], WHOLE), faded, input_precision=PRECISION),)
            tl.store(R + n * (64 * V) + (r[None, :] * V + column[:, None]), dR)
    for p in tl.static_range(0, K, BK):
        tl.store(dstate + owner * (K * V) + (cell + p * V), G[p // BK])


@triton.jit
@no_type_check
def add_pairs(taken, row, column, up, down, of_row, of_column, dG, PRECISION: tl.constexpr):
    """Add what pairs of tokens give to their rows and columns, and from both to the sums up to each gate."""
    part = tl.dot(taken, column, input_precision=PRECISION)
    of_row += part * up
    dG += row.to(tl.float32) * part
    part = tl.dot(tl.trans(taken), row, input_precision=PRECISION)
    if of_column is None:
        of_column = part * down
    else:
        of_column += part * down
    dG -= column.to(tl.float32) * part
    return of_row, of_column, dG


@triton.jit
@no_type_check
def gradients(
    q, k, v, g, beta, dread, first, count, states, Us, R, dS, dq, dk, dv, dg, db,
    qt, qh, kt, kh, vt, vh, gt, gh, bt, bh, rt, rh, T,
    H, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, ANCHORED: tl.constexpr, CAUSAL: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """All gradients of a chunk and head on BK key channels, and on as large a share of the values."""
    piece = tl.program_id(0) % (K // BK)
    slot = (tl.program_id(0) // (K // BK)).to(tl.int64)
    n = slot // H
    h = slot % H
    start = tl.load(first + n).to(tl.int64)
    length = tl.load(count + n)
    E: tl.constexpr = states.dtype.element_ty
    EXACT: tl.constexpr = tl.float32 == E
    BZ: tl.constexpr = V * BK // K
    BV: tl.constexpr = 64 if V > 64 else V
    r = tl.arange(0, 64)
    i = r[None, :]
    c = piece * BK + tl.arange(0, BK)
    live = r < length
    on = live[:, None]
    q += start * qt + h * qh
    k += start * kt + h * kh
    v += start * vt + h * vh
    g += start * gt + h * gh
    dread += start * rt + h * rh
    Us += slot * (64 * V)
    R += slot * (64 * V)
    states += slot * (K * V)
    dS += slot * (K * V)
    dq += (start * H + h) * K
    dk += (start * H + h) * K
    dg += (start * H + h) * K
    dv += (start * H + h) * V
    b = tl.load(beta + start * bt + h * bh + r * bt, mask=live, other=0.0).to(tl.float32)[:, None]
    second = (r >= 32)[:, None]
    far = second & (i < 32)
    y = r[:, None] * (H * K) + c[None, :]

    gates = tl.load(g + (r[:, None] * gt + c[None, :]), mask=on, other=0.0)
    gates = binary_gates(gates, ANCHORED, CAUSAL, EXACT)
    first_sum = tl.sum(tl.where(second, 0.0, gates), axis=0)
    second_sum = tl.sum(tl.where(second, gates, 0.0), axis=0)
    since = since_tile(gates, EXACT)
    tile_sum = tl.where(second, second_sum[None, :], first_sum[None, :])
    from_start = tl.where(second, tl.exp2(first_sum)[None, :], 1.0)
    until_end = tl.where(second, 1.0, tl.exp2(second_sum)[None, :])

    # First what the reads give. At most 64 values at a time, which bounds the registers.
    pairs = tl.zeros((64, 64), tl.float32)
    of_query = tl.zeros((64, BK), tl.float32)
    for tile in tl.static_range(0, V, BV):
        z = tile + tl.arange(0, BV)
        D = tl.load(dread + (r[:, None] * rt + z[None, :]), mask=on, other=0.0)
        U = tl.load(Us + (r[:, None] * V + z[None, :]))
        pairs = tl.dot(D, tl.trans(U), pairs, input_precision=PRECISION)
        S = tl.load(states + (z[:, None] * K + c[None, :]))
        of_query = tl.dot(D, S, of_query, input_precision=PRECISION)
    # A token's own <q_t, k_t> has no decay: kept out of the products, it leaves no rounding in the decay's gradient.
    own = tl.sum(tl.where(r[:, None] == i, pairs, 0.0), axis=1)[:, None]
    key = tl.load(k + (r[:, None] * kt + c[None, :]), mask=on, other=0.0).to(tl.float32)
    query = tl.load(q + (r[:, None] * qt + c[None, :]), mask=on, other=0.0).to(tl.float32)
    cross = tl.exp2(tl.where(second, since, until_tile(gates, since, tile_sum, ANCHORED, EXACT)))
    of_query *= tl.exp2(since) * from_start
    # A pair of tokens adds to the gates at and before one and takes from those at and before the other: in the sum up
    # to a gate almost all of it cancels, so both sides take the very same rounded factors.
    dG = query * of_query
    taken = tl.where(far, pairs, 0.0).to(E)
    row = (query * cross).to(E)
    column = (key * cross).to(E)
    of_query, of_column, dG = add_pairs(taken, row, column, cross, cross, of_query, None, dG, PRECISION)
    if ANCHORED == 32:
        taken = tl.where((r[:, None] > i) & (second == (i >= 32)), pairs, 0.0).to(E)
        up = tl.exp2(since - 0.5 * tile_sum)
        down = tl.exp2(0.5 * tile_sum - since)
        row = (query * up).to(E)
        column = (key * down).to(E)
        of_query, of_column, dG = add_pairs(taken, row, column, up, down, of_query, of_column, dG, PRECISION)
    else:
        for level in tl.static_range(4 if ANCHORED == 16 else 3 if ANCHORED == 8 else 0, 5):
            taken = tl.where(is_below(r[:, None], i, level), pairs, 0.0).to(E)
            x = tl.exp2(crossing(gates, 1 << level, EXACT))
            row = (query * x).to(E)
            column = (key * x).to(E)
            of_query, of_column, dG = add_pairs(taken, row, column, x, x, of_query, of_column, dG, PRECISION)
        if ANCHORED > 1:
            taken = tl.where((r[:, None] > i) & (r[:, None] // ANCHORED == i // ANCHORED), pairs, 0.0).to(E)
            since_own = since_anchor(gates, ANCHORED, CAUSAL, EXACT)
            up = tl.exp2(since_own)
            down = tl.exp2(-since_own)
            row = (query * up).to(E)
            column = (key * down).to(E)
            of_query, of_column, dG = add_pairs(taken, row, column, up, down, of_query, of_column, dG, PRECISION)
    tl.store(dq + y, (of_query + own * key).to(dq.dtype.element_ty), mask=on)

    # Then what the writes give. The rows' numbers anew, or 32 conditions a thread would wait in registers till here.
    again = r[:, None] + tl.minimum(length, 0)
    pairs = tl.zeros((64, 64), tl.float32)
    of_row = tl.zeros((64, BK), tl.float32)
    hat = tl.zeros((64, BK), tl.float32)
    both = tl.zeros((BK,), tl.float32)
    for tile in tl.static_range(0, V, BV):
        z = tile + tl.arange(0, BV)
        dR = tl.load(R + (r[:, None] * V + z[None, :]))
        U = tl.load(Us + (r[:, None] * V + z[None, :]))
        pairs = tl.dot(dR, tl.trans(U), pairs, input_precision=PRECISION)
        S = tl.load(states + (z[:, None] * K + c[None, :]))
        of_row = tl.dot(dR, S, of_row, input_precision=PRECISION)
        G = tl.load(dS + (z[:, None] * K + c[None, :]))
        hat = tl.dot(U, G, hat, input_precision=PRECISION)
        both += tl.sum(S.to(tl.float32) * G.to(tl.float32), axis=0)
    hat *= tl.exp2(until_tile(gates, since, tile_sum, ANCHORED, EXACT)) * until_end
    end = tl.sum(key * hat, axis=0) + tl.exp2(first_sum + second_sum) * both
    of_column += hat
    of_row *= tl.exp2(since) * from_start
    bk = -b * key
    dG += bk * of_row - key * hat
    cross = tl.exp2(tl.where(second, since, until_tile(gates, since, tile_sum, ANCHORED, EXACT)))
    taken = tl.where(far, pairs, 0.0).to(E)
    row = (bk * cross).to(E)
    column = (key * cross).to(E)
    of_row, of_column, dG = add_pairs(taken, row, column, cross, cross, of_row, of_column, dG, PRECISION)
    if ANCHORED == 32:
        taken = tl.where((again > i) & (second == (i >= 32)), pairs, 0.0).to(E)
        up = tl.exp2(since - 0.5 * tile_sum)
        down = tl.exp2(0.5 * tile_sum - since)
        row = (bk * up).to(E)
        column = (key * down).to(E)
        of_row, of_column, dG = add_pairs(taken, row, column, up, down, of_row, of_column, dG, PRECISION)
    else:
        for level in tl.static_range(4 if ANCHORED == 16 else 3 if ANCHORED == 8 else 0, 5):
            taken = tl.where(is_below(again, i, level), pairs, 0.0).to(E)
            x = tl.exp2(crossing(gates, 1 << level, EXACT))
            row = (bk * x).to(E)
            column = (key * x).to(E)
            of_row, of_column, dG = add_pairs(taken, row, column, x, x, of_row, of_column, dG, PRECISION)
        if ANCHORED > 1:
            taken = tl.where((again > i) & (again // ANCHORED == i // ANCHORED), pairs, 0.0).to(E)
            since_own = since_anchor(gates, ANCHORED, CAUSAL, EXACT)
            up = tl.exp2(since_own)
            down = tl.exp2(-since_own)
            row = (bk * up).to(E)
            column = (key * down).to(E)
            of_row, of_column, dG = add_pairs(taken, row, column, up, down, of_row, of_column, dG, PRECISION)

    share = piece * BZ + tl.arange(0, BZ)
    errors = tl.load(R + (r[:, None] * V + share[None, :])).to(tl.float32)
    value = tl.load(v + (r[:, None] * vt + share[None, :]), mask=on, other=0.0).to(tl.float32)
    tl.store(dv + (r[:, None] * (H * V) + share[None, :]), (b * errors).to(dv.dtype.element_ty), mask=on)
    of_beta = tl.sum(errors * value, axis=1) - tl.sum(key * of_row, axis=1)
    tl.store(db + (piece.to(tl.int64) * T + start) * H + h + r * H, of_beta, mask=live)
    of_row *= -b
    query = tl.load(q + (r[:, None] * qt + c[None, :]), mask=on, other=0.0).to(tl.float32)
    tl.store(dk + y, (of_row + of_column + own * query).to(dk.dtype.element_ty), mask=on)
    dg_rows = add_rows(tl.where(r[:, None] <= i, 1.0, 0.0), dG, EXACT) + end[None, :]
    if (8 if CAUSAL else 16) == ANCHORED:
        # The gradient of what a gate that was held would have kept, not of what it kept.
        asked = tl.load(g + (r[:, None] * gt + c[None, :]), mask=on, other=0.0).to(tl.float32) * 1.4426950408889634
        dg_rows *= tl.exp2(tl.minimum(asked - LOWEST, 0.0))
    tl.store(dg + y, dg_rows.to(dg.dtype.element_ty), mask=on)
