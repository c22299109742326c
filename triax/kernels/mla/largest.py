"""The largest logit of each head on a GPU, for QK-Clip: torch's attention does not tell it."""

from collections.abc import Sequence
from functools import lru_cache
from itertools import pairwise
from typing import Any, no_type_check

import torch
import triton
import triton.language as tl
from jaxtyping import Float
from torch import Tensor

from triax.kernels.device import launch

CHANNELS = 64  # multiplied at once
STAGES = 3  # of the pipeline that fetches keys, where they fit
ROOM = 227 * 1024  # bytes of shared memory that a block of Hopper can have


@triton.jit
@no_type_check
def _largest(query, key, tile, part, q_token, q_head, k_token, k_head, H, K: tl.constexpr, BK: tl.constexpr,
             BQ: tl.constexpr, BS: tl.constexpr, PRECISION: tl.constexpr):  # fmt: skip
    """Write part [tiles, H]: the largest product of a tile's queries with the keys up to each of them."""
    n, h = tl.program_id(0), tl.program_id(1).to(tl.int64)
    first = tl.load(tile + 4 * n).to(tl.int64)  # token of the first query
    count = tl.load(tile + 4 * n + 1)
    begin = tl.load(tile + 4 * n + 2).to(tl.int64)  # token of the sequence's first key
    past = tl.load(tile + 4 * n + 3)  # keys before the first query's own
    row, column, channel = tl.arange(0, BQ), tl.arange(0, BS), tl.arange(0, BK)
    query += first * q_token + h * q_head
    key += begin * k_token + h * k_head
    largest = tl.full((BQ, BS), float("-inf"), tl.float32)
    for start in range(0, past + count, BS):
        logit = tl.zeros((BQ, BS), tl.float32)
        seen = start + column
        for c in tl.static_range(0, K, BK):
            q = tl.load(query + row[:, None].to(tl.int64) * q_token + c + channel[None, :],
                        mask=(row < count)[:, None] & (c + channel < K)[None, :], other=0.0)  # fmt: skip
            k = tl.load(key + seen[None, :].to(tl.int64) * k_token + c + channel[:, None],
                        mask=(seen < past + count)[None, :] & (c + channel < K)[:, None], other=0.0)  # fmt: skip
            logit = tl.dot(q, k, logit, input_precision=PRECISION)
        meets = (seen[None, :] <= past + row[:, None]) & (row < count)[:, None]
        largest = tl.where(meets, tl.maximum(largest, logit), largest)
    tl.store(part + n * H + h, tl.max(tl.max(largest, 1), 0))


def largest(
    query: Float[Tensor, "T H K"],
    key: Float[Tensor, "S H K"],
    query_starts: Sequence[int],
    key_starts: Sequence[int],
    scale: float,
) -> Float[Tensor, " H"]:
    """Return the largest scaled logit of each head over all pairs that causal attention sees, in fp32."""
    side, stages = fitting(query.shape[2], query.itemsize, _room(query.device))
    tiles = _tiles(tuple(query_starts), tuple(key_starts), side, query.device)
    query, key = (x if x.stride(-1) == 1 else x.contiguous() for x in (query, key))
    part = torch.full((len(tiles), query.shape[1]), -torch.inf, device=query.device)
    precision = "ieee" if query.dtype is torch.float32 else "tf32"
    launch(
        _largest, tuple(part.shape), query, key, tiles, part, *query.stride()[:2], *key.stride()[:2], query.shape[1],
        query.shape[2], _piece(query.shape[2]), side, side, precision, num_warps=8, num_stages=stages,
    )  # fmt: skip
    return part.amax(0) * scale if len(part) else part.new_full(part.shape[1:], -torch.inf)


@lru_cache
def fitting(channels: int, itemsize: int, room: int) -> tuple[int, int]:
    """Return rows and columns of a tile, and stages of its pipeline, that fit in so many bytes of shared memory.

    A tile's queries stay there whole, its keys in as many copies as are on their way. In fp32 larger tiles than 64
    would also spill kilobytes of registers.
    """
    side = 128 if itemsize < 4 else 64
    while side > 16:
        for stages in range(STAGES, 0, -1):
            if shared_bytes(channels, itemsize, side, stages) <= room:
                return side, stages
        side //= 2
    return side, 1


def shared_bytes(channels: int, itemsize: int, side: int, stages: int) -> int:
    """Return the most bytes of shared memory that a block with tiles of this side takes."""
    piece = _piece(channels)
    pieces = -(-channels // piece)
    return side * piece * itemsize * (pieces + (1 if stages == 1 else pieces * stages))


def _piece(channels: int) -> int:
    return min(CHANNELS, max(16, 1 << (channels - 1).bit_length()))


@lru_cache
def _room(device: torch.device) -> int:
    properties: Any = torch.cuda.get_device_properties(device) if device.type == "cuda" else None
    return ROOM if properties is None else properties.shared_memory_per_block_optin


@lru_cache(maxsize=8)  # every layer of a forward asks for the same one
@torch.inference_mode(False)
def _tiles(query_starts: tuple[int, ...], key_starts: tuple[int, ...], rows: int, device: torch.device) -> Tensor:
    tiles = []
    for row, (first, end) in enumerate(pairwise(query_starts)):
        past = key_starts[row + 1] - key_starts[row] - (end - first)
        for start in range(first, end, rows):
            tiles.append((start, min(rows, end - start), key_starts[row], past + start - first))
    tiles.sort(key=lambda tile: -tile[3])  # the longest first
    return torch.tensor(tiles, dtype=torch.int32).reshape(-1, 4).to(device)
