"""Which experts see which token, and how evenly."""

from contextlib import AbstractContextManager, nullcontext
from typing import Any, ClassVar, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from triax.config.model import Moe
from triax.kernels.linear import linear_fp32
from triax.kernels.moe.router import choose
from triax.kernels.moe.router_counts import MarginBins, RouterCounts
from triax.kernels.routed import Routing
from triax.model.precision import KeepsFp32

SCORE_UNIT = (
    2.0**-20
)  # scores are summed as whole multiples of this, so that all counts add up in one integer reduction


class Router(KeepsFp32):
    """Chooses by biased score and weighs by plain score: balancing never distorts the mixture.

    score = sigmoid(W x); expert = the top_k of score + balance_bias; share = score / sum of the chosen, times a scale

    In training it counts, for the whole optimiser step, the margin of every token and expert:
    margin_ij = cutoff_i - score_ij with cutoff_i the (top_k + 1)-th largest biased score, that is, the bias with which
    expert j would just have won token i. `balance.rebalance` turns the counts into the next bias.

    A forward counts when the module is training, gradients are on, nobody forces its routing, and it is not the
    recomputation of one that counted (non-reentrant activation checkpointing; the reentrant kind runs its first
    forward without gradients and is not counted at all).

    Source: K3 report (arXiv 2607.24653) section 2.3.3 and appendix D; groups as in DeepSeek-V3 (arXiv 2412.19437).
    """

    fp32: ClassVar[tuple[str, ...]] = ("balance_bias",)
    balance_bias: Tensor

    def __init__(self, width: int, moe: Moe, init_std: float = 0.02) -> None:
        super().__init__()
        self.moe = moe
        self.num_bins = 1000
        self.weight = nn.Parameter(torch.empty(moe.num_experts, width))
        nn.init.normal_(self.weight, std=init_std)
        self.register_buffer("balance_bias", torch.zeros(moe.num_experts, dtype=torch.float32))
        self.counts: Counts | None = None
        self.tally: Tally | None = None
        self.agreement: Float[Tensor, ""] | None = None

    def forward(
        self,
        hidden: Float[Tensor, "T D"],
        forced: Routing | None = None,
        logit: Float[Tensor, "T E"] | None = None,
    ) -> Routing:
        """Choose each token's experts and their shares, in fp32 (fp64 where the model is).

        Args:
            hidden: What the choice is read from: the full stream.
            forced: A recorded routing whose experts are used instead of the router's own choice. Shares still come
                from this router's scores, so gradients flow. `agreement` then holds how many of the forced experts
                the router would have chosen itself, as a share.
            logit: `hidden` times the router's weight, in fp32 at least, where another product has it already.
        """
        if logit is None:
            with _no_autocast(hidden):
                logit = linear_fp32(hidden, self.weight)
        counts_it = forced is None and self.training and torch.is_grad_enabled() and not is_recomputing()
        if forced is None and (found := self._choose_at_once(logit, counts_it=counts_it)):
            return found
        score = logit.sigmoid()
        expert, cutoff = self._choose(score.detach())
        if forced is not None:
            assert forced.expert.shape == expert.shape, "a forced routing must have the shape of the router's own"
            self.agreement = (forced.expert[:, :, None] == expert[:, None, :]).any(-1).float().mean()
            expert = forced.expert
        elif counts_it:
            self._count(score.detach(), expert, cutoff)
        share = score.gather(-1, expert)
        if self.moe.renormalize:
            share = share / (share.sum(-1, keepdim=True) + 1e-20)
        return Routing(expert, share * self.moe.share_scale if self.moe.share_scale != 1.0 else share)

    def _choose_at_once(self, logit: Tensor, *, counts_it: bool) -> Routing | None:
        """Choose and count in one kernel, where there is one and no group of experts is left out."""
        moe = self.moe
        if moe.top_groups < moe.num_groups:
            return None
        places = None
        if counts_it:
            counts = self._open_counts(has_losers=moe.top_k < moe.num_experts, device=logit.device)
            places = MarginBins(counts.margins, *bins(self.balance_bias, max(1, counts.margins.shape[1])), SCORE_UNIT)
        found = choose(logit, self.balance_bias, moe.top_k, moe.share_scale, renormalize=moe.renormalize, places=places)
        if found is None:
            return None
        expert, share, tallied = found
        if tallied is not None:
            self._tally_up(tallied, expert)
        return Routing(expert, share)

    @torch.no_grad()
    def _choose(self, score: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return the chosen experts and the biased score of the best loser, if anyone loses."""
        moe, biased = self.moe, score + self.balance_bias
        eligible = biased
        if moe.top_groups < moe.num_groups:
            groups = biased.unflatten(-1, (moe.num_groups, -1))
            strength = groups.topk(min(2, groups.shape[-1]), dim=-1).values.sum(-1)
            out = torch.ones_like(strength, dtype=torch.bool)
            out.scatter_(-1, strength.topk(moe.top_groups, dim=-1).indices, False)
            eligible = groups.masked_fill(out[..., None], -torch.inf).flatten(-2)
        if moe.top_k == moe.num_experts:
            return eligible.topk(moe.top_k, dim=-1).indices, None
        best, expert = eligible.topk(moe.top_k + 1, dim=-1)
        cutoff = best[:, -1:]
        if moe.num_experts // moe.num_groups * moe.top_groups == moe.top_k:  # all losers sit in groups that lost
            cutoff = biased.topk(moe.top_k + 1, dim=-1).values[:, -1:]
        return expert[:, : moe.top_k], cutoff

    @torch.no_grad()
    def _count(self, score: Tensor, expert: Tensor, cutoff: Tensor | None) -> None:
        counts, num_experts = self._open_counts(has_losers=cutoff is not None, device=score.device), score.shape[1]
        load = torch.zeros_like(counts.load).scatter_add_(0, expert.flatten(), torch.ones_like(expert).flatten())
        # every score is rounded by itself: how a step is split then changes nothing
        self._tally_up(RouterCounts(load, (score / SCORE_UNIT).round().sum(dtype=torch.float64).long()), expert)
        num_bins = counts.margins.shape[1]
        if num_bins == 0 or cutoff is None:
            return
        low, width = bins(self.balance_bias, num_bins)
        # the best loser's margin is its bias, whatever its score was rounded to: at first that is a border of two bins
        margin = torch.where(score + self.balance_bias == cutoff, self.balance_bias, cutoff - score)
        bin = ((margin - low) / width).long().clamp_(0, num_bins - 1)
        bin += torch.arange(num_experts, device=score.device) * num_bins
        counts.margins.view(-1).scatter_add_(0, bin.flatten(), torch.ones_like(bin).flatten())

    def _open_counts(self, *, has_losers: bool, device: torch.device) -> "Counts":
        num_bins = self.num_bins if has_losers else 0
        if self.counts is None or self.counts.margins.shape[1] != num_bins:
            self.counts = Counts.zeros(self.moe.num_experts, num_bins, device)
        return self.counts

    def _tally_up(self, tallied: RouterCounts, expert: Tensor) -> None:
        assert self.counts is not None
        self.counts.load.add_(tallied.load)
        self.counts.score.add_(tallied.score)
        if expert.shape[0]:
            even = expert.numel() / self.moe.num_experts
            worst = self.counts.worst_violation
            torch.maximum(worst, tallied.load.max() / even - 1, out=worst)


class Counts(NamedTuple):
    """What one router counted since the last optimiser step, on this rank; transient, in no checkpoint."""

    margins: Int[Tensor, "E bins"]
    """Tokens by expert and by the bias with which it would have won them."""
    load: Int[Tensor, " E"]
    """Tokens that each expert received."""
    score: Int[Tensor, " one"]
    """Sum of all scores in units of `SCORE_UNIT`."""
    worst_violation: Float[Tensor, ""]
    """Largest load over the even load, minus 1, in any one forward of this rank."""

    @classmethod
    def zeros(cls, num_experts: int, num_bins: int, device: torch.device) -> "Counts":
        """Return counts of nothing."""
        return cls(
            torch.zeros(num_experts, num_bins, dtype=torch.int64, device=device),
            torch.zeros(num_experts, dtype=torch.int64, device=device),
            torch.zeros(1, dtype=torch.int64, device=device),
            torch.zeros((), device=device),
        )


class Tally(NamedTuple):
    """What all ranks together counted in the last whole step; the material of the metrics."""

    load: Int[Tensor, " E"]
    """Tokens that each expert received."""
    score_mean: Float[Tensor, ""]
    """Mean score over tokens and experts."""
    at_edges: Float[Tensor, ""]
    """Share of the margins in the first or last bin: above about 0 the range of the histogram is wrong."""
    worst_violation: Float[Tensor, ""]
    """Largest load over the even load, minus 1, in any one forward of this rank."""


def bins(bias: Float[Tensor, " E"], num_bins: int) -> tuple[Float[Tensor, ""], Float[Tensor, ""]]:
    """Return where the margins' histogram begins and how wide a bin is: scores in (0, 1) bound every margin."""
    low, high = bias.aminmax()
    return low - 1, (high - low + 2) / num_bins


def is_recomputing() -> bool:
    """Whether this forward runs inside a backward pass, as activation checkpointing has it."""
    return not torch.compiler.is_compiling() and torch._C._current_graph_task_id() != -1


def _no_autocast(tensor: Tensor) -> AbstractContextManager[Any]:
    kind = tensor.device.type
    return torch.autocast(kind, enabled=False) if torch.amp.is_autocast_available(kind) else nullcontext()
