"""The mix on a GPU: each source is read once forward and once backward, with an online softmax over the sources.

Backward needs no second look at the sources either: the weights' mean gradient is the product of the result with the
result's gradient, so each source's gradient follows from that source alone.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple, no_type_check

import torch
import triton
import triton.language as tl
from jaxtyping import Float
from torch import Tensor
from torch.autograd.function import once_differentiable

from triax.errors import UnsupportedError
from triax.kernels.device import launch

# Measured on an H200 at width 7,168: rows on their way while one is summed, and numbers of a row for each warp.
STAGES, BACKWARD_STAGES = 4, 3
FORWARD_NUMBERS, BACKWARD_NUMBERS = 2048, 1024
PROGRAMS = 2  # a multiprocessor
WIDEST = 16384
MOST_SOURCES = 128
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


@triton.jit
@no_type_check
def _add_both(a, b, c, d):
    return a + c, b + d


@triton.jit
@no_type_check
def _chosen(numbers, j, N: tl.constexpr):
    """Return number j of a tuple."""
    found = tl.cast(numbers[0], tl.int64)
    for k in tl.static_range(1, N):
        found = tl.where(j == k, tl.cast(numbers[k], tl.int64), found)
    return tl.multiple_of(found, 8)


@triton.jit
@no_type_check
def forward(rows, away, total, probe, gain, mixed, rest, normed, weight, score, scale, mass_log, T, eps, gain_eps,
            D: tl.constexpr, BD: tl.constexpr, J: tl.constexpr, BJ: tl.constexpr, ADDS: tl.constexpr,
            STAGES: tl.constexpr):  # fmt: skip
    """Mix for the probe of the program's second number; every result has an outer axis for it.

    The rows of all tokens of a program follow each other in one pipelined loop. Source n lies `away[n]` numbers behind
    `rows`; source 0 is the newest. If it ADDS, an addend comes before it, to which the newest is added, and that sum is
    written to `total`; with `gain` the result is normalised; `rest` is what rounding took from `mixed`.
    """
    column = tl.arange(0, BD)
    inside = column < D
    place = tl.arange(0, BJ)
    vector = tl.load(probe + tl.program_id(1) * D + column, mask=inside, other=0.0)
    result = tl.zeros((BD,), tl.float32)
    scores = tl.full((BJ,), float("-inf"), tl.float32)
    scales = tl.zeros((BJ,), tl.float32)
    mass, best = 0.0, -1e38
    each: tl.constexpr = J + ADDS
    count = (T - tl.program_id(0) + tl.num_programs(0) - 1) // tl.num_programs(0) * each
    for i in tl.range(0, count, num_stages=STAGES):
        j = i % each - ADDS
        token = tl.program_id(0) + i // each * tl.num_programs(0)
        at = tl.cast(token, tl.int64) * D + column
        x = tl.load(rows + _chosen(away, j + ADDS, each) + at, mask=inside, other=0.0).to(tl.float32)
        if ADDS:  # noqa: SIM102 - when compiling, unlike the next
            if j == 0:  # the result so far is the addend
                grown = (x + result).to(rows.dtype.element_ty)
                tl.store(total + at, grown, mask=inside)
                x = grown.to(tl.float32)
        square, product = tl.reduce((x * x, x * vector), 0, _add_both)
        unit = tl.rsqrt(square / D + eps)
        found = product * unit
        before = tl.where(j <= 0, -1e38, best)
        best = tl.maximum(before, found)
        shrunk = tl.where(j <= 0, 0.0, tl.exp(before - best))
        share = tl.where(j < 0, 1.0, tl.exp(found - best))  # exactly one for the addend, whatever is contracted
        mass = mass * shrunk + share
        result = result * shrunk + share * x
        scores = tl.where(place == j, found, scores)
        scales = tl.where(place == j, unit, scales)
        if j == J - 1:
            final = result / mass
            outer = tl.cast(tl.program_id(1), tl.int64) * T + token
            row = outer * J + place
            if weight is not None:
                tl.store(weight + row, tl.exp(scores - best) / mass, mask=place < J)
            if score is not None:
                tl.store(score + row, scores, mask=place < J)
                tl.store(scale + row, scales, mask=place < J)
            if mass_log is not None:
                tl.store(mass_log + outer, best + tl.log(mass))
            if mixed is not None:
                rounded = final.to(mixed.dtype.element_ty)
                tl.store(mixed + outer * D + column, rounded, mask=inside)
                if rest is not None:
                    tl.store(rest + outer * D + column, final - rounded.to(tl.float32), mask=inside)
            if gain is not None:
                _store_normed(normed, gain, final, at, column, inside, gain_eps, D)


@triton.jit
@no_type_check
def _store_normed(normed, gain, result, at, column, inside, eps, D: tl.constexpr):
    """Write the result with a root mean square of one, rounded, then times the gain."""
    unit = (result * tl.rsqrt(tl.sum(result * result) / D + eps)).to(normed.dtype.element_ty)
    by = tl.load(gain + column, mask=inside, other=0.0).to(normed.dtype.element_ty)
    tl.store(normed + at, unit * by, mask=inside)


@triton.jit
@no_type_check
def merge(partial, mass_log, current, addend, total, probe, gain, normed, T, eps, gain_eps,
          D: tl.constexpr, BD: tl.constexpr):  # fmt: skip
    """Put the sum that is being written into a mix of finished sources, and normalise."""
    column = tl.arange(0, BD)
    inside = column < D
    vector = tl.load(probe + column, mask=inside, other=0.0)
    for token in range(tl.program_id(0), T, tl.num_programs(0)):
        at = tl.cast(token, tl.int64) * D + column
        x = tl.load(current + at, mask=inside, other=0.0).to(tl.float32)
        if addend is not None:
            grown = (x + tl.load(addend + at, mask=inside, other=0.0).to(tl.float32)).to(total.dtype.element_ty)
            tl.store(total + at, grown, mask=inside)
            x = grown.to(tl.float32)
        score = tl.sum(x * vector) * tl.rsqrt(tl.sum(x * x) / D + eps)
        before = tl.load(mass_log + token)
        share = 1 / (1 + tl.exp(before - score))
        result = (1 - share) * tl.load(partial + at, mask=inside, other=0.0).to(tl.float32) + share * x
        _store_normed(normed, gain, result, at, column, inside, gain_eps, D)


@triton.jit
@no_type_check
def backward(rows, away, to_sources, probe, weight, score, scale, to_probe, T,
             D: tl.constexpr, BD: tl.constexpr, J: tl.constexpr, STAGES: tl.constexpr):  # fmt: skip
    """Write each source's gradient to `to_sources` [J, T, D] and, a row a program, a part of the probe's.

    Rows are the gradient of the result, its value in two parts, then the sources; they follow each other as in
    `forward`. In two parts, since a source with nearly all the weight is nearly the result: what counts is the
    difference.
    """
    column = tl.arange(0, BD)
    inside = column < D
    each: tl.constexpr = J + 3
    vector = tl.load(probe + column, mask=inside, other=0.0)
    part = tl.zeros((BD,), tl.float32)
    above = tl.zeros((BD,), tl.float32)
    mean = 0.0
    count = (T - tl.program_id(0) + tl.num_programs(0) - 1) // tl.num_programs(0) * each
    for i in tl.range(0, count, num_stages=STAGES):
        j = i % each
        token = tl.program_id(0) + i // each * tl.num_programs(0)
        at = tl.cast(token, tl.int64) * D + column
        x = tl.load(rows + _chosen(away, j, each) + at, mask=inside, other=0.0).to(tl.float32)
        above = tl.where(j == 0, x, above)
        product = tl.sum(above * x)
        mean = tl.where(j == 1, product, tl.where(j == 2, mean + product, mean))
        if j > 2:
            row = tl.cast(token, tl.int64) * J + j - 3
            share = tl.load(weight + row)
            unit = tl.load(scale + row)
            toward = share * (product - mean) * unit
            along = -toward * tl.load(score + row) * unit / D
            part += toward * x
            place = to_sources + tl.cast(j - 3, tl.int64) * T * D + at
            tl.store(place, share * above + toward * vector + along * x, mask=inside)
    tl.store(to_probe + tl.program_id(0) * D + column, part, mask=inside)


class Mixed(NamedTuple):
    """What one place of the network reads when the residual add and the norm are part of it."""

    normed: Float[Tensor, "T D"]
    """The mix, normalised and scaled."""
    total: Float[Tensor, "T D"]
    """The newest source with the addend in it."""


class Finished(NamedTuple):
    """Mixes of the finished sources, one a place, to which the sum that is being written is still to come."""

    mixed: Float[Tensor, "S T D"]
    """The mix of the finished sources alone."""
    mass_log: Float[Tensor, "S T"]
    """Logarithm of the sum of their unnormalised weights."""


def unsupported(sources: Sequence[Tensor]) -> str | None:
    """Say what of these sources the kernels cannot take, if anything."""
    if len({source.dtype for source in sources}) > 1 or sources[0].dtype not in DTYPES:
        return f"dtypes {', '.join(sorted({f'`{source.dtype}`' for source in sources}))}"
    if sources[0].shape[1] > WIDEST:
        return f"width `{sources[0].shape[1]}`"
    return None if len(sources) <= MOST_SOURCES else f"{len(sources)} sources"


def mix(
    sources: Sequence[Float[Tensor, "T D"]], norm: Float[Tensor, " D"], query: Float[Tensor, " D"], eps: float
) -> tuple[Float[Tensor, "T D"], Float[Tensor, "T J"]]:
    """Average the sources as `reference.mix` does, with the GPU kernels or not at all; weights carry no gradient.

    Raises:
        UnsupportedError: The kernels have no form for these dtypes, this width or so many sources.
    """
    _require(sources)
    return _Mix.apply(norm.float() * query.float(), eps, *_aligned(sources))


def add_mix_norm(
    sources: Sequence[Float[Tensor, "T D"]],
    addend: Float[Tensor, "T D"],
    norm: Float[Tensor, " D"],
    query: Float[Tensor, " D"],
    eps: float,
    gain: Float[Tensor, " D"],
    gain_eps: float,
) -> Mixed:
    """Add to the last source, mix, and normalise, in one pass; for inference, so without gradients.

    Args:
        sources: Earlier outputs, oldest first; the last is the sum that is being written.
        addend: What the sublayer before wrote.
        norm: Weight of the norm that the scores read the sources through.
        query: What this place looks for.
        eps: Added to the scores' mean square.
        gain: Weight of the norm that follows the mix.
        gain_eps: Added to that norm's mean square.

    Raises:
        UnsupportedError: The kernel has no form for these dtypes, this width or so many sources.
    """
    _require((*sources, addend))
    length, width = addend.shape
    result = Mixed(addend.new_empty(addend.shape), addend.new_empty(addend.shape))
    rows = _aligned((addend, *reversed(sources)))
    if length:
        launch(
            forward, (_programs(length, addend.device), 1), rows[0], _away(rows), result.total,
            norm.float() * query.float(), gain.contiguous(), None, None, result.normed, None, None, None, None, length,
            eps, gain_eps, *_sizes(width, len(sources)), 1, STAGES, num_warps=_warps(width, FORWARD_NUMBERS),
        )  # fmt: skip
    return result


def finished(
    sources: Sequence[Float[Tensor, "T D"]],
    norms: Float[Tensor, "S D"],
    queries: Float[Tensor, "S D"],
    eps: float,
) -> Finished:
    """Mix the sources for several places at once: those of a block of layers, whose finished sources are the same.

    Args:
        sources: Finished outputs, oldest first.
        norms: Weights of the norms that the scores of each place read the sources through.
        queries: What each place looks for.
        eps: Added to the mean square.

    Raises:
        UnsupportedError: The kernel has no form for these dtypes, this width or so many sources.

    Source: Attention Residuals (arXiv 2603.15031) section 4.2; K3 report (arXiv 2607.24653) section 5.4.2.
    """
    _require(sources)
    (length, width), places = sources[0].shape, len(queries)
    result = Finished(
        sources[0].new_empty(places, length, width), sources[0].new_empty(places, length, dtype=torch.float32)
    )
    rows = _aligned(sources)
    if length and places:
        launch(
            forward, (_programs(length, rows[0].device), places), rows[0], _away(rows), None, (norms.float() *
            queries.float()).contiguous(), None, result.mixed, None, None, None, None, None, result.mass_log, length,
            eps, eps, *_sizes(width, len(sources)), 0, STAGES, num_warps=_warps(width, FORWARD_NUMBERS),
        )  # fmt: skip
    return result


def add_merge_norm(
    mixed: Float[Tensor, "T D"],
    mass_log: Float[Tensor, " T"],
    current: Float[Tensor, "T D"],
    addend: Float[Tensor, "T D"] | None,
    norm: Float[Tensor, " D"],
    query: Float[Tensor, " D"],
    eps: float,
    gain: Float[Tensor, " D"],
    gain_eps: float,
) -> Mixed:
    """Finish one place of `finished`: add to the sum that is being written, merge it in, and normalise.

    Args:
        mixed: The place's mix of the finished sources.
        mass_log: Logarithm of its weights' sum.
        current: The sum that is being written.
        addend: What the sublayer before wrote, if it is not in the sum yet.
        norm: Weight of the norm that the scores read the sources through.
        query: What this place looks for.
        eps: Added to the scores' mean square.
        gain: Weight of the norm that follows the mix.
        gain_eps: Added to that norm's mean square.

    Raises:
        UnsupportedError: The kernel has no form for these dtypes or this width.
    """
    _require((mixed, current) if addend is None else (mixed, current, addend))
    length, width = current.shape
    result = Mixed(current.new_empty(current.shape), current if addend is None else current.new_empty(current.shape))
    if length:
        launch(
            merge, (_programs(length, current.device),), mixed.contiguous(), mass_log.contiguous(),
            current.contiguous(), None if addend is None else addend.contiguous(), None if addend is None else
            result.total, norm.float() * query.float(), gain.contiguous(), result.normed, length, eps, gain_eps, width,
            _power(width), num_warps=_warps(width, FORWARD_NUMBERS),
        )  # fmt: skip
    return result


def _require(sources: Sequence[Tensor]) -> None:
    reason = unsupported(sources)
    if reason is not None:
        raise UnsupportedError(
            f"kernels.attention_residual.fused: no kernel for {reason}; sources have one dtype of bf16, fp16 and fp32, "
            f"at most {WIDEST} columns and are at most {MOST_SOURCES}"
        )


def _aligned(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return the tensors with rows side by side, each from a multiple of 16 bytes on, as the loads assume."""
    whole = [x.contiguous() for x in tensors]
    return [x if x.data_ptr() % 16 == 0 else x.clone() for x in whole]


def _away(rows: Sequence[Tensor]) -> tuple[int, ...]:
    """Return how many numbers each tensor lies behind the first: one pointer and these reach them all."""
    first = rows[0]
    return tuple((x.data_ptr() - first.data_ptr()) // first.element_size() for x in rows)


def _power(n: int) -> int:
    return 1 << (n - 1).bit_length()


def _sizes(width: int, sources: int) -> tuple[int, int, int, int]:
    return width, _power(width), sources, _power(sources)


def _warps(width: int, numbers: int) -> int:
    """Return how many warps share a row, so that a warp has so many of its numbers."""
    return min(16, max(1, _power(width) // numbers))


def _programs(length: int, device: torch.device) -> int:
    """Return how many programs walk over the tokens: a few a multiprocessor, so that each loads its probe once."""
    many = torch.cuda.get_device_properties(device).multi_processor_count * PROGRAMS if device.type == "cuda" else 3
    return min(length, many)


class _Mix(torch.autograd.Function):
    """Keeps references to the sources and the result, what rounding took from it, and three scalars a source."""

    @staticmethod
    def forward(ctx: Any, probe: Tensor, eps: float, *sources: Tensor) -> tuple[Tensor, Tensor]:
        length, width = sources[0].shape
        mixed = sources[-1].new_empty(length, width)
        weight, score, scale = (probe.new_empty(length, len(sources)) for _ in range(3))
        rest = mixed.new_empty(mixed.shape) if any(ctx.needs_input_grad) else None
        if length:
            newest_first = sources[::-1]
            launch(
                forward, (_programs(length, probe.device), 1), newest_first[0], _away(newest_first), None, probe,
                None, mixed, rest, None, weight, score, scale, None, length, eps, eps, *_sizes(width, len(sources)), 0,
                STAGES, num_warps=_warps(width, FORWARD_NUMBERS),
            )  # fmt: skip
        ctx.save_for_backward(probe, mixed, rest, weight, score, scale, *sources)
        weight = weight.flip(1)
        ctx.mark_non_differentiable(weight)
        return mixed, weight

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, ...]:
        probe, mixed, rest, weight, score, scale, *sources = ctx.saved_tensors
        length, width = mixed.shape
        found = mixed.new_empty(len(sources), length, width)
        rows = _aligned((grads[0], mixed, rest, *reversed(sources)))
        programs = _programs(length, probe.device)
        parts = probe.new_empty(programs, width)
        if length:
            launch(
                backward, (programs,), rows[0], _away(rows), found, probe, weight, score, scale, parts, length, width,
                _power(width), len(sources), BACKWARD_STAGES, num_warps=_warps(width, BACKWARD_NUMBERS),
            )  # fmt: skip
        return parts.sum(0), None, *reversed(found.unbind())
