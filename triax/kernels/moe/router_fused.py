"""The router's choice in one pass on a GPU: scores, the best of them with a bias, their shares, and what is counted."""

from typing import Any, no_type_check

import torch
import triton
import triton.language as tl
from jaxtyping import Float, Int
from torch import Tensor
from torch.autograd.function import once_differentiable

from triax.kernels.device import launch
from triax.kernels.moe.router_counts import MarginBins, RouterCounts

MOST_EXPERTS = 4096
WAYS = 64  # places that sums of scores are added up in, lest all programs wait for one


@triton.jit
@no_type_check
def _choose(logit, bias, expert, share, kept_score, margins, tally, low, width, row, scale, per_unit, E: tl.constexpr,
            EE: tl.constexpr, K: tl.constexpr, KK: tl.constexpr, BINS: tl.constexpr, WAYS: tl.constexpr,
            RENORMALIZE: tl.constexpr):  # fmt: skip
    """Let a program choose for a token; `kept_score`, `margins` and `tally` may be absent."""
    token = tl.program_id(0).to(tl.int64)
    column, choice = tl.arange(0, EE), tl.arange(0, KK)
    value = tl.load(logit + token * row + column, mask=column < E, other=0.0).to(tl.float32)
    score = 1.0 / (1.0 + tl.exp(-value))
    own_bias = tl.load(bias + column, mask=column < E, other=0.0)
    biased = score + own_bias
    biased = tl.where(column < E, biased, float("-inf"))
    chosen = tl.zeros((KK,), tl.int32)
    for turn in range(K):
        best = tl.minimum(tl.argmax(biased, 0, tie_break_left=True), E - 1)  # an expert, whatever NaN makes of it
        chosen = tl.where(choice == turn, best, chosen)
        biased = tl.where(column == best, float("-inf"), biased)
    kept = tl.load(logit + token * row + chosen, mask=choice < K, other=float("-inf")).to(tl.float32)
    kept = 1.0 / (1.0 + tl.exp(-kept))
    if tally is not None:
        tl.atomic_add(tally + chosen, tl.full((KK,), 1, tl.int64), mask=choice < K, sem="relaxed")
        # adding and taking away 1.5 x 2^23 rounds to whole numbers, ties to even
        whole = ((score * per_unit + 12582912.0) - 12582912.0).to(tl.int64)
        tl.atomic_add(tally + E + token % WAYS, tl.sum(tl.where(column < E, whole, 0), 0), sem="relaxed")
        if BINS > 0:
            step = tl.load(width)
            cutoff = tl.max(biased, 0)
            # the best loser's margin is its bias, whatever its score was rounded to
            margin = tl.where(score + own_bias == cutoff, own_bias, cutoff - score)
            bin = tl.div_rn(margin - tl.load(low), step).to(tl.int32)
            bin = tl.minimum(tl.maximum(bin, 0), BINS - 1)
            place = margins + column.to(tl.int64) * BINS + bin
            tl.atomic_add(place, tl.full((EE,), 1, tl.int64), mask=column < E, sem="relaxed")
    if kept_score is not None:
        tl.store(kept_score + token * K + choice, kept, mask=choice < K)
    if RENORMALIZE:
        kept = kept / (tl.sum(kept, 0) + 1e-20)
    tl.store(expert + token * K + choice, chosen.to(tl.int64), mask=choice < K)
    tl.store(share + token * K + choice, kept * scale, mask=choice < K)


@triton.jit
@no_type_check
def _lead_back(upstream, expert, kept_score, to_logit, scale, E: tl.constexpr, EE: tl.constexpr, K: tl.constexpr,
               KK: tl.constexpr, RENORMALIZE: tl.constexpr):  # fmt: skip
    """Write the gradient of a token's scores before the sigmoid: zero but for the chosen."""
    token = tl.program_id(0).to(tl.int64)
    column, choice = tl.arange(0, EE), tl.arange(0, KK)
    kept = tl.load(kept_score + token * K + choice, mask=choice < K, other=0.0)
    above = tl.load(upstream + token * K + choice, mask=choice < K, other=0.0).to(tl.float32) * scale
    if RENORMALIZE:
        total = tl.sum(kept, 0) + 1e-20
        above = (above - tl.sum(above * kept, 0) / total) / total
    slope = above * kept * (1.0 - kept)
    chosen = tl.load(expert + token * K + choice, mask=choice < K, other=-1).to(tl.int32)
    result = tl.zeros((EE,), tl.float32)
    for turn in range(K):
        own = tl.sum(tl.where(choice == turn, chosen, 0), 0)
        result = tl.where(column == own, tl.sum(tl.where(choice == turn, slope, 0.0), 0), result)
    tl.store(to_logit + token * E + column, result, mask=column < E)


def unsupported(logit: Tensor) -> str | None:
    """Say what of these inputs the kernel cannot take, if anything."""
    if logit.dtype is not torch.float32:
        return f"dtype `{logit.dtype}`"
    if logit.shape[1] > MOST_EXPERTS:
        return f"{logit.shape[1]} experts"
    return None


def choose(
    logit: Float[Tensor, "T E"],
    bias: Float[Tensor, " E"],
    top_k: int,
    scale: float,
    *,
    renormalize: bool,
    places: MarginBins | None = None,
) -> tuple[Int[Tensor, "T k"], Float[Tensor, "T k"], RouterCounts | None]:
    """See `choice.choose`; of equal scores the first expert's counts as the larger."""
    expert, share, tally = _Choice.apply(logit, bias, top_k, scale, renormalize, places)
    if tally is None:
        return expert, share, None
    experts = logit.shape[1]
    return expert, share, RouterCounts(tally[:experts], tally[experts:].sum())


class _Choice(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        logit: Tensor,
        bias: Tensor,
        top_k: int,
        scale: float,
        renormalize: bool,
        places: MarginBins | None,
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        tokens, experts = logit.shape
        device = logit.device
        logit, bias = logit if logit.stride(-1) == 1 else logit.contiguous(), bias.contiguous()
        expert = torch.empty(tokens, top_k, dtype=torch.long, device=device)
        share = torch.empty(tokens, top_k, dtype=torch.float32, device=device)
        learns = ctx.needs_input_grad[0]
        kept = torch.empty_like(share) if learns else None
        margins = tally = low = width = None
        bins, per_unit = 0, 1.0
        if places is not None:
            tally = torch.zeros(experts + WAYS, dtype=torch.long, device=device)
            margins, low, width = places[:3]
            bins, per_unit = margins.shape[1], 1 / places.score_unit
        ctx.sizes = {
            "E": experts, "EE": triton.next_power_of_2(experts), "K": top_k, "KK": triton.next_power_of_2(top_k),
            "RENORMALIZE": renormalize,
        }  # fmt: skip
        launch(
            _choose, (tokens,), logit, bias, expert, share, kept, margins, tally, low, width, logit.stride(0), scale,
            per_unit, BINS=bins, WAYS=WAYS, num_warps=1 if experts <= 512 else 2, **ctx.sizes,
        )  # fmt: skip
        if learns:
            ctx.save_for_backward(expert, kept)
            ctx.scale = scale
        ctx.mark_non_differentiable(expert, *([] if tally is None else [tally]))
        return expert, share, tally

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, ...]:
        expert, kept = ctx.saved_tensors
        to_logit = kept.new_empty(len(kept), ctx.sizes["E"])
        launch(
            _lead_back, (len(kept),), grads[1].contiguous(), expert, kept, to_logit, ctx.scale, num_warps=2, **ctx.sizes
        )
        return to_logit, None, None, None, None, None
