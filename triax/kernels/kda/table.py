"""Where a packed stream is cut into chunks, and in which order they are worked off."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import NamedTuple

import torch
from jaxtyping import Int
from torch import Tensor


class Step(NamedTuple):
    """The chunks at one depth: the next chunk of each sequence that has one, longest sequence first."""

    first: int
    """Number of its first chunk."""
    count: int
    """How many chunks it has."""
    next_count: int
    """How many of them have a successor; they come first."""


@dataclass(frozen=True, eq=False)
class ChunkTable:
    """Chunks of a stream in the order step, then sequence, so that a step is one slice and its successors a prefix.

    Every start of a sequence and every place where a state is wanted is a border of chunks.
    """

    chunk: int
    """Rows of a chunk; the last ones of a short chunk are padding."""
    num_chunks: int
    num_heads: int
    blocks: tuple[tuple[Step, ...], ...]
    """Steps in order, grouped so that a group's tensors fit the cache."""
    rows: Int[Tensor, "chunks H C"]
    """Row of the [T*H, channels] stream for each place of the padded [chunks, H, C, channels] layout."""
    pads: tuple[Int[Tensor, " _"], ...]
    """Padding places of each block, counted from the block's first place."""
    places: Int[Tensor, " T_H"]
    """The inverse of `rows`: the place of each row of the stream."""
    ranks: Int[Tensor, " N"]
    """Sequences that have tokens, those with most chunks first."""
    interior: tuple[int, ...]
    """Where each wanted state stands: chunk n if it is the state before n, else num_chunks + rank."""

    def span(self, number: int) -> tuple[int, int]:
        """First chunk of a block, and one past its last."""
        steps = self.blocks[number]
        return steps[0].first, steps[-1].first + steps[-1].count

    def heads_of(self, number: int) -> slice:
        """Where the heads of a block's chunks lie among those of all chunks."""
        first, end = self.span(number)
        return slice(first * self.num_heads, end * self.num_heads)


def cut(starts: Sequence[int], states_at: Sequence[int], chunk: int) -> list[list[tuple[int, int]]]:
    """Return first token and end of the chunks of each sequence."""
    chunks: list[list[tuple[int, int]]] = [[] for _ in starts[1:]]
    sequence = 0
    for first, end in pairwise(sorted({*starts, *states_at})):
        while starts[sequence + 1] <= first:
            sequence += 1
        chunks[sequence] += [(t, min(t + chunk, end)) for t in range(first, end, chunk)]
    return chunks


@lru_cache(maxsize=32)
def chunk_table(
    starts: tuple[int, ...],
    states_at: tuple[int, ...],
    num_heads: int,
    chunk: int,
    block_rows: int,
    device: torch.device,
) -> ChunkTable:
    """Cut a stream; the layers of a network ask for the same few tables again and again, hence the cache."""
    chunks = cut(starts, states_at, chunk)
    ranks = sorted((n for n in range(len(chunks)) if chunks[n]), key=lambda n: -len(chunks[n]))

    steps: list[Step] = []
    spans: list[tuple[int, int]] = []
    standing: dict[int, tuple[int, int]] = {}
    for depth in range(len(chunks[ranks[0]]) if ranks else 0):
        active = [n for n in ranks if len(chunks[n]) > depth]
        next_count = sum(len(chunks[n]) > depth + 1 for n in active)
        steps.append(Step(len(spans), len(active), next_count))
        for rank, n in enumerate(active):
            standing[chunks[n][depth][1]] = (depth, rank)
            spans.append(chunks[n][depth])
    interior = []
    for position in states_at:
        depth, rank = standing[position]
        interior.append(steps[depth + 1].first + rank if rank < steps[depth].next_count else len(spans) + rank)

    blocks = _grouped(steps, max(1, block_rows // (chunk * num_heads)))
    rows, pads, places = _addresses(spans, chunk, num_heads, blocks)
    return ChunkTable(
        chunk,
        len(spans),
        num_heads,
        blocks,
        rows.to(device),
        tuple(p.to(device) for p in pads),
        places.to(device),
        torch.tensor(ranks, dtype=torch.long, device=device),
        tuple(interior),
    )


def _grouped(steps: Sequence[Step], most: int) -> tuple[tuple[Step, ...], ...]:
    """Group neighbouring steps while they have at most that many chunks together."""
    blocks: list[list[Step]] = []
    for step in steps:
        if blocks and step.first + step.count - blocks[-1][0].first <= most:
            blocks[-1].append(step)
        else:
            blocks.append([step])
    return tuple(tuple(block) for block in blocks)


def _addresses(
    spans: list[tuple[int, int]], chunk: int, num_heads: int, blocks: tuple[tuple[Step, ...], ...]
) -> tuple[Tensor, tuple[Tensor, ...], Tensor]:
    first, end = torch.tensor(spans, dtype=torch.long).view(-1, 2).T
    head = torch.arange(num_heads)[None, :, None]
    token = first[:, None] + torch.arange(chunk)
    padding = (token >= end[:, None])[:, None].expand(-1, num_heads, -1)
    # Padding reads a real row, so nothing outside the stream is touched; the reader then writes zeros over it.
    rows = token.minimum(end[:, None] - 1)[:, None] * num_heads + head
    places = torch.empty(int((end - first).sum()) * num_heads, dtype=torch.long)
    places[rows[~padding]] = torch.arange(rows.numel()).view(rows.shape)[~padding]
    pads = []
    for steps in blocks:
        inside = padding[steps[0].first : steps[-1].first + steps[-1].count]
        pads.append(inside.reshape(-1).nonzero()[:, 0])
    return rows, tuple(pads), places
