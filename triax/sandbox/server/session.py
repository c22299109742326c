"""What clients have open in one sandbox: its running processes, with everyone who listens to them."""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from typing import Any

from triax.errors import SandboxError
from triax.sandbox.protocol import Process, Result
from triax.sandbox.server.connect import Fault

WAITING_CHUNKS = 64
"""Chunks of output that may wait for one listener before the process is made to wait."""

FIRST_S = 5.0
"""Seconds that output waits for the first listener: a short command has written all before its client listens."""

Event = tuple[str, bytes] | Result
"""A chunk of output with the name of its stream, or how the process ended."""


class Running:
    """A process of a sandbox and those who listen to it; it runs on when nobody does.

    Args:
        process: The process itself.
        config: Its command as the client wrote it: `cmd`, `args`, `envs`, `cwd`.
        tag: The client's name for it.
        has_terminal: Its output comes from a terminal.
        limit_s: Seconds after which it is killed.
        waits: Whether a client that listens from the start is on its way.
        note_end: Told how it ended.
    """

    def __init__(
        self,
        process: Process,
        config: Mapping[str, Any],
        *,
        tag: str | None = None,
        has_terminal: bool = False,
        limit_s: float | None = None,
        waits: bool = True,
        note_end: Callable[[Result], Awaitable[None]] | None = None,
    ) -> None:
        self.process = process
        self.config = config
        self.tag = tag
        self.has_terminal = has_terminal
        self.result: Result | None = None
        self.failure: Exception | None = None
        self._listeners: set[asyncio.Queue[Event | Exception]] = set()
        self._heard = asyncio.Event()
        if not waits:
            self._heard.set()
        self._note_end = note_end
        self._pump = asyncio.create_task(self._run())
        self._limit = None if limit_s is None else asyncio.create_task(self._kill_after(limit_s))

    @property
    def pid(self) -> int:
        """Number of the process inside the sandbox."""
        return self.process.pid

    @property
    def is_over(self) -> bool:
        """Whether it has ended or was lost."""
        return self._pump.done()

    @property
    def has_ended(self) -> bool:
        """Whether its end was heard of; of one whose machine was put away nothing more was."""
        return self.result is not None and self.result.outcome != "infrastructure"

    async def listen(self, keepalive_s: float | None = None) -> AsyncGenerator[Event | None, None]:
        """Give what the process writes from now on and, last, how it ended.

        Args:
            keepalive_s: Seconds of silence after which None is given.

        Raises:
            Exception: What kept the process's output from coming.
        """
        queue: asyncio.Queue[Event | Exception] = asyncio.Queue(WAITING_CHUNKS)
        if self._pump.done():
            queue.put_nowait(self._outcome())
        else:
            self._listeners.add(queue)
            self._heard.set()
        try:
            while True:
                try:
                    async with asyncio.timeout(keepalive_s):
                        event = await queue.get()
                except TimeoutError:
                    yield None
                    continue
                if isinstance(event, Exception):
                    raise event
                yield event
                if isinstance(event, Result):
                    return
        finally:
            self._listeners.discard(queue)
            while not queue.empty():  # a pump that waits for this queue must not wait for ever
                queue.get_nowait()

    async def close(self) -> None:
        """Stop listening to the process; it is not killed."""
        for task in (self._pump, self._limit):
            if task is not None:
                task.cancel()
                with contextlib.suppress(asyncio.CancelledError, Exception):
                    await task

    async def _run(self) -> None:
        try:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(FIRST_S):
                    await self._heard.wait()
            async for name, chunk in self.process.output():
                await self._tell((name, chunk))
            self.result = await self.process.wait()
            if self._note_end is not None:
                await self._note_end(self.result)
        except asyncio.CancelledError:
            self.failure = Fault("unavailable", "the connection to the process ended: its sandbox was stopped")
            raise
        except Exception as problem:
            self.failure = problem
        finally:
            if self._limit is not None:
                self._limit.cancel()
            for queue in list(self._listeners):
                if queue.full() and self.failure is not None:
                    queue.get_nowait()  # a listener that lags loses output of a lost process, never the loss itself
                if self.failure is not None:
                    queue.put_nowait(self.failure)
            if self.failure is None and self.result is not None:
                await self._tell(self.result)

    async def _tell(self, event: Event) -> None:
        for queue in list(self._listeners):
            while queue in self._listeners:
                try:
                    async with asyncio.timeout(1):
                        await queue.put(event)
                    break
                except TimeoutError:
                    continue

    def _outcome(self) -> Event | Exception:
        return self.failure or self.result or Fault("not_found", "the process has ended")

    async def _kill_after(self, limit_s: float) -> None:
        await asyncio.sleep(limit_s)
        with contextlib.suppress(Exception):  # it ended in this very moment
            await self.process.kill(9)


class Session:
    """The open processes of one sandbox, by their numbers, through all its generations.

    Args:
        sandbox: The sandbox; only `start`, `stat`, `attach` and `processes` are asked of it here.
    """

    def __init__(self, sandbox: Any) -> None:
        self.sandbox = sandbox
        self.processes: dict[int, Running] = {}
        self.watchers: dict[str, Any] = {}
        self._earlier: dict[int, Running] = {}
        self.writing = asyncio.Lock()
        """Held while a large file goes through this process's memory."""
        self._shell: str | None = None

    async def shell(self) -> str:
        """Return the path of a shell that this sandbox has, bash before sh."""
        if self._shell is None:
            try:
                await self.sandbox.stat("/bin/bash")
                self._shell = "/bin/bash"
            except Exception:
                self._shell = "/bin/sh"
        return self._shell

    @property
    def open_processes(self) -> int:
        """How many processes run."""
        return sum(not running.is_over for running in self.processes.values())

    def add(self, running: Running) -> None:
        """Remember a process, and forget those that are over."""
        self.processes = {pid: known for pid, known in self.processes.items() if not known.is_over}
        self.processes[running.pid] = running

    async def find(self, selector: Any) -> Running:
        """Return the process that a `process.ProcessSelector` names.

        Raises:
            Fault: There is none.
        """
        which = selector.WhichOneof("selector")
        for running in [*self.processes.values(), *await self.rejoined()]:
            same = running.pid == selector.pid if which == "pid" else running.tag == selector.tag
            if which is not None and same and not running.is_over:
                return running
        wanted = getattr(selector, which) if which else "none"
        raise Fault("not_found", f"process with {which or 'pid or tag'} `{wanted}` is not running")

    async def rejoined(self) -> list[Running]:
        """Listen again to those that clients started before the machine was put away, where that can be."""
        found = []
        if self._earlier:
            try:
                left = await self.sandbox.processes()
            except SandboxError as problem:
                if problem.status != 501:
                    raise
                left = ()  # this backend keeps no processes
            earlier, self._earlier = self._earlier, {}
            for pid in left:
                known = earlier.get(pid)
                if known is None or pid in self.processes:
                    continue
                with contextlib.suppress(SandboxError):  # it ended in this very moment
                    process = await self.sandbox.attach(pid)
                    again = Running(process, known.config, tag=known.tag, has_terminal=known.has_terminal, waits=False)
                    self.add(again)
                    found.append(again)
        return found

    async def close(self) -> None:
        """Let go of every process and watcher, as when the machine stops."""
        self._earlier |= {pid: running for pid, running in self.processes.items() if not running.has_ended}
        processes, self.processes = list(self.processes.values()), {}
        watchers, self.watchers = list(self.watchers.values()), {}
        for each in [*processes, *watchers]:
            await each.close()
