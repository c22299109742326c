"""Watching a folder of a sandbox by looking at it again and again: no backend tells of changes by itself."""

import asyncio
import contextlib
import posixpath
import secrets
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from triax.errors import SandboxError
from triax.sandbox.protocol import Entry

INTERVAL_S = 0.2
MOST_CHANGES = 10_000
"""Changes that are kept for a reader that does not come; the oldest are dropped first."""


@dataclass(frozen=True)
class Change:
    """One change below a watched folder."""

    kind: Literal["create", "write", "remove", "chmod"]
    name: str
    """Path relative to the watched folder."""
    entry: Entry | None
    """What lies there now, None after a removal."""


def changes(before: dict[str, Entry], after: dict[str, Entry]) -> list[Change]:
    """Return what happened between two looks at a folder; a file renamed is one removed and one created.

    Args:
        before: Entries of the first look, by path relative to the folder.
        after: Those of the second.
    """
    found = [Change("remove", name, None) for name in sorted(before.keys() - after.keys())]
    for name, entry in sorted(after.items()):
        old = before.get(name)
        if old is None:
            found.append(Change("create", name, entry))
            if entry.kind == "file" and entry.size:
                found.append(Change("write", name, entry))
            continue
        if entry.kind == "file" and (entry.size, entry.modified_s) != (old.size, old.modified_s):
            found.append(Change("write", name, entry))
        if entry.mode != old.mode:
            found.append(Change("chmod", name, entry))
    return found


class Watcher:
    """A folder that is being watched.

    Args:
        look: Lists what lies below the folder.
        path: The folder.
        seen: What lay there at first.
    """

    def __init__(self, look: Callable[[], Awaitable[Sequence[Entry]]], path: str, seen: Sequence[Entry]) -> None:
        self.id = secrets.token_hex(8)
        self.with_entry = False
        self._look = look
        self._path = path
        self._seen = self._named(seen)
        self._changes: deque[Change] = deque(maxlen=MOST_CHANGES)
        self._news = asyncio.Event()
        self._failure: Exception | None = None
        self._task = asyncio.create_task(self._run())

    @classmethod
    async def open(cls, look: Callable[[], Awaitable[Sequence[Entry]]], path: str) -> "Watcher":
        """Look at a folder for the first time and begin to watch it."""
        return cls(look, path, await look())

    def take(self) -> list[Change]:
        """Return the changes since the last call.

        Raises:
            Exception: What ended the watching, once its changes were taken.
        """
        if not self._changes and self._failure is not None:
            raise self._failure
        taken = list(self._changes)
        self._changes.clear()
        self._news.clear()
        return taken

    async def follow(self, keepalive_s: float | None = None) -> AsyncGenerator[Change | None, None]:
        """Give each change as it is seen, None after some seconds without any."""
        while True:
            try:
                async with asyncio.timeout(keepalive_s):
                    await self._news.wait()
            except TimeoutError:
                yield None
                continue
            for change in self.take():
                yield change
            if self._failure is not None:
                raise self._failure

    async def close(self) -> None:
        """Stop watching; who follows is told, and hears no silence that means nothing."""
        self._task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._task
        if self._failure is None:
            self._failure = SandboxError("watch: the sandbox was stopped; connect to it and watch anew", status=503)
        self._news.set()

    async def _run(self) -> None:
        try:
            while True:
                await asyncio.sleep(INTERVAL_S)
                now = self._named(await self._look())
                self._changes.extend(changes(self._seen, now))
                self._seen = now
                if self._changes:
                    self._news.set()
        except Exception as problem:
            self._failure = problem
            self._news.set()

    def _named(self, entries: Sequence[Entry]) -> dict[str, Entry]:
        return {posixpath.relpath(entry.path, self._path): entry for entry in entries}
