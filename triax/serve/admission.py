"""Who may start: in order within a class, in shares between classes, and only where memory is."""

import heapq
from bisect import insort
from collections.abc import Callable, Generator

from triax.config.serve import Scheduling
from triax.serve.cache.holding import Holding
from triax.serve.cache.manager import Manager
from triax.serve.cache.prefix import Match
from triax.serve.sequence import Sequence

MOST_DEFERRED = 64  # sequences of a class that one plan looks past because their prefix is on its way
MOST_REFUSALS = 256  # plans without room for a sequence, after which nobody else may take what becomes free
MOST_RECLAIMS = 3  # times that a sequence gives back what its class has borrowed; then it may finish


class Admission:
    """Sequences that wait, class by class, and the giving of memory to them.

    Args:
        manager: Owner of the memory.
        settings: Shares.
        running: Sequences with memory, in their order; shared with the scheduler.
        park: Takes a sequence's memory back, at once or after its plans in flight.
    """

    def __init__(
        self, manager: Manager, settings: Scheduling, running: list[Sequence], park: Callable[[Sequence], None]
    ) -> None:
        self.manager, self.settings, self.running, self._park = manager, settings, running, park
        self.most_running = min(settings.max_running, max(0, manager.sizes.slots - 1))
        self.owed: Sequence | None = None
        """What becomes free is for this one."""
        self.was_refused = False
        """Whether the latest `start` ended because there was no room."""
        self.num_deferred = 0
        """How often a sequence has waited for a prefix on its way."""
        self._held: list[Sequence] | None = None
        self._waiting: dict[str, list[tuple[tuple[int, int], Sequence]]] = {name: [] for name in settings.classes}

    def hold(self) -> None:
        """Let sequences that enter from now on wait outside until `release`."""
        self._held = self._held or []

    def release(self) -> None:
        """Let sequences that were held take their turn."""
        for sequence in self._held or ():
            self.push(sequence)
        self._held = None

    @property
    def num_held(self) -> int:
        """Sequences that wait for `release`."""
        return sum(not one.is_closing for one in self._held or ())

    def enter(self, sequence: Sequence) -> None:
        """Take in a new sequence."""
        if self._held is None:
            self.push(sequence)
        else:
            self._held.append(sequence)

    def push(self, sequence: Sequence) -> None:
        """Let a sequence wait in its class."""
        heapq.heappush(self._waiting[sequence.class_name], (sequence.order, sequence))

    @property
    def has_waiting(self) -> bool:
        """Whether a sequence waits, or has ended while it did."""
        return any(self._waiting.values())

    def urgency(self, name: str) -> float:
        """Return the priority of the first sequence that waits in a class; infinite if none does."""
        waiting = self._waiting[name]
        return float(waiting[0][0][0]) if waiting else float("inf")

    def num_tokens(self, name: str, most: int) -> int:
        """Return the tokens that a class waits with, counted up to `most`."""
        total = 0
        for _, sequence in self._waiting[name]:
            if total >= most:
                break
            if not sequence.is_closing:
                total += len(sequence.tokens)
        return total

    def start(self, name: str) -> Generator[Sequence, None, None]:
        """Give memory to waiting sequences of a class, one by one, until no more fits; close it when done."""
        waiting = self._waiting[name]
        deferred: list[Sequence] = []
        self.was_refused = False
        if self.owed is not None and self.owed.is_closing:
            self.owed = None
        try:
            while waiting and len(deferred) < MOST_DEFERRED:
                sequence = waiting[0][1]
                if sequence.is_closing:
                    heapq.heappop(waiting)
                    continue
                if not self._may_start(sequence):
                    break
                match = None if self._must_follow(sequence) else self._match(sequence)
                if match is None or match.is_pending or self._follow(sequence, match):
                    deferred.append(heapq.heappop(waiting)[1])
                    continue
                if not self._start(sequence, match):
                    self._refuse(sequence)
                    break
                heapq.heappop(waiting)
                yield sequence
        finally:
            for sequence in deferred:
                self.push(sequence)
            self.num_deferred += len(deferred)

    def _match(self, sequence: Sequence) -> Match:
        limit = sequence.scored if sequence.request.score_prompt else len(sequence.tokens)
        return self.manager.match(sequence.keys, sequence.request.cache_salt, min(limit, len(sequence.tokens) - 1))

    def _refuse(self, sequence: Sequence) -> None:
        self.was_refused = True
        sequence.refusals += 1
        if sequence.refusals > MOST_REFUSALS and self.owed is None:
            self.owed = sequence
        if self.manager.sizes.host_pages:
            self.manager.prefetch(self._match(sequence), spare=len(self.running))

    def _may_start(self, sequence: Sequence) -> bool:
        owed = self.owed
        if owed is None or sequence is owed or sequence.request.priority < owed.request.priority:
            return True
        return sequence.class_name == owed.class_name and sequence.order < owed.order

    def _start(self, sequence: Sequence, match: Match) -> bool:
        while (holding := self._admit(sequence, match)) is None:
            if not self._reclaim(sequence):
                return False
            match = self._match(sequence)  # memory has changed hands since
        sequence.holding = holding
        sequence.target, sequence.planned = len(sequence.tokens), holding.position
        sequence.is_parking, sequence.refusals = False, 0
        if self.owed is sequence:
            self.owed = None
        if sequence.cached_tokens is None:
            sequence.cached_tokens, sequence.matched_tokens = holding.cached, min(holding.matched, len(sequence.tokens))
            counts = self.manager.counts
            counts["prompts"] += 1
            counts["prompt_tokens"] += len(sequence.tokens)
            counts["matched_tokens"] += sequence.matched_tokens
            counts["cached_tokens"] += holding.cached
        insort(self.running, sequence, key=lambda one: one.order)
        return True

    def _admit(self, sequence: Sequence, match: Match) -> Holding | None:
        """Give a sequence memory if there is room, with what was found of its prefix or, if need be, without.

        A hit keeps its snapshot's slot and its partly filled page from giving way, and needs a copy of each beside
        them. Where nothing runs, no memory will come back for that: the sequence starts from its first token instead.
        """
        if len(self.running) >= self.most_running or match.is_pending:
            return None
        request, tried = sequence.request, [match]
        if match.snapshot is not None and not self.running:
            tried.append(Match(match.root, match.path, match.matched))
        for found in tried:
            holding = self.manager.admit(
                sequence.number,
                sequence.keys,
                request.cache_salt,
                found,
                len(sequence.tokens),
                spare=len(self.running) + 1 if self.running else 0,
                borders=request.borders,
            )
            if holding is not None:
                return holding
        return None

    def _reclaim(self, sequence: Sequence) -> bool:
        """Take memory back for a sequence that comes first or whose class gets less than its share."""
        usage, classes = self.usage(), self.settings.classes
        needed = len(sequence.tokens) // self.manager.page_tokens + 1
        # only what fits in its own share: else two classes could take the same memory from each other for ever
        own = [one for one in self.running if one.class_name == sequence.class_name]
        pages = needed + sum(len(one.holding.pages) for one in own if one.holding is not None)
        share = classes[sequence.class_name].share
        is_due = (len(own) + 1) / self.most_running <= share and pages / (self.manager.sizes.pages - 1) <= share
        givers = [
            one
            for one in self.running
            if not one.is_closing
            and (
                one.request.priority > sequence.request.priority
                or (
                    is_due
                    and one.request.priority == sequence.request.priority
                    and one.class_name != sequence.class_name
                    and usage[one.class_name] > classes[one.class_name].share
                    and one.preemptions < MOST_RECLAIMS
                )
            )
        ]
        if any(one.is_parking for one in self.running):
            return False
        promised = self.manager.tiers.available_pages
        chosen: list[Sequence] = []
        for one in sorted(givers, key=lambda one: one.order, reverse=True):
            chosen.append(one)
            assert one.holding is not None
            promised += len(one.holding.pages)
            others = len(self.running) - len(chosen)
            if promised >= needed + others + 1 or not others:
                break
        else:
            return False
        for one in chosen:
            self._park(one)
        self.owed = sequence
        return any(one.holding is None for one in chosen)

    def usage(self) -> dict[str, float]:
        """Return the share of slots or pages, whichever is larger, that each class holds."""
        slots: dict[str, int] = {}
        pages: dict[str, int] = {}
        for one in self.running:
            if one.holding is not None:
                slots[one.class_name] = slots.get(one.class_name, 0) + 1
                pages[one.class_name] = pages.get(one.class_name, 0) + len(one.holding.pages)
        most_pages = max(1, self.manager.sizes.pages - 1)
        return {name: max(slots[name] / self.most_running, pages[name] / most_pages) for name in slots}

    @staticmethod
    def _must_follow(sequence: Sequence) -> bool:
        if sequence.leader is not None:
            holding = sequence.leader.holding
            if holding is not None and not sequence.leader.is_closing and holding.position < sequence.leader_place:
                return True
            sequence.leader = None
        return False

    def _follow(self, sequence: Sequence, match: Match) -> bool:
        """Whether a running prompt is about to leave a snapshot that this one can use; then it waits for it."""
        prefixes = self.manager.prefixes
        if prefixes is None or sequence.request.score_prompt:
            return False
        least, most = match.position + prefixes.gap, len(sequence.tokens) - 1
        for leader in self.running:
            holding = leader.holding
            if holding is None or leader.is_closing or leader.is_parking or not holding.places:
                continue
            if holding.salt != sequence.request.cache_salt or holding.epoch != self.manager.epoch:
                continue
            for place in reversed(holding.places):
                if place < least or place <= holding.position:
                    break
                if place > most or sequence.keys[place - 1] != holding.keys[place - 1]:
                    continue
                if sequence.keys[:place] == holding.keys[:place]:
                    sequence.leader, sequence.leader_place = leader, place
                    return True
        return False
