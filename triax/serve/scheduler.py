"""Who computes what in the next step: decoding first, then prompts within each class's share."""

import heapq
import time
from bisect import bisect_right
from collections import deque
from collections.abc import Callable

from triax.config.serve import Scheduling
from triax.errors import CapacityError
from triax.serve.admission import Admission
from triax.serve.cache.manager import Manager
from triax.serve.plan import PENDING, Plan, Row, RowResult, StepResult
from triax.serve.request import Request
from triax.serve.sequence import Sequence
from triax.serve.shares import shared_out

MOST_FAILURES = 2  # failed steps after which a sequence is given up
MOST_IN_FLIGHT = 2  # one plan runs, the next one is ready

Propose = Callable[[Sequence, int], tuple[int, ...]]
"""Given a sequence and the most drafts that it may have, its drafts."""


class Scheduler:
    """Plans steps, and learns from their results.

    `plan` may be called while one plan is still running: tokens not yet known are `PENDING` in its rows. Plans must
    run, and be committed, in order. An empty plan is not committed.

    Args:
        manager: Owner of the memory.
        settings: Budgets and shares.
        clock: Seconds that deadlines are measured with.
    """

    def __init__(
        self, manager: Manager, settings: Scheduling | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.manager, self.settings, self.clock = manager, settings or Scheduling(), clock
        self.sequences: dict[int, Sequence] = {}
        self.running: list[Sequence] = []
        """Sequences with memory, in their order."""
        self.admission = Admission(manager, self.settings, self.running, self._park)
        self._deadlines: list[tuple[float, int]] = []
        self._open: deque[tuple[Plan, list[Sequence]]] = deque()
        self._next_number = 1
        self._step = 0
        self.counts = {"steps": 0, "preemptions": 0, "failed_steps": 0}

    # coming and going

    @property
    def most_running(self) -> int:
        """Sequences that can run at once."""
        return self.admission.most_running

    @property
    def num_waiting(self) -> int:
        """Sequences without memory."""
        return len(self.sequences) - sum(not one.is_closing for one in self.running)

    @property
    def has_work(self) -> bool:
        """Whether there is anything to plan or to commit."""
        return bool(self.running or self._open or len(self.sequences) > self.admission.num_held)

    @property
    def is_late(self) -> bool:
        """Whether a deadline has passed that `expired` has not told."""
        return bool(self._deadlines) and self._deadlines[0][0] <= self.clock()

    @property
    def num_in_flight(self) -> int:
        """Plans that were made and not yet committed."""
        return len(self._open)

    def add(self, request: Request) -> Sequence:
        """Let a request wait.

        Raises:
            CapacityError: It can never fit, or too many wait; nothing is left behind.
        """
        self.manager.check_fit(len(request.tokens) + max(0, request.max_tokens - 1))
        if self.num_waiting > self.settings.max_waiting:
            raise CapacityError(
                f"scheduler: too many requests wait; found {self.num_waiting}; come back later, or raise "
                "scheduling.max_waiting"
            )
        now = self.clock()
        sequence = Sequence.of(self._next_number, request, self._class_of(request), now)
        self._next_number += 1
        self.sequences[sequence.number] = sequence
        self.admission.enter(sequence)
        if request.deadline_s is not None:
            heapq.heappush(self._deadlines, (now + request.deadline_s, sequence.number))
        return sequence

    def _class_of(self, request: Request) -> str:
        classes = self.settings.classes
        name = request.request_class if request.request_class in classes else "default"
        is_long = len(request.tokens) >= self.settings.long_from
        return "long" if name == "default" and is_long and "long" in classes else name

    def finish(self, number: int, *, keep: bool = True) -> None:
        """End a sequence, whatever it is doing; one that is not known any more is no error.

        Args:
            number: The sequence.
            keep: Leave what it computed for others.
        """
        sequence = self.sequences.pop(number, None)
        if sequence is None:
            return
        sequence.is_closing, sequence.keeps = True, keep
        if sequence.holding is not None and not sequence.in_flight:
            self._close(sequence)

    def expired(self) -> list[int]:
        """Return the sequences whose deadline has passed, once; the caller ends them."""
        late, now = [], self.clock()
        while self._deadlines and self._deadlines[0][0] <= now:
            number = heapq.heappop(self._deadlines)[1]
            if number in self.sequences:
                late.append(number)
        return late

    # planning

    def plan(self, propose: Propose | None = None) -> Plan:
        """Return the next step.

        Args:
            propose: Gives drafts to sequences whose tokens are all known.
        """
        assert len(self._open) < MOST_IN_FLIGHT, "commit the oldest plan first"
        rows: list[Row] = []
        members: list[Sequence] = []
        num_decoding = sum([one.planned >= one.target for one in self.running])
        decode_tokens = self._plan_decoding(rows, members, propose, num_decoding) if num_decoding else 0
        prefill_tokens = 0
        if num_decoding < len(self.running) or self.admission.has_waiting:
            budget = self.settings.step_tokens - decode_tokens
            if rows:
                budget = min(budget, self.settings.mixed_prefill_tokens)
            if budget > 0:
                prefill_tokens = self._plan_prefill(rows, members, budget)
        if not rows and self.manager.tiers.moves.is_empty:
            return Plan(self._step)
        moves = self.manager.close()
        if moves is None:
            plan = Plan(self._step, rows=tuple(rows), decode_tokens=decode_tokens, prefill_tokens=prefill_tokens)
        else:
            plan = Plan(
                self._step,
                (*moves.write_backs, *moves.restores),
                tuple(moves.clear),
                tuple(rows),
                tuple(moves.after),
                tuple(moves.beside),
                decode_tokens,
                prefill_tokens,
            )
        self._open.append((plan, members))
        self._step += 1
        self.counts["steps"] += 1
        return plan

    def _plan_decoding(
        self, rows: list[Row], members: list[Sequence], propose: Propose | None, num_decoding: int
    ) -> int:
        step, size = self._step, self.manager.page_tokens
        left = self.settings.step_tokens
        others = num_decoding  # sequences that come after a drafting one still get their token
        for sequence in tuple(self.running):
            holding, position = sequence.holding, sequence.planned
            if (
                holding is None
                or position < sequence.target
                or sequence.is_closing
                or sequence.is_parking
                or sequence.is_uncertain
            ):
                continue
            others -= 1
            ahead = sequence.ahead
            room = sequence.request.max_tokens - len(sequence.tokens) + len(sequence.request.tokens) - ahead
            if room <= 0 or (ahead and sequence.request.structure is not None):
                continue
            drafts: tuple[int, ...] = ()
            if propose is not None and not ahead and (most := min(room - 1, left - 1 - others)) > 0:
                drafts = propose(sequence, most)[:most]
            needed = position + 1 + len(drafts)
            if needed > len(holding.pages) * size and not self._grow(sequence, needed):
                if not drafts or sequence.holding is None or not self.manager.grow(holding, position + 1):
                    continue
                drafts = ()
            if drafts:
                tokens, kind = (sequence.tokens[-1], *drafts), "verify"
                sequence.is_uncertain = True
            else:
                tokens, kind = (PENDING if ahead else sequence.tokens[-1],), "decode"
                sequence.planned, sequence.ahead = position + 1, ahead + 1
            sequence.in_flight += 1
            sequence.last_step = step
            rows.append(Row(sequence.number, tokens, position, holding.slot, holding.table, kind, True, len(drafts)))
            members.append(sequence)
            left -= len(tokens)
        return self.settings.step_tokens - left

    def _grow(self, sequence: Sequence, length: int) -> bool:
        """Get pages, from sequences that come later if need be; without success the sequence may have been parked."""
        assert sequence.holding is not None
        while not self.manager.grow(sequence.holding, length):
            later = [one for one in self.running if one.order > sequence.order and one.last_step != self._step]
            if any(one.in_flight and (one.is_closing or one.is_parking) for one in self.running):
                return False  # memory comes back once their plans are done
            victim = max((one for one in later if not one.is_closing), key=lambda one: one.order, default=None)
            if victim is None and sequence.in_flight:
                return False
            self._park(victim or sequence)
            if sequence.holding is None or (victim is not None and victim.in_flight):
                return False
        return True

    def _plan_prefill(self, rows: list[Row], members: list[Sequence], budget: int) -> int:
        prompts: dict[str, list[Sequence]] = {}
        for one in self.running:
            if one.planned < one.target and not one.is_closing and not one.is_parking:
                prompts.setdefault(one.class_name, []).append(one)
        demand = self._demand(prompts, budget)
        if not demand:
            return 0
        admission = self.admission
        usage = admission.usage() if len(demand) > 1 else dict.fromkeys(demand, 0.0)
        shares = {name: self.settings.classes[name].share for name in demand}
        allotted = shared_out(budget, demand, shares)
        order = sorted(demand, key=lambda name: (admission.urgency(name), usage.get(name, 0.0) / shares[name]))
        left, is_blocked = budget, False
        for allowance in (allotted, None):  # each its share first, then whatever is left
            for name in order:
                limit = left if allowance is None else min(left, allowance[name])
                spent = 0
                for one in prompts.get(name, ()):
                    if spent < limit and one.holding is not None:
                        spent += self._plan_chunk(one, limit - spent, rows, members)
                is_lent = usage.get(name, 0.0) > shares[name]
                if spent < limit and not (is_blocked and is_lent):
                    started = admission.start(name)
                    for one in started:
                        spent += self._plan_chunk(one, limit - spent, rows, members)
                        if spent >= limit:
                            break
                    started.close()
                    is_blocked |= admission.was_refused and not is_lent
                left -= spent
        return budget - left

    def _demand(self, prompts: dict[str, list[Sequence]], budget: int) -> dict[str, int]:
        """Return how many tokens each class could use, as far as it matters."""
        demand: dict[str, int] = {}
        for name in self.settings.classes:
            wanted = sum(one.target - one.planned for one in prompts.get(name, ()))
            if wanted < budget:
                wanted += self.admission.num_tokens(name, budget - wanted)
            if wanted:
                demand[name] = min(wanted, budget)
        return demand

    def _plan_chunk(self, sequence: Sequence, budget: int, rows: list[Row], members: list[Sequence]) -> int:
        holding, start = sequence.holding, sequence.planned
        assert holding is not None
        first, index, place = start, None, bisect_right(holding.places, start)
        if sequence.last_step == self._step:  # it has a row already: let it go further
            index = members.index(sequence)
            first = rows[index].position
            if start == sequence.target or holding.places[place - 1 : place] == [start]:
                return 0
        end = min(sequence.target, start + budget)
        if place < len(holding.places):
            end = min(end, holding.places[place])
        samples = end == sequence.target
        tokens, media = tuple(sequence.tokens[first:end]), sequence.media_between(first, end)
        row = Row(sequence.number, tokens, first, holding.slot, holding.table, "prefill", samples=samples, media=media)
        if index is not None:
            rows[index] = row
        else:
            rows.append(row)
            members.append(sequence)
            sequence.in_flight += 1
            sequence.last_step = self._step
        sequence.planned = end
        sequence.ahead += samples
        if place < len(holding.places) and end == holding.places[place]:
            self.manager.take_snapshot(holding, end)
        return end - start

    # results

    def commit(self, plan: Plan, result: StepResult) -> list[tuple[Sequence, RowResult]]:
        """Take over what the oldest plan gave.

        Returns:
            Sequences that still go on, with their results; the caller decides which of them end and calls `finish`.
            One whose result is not valid has been ended here, with everything that it published.
        """
        assert self._open, "no plan is open"
        assert self._open[0][0] is plan, "plans are committed in order"
        assert len(result.rows) == len(plan.rows), "one result a row"
        _, members = self._open.popleft()
        advances, going, ending = [], [], []
        for sequence, row, given in zip(members, plan.rows, result.rows, strict=True):
            holding = sequence.holding
            assert holding is not None
            sequence.in_flight -= 1
            sequence.append(given.tokens)
            if row.kind == "verify":
                position = row.position + max(1, len(given.tokens))
                sequence.planned, sequence.is_uncertain = position, False
                sequence.drafted += row.drafts
                sequence.accepted += max(0, len(given.tokens) - 1)
            else:
                position = row.position + len(row.tokens)
                sequence.ahead -= row.samples
            if sequence.request.score_prompt:
                sequence.scored = max(sequence.scored, min(position, len(sequence.request.tokens)))
            if not given.is_valid:
                holding.is_void = True
            advances.append((holding, position))
            if not sequence.is_closing:
                going.append((sequence, given))
            if sequence.is_closing or sequence.is_parking or not given.is_valid:
                ending.append((sequence, given.is_valid))
        self.manager.land(advances)
        for sequence, is_valid in ending:
            if not is_valid:
                self.finish(sequence.number, keep=False)
                sequence.keeps = False
            if sequence.in_flight or sequence.holding is None:
                continue
            if sequence.is_closing:
                self._close(sequence)
            elif sequence.is_parking:
                self._park(sequence)
        return going

    def fail(self) -> list[Sequence]:
        """Forget all plans in flight because the oldest did not run; their sequences start again from what is known.

        Returns:
            Sequences that failed too often and have been ended.
        """
        self.counts["failed_steps"] += 1
        hit = {one.number: one for _, members in self._open for one in members}
        self._open.clear()
        self.manager.fail()
        given_up = []
        for one in hit.values():
            assert one.holding is not None
            one.holding.is_void = True
            one.in_flight = one.ahead = 0
            one.is_uncertain = False
            one.failures += 1
            if one.is_closing:
                self._close(one)
            elif one.failures > MOST_FAILURES:
                given_up.append(one)
                self.finish(one.number, keep=False)
            else:
                self._park(one)
        return given_up

    def park_all(self) -> None:
        """Let all running sequences give their memory back and wait; no plan may be in flight."""
        assert not self._open, "commit the plans in flight first"
        for sequence in tuple(self.running):
            self._park(sequence)

    def _park(self, sequence: Sequence) -> None:
        if sequence.in_flight:
            sequence.is_parking = True
            return
        assert sequence.holding is not None
        self.manager.release(sequence.holding, keep=True)
        self.running.remove(sequence)
        sequence.holding = None
        sequence.is_parking = False
        sequence.planned = sequence.target = 0
        sequence.preemptions += 1
        self.counts["preemptions"] += 1
        self.admission.push(sequence)

    def _close(self, sequence: Sequence) -> None:
        assert sequence.holding is not None
        self.manager.release(sequence.holding, keep=sequence.keeps)
        self.running.remove(sequence)
        sequence.holding = None
