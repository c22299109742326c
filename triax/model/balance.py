"""How routed experts are kept evenly loaded: one new bias for every router after each optimiser step."""

from collections.abc import Callable, Sequence

import torch
from jaxtyping import Float, Int
from torch import Tensor

from triax.config.optim import Balance
from triax.model.router import SCORE_UNIT, Counts, Router, Tally, bins


def prepare(routers: Sequence[Router], settings: Balance) -> None:
    """Tell the routers what to count from now on; call it once, before the first step and after every resume."""
    for router in routers:
        router.num_bins = settings.num_bins if settings.rule == "quantile" else 0
        router.counts = None


@torch.no_grad()
def rebalance(
    routers: Sequence[Router],
    settings: Balance,
    reduce: Callable[[Tensor], Tensor] | None = None,
) -> None:
    """Give every router its next bias from what the whole step counted, then forget the counts.

    Call it once per optimiser step, after the last microbatch: the new bias serves from the next step on, so that no
    batch is routed by a bias made from itself. Counts are integers and add up: the result does not depend on how the
    step was split over microbatches and ranks.

    Args:
        routers: All routers of the model, in the same order on every rank.
        settings: The rule; `prepare` must have seen the same.
        reduce: Sums one int64 tensor over the ranks that saw different tokens, and only those; called once.
    """
    if not routers:
        return
    counted = [router.counts or _nothing(router) for router in routers]
    packed = torch.cat([part.flatten() for counts in counted for part in counts[:3]])
    total = (packed if reduce is None else reduce(packed)).split(
        [part.numel() for counts in counted for part in counts[:3]]
    )
    for place, (router, counts) in enumerate(zip(routers, counted, strict=True)):
        margins, load, score = total[3 * place : 3 * place + 3]
        margins = margins.view_as(counts.margins)
        router.tally = _tally(router, margins, load, score, counts.worst_violation.clone())
        bias = router.balance_bias.double()
        if settings.rule == "quantile" and margins.numel():
            assert margins.shape[1] == settings.num_bins, "the routers count other bins; call balance.prepare first"
            bias = quantile_bias(margins, router.balance_bias, router.moe.top_k)
            bias = settings.ema * router.balance_bias.double() + (1 - settings.ema) * bias
        elif settings.rule == "sign":
            step = settings.step * (load.sum() - load * load.numel()).sign().double()
            bias = bias + step - step.mean()
        router.balance_bias.copy_(bias)
    forget(routers)


def forget(routers: Sequence[Router]) -> None:
    """Drop what was counted since the last step, as when a step is skipped."""
    for router in routers:
        if router.counts is not None:
            for part in router.counts:
                part.zero_()


def quantile_bias(margins: Int[Tensor, "E bins"], bias: Float[Tensor, " E"], top_k: int) -> Float[Tensor, " E"]:
    """Return, in fp64, the bias that would have handed every expert its even load of the counted tokens.

    It is the top_k / num_experts quantile of each expert's margins, to within a bin, minus the mean over experts; the
    old bias where nothing was counted.

    Source: K3 report (arXiv 2607.24653) section 2.3.3 and appendix D.
    """
    num_experts, num_bins = margins.shape
    low, width = (edge.double() for edge in bins(bias, num_bins))
    reached = margins.cumsum(1)
    tokens = reached[:, -1:]
    quota = tokens * top_k  # the even load times num_experts, which keeps it whole
    needed = (quota + num_experts - 1) // num_experts
    bin = (reached < needed).sum(1, keepdim=True).clamp_(max=num_bins - 1)
    inside = margins.gather(1, bin)
    before = reached.gather(1, bin) - inside
    part = ((quota.double() / num_experts - before) / inside.clamp(min=1)).clamp(0, 1)
    fresh = (low + (bin + part) * width).squeeze(1)
    return torch.where(tokens.squeeze(1) > 0, fresh - fresh.mean(), bias.double())


def evenness(routers: Sequence[Router]) -> dict[str, list[float]]:
    """Return how evenly the routers that have finished a step loaded their experts in it, one entry a router.

    `load_max_over_mean` is the largest load over the even one, `load_cv` the standard deviation over the mean,
    `dead_share` the experts without tokens, `load_diversity` exp(entropy) over the number of experts (1 when even),
    `balance_bias_range` from the smallest to the largest bias, `score_mean` the mean score, `margins_at_edges` the
    margins outside the histogram's inner bins, and `worst_violation` the largest load over the even one, minus 1, in
    the worst single forward of this rank.
    """
    found = [_evenness(router, router.tally) for router in routers if router.tally is not None]
    if not found:
        return {}
    table = torch.stack([torch.stack([value.double() for value in row.values()]) for row in found])
    return dict(zip(found[0], table.T.tolist(), strict=True))


def _evenness(router: Router, tally: Tally) -> dict[str, Tensor]:
    load = tally.load.double()
    share = load / load.sum().clamp(min=1)
    even = load.mean().clamp(min=1e-9)
    return {
        "load_max_over_mean": load.max() / even,
        "load_cv": load.std(correction=0) / even,
        "dead_share": (load == 0).double().mean(),
        "load_diversity": torch.special.entr(share).sum().exp() / load.numel(),
        "balance_bias_range": router.balance_bias.max() - router.balance_bias.min(),
        "score_mean": tally.score_mean,
        "margins_at_edges": tally.at_edges,
        "worst_violation": tally.worst_violation,
    }


def _tally(router: Router, margins: Tensor, load: Tensor, score: Tensor, worst_violation: Tensor) -> Tally:
    num_scores = (load.sum().double() / router.moe.top_k * router.moe.num_experts).clamp(min=1)
    edges = margins[:, 0].sum() + margins[:, -1].sum() if margins.numel() else score.new_zeros(())
    at_edges = edges.double() / margins.sum().clamp(min=1)
    return Tally(load.clone(), score[0].double() * SCORE_UNIT / num_scores, at_edges, worst_violation)


def _nothing(router: Router) -> Counts:
    num_bins = router.num_bins if router.moe.top_k < router.moe.num_experts else 0
    return Counts.zeros(router.moe.num_experts, num_bins, router.balance_bias.device)
