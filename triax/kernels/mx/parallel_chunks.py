"""Work on long tensors in pieces that stay in a core's cache, shared among threads."""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise

import torch

PIECE = 1 << 15  # values: all buffers of a piece fit a second-level cache, and torch starts no threads of its own
WORTH_A_THREAD = 1 << 19  # values; below, starting a thread costs more than it saves


def run_chunks(length: int, work: Callable[[int, int], None], threads: int | None = None, unit: int = PIECE) -> None:
    """Call `work(start, stop)` on parts that cover `length` values; parts run at the same time.

    Args:
        length: How many values there are.
        work: Goes through its part piece by piece.
        threads: How many; none is as many as torch uses, fewer where there is little to do.
        unit: Parts begin at multiples of this many values.
    """
    units = -(-length // unit)
    count = min(torch.get_num_threads(), length // WORTH_A_THREAD) if threads is None else min(threads, units)
    if count <= 1:
        work(0, length)
        return
    cuts = [min(units * k // count * unit, length) for k in range(count + 1)]
    with ThreadPoolExecutor(count, thread_name_prefix="mx") as pool:
        for done in [pool.submit(work, start, stop) for start, stop in pairwise(cuts)]:
            done.result()


def pieces(start: int, stop: int, group: int) -> Iterator[slice]:
    """Return the pieces of a part, counted in groups of so many values."""
    for at in range(start, stop, PIECE):
        yield slice(at // group, min(at + PIECE, stop) // group)
