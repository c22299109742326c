"""Absorbed attention in tiles of 64 latents, always in the same order: a token's bits depend on what it sees alone.

Each query meets one tile after another with a running maximum and sum, so how many the longest sequence of the batch
has changes nothing for the others, and neither does the size of pages.
"""

from collections.abc import Sequence
from itertools import pairwise

import torch
from jaxtyping import Float, Int
from torch import Tensor

KEYS = 64  # latents of a tile
LANES = 32  # single exponentials are taken so often over, so that none falls to scalar code


def attend(
    query: Float[Tensor, "T H L"],
    pages: Float[Tensor, "P page L"],
    tables: Int[Tensor, "N columns"],
    seen: Sequence[int],
    starts: Sequence[int],
    value_dim: int,
    scale: float,
) -> Float[Tensor, "T H W"]:
    """Average the first `value_dim` channels of the latents that a token may see by softmax of `scale query · latent`.

    Args:
        query: Absorbed queries, sequences laid end to end.
        pages: Latents of tokens, a page of them at a time.
        tables: Pages of each sequence, in order; what lies past its end is not read.
        seen: Latents that the last query of each sequence sees, itself included.
        starts: First query of each sequence, and one past the last of all.
        value_dim: Width `W` of what is averaged.
        scale: Factor on the logits.

    Returns:
        What each token read, in fp32 or wider.
    """
    wide = torch.promote_types(pages.dtype, torch.float32)
    query = query.to(wide)
    mean = query.new_zeros(*query.shape[:2], value_dim)
    lengths = [end - first for first, end in pairwise(starts)]
    singles = [n for n, length in enumerate(lengths) if length == 1]
    if singles:
        rows = torch.tensor([starts[n] for n in singles], device=query.device)
        counts = torch.tensor([seen[n] for n in singles], device=query.device)
        mean[rows] = _walk(query[rows], pages, tables[singles], counts, value_dim, scale)
    for n, length in enumerate(lengths):
        if length > 1:
            rows = slice(starts[n], starts[n + 1])
            counts = torch.arange(seen[n] - length + 1, seen[n] + 1, device=query.device)
            mean[rows] = _walk(query[rows], pages, tables[n : n + 1], counts, value_dim, scale)
    return mean


def _walk(
    query: Tensor, pages: Tensor, tables: Tensor, counts: Tensor, value_dim: int, scale: float
) -> Float[Tensor, "T H W"]:
    """Let queries, with a table each or one for all, see the first `counts` latents of theirs."""
    size, wide, is_shared = pages.shape[1], query.dtype, len(tables) == 1
    flat = pages.flatten(0, 1)
    span = torch.arange(KEYS, device=query.device)
    largest = query.new_full(query.shape[:2], -torch.inf)
    total, mean = query.new_zeros(query.shape[:2]), query.new_zeros(*query.shape[:2], value_dim)
    for first in range(0, int(counts.max()), KEYS):
        going = (counts > first).nonzero().squeeze(-1)
        left = (counts[going] - first)[:, None]
        place = first + span
        table = tables if is_shared else tables[going]
        column = (place // size).clamp(max=table.shape[1] - 1)
        seen = flat[table[:, column] * size + place % size].to(wide)
        written = left.max()[None] if is_shared else left
        # whatever lies past what was written, even NaN, counts nothing
        seen = seen.masked_fill((span >= written)[..., None], 0).expand(len(going), -1, -1)
        logit = torch.bmm(query[going], seen.transpose(1, 2)) * scale
        logit.masked_fill_((span >= left)[:, None], -torch.inf)
        before = largest[going]
        now = torch.maximum(before, logit.amax(-1))
        faded = (before - now)[..., None].expand(-1, -1, LANES).contiguous().exp_()[..., 0]
        weight = (logit - now[..., None]).exp_()
        largest[going] = now
        total[going] = total[going] * faded + weight.sum(-1)
        mean[going] = mean[going] * faded[..., None] + torch.bmm(weight, seen[..., :value_dim])
    return mean / total[..., None]
