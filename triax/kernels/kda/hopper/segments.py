"""Cut long sequences with few heads in segments, so that all multiprocessors walk at once.

A segment maps any state it starts from to `keep @ state + add`. First every segment's map is computed, then the states
before each segment by joining the maps, then all segments are walked at once: exact for every gate.
"""

from functools import lru_cache
from itertools import pairwise
from typing import NamedTuple

import torch
from jaxtyping import Int
from torch import Tensor

CHUNK = 64
FEWEST_CHUNKS = 8
"""Shorter segments would spend more on their maps than they save."""


class Segments(NamedTuple):
    """Runs of chunks as in a run table, with segments in the place of sequences."""

    runs: Int[Tensor, " S_1"]
    """First run of each segment, and the number of runs."""
    run_first: Int[Tensor, " runs"]
    run_tokens: Int[Tensor, " runs"]
    run_chunk: Int[Tensor, " runs"]
    run_slot: Int[Tensor, " runs"]
    """Where the state after each run is kept; the last slot is for states that nobody wants."""
    run_segment: Int[Tensor, " runs"]
    """Which segment each run belongs to."""
    of_sequence: Int[Tensor, " N_1"]
    """First segment of each sequence, and the number of segments."""
    num_slots: int


@lru_cache(maxsize=32)
def segments(
    starts: tuple[int, ...], states_at: tuple[int, ...], heads: int, multiprocessors: int, device: torch.device
) -> Segments | None:
    """Cut sequences into segments of whole chunks, or return nothing where that would not pay."""
    lengths = [end - begin for begin, end in pairwise(starts)]
    chunks = [-(-n // CHUNK) for n in lengths]
    if not chunks or min(chunks) == 0:
        return None
    # Two blocks a segment and head, one wave of them.
    length = max(FEWEST_CHUNKS, -(-2 * heads * sum(chunks) // multiprocessors))
    longest = max(chunks)
    # Measured: a map costs about as much as a walk, and a joint as much as two chunks.
    if longest < 2.5 * length + 2 * longest / length:
        return None
    runs, first, tokens, chunk, slot, segment, of_sequence = [0], [], [], [], [], [], [0]
    num_slots, num_chunks = len(lengths), 0
    unwanted: list[int] = []
    for sequence, (begin, end) in enumerate(pairwise(starts)):
        filled = 0
        places = sorted({begin, end, *(p for p in states_at if begin < p < end)})
        for low, high in pairwise(places):
            target = sequence if high == end else num_slots
            num_slots += high != end
            while low < high:
                take = min(high - low, (length - filled) * CHUNK)
                first.append(low)
                tokens.append(take)
                chunk.append(num_chunks)
                segment.append(len(runs) - 1)
                if low + take < high:
                    unwanted.append(len(slot))
                slot.append(target)
                num_chunks += -(-take // CHUNK)
                filled += -(-take // CHUNK)
                low += take
                if filled == length or low == end:
                    runs.append(len(first))
                    filled = 0
        of_sequence.append(len(runs) - 1)
    for n in unwanted:
        slot[n] = num_slots

    def to_device(numbers: list[int]) -> Tensor:
        return torch.tensor(numbers, dtype=torch.int32, device=device)

    return Segments(
        to_device(runs),
        to_device(first),
        to_device(tokens),
        to_device(chunk),
        to_device(slot),
        to_device(segment),
        to_device(of_sequence),
        num_slots + 1,
    )
