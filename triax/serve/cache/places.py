"""Where in a prompt snapshots are worth their memory."""

from collections.abc import Iterable

from triax.config.serve import Prefixes

MOST_BORDERS = 3  # of those that a request names: the first (system and tools) and the last two (turns)


def snapshot_places(settings: Prefixes, start: int, length: int, borders: Iterable[int], branch: int) -> list[int]:
    """Return the numbers of tokens after which to take a snapshot while computing a prompt, in order.

    They are borders that the request names, the place where it leaves a known prefix, the last aligned place, and
    places whose distance doubles. Where two lie closer than the settings' gap, the one named first here stays.

    Args:
        settings: Distances.
        start: Tokens that need not be computed; a snapshot exists there.
        length: Tokens of the prompt.
        borders: Places that the request names.
        branch: Tokens that it shares with what was computed before, snapshot or not.
    """
    named = sorted({border for border in borders if start < border <= length})
    if len(named) > MOST_BORDERS:
        named = [named[0], *named[1 - MOST_BORDERS :]]
    wished = [*reversed(named), branch, (length - 1) // settings.align * settings.align]
    spaced = settings.first
    while spaced < length:
        wished.append(spaced)
        spaced *= 2
    chosen: list[int] = []
    for place in wished:
        taken = [*chosen, start] if start else chosen
        if start < place <= length and all(abs(place - other) >= settings.gap for other in taken):
            chosen.append(place)
    return sorted(chosen)
