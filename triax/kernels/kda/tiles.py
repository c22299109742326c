"""Products of decayed rows inside chunks, without an exponent that could overflow.

The decay between two tokens is a product of two factors that meet at an anchor between them. Where the anchor lies at
the border of two halves, both factors are at most 1. Tiles on the diagonal have no such anchor: with a bounded gate
they are small enough for a factor and its inverse to stay in range, without a bound they shrink to single tokens.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

SOLVE_TILE = 16
LARGEST_EXPONENT = 80.0  # exp(80) is 5.5e34: in range for fp32 and bf16


class Own(NamedTuple):
    """Decay inside tiles on the diagonal as [tiles, tile, K]; the product of a rise and a later row's fall."""

    rise: Tensor  # from the tile's start to a row, times a power of two that centres the range on 1
    fall: Tensor  # its inverse


class Level(NamedTuple):
    """Neighbouring halves of w rows: what the second half kept since their border, what the first kept until it."""

    width: int
    since: Tensor  # [B, C/2w, w, K]
    until: Tensor  # [B, C/2w, w, K]


class Decays(NamedTuple):
    """How much each channel kept between the tokens of a chunk; B chunks of C rows, one head each."""

    own: Own | None  # none where tiles are single rows
    levels: tuple[Level, ...]
    since_start: Tensor  # [B, C, K] from the chunk's start to a row, that row's decay included
    until_end: Tensor  # [B, C, K] from a row to the chunk's end, that row's decay not included
    whole: Tensor  # [B, K]


def widest_tile(lowest_log_decay: float) -> int:
    """Rows, a power of two and at most 16, whose summed log decay stays in range for a gate with this lower bound."""
    tile = SOLVE_TILE
    while tile > 1 and -lowest_log_decay * tile > LARGEST_EXPONENT:
        tile //= 2
    return tile


def decays(log_decay: Tensor, lowest_log_decay: float) -> Decays:
    """Build the factors of every level from one exponential per element; each later factor is a product of earlier."""
    batch, rows, channels = log_decay.shape
    tile = widest_tile(lowest_log_decay)
    tiled = log_decay.view(batch, rows // tile, tile, channels)
    since = tiled.cumsum(2).exp_() if tile > 1 else tiled.exp()
    whole = since[:, :, -1]
    if tile > 1:
        # A power of two rounds nothing; with both factors centred on 1 small gradients do not underflow.
        balance = 2.0 ** round(-lowest_log_decay * tile / 2 / math.log(2))
        rise = since * balance
        fall = rise.reciprocal()
        until = fall * (whole * balance)[:, :, None]
        own = Own(rise.view(-1, tile, channels), fall.view(-1, tile, channels))
    else:
        own = None
        until = torch.ones_like(since)
    levels = []
    width = tile
    while width < rows:
        halves = (batch, rows // (2 * width), 2, width, channels)
        since, until, whole = since.view(halves), until.view(halves), whole.view(*halves[:3], channels)
        first, second = whole.unbind(2)
        levels.append(Level(width, since[:, :, 1], until[:, :, 0]))
        one = torch.ones_like(first)
        since = since * torch.stack((one, first), 2)[..., None, :]
        until = until * torch.stack((second, one), 2)[..., None, :]
        whole = first * second
        width *= 2
    shape = (batch, rows, channels)
    return Decays(own, tuple(levels), since.view(shape), until.view(shape), whole.view(batch, channels))


def products(query: Tensor, key: Tensor, decay: Decays) -> tuple[Tensor, Tensor]:
    """Return decayed <q_t, k_i> for i <= t and decayed <k_t, k_i> for i < t as [B, C, C]; the rest is 0."""
    batch, rows, channels = key.shape
    if decay.own:
        tile = decay.own.fall.shape[1]
        both = torch.bmm(_risen(query, key, decay.own), (key.view(-1, tile, channels) * decay.own.fall).mT)
        # Selected, never multiplied by a mask: above the diagonal a product may be infinite.
        ones = torch.ones(tile, tile, dtype=torch.bool, device=key.device)
        keep = torch.stack((ones.tril(), ones.tril(-1)))
        own_reads, own_overlaps = torch.where(keep, both.view(-1, 2, tile, tile), key.new_zeros(())).unbind(1)
        if tile == rows:
            return own_reads, own_overlaps
        reads, overlaps = key.new_zeros(batch, rows, rows), key.new_zeros(batch, rows, rows)
        _put(reads, own_reads)
        _put(overlaps, own_overlaps)
    else:
        reads, overlaps = key.new_zeros(batch, rows, rows), key.new_zeros(batch, rows, rows)
        reads.diagonal(dim1=1, dim2=2).copy_((query * key).sum(-1))
    for level in decay.levels:
        columns = (_half(key, level.width, 0) * level.until).view(-1, level.width, channels).mT
        for target, source in ((reads, query), (overlaps, key)):
            row = (_half(source, level.width, 1) * level.since).view(-1, level.width, channels)
            _put_below(target, torch.bmm(row, columns))
    return reads, overlaps


def product_gradients(
    query: Tensor, key: Tensor, decay: Decays, d_reads: Tensor, d_overlaps: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of the products for q_t, k_t (as a row) and k_i (as a column), diagonal left out.

    Only what lies strictly below the diagonal of the two gradients is read.
    """
    channels = key.shape[2]
    if decay.own:
        rise, fall = decay.own
        tile = fall.shape[1]
        keep = torch.ones(tile, tile, dtype=torch.bool, device=key.device).tril(-1)
        zero = key.new_zeros(())
        both = key.new_empty(len(fall), 2, tile, tile)
        torch.where(keep, _tiles(d_reads, tile), zero, out=both[:, 0])
        torch.where(keep, _tiles(d_overlaps, tile), zero, out=both[:, 1])
        both = both.view(-1, 2 * tile, tile)
        as_rows = torch.bmm(both, key.view(-1, tile, channels) * fall).view(-1, 2, tile, channels)
        d_query, d_row = ((x * rise).view(key.shape) for x in as_rows.unbind(1))
        d_column = torch.bmm(both.mT, _risen(query, key, decay.own)).mul_(fall).view(key.shape)
    else:
        d_query, d_row, d_column = (torch.zeros_like(key) for _ in range(3))
    for level in decay.levels:
        flat = (-1, level.width, channels)
        of_reads, of_overlaps = _below(d_reads, level.width), _below(d_overlaps, level.width)
        columns = (_half(key, level.width, 0) * level.until).view(flat)
        of_query, of_key = torch.bmm(of_reads, columns), torch.bmm(of_overlaps, columns)
        _half(d_query, level.width, 1).addcmul_(of_query.view(level.since.shape), level.since)
        _half(d_row, level.width, 1).addcmul_(of_key.view(level.since.shape), level.since)
        column = torch.bmm(of_reads.mT, (_half(query, level.width, 1) * level.since).view(flat))
        column.baddbmm_(of_overlaps.mT, (_half(key, level.width, 1) * level.since).view(flat))
        _half(d_column, level.width, 0).addcmul_(column.view(level.until.shape), level.until)
    return d_query, d_row, d_column


def unit_lower_inverse(lower: Tensor) -> Tensor:
    """Return (I + lower)^-1 of strictly lower [B, C, C] by substitution.

    Sums of powers would be shorter, but for near-equal keys the powers grow to thousands and cancel.
    """
    rows, tile = lower.shape[1], SOLVE_TILE
    # Matrices last: each of the 15 steps is one long vector operation over all tiles.
    flat = _tiles(lower, tile).reshape(-1, tile * tile).t().contiguous().view(tile, tile, -1)
    solved = torch.zeros_like(flat)
    solved.diagonal(dim1=0, dim2=1).fill_(1)
    for j in range(tile - 1):
        solved[j + 1 :, : j + 1].addcmul_(flat[j + 1 :, j, None], solved[j, None, : j + 1], value=-1)
    solved = solved.view(tile * tile, -1).t().contiguous().view(-1, tile, tile)
    if rows == tile:
        return solved
    inverse = torch.zeros_like(lower)
    _put(inverse, solved)
    width = tile
    while width < rows:
        if width > tile:
            solved = _tiles(inverse, width).contiguous()
        first, second = solved.view(-1, 2, width, width).unbind(1)
        _put_below(inverse, torch.bmm(torch.bmm(second, _below(lower, width)), first).neg_())
        width *= 2
    return inverse


def _risen(query: Tensor, key: Tensor, own: Own) -> Tensor:
    """Rows of both, decayed since their tile's start, one above the other: [tiles, 2 tile, K]."""
    tiles, tile, channels = own.rise.shape
    rows = key.new_empty(tiles, 2, tile, channels)
    torch.mul(query.view(own.rise.shape), own.rise, out=rows[:, 0])
    torch.mul(key.view(own.rise.shape), own.rise, out=rows[:, 1])
    return rows.view(tiles, 2 * tile, channels)


def _half(rows: Tensor, width: int, which: int) -> Tensor:
    return rows.view(rows.shape[0], -1, 2, width, rows.shape[-1])[:, :, which]


def _tile_view(matrix: Tensor, width: int) -> Tensor:
    """Diagonal tiles of [B, C, C] as [B, width, width, C/width]."""
    n = matrix.shape[1] // width
    return matrix.view(-1, n, width, n, width).diagonal(dim1=1, dim2=3)


def _below_view(matrix: Tensor, width: int) -> Tensor:
    """Tiles left below the diagonal, second half's rows and first half's columns, as [B, width, width, C/2width]."""
    n = matrix.shape[1] // (2 * width)
    return matrix.view(-1, n, 2, width, n, 2, width)[:, :, 1, :, :, 0].diagonal(dim1=1, dim2=3)


def _tiles(matrix: Tensor, width: int) -> Tensor:
    return _tile_view(matrix, width).permute(0, 3, 1, 2).reshape(-1, width, width)


def _below(matrix: Tensor, width: int) -> Tensor:
    return _below_view(matrix, width).permute(0, 3, 1, 2).reshape(-1, width, width)


def _put(matrix: Tensor, tiles: Tensor) -> None:
    width = tiles.shape[-1]
    _tile_view(matrix, width).copy_(tiles.view(matrix.shape[0], -1, width, width).permute(0, 2, 3, 1))


def _put_below(matrix: Tensor, tiles: Tensor) -> None:
    width = tiles.shape[-1]
    _below_view(matrix, width).copy_(tiles.view(matrix.shape[0], -1, width, width).permute(0, 2, 3, 1))
