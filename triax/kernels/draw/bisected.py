"""The choice of tokens without sorting: filters become the smallest logit that stays, found by halving its range.

One program has one row, which stays in the cache; a pass over it counts tokens above a bound, or adds up their weights.
"""

from typing import no_type_check

import torch
import triton
import triton.language as tl
from jaxtyping import Bool, Float
from torch import Tensor

from triax.errors import UnsupportedError
from triax.kernels.device import launch
from triax.kernels.draw.reference import Drawn, Ways

BLOCK, WARPS = 4096, 16
LEAST = tl.constexpr(-2147483648)
FAINT = tl.constexpr(100.0)
"""Exponents below this have weights that fp32 does not hold."""


@triton.jit
@no_type_check
def _ordered(x):
    """Whole numbers in the order of fp32 numbers."""
    bits = x.to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
@no_type_check
def _scores(logits, barred, column, V):
    """Read a block of a row: plain logits, and those that may be said."""
    plain = tl.load(logits + column, mask=column < V, other=float("-inf"))
    said = plain
    if barred is not None:
        said = tl.where(tl.load(barred + column, mask=column < V, other=1) != 0, float("-inf"), plain)
    return plain, said


@triton.jit
@no_type_check
def _above(logits, barred, bound, peak, slope, V, BLOCK: tl.constexpr):
    """Count the tokens above a bound, and add up their weights."""
    count = tl.zeros((BLOCK,), tl.int32)
    mass = tl.zeros((BLOCK,), tl.float64)
    for first in range(0, V, BLOCK):
        _plain, said = _scores(logits, barred, first + tl.arange(0, BLOCK), V)
        is_above = _ordered(said) > bound
        count += is_above.to(tl.int32)
        mass += tl.where(is_above, tl.exp((said - peak) * slope), 0.0).to(tl.float64)
    return tl.sum(count, 0), tl.sum(mass, 0)


@triton.jit
@no_type_check
def _weight(key, peak, slope):
    """Weight of a logit that is given by its place in the order."""
    bits = key ^ ((key >> 31) & 0x7FFFFFFF)
    return tl.exp((bits.to(tl.float32, bitcast=True) - peak) * slope).to(tl.float64)


@triton.jit(do_not_specialize_on_alignment=["temperature", "top_k", "top_p", "min_p", "uniform"])
@no_type_check
def _draw(logits, barred, temperature, top_k, top_p, min_p, uniform, token, logprob, is_valid, V, stride,
          BLOCK: tl.constexpr):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    logits += row * stride
    largest = tl.full((BLOCK,), float("-inf"), tl.float32)
    best = tl.full((BLOCK,), float("-inf"), tl.float32)
    wrong = tl.zeros((BLOCK,), tl.int32)
    for first in range(0, V, BLOCK):
        plain, said = _scores(logits, barred, first + tl.arange(0, BLOCK), V)
        wrong |= (plain != plain).to(tl.int32)
        largest = tl.maximum(largest, plain)
        best = tl.maximum(best, said)
    peak, plain_peak = tl.max(best, 0), tl.max(largest, 0)
    fine = (tl.max(wrong, 0) == 0) & (plain_peak < float("inf")) & (peak > float("-inf"))
    chosen = tl.sum(tl.zeros((BLOCK,), tl.int32), 0)
    heat = tl.load(temperature + row)
    if fine:
        if heat == 0.0:
            place = tl.full((BLOCK,), V, tl.int32)
            for first in range(0, V, BLOCK):
                column = first + tl.arange(0, BLOCK)
                plain, said = _scores(logits, barred, column, V)
                place = tl.minimum(place, tl.where(said == peak, column, V))
            chosen = tl.min(place, 0)
        else:
            slope = 1.0 / heat
            k = tl.load(top_k + row)
            p = tl.load(top_p + row).to(tl.float64)
            # what lies so far below the peak weighs nothing
            faint = _ordered(peak - FAINT * heat)
            highest = _ordered(peak)
            bound = tl.minimum(highest, LEAST)
            ties = chosen + V
            _count, mass = _above(logits, barred, bound, peak, slope, V, BLOCK)
            if (k > 0) & (k < V):
                low = bound.to(tl.int64)
                high = highest.to(tl.int64)
                while low < high:  # the smallest bound above which there are fewer than k
                    middle = (low + high) >> 1
                    count, above = _above(logits, barred, middle.to(tl.int32), peak, slope, V, BLOCK)
                    if count < k:
                        high = middle
                    else:
                        low = middle + 1
                bound = high.to(tl.int32)
                count, above = _above(logits, barred, bound, peak, slope, V, BLOCK)
                ties = k - count
                equal, _mass = _above(logits, barred, bound - 1, peak, slope, V, BLOCK)
                ties = tl.minimum(ties, equal - count)
                mass = above + ties.to(tl.float64) * _weight(bound, peak, slope)
            if p < 1.0:
                low = tl.minimum(faint, highest).to(tl.int64) - 1
                high = highest.to(tl.int64)
                while low < high:  # the smallest bound above which there is less than that share
                    middle = (low + high) >> 1
                    _count, above = _above(logits, barred, middle.to(tl.int32), peak, slope, V, BLOCK)
                    if above < p * mass:
                        high = middle
                    else:
                        low = middle + 1
                last = high.to(tl.int32)
                _count, above = _above(logits, barred, last, peak, slope, V, BLOCK)
                weight = _weight(last, peak, slope)
                more = tl.where(weight > 0.0, tl.ceil((p * mass - above) / tl.where(weight > 0.0, weight, 1.0)), 0.0)
                more = tl.minimum(more, V * 1.0).to(tl.int32)
                if last > bound:
                    bound = last
                    ties = more
                elif last == bound:
                    ties = tl.minimum(ties, more)
            least = tl.load(min_p + row)
            # the same walk twice: first for the sum of what stays, then for the place on that line
            point = tl.sum(tl.zeros((BLOCK,), tl.float64), 0)
            for turn in tl.static_range(2):
                total = tl.zeros((1,), tl.float64)
                seen = tl.zeros((1,), tl.int32)
                found = tl.full((1,), V, tl.int32)
                final = tl.zeros((1,), tl.int32)
                for first in range(0, V, BLOCK):
                    column = first + tl.arange(0, BLOCK)
                    plain, said = _scores(logits, barred, column, V)
                    key = _ordered(said)
                    tied = (key == bound).to(tl.int32)
                    rank = seen + tl.cumsum(tied, 0) - tied
                    weight = tl.exp((said - peak) * slope)
                    stays = ((key > bound) | ((tied == 1) & (rank < ties))) & (weight >= least) & (weight > 0.0)
                    weight = tl.where(stays, weight, 0.0).to(tl.float64)
                    if turn == 1:
                        is_past = stays & (total + tl.cumsum(weight, 0) > point)
                        found = tl.minimum(found, tl.min(tl.where(is_past, column, V), 0))
                        final = tl.maximum(final, tl.max(tl.where(stays, column, 0), 0))
                    total += tl.sum(weight, 0)
                    seen += tl.sum(tied, 0)
                if turn == 0:
                    point = tl.load(uniform + row) * tl.sum(total, 0)
                else:
                    chosen = tl.sum(tl.where(found < V, found, final), 0)
        masses = tl.zeros((BLOCK,), tl.float64)
        for first in range(0, V, BLOCK):
            plain, said = _scores(logits, barred, first + tl.arange(0, BLOCK), V)
            masses += tl.exp(plain - plain_peak).to(tl.float64)
        own = tl.load(logits + chosen) - plain_peak
        tl.store(logprob + row, own - tl.log(tl.sum(masses, 0).to(tl.float32)))
    tl.store(token + row, chosen.to(tl.int64))
    tl.store(is_valid + row, fine)


def unsupported(logits: Tensor) -> str | None:
    """Say what of these inputs the kernel cannot take, if anything."""
    return None if logits.dtype is torch.float32 else f"dtype `{logits.dtype}`"


def draw(logits: Float[Tensor, "B V"], barred: Bool[Tensor, " V"] | None, ways: Ways) -> Drawn:
    """Compute `reference.draw` with the kernel or not at all.

    Raises:
        UnsupportedError: The kernel has no form for this dtype.
    """
    if reason := unsupported(logits):
        raise UnsupportedError(f"kernels.draw.bisected: no kernel for {reason}; use fp32 logits")
    rows, size = logits.shape
    logits = logits if logits.stride(-1) == 1 else logits.contiguous()
    barred = None if barred is None else barred.contiguous()
    token = torch.empty(rows, dtype=torch.long, device=logits.device)
    logprob = torch.full((rows,), torch.nan, dtype=torch.float32, device=logits.device)
    is_valid = torch.empty(rows, dtype=torch.bool, device=logits.device)
    launch(
        _draw, (rows,), logits, barred, *(way.contiguous() for way in ways), token, logprob, is_valid, size,
        logits.stride(0), BLOCK=BLOCK, num_warps=WARPS,
    )  # fmt: skip
    return Drawn(token, logprob, is_valid)
