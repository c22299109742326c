"""Kimi Delta Attention while decoding: the recurrence alone, a whole layer between projections, and drafts."""

from collections.abc import Callable, Iterator
from typing import Any

import torch

from benchmarks.replay import CEILING, Time, milliseconds
from triax.kernels.kda.decode import Projected, Slots, Weights, recur, replay, step, verify

HEADS, SIZE = 96, 128
# ms; the peer is flash-linear-attention 0.6.0 (`fused_recurrent_kda`), quoted from one run on an H200.
RECURRENCE = {1: (None, "fla 0.006"), 64: (0.22, "fla 0.246"), 256: (0.92, "fla 1.223")}
FUSED = {1: None, 64: 0.235, 256: 0.93}
DRAFTS = 8
REPEATS = 10
"""Launches in one graph, so that a graph's own start does not count."""
VERIFY = 1.5
"""Times one decode step that checking the drafts may cost."""


def measure() -> Iterator[Time]:
    """Yield every figure of the operation; each replay works on slots that the cache no longer holds."""
    for batch, (bar, peer) in RECURRENCE.items():
        inputs, weights, slots, slot = made(batch)
        activated = Projected(inputs.mixed.sigmoid(), *inputs[1:])
        floor = batch * HEADS * SIZE * (SIZE * 8 + 10) / CEILING * 1e3
        time = each(lambda x=(activated, weights, slots.state, slot): recur(*x))
        yield Time(f"KDA decode B={batch}, recurrence with gate and norms", time, bar, floor, peer)
    of_step = {}
    for batch, bar in FUSED.items():
        inputs, weights, slots, slot = made(batch)
        floor = batch * HEADS * SIZE * (SIZE * 8 + 6 * 6 + 12) / CEILING * 1e3
        of_step[batch] = each(lambda x=(inputs, weights, slots, slot): step(*x))
        yield Time(f"KDA decode B={batch}, whole fused launch", of_step[batch], bar, floor)
    for stored in (torch.float32, torch.bfloat16):
        inputs, weights, slots, slot = made(64, stored=stored)
        if stored is torch.bfloat16:
            time = each(lambda x=(inputs, weights, slots, slot): step(*x))
            yield Time("KDA decode B=64, whole fused launch, bf16 states", time)
        tokens, *_ = made(64, DRAFTS + 1)
        bar = VERIFY * of_step[64] if stored is torch.float32 else None
        note = f"{'bf16' if stored is torch.bfloat16 else 'fp32'} states"
        x = (tokens, weights, slots, slot)
        yield Time(f"KDA verify of {DRAFTS} drafts, B=64, {note}", each(lambda x=x: verify(*x)), bar)
        _, records = verify(*x)
        for accepted in (1, 4, DRAFTS + 1):
            count = torch.full((64,), accepted, device="cuda", dtype=torch.int32)
            time = each(lambda x=x, r=records, n=count: verify(*x, pending=r, accepted=n))
            yield Time(f"KDA verify of {DRAFTS} drafts and {accepted} pending tokens, B=64, {note}", time, bar)
        time = each(lambda r=records, n=count, s=slots, i=slot: replay(r, n, s, i))
        yield Time(f"KDA replay of {DRAFTS + 1} tokens, B=64, {note}", time)


def each(work: Callable[[], Any]) -> float:
    """Return the median time of one of several launches in a graph."""
    return milliseconds(lambda: [work() for _ in range(REPEATS)]) / REPEATS


def made(
    batch: int, *tokens: int, stored: torch.dtype = torch.float32
) -> tuple[Projected, Weights, Slots, torch.Tensor]:
    """Return bf16 projections, fp32 weights and memory of twice as many slots as rows, in mixed order."""
    channels = 3 * HEADS * SIZE

    def normal(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.randn(*shape, device="cuda", dtype=dtype)

    shapes = [channels], [HEADS, SIZE], [HEADS], [HEADS, SIZE]
    inputs = Projected(*(normal(batch, *tokens, *shape, dtype=torch.bfloat16) for shape in shapes))
    weights = Weights(
        normal(channels, 4) / 2, normal(HEADS) / 2, normal(HEADS * SIZE), 1 + normal(SIZE) / 4, 1e-5, -5.0
    )
    slots = Slots(
        normal(batch + 64, HEADS, SIZE, SIZE, dtype=stored), normal(batch + 64, 3, channels, dtype=torch.bfloat16)
    )
    return inputs, weights, slots, (1 + torch.randperm(batch + 63, device="cuda")[:batch]).int()
