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

WIDEST = 16384
MOST_SOURCES = 128
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


@triton.jit
@no_type_check
def forward(sources, addend, total, probe, gain, mixed, normed, weight, score, scale, mass_log, T, eps, gain_eps,
            D: tl.constexpr, BD: tl.constexpr, J: tl.constexpr, BJ: tl.constexpr):  # fmt: skip
    """Mix for the probe of the program's second number; every result has an outer axis for it.

    With `addend` the last source is first that sum, written to `total`; with `gain` the result is normalised.
    """
    column = tl.arange(0, BD)
    inside = column < D
    place = tl.arange(0, BJ)
    vector = tl.load(probe + tl.program_id(1) * D + column, mask=inside, other=0.0)
    for token in range(tl.program_id(0), T, tl.num_programs(0)):
        at = tl.cast(token, tl.int64) * D + column
        outer = tl.cast(tl.program_id(1), tl.int64) * T + token
        mass = 0.0
        best = float("-inf")
        scores = tl.full((BJ,), float("-inf"), tl.float32)
        scales = tl.zeros((BJ,), tl.float32)
        result = tl.zeros((BD,), tl.float32)
        for j in tl.static_range(J):
            x = tl.load(sources[j] + at, mask=inside, other=0.0).to(tl.float32)
            if j == J - 1 and addend is not None:
                grown = (x + tl.load(addend + at, mask=inside, other=0.0).to(tl.float32)).to(total.dtype.element_ty)
                tl.store(total + at, grown, mask=inside)
                x = grown.to(tl.float32)
            unit = tl.rsqrt(tl.sum(x * x) / D + eps)
            found = tl.sum(x * vector) * unit
            top = tl.maximum(best, found)
            shrunk = tl.exp(best - top)
            share = tl.exp(found - top)
            mass = mass * shrunk + share
            result = result * shrunk + share * x
            best = top
            scores = tl.where(place == j, found, scores)
            scales = tl.where(place == j, unit, scales)
        result = result / mass
        row = outer * J + place
        if weight is not None:
            tl.store(weight + row, tl.exp(scores - best) / mass, mask=place < J)
        if score is not None:
            tl.store(score + row, scores, mask=place < J)
            tl.store(scale + row, scales, mask=place < J)
        if mass_log is not None:
            tl.store(mass_log + outer, best + tl.log(mass))
        if mixed is not None:
            tl.store(mixed + outer * D + column, result, mask=inside)
        if gain is not None:
            _store_normed(normed, gain, result, at, column, inside, gain_eps, D)


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
def backward(sources, to_sources, upstream, mixed, probe, weight, score, scale, to_probe, T,
             D: tl.constexpr, BD: tl.constexpr, J: tl.constexpr):  # fmt: skip
    """Write each source's gradient and, a row a program, a part of the probe's."""
    column = tl.arange(0, BD)
    inside = column < D
    vector = tl.load(probe + column, mask=inside, other=0.0)
    part = tl.zeros((BD,), tl.float32)
    for token in range(tl.program_id(0), T, tl.num_programs(0)):
        at = tl.cast(token, tl.int64) * D + column
        above = tl.load(upstream + at, mask=inside, other=0.0).to(tl.float32)
        mean = tl.sum(above * tl.load(mixed + at, mask=inside, other=0.0).to(tl.float32))
        row = tl.cast(token, tl.int64) * J
        for j in tl.static_range(J):
            x = tl.load(sources[j] + at, mask=inside, other=0.0).to(tl.float32)
            share = tl.load(weight + row + j)
            unit = tl.load(scale + row + j)
            toward = share * (tl.sum(above * x) - mean) * unit
            along = -toward * tl.load(score + row + j) * unit / D
            part += toward * x
            tl.store(to_sources[j] + at, share * above + toward * vector + along * x, mask=inside)
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
    return _Mix.apply(norm.float() * query.float(), eps, *(source.contiguous() for source in sources))


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
    if length:
        launch(
            forward, (_programs(length, addend.device), 1), tuple(source.contiguous() for source in sources),
            addend.contiguous(), result.total, norm.float() * query.float(), gain, None, result.normed, None, None,
            None, None, length, eps, gain_eps, *_sizes(width, len(sources)), num_warps=_warps(width),
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
    if length and places:
        launch(
            forward, (_programs(length, sources[0].device), places), tuple(source.contiguous() for source in
            sources), None, None, norms.float() * queries.float(), None, result.mixed, None, None, None, None,
            result.mass_log, length, eps, eps, *_sizes(width, len(sources)), num_warps=_warps(width),
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
            merge, (_programs(length, current.device),), mixed.contiguous(), mass_log, current.contiguous(), None if
            addend is None else addend.contiguous(), None if addend is None else result.total, norm.float() *
            query.float(), gain, result.normed, length, eps, gain_eps, width, _power(width),
            num_warps=_warps(width),
        )  # fmt: skip
    return result


def _require(sources: Sequence[Tensor]) -> None:
    reason = unsupported(sources)
    if reason is not None:
        raise UnsupportedError(
            f"kernels.attention_residual.fused: no kernel for {reason}; sources have one dtype of bf16, fp16 and fp32, "
            f"at most {WIDEST} columns and are at most {MOST_SOURCES}"
        )


def _power(n: int) -> int:
    return 1 << (n - 1).bit_length()


def _sizes(width: int, sources: int) -> tuple[int, int, int, int]:
    return width, _power(width), sources, _power(sources)


def _warps(width: int) -> int:
    return min(8, max(1, _power(width) // 512))


def _programs(length: int, device: torch.device) -> int:
    """Return how many programs walk over the tokens: a few a multiprocessor, so that each loads its probe once."""
    many = torch.cuda.get_device_properties(device).multi_processor_count * 4 if device.type == "cuda" else 3
    return min(length, many)


class _Mix(torch.autograd.Function):
    """Keeps references to the sources and the result, and three scalars a token and source."""

    @staticmethod
    def forward(ctx: Any, probe: Tensor, eps: float, *sources: Tensor) -> tuple[Tensor, Tensor]:
        length, width = sources[0].shape
        mixed = sources[-1].new_empty(length, width)
        weight, score, scale = (probe.new_empty(length, len(sources)) for _ in range(3))
        if length:
            launch(
                forward, (_programs(length, probe.device), 1), sources, None, None, probe, None, mixed, None,
                weight, score, scale, None, length, eps, eps, *_sizes(width, len(sources)), num_warps=_warps(width),
            )  # fmt: skip
        ctx.save_for_backward(probe, mixed, weight, score, scale, *sources)
        ctx.mark_non_differentiable(weight)
        return mixed, weight

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, ...]:
        probe, mixed, weight, score, scale, *sources = ctx.saved_tensors
        length, width = mixed.shape
        found = tuple(source.new_empty(source.shape) for source in sources)
        programs = _programs(length, probe.device)
        parts = probe.new_empty(programs, width)
        if length:
            launch(
                backward, (programs,), tuple(sources), found, grads[0].contiguous(), mixed, probe, weight, score,
                scale, parts, length, width, _power(width), len(sources), num_warps=_warps(width),
            )  # fmt: skip
        return parts.sum(0), None, *found
