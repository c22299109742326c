"""From logits to the next token: greedy or drawn, always a valid token or a flag that says why not."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from triax.kernels import draw as kernel
from triax.model.device import on_device
from triax.model.logprob import logprobs
from triax.serve.request import Sampling, TokenInfo


class Chosen(NamedTuple):
    """The next token of each sequence."""

    token: Int[Tensor, " B"]
    """In range for every row, also where it means nothing."""
    logprob: Float[Tensor, " B"]
    """Its natural log-probability under the plain logits, before temperature and filters."""
    is_valid: Bool[Tensor, " B"]
    """False where the logits name no distribution: a NaN, an infinity upwards, or nothing but -inf."""


@dataclass(frozen=True)
class Draw:
    """How one row's token is chosen."""

    how: Sampling
    uniform: float
    """Number in [0, 1) that decides; greedy choice does not read it."""
    prompt: Sequence[int] = ()
    """Read by the repetition penalty alone."""
    answer: Sequence[int] = ()
    """Tokens of the answer before this one; read by the penalties."""
    allowed: Bool[Tensor, " V"] | None = None
    """Tokens that a structure permits; none permits all."""


def uniform(seed: int, place: int) -> float:
    """Return the number in [0, 1) that decides a request's draw at a place of its answer, whatever runs beside it."""
    digest = hashlib.blake2b(seed.to_bytes(8, "little") + place.to_bytes(8, "little"), digest_size=8).digest()
    return (int.from_bytes(digest, "little") >> 11) * 2.0**-53


def sample(
    logits: Float[Tensor, "B V"], draws: Sequence[Draw], unsaid: Int[Tensor, " U"] | None = None
) -> tuple[Int[Tensor, " B"], Bool[Tensor, " B"]]:
    """Choose one token for each row by itself: bias and penalties, structure, temperature, filters.

    Args:
        logits: Scores of the next token.
        draws: One a row.
        unsaid: Tokens that are never chosen.

    Returns:
        Tokens, in range for every row, and whether the row's logits were a distribution.
    """
    if logits.is_cuda and logits.dtype is torch.float32:
        return _sample_at_once(logits, draws, unsaid)
    score, is_valid = adjusted(logits, draws, unsaid)
    groups: dict[tuple[float, int, float, float], list[int]] = {}
    for row, draw in enumerate(draws):
        how = draw.how
        key = (0.0, 0, 1.0, 0.0) if how.temperature == 0 else (how.temperature, how.top_k, how.top_p, how.min_p)
        groups.setdefault(key, []).append(row)
    token = torch.zeros(len(draws), dtype=torch.long, device=logits.device)
    for rows in groups.values():
        points = on_device([draws[row].uniform for row in rows], logits.device, torch.float64)
        some = score if len(rows) == len(draws) else score[rows]
        chosen = choose(some, points, draws[rows[0]].how)
        token[rows], is_valid[rows] = chosen.token, is_valid[rows] & chosen.is_valid
    return token, is_valid


def _sample_at_once(
    logits: Float[Tensor, "B V"], draws: Sequence[Draw], unsaid: Int[Tensor, " U"] | None
) -> tuple[Int[Tensor, " B"], Bool[Tensor, " B"]]:
    """Choose by one kernel, whatever the rows ask for."""
    score, is_valid = adjusted(logits, draws, unsaid, torch.float32)
    columns = [[getattr(draw.how, name) for draw in draws] for name in ("temperature", "top_p", "min_p")]
    temperature, top_p, min_p = (on_device(column, logits.device, torch.float32) for column in columns)
    top_k = on_device([draw.how.top_k for draw in draws], logits.device, torch.int32)
    points = on_device([draw.uniform for draw in draws], logits.device, torch.float64)
    drawn = kernel.draw(score, None, kernel.Ways(temperature, top_k, top_p, min_p, points))
    return drawn.token, is_valid & drawn.is_valid


def adjusted(
    logits: Float[Tensor, "B V"],
    draws: Sequence[Draw],
    unsaid: Int[Tensor, " U"] | None = None,
    dtype: torch.dtype = torch.float64,
) -> tuple[Float[Tensor, "B V"], Bool[Tensor, " B"]]:
    """Return the scores that temperature and filters work on, and whether the logits were a distribution."""
    is_valid = logits.amax(-1).isfinite() & ~logits.isnan().any(-1)
    score = logits.to(dtype, copy=True)
    if unsaid is not None and len(unsaid):
        score[:, unsaid] = -torch.inf
    for row, draw in enumerate(draws):
        _adjust(score[row], draw)
    return score, is_valid


def _adjust(score: Float[Tensor, " V"], draw: Draw) -> None:
    """Change one row's scores in place."""
    how = draw.how
    if how.bias:
        tokens, values = how.bias_columns
        places = torch.frombuffer(tokens, dtype=torch.long).to(score.device)
        score.index_add_(0, places, torch.frombuffer(values, dtype=torch.float64).to(score.device, score.dtype))
    if how.repetition_penalty != 1 and (draw.prompt or draw.answer):
        said = {token for token in (*draw.prompt, *draw.answer) if token < len(score)}
        seen = torch.tensor(sorted(said), dtype=torch.long, device=score.device)
        own = score[seen]
        score[seen] = torch.where(own > 0, own / how.repetition_penalty, own * how.repetition_penalty)
    if draw.answer and (how.presence_penalty or how.frequency_penalty):
        seen, counts = torch.tensor(list(draw.answer), device=score.device).unique(return_counts=True)
        score[seen] -= how.presence_penalty + how.frequency_penalty * counts
    if draw.allowed is not None:
        score.masked_fill_(~draw.allowed.to(score.device), -torch.inf)


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
    logprob = logprobs(score).gather(-1, token[:, None]).squeeze(-1).float()
    return Chosen(token, logprob, is_valid)


def distribution(logits: Float[Tensor, "B V"], how: Sampling) -> Float[Tensor, "B V"]:
    """Return the probabilities that `choose` draws from; greedy choice puts all on one token."""
    score = logits.double() - logits.double().amax(-1, keepdim=True)
    if how.temperature == 0:
        return torch.zeros_like(score).scatter_(-1, score.argmax(-1, keepdim=True), 1.0)
    weight = _weights(score, how)
    return weight / weight.sum(-1, keepdim=True)


def infos(logits: Float[Tensor, "B V"], tokens: Sequence[int], tops: Sequence[int]) -> list[TokenInfo]:
    """Return each row's token with its log-probability and so many of the likeliest ones, under the plain logits.

    Args:
        logits: One row a token.
        tokens: The tokens to report.
        tops: Alternatives to report, a row.
    """
    if not len(tokens):
        return []
    table = logprobs(logits)
    own = table.gather(-1, on_device(tokens, logits.device)[:, None]).squeeze(-1).float().tolist()
    most = max(tops)
    if not most:
        return [TokenInfo(token, value) for token, value in zip(tokens, own, strict=True)]
    # sorted by value and then by token, so that ties come in one order on every machine
    values, places = table.sort(dim=-1, descending=True, stable=True)
    values, places = values[:, :most].float().tolist(), places[:, :most].tolist()
    return [
        TokenInfo(token, value, tuple(zip(places[row][:top], values[row][:top], strict=True)))
        for row, (token, value, top) in enumerate(zip(tokens, own, tops, strict=True))
    ]


def _draw(score: Float[Tensor, "B V"], uniform: Float[Tensor, " B"], how: Sampling) -> Int[Tensor, " B"]:
    weight = _weights(score, how)
    # Laid end to end by token number and not by rank: a near tie may swap ranks between two runs, numbers stay.
    ends = weight.cumsum(-1)
    point = uniform[:, None] * ends[:, -1:]
    token = torch.searchsorted(ends, point, right=True).squeeze(-1)
    last = weight.shape[-1] - 1 - (weight > 0).flip(-1).long().argmax(-1)  # rounding must not point past the last one
    return torch.minimum(token, last)


def _weights(score: Float[Tensor, "B V"], how: Sampling) -> Float[Tensor, "B V"]:
    weight = (score / how.temperature).exp()  # the likeliest token has weight 1
    return torch.where(_kept(weight, how), weight, torch.zeros_like(weight))


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
