"""Requests that wait for the grammar of their form, which a thread makes beside the engine's steps.

A large schema takes seconds to compile. The library lets go of the interpreter meanwhile, so that everybody else's
tokens keep coming; only the request itself waits.
"""

import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Protocol, runtime_checkable

from triax.errors import TriaxError
from triax.serve.request import FinishReason, Request, Structure, Update, Usage


@runtime_checkable
class Grammars(Protocol):
    """Makes grammars and keeps them, as `triax.serve.structure.Guides` does, which brings torch."""

    def knows(self, structure: Structure) -> bool:
        """Whether the grammar of a structure is there."""
        ...

    def prepare(self, structure: Structure) -> None:
        """Make the grammar of a structure."""
        ...


@dataclass(frozen=True)
class Held:
    """A request that waits."""

    request: Request
    grammar: "Future[None]"
    since_s: float
    """The clock when it came."""


class Forms:
    """Holds requests back until their grammars are there.

    Args:
        grammars: Of the engine, which finds them there; None holds nothing back.
        clock: Seconds that deadlines are measured with.
    """

    def __init__(self, grammars: Grammars | None, clock: Callable[[], float] = time.monotonic) -> None:
        self._maker, self._clock = grammars, clock
        self._worker = ThreadPoolExecutor(1, "grammar")
        self._held: dict[str, Held] = {}
        self._grammars: dict[Structure, Future[None]] = {}

    @property
    def is_busy(self) -> bool:
        """Whether a request waits."""
        return bool(self._held)

    def hold(self, request: Request) -> bool:
        """Take a request and have its grammar made, or return False if it needs none or has one already."""
        structure = request.structure
        if self._maker is None or structure is None or self._maker.knows(structure):
            return False
        if structure not in self._grammars:
            self._grammars[structure] = self._worker.submit(self._maker.prepare, structure)
        self._held[request.id] = Held(request, self._grammars[structure], self._clock())
        return True

    def take(self) -> list[tuple[Request, TriaxError | None]]:
        """Return the requests that need not wait any longer, in their order, each with what is wrong with its form."""
        taken: list[tuple[Request, TriaxError | None]] = []
        for held in [one for one in self._held.values() if one.grammar.done()]:
            request, problem = held.request, held.grammar.exception()
            if problem is not None and not isinstance(problem, TriaxError):
                raise problem
            if request.deadline_s is not None:
                request = replace(request, deadline_s=max(0.0, request.deadline_s - self._clock() + held.since_s))
            self._forget(held)
            taken.append((request, problem))
        return taken

    def drop(self, request_id: str) -> bool:
        """Give a request up; returns whether it waited here."""
        held = self._held.get(request_id)
        if held is not None:
            self._forget(held)
        return held is not None

    def late(self) -> list[Update]:
        """Give those up whose deadline has passed, and return what is to be told of them."""
        now = self._clock()
        return [
            self._end(held, "deadline")
            for held in list(self._held.values())
            if held.request.deadline_s is not None and now - held.since_s >= held.request.deadline_s
        ]

    def abort(self) -> list[Update]:
        """Give all up and return what is to be told of them."""
        return [self._end(held, "abort") for held in list(self._held.values())]

    def close(self) -> None:
        """Begin no more grammars."""
        self._worker.shutdown(wait=False, cancel_futures=True)

    def _end(self, held: Held, reason: FinishReason) -> Update:
        self._forget(held)
        usage = Usage(len(held.request.tokens), 0, 0, 0)
        return Update(held.request.id, finish_reason=reason, usage=usage)

    def _forget(self, held: Held) -> None:
        del self._held[held.request.id]
        structure = held.request.structure
        assert structure is not None
        if all(one.grammar is not held.grammar for one in self._held.values()):
            self._grammars.pop(structure).cancel()  # it is made all the same if it has begun
