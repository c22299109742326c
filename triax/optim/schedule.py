"""The learning rate as a function of tokens seen, never of steps: batch sizes may change under it."""

import math
from typing import Literal

from triax.config.optim import Schedule, Segment


def rate(settings: Schedule, share: float) -> float:
    """Return the learning rate as a share of its peak.

    The first segment starts from 0, each other one from the end of the one before; a constant segment stands at its
    own `to` from its start. At a border the value is exactly the ending segment's `to`.

    Args:
        settings: Segments over the planned tokens.
        share: Tokens seen over tokens planned; past 1 the last value stays.
    """
    start, before = 0.0, 0.0
    for segment in settings.segments:
        if share < segment.until:
            done = max(0.0, share - start) / (segment.until - start)
            return _between(segment.shape, before, segment.to, done)
        if share == segment.until:
            return segment.to
        start, before = segment.until, segment.to
    return before


def branch(
    settings: Schedule, at: float, more: float, shape: Literal["linear", "cosine", "1-sqrt"] = "1-sqrt", to: float = 0.0
) -> tuple[Schedule, float]:
    """Return the schedule of a run that leaves another at some checkpoint and decays from there.

    Before the checkpoint both prescribe the same rate. The one exception is a cosine or 1-sqrt segment cut in the
    middle: its first part, which the run has behind it, is written as a straight line to the rate at the checkpoint.

    Args:
        settings: Schedule of the run that is left.
        at: Where it is left, as a share of its planned tokens.
        more: Tokens that the branch adds, as a share of the old run's planned tokens.
        shape: Form of the decay.
        to: Rate at the end, as a share of the peak.

    Returns:
        The new schedule, and its planned tokens over the old run's: multiply `train.tokens` by it.
    """
    total = at + more
    kept = [segment for segment in settings.segments if segment.until <= at]
    if at > 0 and (not kept or kept[-1].until < at):
        cut = settings.segments[len(kept)]
        kept.append(Segment(shape="constant" if cut.shape == "constant" else "linear", until=at, to=rate(settings, at)))
    segments = [segment.model_copy(update={"until": segment.until / total}) for segment in kept]
    return Schedule(segments=(*segments, Segment(shape=shape, until=1.0, to=to))), total


def _between(shape: str, before: float, to: float, done: float) -> float:
    if shape == "constant":
        return to
    if shape == "linear":
        left = 1 - done
    elif shape == "cosine":
        left = (1 + math.cos(math.pi * done)) / 2
    else:
        left = 1 - math.sqrt(done)
    return to + (before - to) * left
