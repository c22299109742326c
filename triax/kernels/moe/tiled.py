"""Routed experts in which a token's result has the same bits whatever the other tokens are.

Rows of one expert are worked on in tiles of one size, and what a token's experts return is added in the order of the
token's own choice.
"""

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from triax.kernels.moe.activation import Activation
from triax.kernels.moe.grouped import sort_by_expert

ROWS = 8  # of one expert at a time: few tokens share an expert
WHOLE = 32  # activations see a multiple of this many rows, so that no element falls to scalar code


def experts(
    hidden: Float[Tensor, "T L"],
    expert: Int[Tensor, "T k"],
    share: Float[Tensor, "T k"],
    gate: Float[Tensor, "E F L"],
    up: Float[Tensor, "E F L"],
    down: Float[Tensor, "E L F"],
    activation: Activation,
) -> Float[Tensor, "T L"]:
    """Send each token through its experts, see `reference.experts`; no gradient."""
    if not len(hidden):
        return torch.zeros_like(hidden)
    order = sort_by_expert(expert, len(gate))
    ends = order.ends.tolist()
    spans = [(e, first, end) for e, (first, end) in enumerate(zip([0, *ends], ends, strict=False)) if first < end]
    counts = [-(-(end - first) // ROWS) for _, first, end in spans]
    total = sum(counts) * ROWS
    place = torch.cat(
        [
            torch.arange(end - first, device=hidden.device) + before * ROWS
            for (_, first, end), before in zip(spans, _sums(counts), strict=False)
        ]
    )
    tiles = hidden.new_zeros(total + -total % WHOLE, hidden.shape[1])
    tiles[place] = hidden[order.token]
    opening = _multiply(tiles, [(e, n) for (e, _, _), n in zip(spans, counts, strict=True)], gate)
    passing = _multiply(tiles, [(e, n) for (e, _, _), n in zip(spans, counts, strict=True)], up)
    inner = activation(opening, passing)
    returned = _multiply(inner, [(e, n) for (e, _, _), n in zip(spans, counts, strict=True)], down)
    each = returned[place][order.row] * share[..., None].to(returned.dtype)
    summed = each[:, 0]
    for choice in range(1, each.shape[1]):
        summed = summed + each[:, choice]
    return summed.to(hidden.dtype)


def _multiply(tiles: Tensor, work: list[tuple[int, int]], weight: Tensor) -> Tensor:
    """Return tiles times their experts' matrices; `work` names an expert and its number of tiles, in order."""
    parts, first = [], 0
    for expert, count in work:
        rows = tiles[first : first + count * ROWS].view(count, ROWS, -1)
        parts.append(torch.bmm(rows, weight[expert].T.expand(count, -1, -1)).flatten(0, 1))
        first += count * ROWS
    product = torch.cat(parts)
    return F.pad(product, (0, 0, 0, len(tiles) - len(product)))


def _sums(counts: list[int]) -> list[int]:
    sums = [0]
    for count in counts:
        sums.append(sums[-1] + count)
    return sums
