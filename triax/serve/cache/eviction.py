"""What goes first when memory is short: what costs least to compute again, aged by what went before."""

import heapq
from collections.abc import Hashable, Iterator
from typing import Generic, TypeVar

EVEN_CONTEXT = (
    32_768  # tokens of context at which attention takes about as long as all else; sizes differ, orders agree
)

Entry = TypeVar("Entry", bound=Hashable)


def recompute_cost(position: int, saved: int) -> float:
    """Return what a snapshot saves, in tokens without context.

    Args:
        position: Tokens before the snapshot.
        saved: How many of them had to be computed again without it, because the next snapshot lies so far back.
    """
    return saved * (1 + (position - saved / 2) / EVEN_CONTEXT)


class Order(Generic[Entry]):
    """Evictable entries, cheapest first.

    An entry's score is the order's age plus its worth; the age is the highest score that was ever evicted. So worth
    counts, and what has not been used for long gives way to what has (GreedyDual-Size with entries of equal size).

    Source: Cao and Irani, Cost-aware WWW proxy caching algorithms (USITS 1997).
    """

    def __init__(self) -> None:
        self.age = 0.0
        self._heap: list[tuple[float, int, Entry]] = []
        self._ticket: dict[Entry, int] = {}
        self._next = 0

    def __len__(self) -> int:
        return len(self._ticket)

    def __contains__(self, entry: Entry) -> bool:
        return entry in self._ticket

    def __iter__(self) -> Iterator[Entry]:
        return iter(self._ticket)

    def add(self, entry: Entry, worth: float) -> None:
        """Let an entry be evicted; one that is there is scored anew."""
        self._next += 1
        self._ticket[entry] = self._next
        heapq.heappush(self._heap, (self.age + worth, self._next, entry))
        if len(self._heap) > 4 * len(self._ticket) + 64:
            self._heap = [item for item in self._heap if self._ticket.get(item[2]) == item[1]]
            heapq.heapify(self._heap)

    def discard(self, entry: Entry) -> None:
        """Keep an entry from being evicted."""
        self._ticket.pop(entry, None)

    def lowest(self) -> float | None:
        """Return the score of the entry that goes first."""
        while self._heap and self._ticket.get(self._heap[0][2]) != self._heap[0][1]:
            heapq.heappop(self._heap)
        return self._heap[0][0] if self._heap else None

    def pop(self) -> Entry | None:
        """Take out the entry that goes first."""
        while self._heap:
            score, ticket, entry = heapq.heappop(self._heap)
            if self._ticket.get(entry) == ticket:
                del self._ticket[entry]
                self.age = max(self.age, score)
                return entry
        return None
