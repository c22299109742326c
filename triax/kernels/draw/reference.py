"""The choice of tokens by sorting: the definition that the fast path is held to."""

from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor


class Ways(NamedTuple):
    """How each row's token is chosen."""

    temperature: Float[Tensor, " B"]
    """Divides the logits; 0 takes the likeliest token and reads nothing else here."""
    top_k: Int[Tensor, " B"]
    """Keep this many of the likeliest tokens; 0 keeps all."""
    top_p: Float[Tensor, " B"]
    """Keep the fewest likeliest tokens that hold this share of the probability."""
    min_p: Float[Tensor, " B"]
    """Drop tokens less likely than this share of the likeliest one."""
    uniform: Float[Tensor, " B"]
    """Number in [0, 1) that decides, in fp64."""


class Drawn(NamedTuple):
    """The next token of each row."""

    token: Int[Tensor, " B"]
    """In range for every row, also where it means nothing."""
    logprob: Float[Tensor, " B"]
    """Its natural log-probability under the plain logits, before temperature, filters and bars; in fp32."""
    is_valid: Bool[Tensor, " B"]
    """False where the logits name no distribution: a NaN, an infinity upwards, or nothing that may be said."""


def draw(logits: Float[Tensor, "B V"], barred: Bool[Tensor, " V"] | None, ways: Ways) -> Drawn:
    """Choose one token for each row by itself.

    Tokens that stay are laid end to end by their numbers, each as long as it is likely; `uniform` is a place on that
    line. Filters count equal logits in the order of their numbers.

    Args:
        logits: Scores of the next token.
        barred: Tokens that are never chosen.
        ways: How each row chooses.
    """
    wide = logits.double()
    score = wide if barred is None else wide.masked_fill(barred, -torch.inf)
    highest = score.amax(-1, keepdim=True)
    is_valid = ~wide.isnan().any(-1) & wide.amax(-1).isfinite() & highest[:, 0].isfinite()
    score = torch.where(is_valid[:, None], score - highest, torch.zeros_like(score))
    tokens = [_drawn(row, Ways(*(column[n] for column in ways))) for n, row in enumerate(score)]
    token = torch.stack(tokens) if tokens else torch.zeros(0, dtype=torch.long, device=logits.device)
    logprob = wide.log_softmax(-1).gather(-1, token[:, None])[:, 0].float()
    return Drawn(token, logprob, is_valid)


def _drawn(score: Float[Tensor, " V"], way: Ways) -> Int[Tensor, ""]:
    if way.temperature == 0:
        return score.argmax(-1)
    weight = (score / way.temperature.double()).exp()
    ranked, order = weight.sort(descending=True, stable=True)
    if way.top_k > 0:
        ranked[int(way.top_k) :] = 0
    before = ranked.cumsum(-1) - ranked
    is_in = (ranked > 0) & (before < way.top_p.double() * ranked.sum())
    kept = torch.zeros_like(is_in).scatter(0, order, is_in) & (weight >= way.min_p.double())
    ends = torch.where(kept, weight, torch.zeros_like(weight)).cumsum(-1)
    token = torch.searchsorted(ends, (way.uniform * ends[-1])[None], right=True)[0]
    return torch.minimum(token, kept.nonzero()[-1, 0])
