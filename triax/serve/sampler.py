"""From logits to the next token: greedy or drawn, always a valid token or a flag that says why not."""

from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from triax.serve.request import Sampling


class Chosen(NamedTuple):
    """The next token of each sequence."""

    token: Int[Tensor, " B"]
    """In range for every row, also where it means nothing."""
    logprob: Float[Tensor, " B"]
    """Its natural log-probability under the plain logits, before temperature and filters."""
    is_valid: Bool[Tensor, " B"]
    """False where the logits name no distribution: a NaN, an infinity upwards, or nothing but -inf."""


def choose(logits: Float[Tensor, "B V"], uniform: Float[Tensor, " B"], how: Sampling) -> Chosen:
    """Choose one token for each row by itself; equal logits go to the smaller token.

    Args:
        logits: Scores of the next token.
        uniform: One number in [0, 1) a row, which decides its draw; greedy choice does not read it.
        how: Temperature and filters.
    """
    wide = logits.double()  # the filters and the draw add rounding of their own to nothing
    highest = wide.amax(-1, keepdim=True)
    is_valid = highest.isfinite().squeeze(-1) & ~wide.isnan().any(-1)
    score = torch.where(is_valid[:, None], wide - highest, torch.zeros_like(wide))
    token = score.argmax(-1) if how.temperature == 0 else _draw(score, uniform.double(), how)
    logprob = score.log_softmax(-1).gather(-1, token[:, None]).squeeze(-1).float()
    return Chosen(token, logprob, is_valid)


def _draw(score: Float[Tensor, "B V"], uniform: Float[Tensor, " B"], how: Sampling) -> Int[Tensor, " B"]:
    weight = (score / how.temperature).exp()  # the likeliest token has weight 1
    weight = torch.where(_kept(weight, how), weight, torch.zeros_like(weight))
    # Laid end to end by token number and not by rank: a near tie may swap ranks between two runs, numbers stay.
    ends = weight.cumsum(-1)
    point = uniform[:, None] * ends[:, -1:]
    token = torch.searchsorted(ends, point, right=True).squeeze(-1)
    last = weight.shape[-1] - 1 - (weight > 0).flip(-1).long().argmax(-1)  # rounding must not point past the last one
    return torch.minimum(token, last)


def _kept(weight: Float[Tensor, "B V"], how: Sampling) -> Bool[Tensor, "B V"]:
    kept = weight >= how.min_p
    if how.top_k == 0 and how.top_p == 1:
        return kept
    ranked, order = weight.sort(dim=-1, descending=True, stable=True)
    if 0 < how.top_k < weight.shape[-1]:
        ranked[:, how.top_k :] = 0
    before = ranked.cumsum(-1) - ranked
    is_in = (ranked > 0) & (before < how.top_p * ranked.sum(-1, keepdim=True))
    return kept & torch.zeros_like(kept).scatter(-1, order, is_in)
