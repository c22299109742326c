"""Rows of pairs of token and expert on a GPU: their places, their copies of the tokens, and their sums.

Rows stand by expert and inside an expert by token. Each expert's rows begin at a multiple of a tile and are followed
by rows of zeros up to the next, so that every tile of rows belongs to one expert and no product needs a mask. Nothing
waits for the device: what depends on the choice stays there.
"""

from typing import NamedTuple, no_type_check

import torch
import triton
import triton.language as tl
from jaxtyping import Float, Int
from torch import Tensor

from triax.kernels.device import launch

PAIRS, BLOCKS, EXPERTS, TILES = 128, 256, 4, 64  # what a program counts at a time
WARPS = 4


class ExpertRows(NamedTuple):
    """Where each pair's row stands, and whose rows stand where."""

    row: Int[Tensor, "T k"]
    """Row of each pair."""
    share: Float[Tensor, " R"]
    """How much a row counts, in fp32; zero where no pair stands."""
    expert: Int[Tensor, " tiles"]
    """Expert of each tile of rows; the number of experts behind the last used one."""
    first: Int[Tensor, " E"]
    """First row of each expert."""
    count: Int[Tensor, " E"]
    """Pairs of each expert."""
    used: Int[Tensor, " 1"]
    """Tiles that hold any rows."""
    tile: int
    """Rows of a tile."""


@triton.jit
@no_type_check
def _count(expert, counts, P, E, PAIRS: tl.constexpr, EXPERTS: tl.constexpr):
    """Write how many pairs of a block go to each expert."""
    block = tl.program_id(0)
    pair = block * PAIRS + tl.arange(0, PAIRS)
    chosen = tl.load(expert + pair, mask=pair < P, other=-1).to(tl.int32)
    for start in range(0, E, EXPERTS):
        own = start + tl.arange(0, EXPERTS)
        found = tl.sum((chosen[:, None] == own[None, :]).to(tl.int32), 0)
        tl.store(counts + block * E + own, found, mask=own < E)


@triton.jit
@no_type_check
def _accumulate(counts, count, N, E, BLOCKS: tl.constexpr, EXPERTS: tl.constexpr):
    """Replace the counts of each block by those of the blocks before it, and write their sums."""
    own = tl.program_id(0) * EXPERTS + tl.arange(0, EXPERTS)
    total = tl.zeros((EXPERTS,), tl.int32)
    for start in range(0, N, BLOCKS):
        block = start + tl.arange(0, BLOCKS)
        place = counts + block[:, None] * E + own[None, :]
        inside = (block[:, None] < N) & (own[None, :] < E)
        found = tl.load(place, mask=inside, other=0)
        tl.store(place, tl.cumsum(found, 0) - found + total[None, :], mask=inside)
        total += tl.sum(found, 0)
    tl.store(count + own, total, mask=own < E)


@triton.jit
@no_type_check
def _arrange(count, first, used, expert, tiles, E, TILE: tl.constexpr, EE: tl.constexpr, TILES: tl.constexpr):
    """Write where each expert's tiles begin and to whom each tile belongs."""
    own = tl.arange(0, EE)
    pairs = tl.load(count + own, mask=own < E, other=0)
    high = (pairs + TILE - 1) // TILE
    end = tl.cumsum(high, 0)
    if tl.program_id(0) == 0:
        tl.store(first + own, (end - high) * TILE, mask=own < E)
        tl.store(used, tl.sum(high, 0))
    tile = tl.program_id(0) * TILES + tl.arange(0, TILES)
    before = ((end[None, :] <= tile[:, None]) & (own[None, :] < E)).to(tl.int32)
    tl.store(expert + tile, tl.sum(before, 1), mask=tile < tiles)


@triton.jit
@no_type_check
def _place(expert, share, counts, first, row, row_share, P, E, PAIRS: tl.constexpr):
    """Write the row of each pair, and its share there."""
    block = tl.program_id(0)
    pair = block * PAIRS + tl.arange(0, PAIRS)
    inside = pair < P
    chosen = tl.load(expert + pair, mask=inside, other=-1).to(tl.int32)
    place = tl.arange(0, PAIRS)
    # the same numbers once more, along the other axis
    others = tl.load(expert + block * PAIRS + place, mask=block * PAIRS + place < P, other=-1).to(tl.int32)
    is_before = (others[None, :] == chosen[:, None]) & (place[None, :] < place[:, None])
    rank = tl.sum(is_before.to(tl.int32), 1)
    base = tl.load(first + chosen, mask=inside, other=0) + tl.load(counts + block * E + chosen, mask=inside, other=0)
    tl.store(row + pair, base + rank, mask=inside)
    tl.store(row_share + base + rank, tl.load(share + pair, mask=inside, other=0.0).to(tl.float32), mask=inside)


@triton.jit
@no_type_check
def _spread(x, row, first, count, rows, E, L, K: tl.constexpr, TILE: tl.constexpr, BLOCK: tl.constexpr):
    """Copy each token to its rows; the first programs write zeros behind each expert's rows."""
    program = tl.program_id(0)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < L
    if program < E:
        start = tl.load(first + program)
        pairs = tl.load(count + program)
        blank = tl.zeros((BLOCK,), rows.dtype.element_ty)
        for unused in range(start + pairs, start + (pairs + TILE - 1) // TILE * TILE):
            tl.store(rows + tl.cast(unused, tl.int64) * L + column, blank, mask=inside)
    else:
        token = program - E
        values = tl.load(x + tl.cast(token, tl.int64) * L + column, mask=inside).to(rows.dtype.element_ty)
        for choice in tl.static_range(K):
            place = tl.load(row + token * K + choice).to(tl.int64)
            tl.store(rows + place * L + column, values, mask=inside)


@triton.jit
@no_type_check
def _sum(rows, row, output, L, K: tl.constexpr, BLOCK: tl.constexpr):
    """Add a token's rows in fp32, in the order of its choice."""
    token = tl.program_id(0)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < L
    total = tl.zeros((BLOCK,), tl.float32)
    for choice in tl.static_range(K):
        place = tl.load(row + token * K + choice).to(tl.int64)
        total += tl.load(rows + place * L + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(output + tl.cast(token, tl.int64) * L + column, total, mask=inside)


@triton.jit
@no_type_check
def _collect(parts, row, output, P, R, PARTS, BLOCK: tl.constexpr):
    """Add the parts of each pair's row, in order."""
    pair = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    place = tl.load(row + pair, mask=pair < P, other=0)
    total = tl.zeros((BLOCK,), tl.float32)
    for part in range(PARTS):
        total += tl.load(parts + tl.cast(part, tl.int64) * R + place, mask=pair < P, other=0.0)
    tl.store(output + pair, total, mask=pair < P)


def most_rows(pairs: int, num_experts: int, tile: int) -> int:
    """Return how many rows any choice may need, a multiple of the tile."""
    return (pairs + min(pairs, num_experts) * (tile - 1)) // tile * tile


def arrange(expert: Int[Tensor, "T k"], share: Float[Tensor, "T k"], num_experts: int, tile: int) -> ExpertRows:
    """Give every pair its row.

    Args:
        expert: The experts of each token, each below `num_experts`.
        share: How much each of them counts.
        num_experts: How many there are.
        tile: Rows of a tile.
    """
    pairs, on = expert.numel(), {"device": expert.device, "dtype": torch.int32}
    expert, share = expert.contiguous(), share.contiguous()
    blocks, tiles = -(-pairs // PAIRS), most_rows(pairs, num_experts, tile) // tile
    counts, row = torch.empty(blocks, num_experts, **on), torch.empty(expert.shape, **on)
    first, count = torch.empty(num_experts, **on), torch.empty(num_experts, **on)
    used, of_tile = torch.empty(1, **on), torch.empty(tiles, **on)
    row_share = torch.zeros(tiles * tile, dtype=torch.float32, device=expert.device)
    launch(_count, (blocks,), expert, counts, pairs, num_experts, PAIRS, 64, num_warps=WARPS)
    launch(_accumulate, (-(-num_experts // EXPERTS),), counts, count, blocks, num_experts, BLOCKS, EXPERTS, num_warps=8)
    grid, wide = (-(-tiles // TILES),), 1 << (num_experts - 1).bit_length()
    launch(_arrange, grid, count, first, used, of_tile, tiles, num_experts, tile, wide, TILES, num_warps=8)
    launch(_place, (blocks,), expert, share, counts, first, row, row_share, pairs, num_experts, PAIRS, num_warps=8)
    return ExpertRows(row, row_share, of_tile, first, count, used, tile)


def spread(x: Float[Tensor, "T L"], rows: ExpertRows, dtype: torch.dtype) -> Float[Tensor, "R L"]:
    """Return each row's token, rounded to a format, and zeros in the rows that end an expert's last tile."""
    (tokens, width), (num_experts,) = x.shape, rows.first.shape
    result = torch.empty(rows.share.shape[0], width, dtype=dtype, device=x.device)
    grid, block = _columns(tokens + num_experts, width)
    launch(
        _spread, grid, x.contiguous(), rows.row, rows.first, rows.count, result, num_experts, width,
        rows.row.shape[1], rows.tile, block, num_warps=WARPS,
    )  # fmt: skip
    return result


def sum_by_token(values: Float[Tensor, "R L"], rows: ExpertRows, dtype: torch.dtype) -> Float[Tensor, "T L"]:
    """Return the sum of each token's rows, taken in fp32 and always in the same order."""
    (tokens, top_k), width = rows.row.shape, values.shape[1]
    result = torch.empty(tokens, width, dtype=dtype, device=values.device)
    grid, block = _columns(tokens, width)
    launch(_sum, grid, values, rows.row, result, width, top_k, block, num_warps=WARPS)
    return result


def collect(parts: Float[Tensor, "parts R"], rows: ExpertRows, dtype: torch.dtype) -> Float[Tensor, "T k"]:
    """Return the sum of the parts of each pair's row."""
    result = torch.empty(rows.row.shape, dtype=dtype, device=parts.device)
    grid = (-(-result.numel() // PAIRS),)
    launch(_collect, grid, parts, rows.row, result, result.numel(), *reversed(parts.shape), PAIRS, num_warps=WARPS)
    return result


def _columns(programs: int, width: int) -> tuple[tuple[int, int], int]:
    block = min(1 << (width - 1).bit_length(), 2048)
    return (programs, -(-width // block)), block
