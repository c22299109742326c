"""Sandboxes for many rollouts at once: a bounded number of them, some made ahead, each handed out healthy."""

import asyncio
import random
import time
from collections import deque
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass

from triax.errors import SandboxError
from triax.log import logger
from triax.sandbox.host import Host
from triax.sandbox.protocol import Spec
from triax.sandbox.sandbox import Sandbox

FIRST_WAIT_S = 0.1  # before the second try to make a sandbox; doubles, with a random part so that many do not agree
CALM_S = 1.0  # before the next try to make one ahead, after it failed


@dataclass(frozen=True, slots=True)
class PoolCounts:
    """What a pool holds and did.

    Args:
        leased: Handed out and not yet given back.
        warm: Made ahead and unused.
        making: Being made.
        waiting: Callers that wait for their turn.
        acquired: Handed out since the start.
        from_warm: Of those, the ones that were made ahead.
        failed: Tries to make one that failed.
        unhealthy: Ones made ahead that had ended before they were used.
        longest_wait_s: The longest that a caller waited.
    """

    leased: int
    warm: int
    making: int
    waiting: int
    acquired: int
    from_warm: int
    failed: int
    unhealthy: int
    longest_wait_s: float


class Pool:
    """Hands out sandboxes of one kind; used as `async with Pool(...) as pool`.

    At most `most` machines live at a time, handed out or made ahead: further callers wait in line. A sandbox that was
    put away costs no machine and does not count; it is taken up again by its snapshot's id, by any process that owns
    the folder then.

    Args:
        host: Owner of the sandboxes.
        spec: What each is; none for the defaults.
        snapshot: Snapshot that each starts from; none to start afresh.
        most: Machines at a time.
        ahead: How many to keep made ahead, within `most`.
        tries: How often to try to make one before its caller is told.
    """

    def __init__(
        self,
        host: Host,
        spec: Spec | None = None,
        *,
        snapshot: str | None = None,
        most: int = 8,
        ahead: int = 0,
        tries: int = 5,
    ) -> None:
        if most < 1 or tries < 1 or not 0 <= ahead <= most:
            raise SandboxError(
                f"pool: needs most ≥ 1, tries ≥ 1 and 0 ≤ ahead ≤ most; found {most}, {tries} and {ahead}", "refused"
            )
        self.host = host
        self.spec = spec
        self.snapshot = snapshot
        self.most = most
        self.ahead = ahead
        self.tries = tries
        self._turns = asyncio.Semaphore(most)
        self._leased: set[Sandbox] = set()
        self._warm: deque[Sandbox] = deque()
        self._making = self._waiting = self._live = 0
        self._news = asyncio.Condition()
        self._acquired = self._from_warm = self._failed = self._unhealthy = 0
        self._longest_wait_s = 0.0
        self._filler: asyncio.Task[None] | None = None

    async def __aenter__(self) -> "Pool":
        self._filler = asyncio.create_task(self._fill())
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    @property
    def counts(self) -> PoolCounts:
        """What it holds and did."""
        return PoolCounts(
            len(self._leased),
            len(self._warm),
            self._making,
            self._waiting,
            self._acquired,
            self._from_warm,
            self._failed,
            self._unhealthy,
            self._longest_wait_s,
        )

    async def acquire(self, *, snapshot: str | None = None, timeout_s: float | None = None) -> Sandbox:
        """Wait for a turn and return a running sandbox.

        Args:
            snapshot: Take up this snapshot instead of what the pool hands out, such as what `put_away` returned.
            timeout_s: Seconds to wait for a turn; none for as long as it takes.

        Raises:
            SandboxError: No turn came in time (`timeout`), or none could be made though tried repeatedly.
        """
        started = time.monotonic()
        self._waiting += 1
        try:
            await asyncio.wait_for(self._turns.acquire(), timeout_s)
        except TimeoutError:
            raise SandboxError(
                f"pool: all {self.most} sandboxes were in use for {timeout_s:g} s; give some back or raise `most`",
                "timeout",
                status=503,
            ) from None
        finally:
            self._waiting -= 1
            self._longest_wait_s = max(self._longest_wait_s, time.monotonic() - started)
        try:
            sandbox = await self._next(snapshot)
        except BaseException:
            self._turns.release()
            raise
        self._leased.add(sandbox)
        self._acquired += 1
        return sandbox

    async def release(self, sandbox: Sandbox) -> None:
        """Give a sandbox back, which ends it; giving back twice is fine, and a failure to end it is left to `gc`."""
        if sandbox in self._leased:
            self._leased.discard(sandbox)
            await self._end(sandbox)
            self._turns.release()

    async def put_away(self, sandbox: Sandbox) -> str:
        """Give a sandbox back without ending it: return the id of the snapshot that `acquire` takes up again.

        Raises:
            SandboxError: It could not be put away; it is still handed out, and runs.
        """
        await sandbox.suspend()
        kept = await sandbox.snapshot()
        await self.release(sandbox)
        return kept

    @asynccontextmanager
    async def lease(self, *, snapshot: str | None = None, timeout_s: float | None = None) -> AsyncGenerator[Sandbox]:
        """Hand out a sandbox for the length of a block, and end it whatever happens there."""
        sandbox = await self.acquire(snapshot=snapshot, timeout_s=timeout_s)
        try:
            yield sandbox
        finally:
            await asyncio.shield(self.release(sandbox))

    async def close(self) -> None:
        """End what was made ahead; what is handed out stays with who has it."""
        if self._filler is not None:
            self._filler.cancel()
            with suppress(asyncio.CancelledError):
                await self._filler
            self._filler = None
        while self._warm:
            await self._end(self._warm.popleft())

    async def _next(self, snapshot: str | None) -> Sandbox:
        while True:
            async with self._news:
                await self._news.wait_for(lambda: self._warm or self._live < self.most)
                warm = self._warm.popleft() if self._warm and (snapshot is None or self._live >= self.most) else None
                if warm is None:
                    self._live += 1
                    self._making += 1
                self._news.notify_all()  # the next can be made ahead
            if warm is None:
                return await self._made(snapshot or self.snapshot, self.tries)
            if snapshot is None and await warm.is_alive() and warm.status == "running":
                await warm.set_timeout(warm.spec.timeout_s)
                self._from_warm += 1
                return warm
            # it has ended, or what is asked for now needs its place
            self._unhealthy += snapshot is None
            await self._end(warm)

    async def _made(self, snapshot: str | None, tries: int) -> Sandbox:
        """Make one in a place that was taken before; if that fails the place is free again."""
        made = False
        try:
            for attempt in range(tries):
                try:
                    sandbox = await self.host.create(self.spec, snapshot=snapshot)
                    made = True
                    return sandbox
                except SandboxError as error:
                    self._failed += 1
                    if error.kind == "refused" or attempt == tries - 1:
                        raise
                    logger("sandbox").info("pool: try %d of %d failed: %s", attempt + 1, tries, error)
                await asyncio.sleep(FIRST_WAIT_S * 2 ** min(attempt, 6) * random.uniform(0.5, 1.5))
            raise AssertionError("the last try returns or raises")
        finally:
            async with self._news:
                self._making -= 1
                self._live -= not made
                self._news.notify_all()

    async def _fill(self) -> None:
        while True:
            async with self._news:
                await self._news.wait_for(self._has_spare)
                self._live += 1
                self._making += 1
            sandbox = None
            try:
                sandbox = await self._made(self.snapshot, 1)
                await sandbox.set_timeout(None)  # unused time is nobody's
            except SandboxError as error:
                if sandbox is not None:
                    await self._end(sandbox)
                logger("sandbox").warning("pool: none could be made ahead, tried again in %g s: %s", CALM_S, error)
                await asyncio.sleep(CALM_S)
                continue
            async with self._news:
                self._warm.append(sandbox)
                self._news.notify_all()

    def _has_spare(self) -> bool:
        return len(self._warm) < self.ahead and self._live < self.most and self._waiting == 0

    async def _end(self, sandbox: Sandbox) -> None:
        try:
            await sandbox.kill()
        except SandboxError as error:
            logger("sandbox").warning("pool: sandbox %s could not be ended, `gc` will: %s", sandbox.id, error)
        async with self._news:
            self._live -= 1
            self._news.notify_all()
