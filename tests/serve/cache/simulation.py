"""A machine whose pages and slots hold what was computed, so that a wrong byte shows where it is first read."""

import hashlib
from collections import deque
from collections.abc import Sequence

from triax.config.serve import Prefixes, RequestClass, Scheduling
from triax.serve.cache.check import faults
from triax.serve.cache.manager import Manager
from triax.serve.cache.prefix import keys_of
from triax.serve.cache.tiers import Sizes
from triax.serve.plan import PENDING, Plan, RowResult, StepResult
from triax.serve.request import Request
from triax.serve.scheduler import Scheduler

VOCABULARY = 50


def digest(state: int, key: int, weights: int) -> int:
    return int.from_bytes(hashlib.blake2b(f"{state} {key} {weights}".encode(), digest_size=6).digest(), "big")


def states(keys: Sequence[int], weights: int = 0) -> list[int]:
    """State after each number of tokens; the latent of a token is the state after it."""
    found = [0]
    for key in keys:
        found.append(digest(found[-1], key, weights))
    return found


def answer(request: Request, count: int, weights: int = 0) -> list[int]:
    """What the request must get, computed without any cache."""
    keys = keys_of(request.tokens, request.media)
    state, given = states(keys, weights)[-1], []
    for _ in range(count):
        given.append(state % VOCABULARY)
        state = digest(state, given[-1], weights)
    return given


class Machine:
    """Runs plans as a runner does, and refuses to read what was not written for the reader."""

    def __init__(self, sizes, page_tokens: int) -> None:
        self.page_tokens, self.weights = page_tokens, 0
        self.slots = {"device": [None] * sizes.slots, "host": [None] * sizes.host_slots}
        self.pages = {
            "device": [[None] * page_tokens for _ in range(sizes.pages)],
            "host": [[None] * page_tokens for _ in range(sizes.host_pages)],
        }
        self.drawn: dict[int, int] = {}
        self.computed = 0
        self.copied = {"page": 0, "slot": 0}

    def poison(self, kind: str, place: str, free: list[int]) -> None:
        for index in free:
            if kind == "page":
                self.pages[place][index] = ["poison"] * self.page_tokens
            else:
                self.slots[place][index] = "poison"

    def _copy(self, copies) -> None:
        for copy in copies:
            self.copied[copy.kind] += 1
            if copy.kind == "page":
                self.pages[copy.target][copy.target_index] = list(self.pages[copy.source][copy.source_index])
            else:
                self.slots[copy.target][copy.target_index] = self.slots[copy.source][copy.source_index]

    def run(self, plan: Plan, sequences) -> StepResult:
        self._copy(copy for copy in plan.before if copy.target == "host")
        self._copy(copy for copy in plan.before if copy.target != "host")
        for slot in plan.clear:
            assert slot
            self.slots["device"][slot] = 0
        results = []
        for row in plan.rows:
            sequence = sequences[row.sequence]
            known, end = sequence.keys, row.position + len(row.tokens) - row.drafts
            tokens = tuple(self.drawn[row.sequence] if token == PENDING else token for token in row.tokens)
            assert tuple(sequence.tokens[row.position : end]) == tokens[: len(tokens) - row.drafts]
            expected = states(known[: row.position], self.weights)
            assert self.slots["device"][row.slot] == expected[-1], "the state is another prefix's"
            for place in range(row.position):
                page = self.pages["device"][row.pages[place // self.page_tokens]]
                assert page[place % self.page_tokens] == expected[place + 1], f"latent {place} is another prefix's"
            state, given = expected[-1], []
            keys = [*known[row.position : end], *tokens[len(tokens) - row.drafts :]]
            kept = None
            for offset, key in enumerate(keys):
                if offset >= len(keys) - row.drafts and kept is None:
                    if state % VOCABULARY == key:
                        given.append(key)
                    else:
                        kept = state
                        given.append(state % VOCABULARY)
                state = digest(state, key, self.weights)
                place = row.position + offset
                self.pages["device"][row.pages[place // self.page_tokens]][place % self.page_tokens] = state
                self.computed += 1
            if kept is None:
                kept = state
                if row.samples:
                    given.append(state % VOCABULARY)
            self.slots["device"][row.slot] = kept
            if given:
                self.drawn[row.sequence] = given[-1]
            results.append(RowResult(tuple(given)))
        self._copy(plan.after)
        self._copy(plan.beside)
        return StepResult(tuple(results))


ONE_CLASS = {"default": RequestClass(share=1.0)}
CLOSE = Prefixes(align=4, first=8, gap=1, write_back_tokens=0)


class Session:
    """Manager, scheduler and machine, with an engine's part: ends, deadlines, and what each request must get."""

    def __init__(
        self,
        pages: int = 40,
        slots: int = 8,
        host_pages: int = 0,
        host_slots: int = 0,
        page_tokens: int = 4,
        prefixes: Prefixes | None = CLOSE,
        manager=Manager,
        **scheduling,
    ) -> None:
        sizes = Sizes(pages, slots, host_pages, host_slots)
        settings = {"step_tokens": 32, "max_running": 16, "mixed_prefill_tokens": 32, "classes": ONE_CLASS} | scheduling
        self.now = 0.0
        self.manager = manager(sizes, page_tokens, prefixes)
        self.scheduler = Scheduler(self.manager, Scheduling(**settings), clock=lambda: self.now)
        self.machine = Machine(sizes, page_tokens)
        self.sequences: dict = {}
        self.open: deque = deque()
        self.answers: dict[str, list[int]] = {}
        self.weights_of: dict[str, int] = {}
        self.ended: dict[str, str] = {}
        self.next_id = 0
        self.propose = None

    def add(self, tokens, max_tokens: int = 4, **options) -> str:
        name = f"r{self.next_id}"
        self.next_id += 1
        request = Request(name, tuple(tokens), max_tokens, **options)
        sequence = self.scheduler.add(request)
        self.sequences[sequence.number] = sequence
        self.weights_of[name] = self.machine.weights
        return name

    def sequence(self, name: str):
        return next(one for one in self.sequences.values() if one.request.id == name)

    def plan(self) -> Plan | None:
        for number in self.scheduler.expired():
            self.ended[self.sequences[number].request.id] = "deadline"
            self.scheduler.finish(number)
        plan = self.scheduler.plan(self.propose)
        if plan.is_empty:
            return None
        self.open.append(plan)
        return plan

    def commit(self) -> None:
        plan = self.open[0]
        result = self.machine.run(plan, self.sequences)
        self.open.popleft()
        for sequence, row in self.scheduler.commit(plan, result):
            answer = self.answers.setdefault(sequence.request.id, [])
            answer.extend(row.tokens)
            is_stopped = any(token in sequence.request.stop_ids for token in row.tokens)
            if is_stopped or (row.tokens and len(answer) >= sequence.request.max_tokens):
                self.end(sequence)
        self.check()

    def end(self, sequence) -> None:
        self.ended[sequence.request.id] = "stop"
        self.scheduler.finish(sequence.number)
        request, given = sequence.request, self.answers[sequence.request.id]
        if self.weights_of[request.id] == self.machine.weights:
            assert given == answer(request, len(given), self.machine.weights), "warm differs from cold"

    def abort(self, name: str) -> None:
        self.ended[name] = "abort"
        self.scheduler.finish(self.sequence(name).number)

    def fail(self) -> None:
        """The oldest plan stops half way: some rows have written, nothing came after them."""
        plan = self.open[0]
        self.machine.run(plan._replace(rows=plan.rows[:1], after=(), beside=()), self.sequences)
        self.open.clear()
        for sequence in self.scheduler.fail():
            self.ended[sequence.request.id] = "error"
        self.check()

    def update(self) -> None:
        while self.open:
            self.commit()
        self.scheduler.park_all()
        self.manager.reset()
        self.machine.weights += 1
        self.check()

    def check(self) -> None:
        assert not faults(self.manager), faults(self.manager)
        if not self.open:
            tiers = self.manager.tiers
            for kind, place, pool in (
                ("page", "device", tiers.pages),
                ("slot", "device", tiers.slots),
                ("page", "host", tiers.host_pages),
                ("slot", "host", tiers.host_slots),
            ):
                self.machine.poison(kind, place, pool.free())
            self.machine.poison("page", "device", [0])
            self.machine.poison("slot", "device", [0])

    def report(self) -> dict:
        """Return what is held and what was saved, by name."""
        tiers, counts = self.manager.tiers, self.manager.counts
        nodes = self.manager.tree.nodes()
        return {
            "pages": self.manager.sizes.pages - 1,
            "pages_free": tiers.pages.num_free,
            "pages_idle": tiers.idle_pages,
            "slots": self.manager.sizes.slots - 1,
            "slots_free": tiers.slots.num_free,
            "slots_idle": len(tiers.slot_order),
            "host_pages": self.manager.sizes.host_pages,
            "host_pages_free": tiers.host_pages.num_free,
            "host_slots": self.manager.sizes.host_slots,
            "host_slots_free": tiers.host_slots.num_free,
            "running": len(self.manager.holdings),
            "known_pages": len(nodes),
            "known_snapshots": sum(len(node.snapshots) for node in nodes),
            "epoch": self.manager.epoch,
            "hit_share": counts["cached_tokens"] / counts["prompt_tokens"] if counts["prompt_tokens"] else 0.0,
            **counts,
            **tiers.counts,
        }

    def run(self, most: int = 1000, depth: int = 1) -> int:
        """Go on until nothing is left to do; return the number of steps."""
        for count in range(most):
            while len(self.open) < depth and self.plan():
                pass
            if not self.open:
                assert not self.scheduler.has_work, "there is work, but no plan"
                return count
            self.commit()
        raise AssertionError("it does not end")

    def ask(self, tokens, max_tokens: int = 4, **options):
        """Answer one request alone; return its sequence."""
        name = self.add(tokens, max_tokens, **options)
        self.run()
        return self.sequence(name)
