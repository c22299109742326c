"""Connections: how many there may be, and how long one may take to say what it wants."""

import asyncio
import errno
import resource
import time
from contextlib import suppress
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol

from triax.log import logger

HEADER_S = 20.0
"""Longest wait for the head of a request, from the connection or from its first byte on."""
RESERVED_FILES = 64
"""Open files that are kept for everything but connections."""
MOST_FILES = 65_536
QUIET_S = 10.0
"""Seconds between two lines about connections that cannot be taken."""
log = logger("serve")


class HTTP(H11Protocol):
    """Uvicorn's protocol that closes connections which never say what they want."""

    _timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Begin to wait for a request."""
        super().connection_made(transport)
        self._watch()

    def data_received(self, data: bytes) -> None:
        """Take bytes."""
        super().data_received(data)
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        """Wait no longer."""
        self._forget()
        super().connection_lost(exc)

    def _watch(self) -> None:
        is_waiting = self.cycle is None or self.cycle.response_complete
        if not is_waiting:
            self._forget()
        elif self._timer is None:
            self._timer = self.loop.call_later(HEADER_S, self._give_up)

    def _forget(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _give_up(self) -> None:
        self._timer = None
        if (self.cycle is None or self.cycle.response_complete) and not self.transport.is_closing():
            self.transport.close()


def most_connections() -> int:
    """Let this process open as many files as the system allows; return how many connections that leaves room for."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MOST_FILES if hard == resource.RLIM_INFINITY else min(hard, MOST_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
            soft = wanted
    return max(RESERVED_FILES, (MOST_FILES if soft == resource.RLIM_INFINITY else soft) - RESERVED_FILES)


_told_at = float("-inf")


def tell_briefly(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """Handle what goes wrong in an event loop: a lack of files is one line, however many connections it turns away."""
    global _told_at
    problem = context.get("exception")
    if not isinstance(problem, OSError) or problem.errno not in (errno.EMFILE, errno.ENFILE):
        loop.default_exception_handler(context)
    elif time.monotonic() - _told_at > QUIET_S:
        _told_at = time.monotonic()
        log.warning("server: no more files can be opened, so connections wait; raise `ulimit -n`")
