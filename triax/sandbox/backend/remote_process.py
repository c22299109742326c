"""A process in a sandbox of an E2B-compatible service, heard through one stream."""

import asyncio
import signal as signals
import time
from base64 import b64decode, b64encode
from collections.abc import AsyncIterator, Mapping
from contextlib import suppress
from typing import Any, Literal

from triax.errors import SandboxError
from triax.sandbox.backend.remote_calls import Guest
from triax.sandbox.protocol import Result

WAITING_BYTES = 2**20
_SIGNALS = {(signals.strsignal(number) or "").lower(): int(number) for number in signals.valid_signals()}


class RemoteProcess:
    """A process in a sandbox of the service, heard through one stream.

    Args:
        guest: The sandbox's data plane.
        user: Who runs it.
        has_terminal: Its output comes from a terminal.
        waiting_bytes: Output that may wait here for a reader, none for any; beyond it the process is made to wait.
    """

    def __init__(
        self, guest: Guest, user: str | None, *, has_terminal: bool = False, waiting_bytes: int | None = WAITING_BYTES
    ) -> None:
        self.guest = guest
        self.pid = 0
        self._user = user
        self._has_terminal = has_terminal
        self._limit = waiting_bytes
        self._waiting: list[tuple[Literal["stdout", "stderr"], bytes]] = []
        self._size = 0
        self._changed = asyncio.Condition()
        self._result: asyncio.Future[Result] = asyncio.get_running_loop().create_future()
        self._result.add_done_callback(lambda done: done.cancelled() or done.exception())
        self._task: asyncio.Task[None] | None = None

    async def begin(self, wish: Mapping[str, Any], timeout_s: float | None) -> None:
        """Start it and learn its number.

        Raises:
            SandboxError: The service did not start it.
        """
        started: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._task = asyncio.create_task(self._listen(wish, timeout_s, started))
        self.pid = await started

    async def _listen(self, wish: Mapping[str, Any], timeout_s: float | None, started: "asyncio.Future[int]") -> None:
        events = self.guest.stream("process.Process/Start", wish, user=self._user, timeout_s=timeout_s)
        began = time.monotonic()
        try:
            async for answer in events:
                event = answer.get("event", {})
                if "start" in event:
                    started.set_result(int(event["start"].get("pid", 0)))
                elif "data" in event:
                    await self._take(event["data"])
                elif "end" in event:
                    self._result.set_result(_ending(event["end"], time.monotonic() - began))
                    return
            raise SandboxError(f"sandbox {self.guest.id}: a process ended without a word", status=503)
        except SandboxError as problem:
            if not started.done():
                started.set_exception(problem)
                self._result.cancel()
            elif problem.kind == "timeout":
                limit = f"{timeout_s:g} s" if timeout_s is not None else "the service"
                self._result.set_result(Result("timeout", detail=f"ended after its limit of {limit}"))
            else:
                self._result.set_exception(problem)
        finally:
            await events.aclose()
            if not self._result.done():
                self._result.cancel()
            async with self._changed:
                self._changed.notify_all()

    async def _take(self, data: Mapping[str, str]) -> None:
        for field, text in data.items():
            name: Literal["stdout", "stderr"] = "stderr" if field == "stderr" else "stdout"
            chunk = b64decode(text)
            async with self._changed:
                await self._changed.wait_for(lambda: self._limit is None or self._size < self._limit)
                self._waiting.append((name, chunk))
                self._size += len(chunk)
                self._changed.notify_all()

    async def output(self) -> AsyncIterator[tuple[Literal["stdout", "stderr"], bytes]]:
        """Yield what it writes until it ends."""
        while True:
            async with self._changed:
                await self._changed.wait_for(lambda: self._waiting or self._result.done())
                waiting, self._waiting, self._size = self._waiting, [], 0
                self._changed.notify_all()
            if not waiting:
                return
            for piece in waiting:
                yield piece

    async def write(self, data: bytes) -> None:
        """Send to its standard input or terminal."""
        field = "pty" if self._has_terminal else "stdin"
        await self._ask("SendInput", input={field: b64encode(data).decode()})

    async def close_stdin(self) -> None:
        """Say that no more input comes; on a terminal that is its end-of-file key."""
        if self._has_terminal:
            await self.write(b"\x04")
            return
        try:
            await self._ask("CloseStdin")
        except SandboxError as problem:
            if problem.status != 404:  # one that has ended reads no more
                raise

    async def kill(self, signal: int = 9) -> None:
        """Send SIGTERM or SIGKILL, the two that the service carries; one that has ended already is fine."""
        if signal not in (9, 15):
            raise SandboxError(f"kill: a remote service carries signals 9 and 15; found `{signal}`", "refused")
        try:
            await self._ask("SendSignal", signal="SIGNAL_SIGKILL" if signal == 9 else "SIGNAL_SIGTERM")
        except SandboxError as problem:
            if problem.status != 404:
                raise

    async def resize(self, rows: int, columns: int) -> None:
        """Set the size of its terminal."""
        await self._ask("Update", pty={"size": {"rows": rows, "cols": columns}})

    async def wait(self) -> Result:
        """Wait for its end.

        Raises:
            SandboxError: It was lost; kind `infrastructure`.
        """
        return await asyncio.shield(self._result)

    async def close(self) -> None:
        """Stop listening; the process is not ended."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _ask(self, method: str, **fields: Any) -> None:
        body = {"process": {"pid": self.pid}, **fields}
        await self.guest.call(f"process.Process/{method}", body, user=self._user, repeat=False)


async def feed(process: RemoteProcess, data: bytes) -> None:
    """Send all of a process's input, then say that no more comes."""
    with suppress(SandboxError):  # it may end without having read everything
        for begin in range(0, len(data), WAITING_BYTES):
            await process.write(data[begin : begin + WAITING_BYTES])
        await process.close_stdin()


def _ending(end: Mapping[str, Any], duration_s: float) -> Result:
    code, status = int(end.get("exitCode", 0)), str(end.get("status", ""))
    if status == "out of memory":
        return Result("out_of_memory", code if code >= 0 else None, duration_s=duration_s, detail=str(end.get("error")))
    if status.startswith("signal: "):
        number = _SIGNALS.get(status.removeprefix("signal: ").split(" (")[0])
        return Result("ok", None, number, duration_s=duration_s)
    return Result("ok", code, duration_s=duration_s)
