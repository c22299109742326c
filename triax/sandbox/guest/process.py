"""Commands in a guest as the host holds them: run to the end, or long-lived."""

import asyncio
import os
import time
from collections.abc import AsyncIterator
from contextlib import suppress

from triax.errors import SandboxError
from triax.sandbox.command import signal_number, window
from triax.sandbox.errnos import exit_code, folder_refusal, start_refusal
from triax.sandbox.guest.channel import AgentRefusal, Name, Stream
from triax.sandbox.guest.wire import Kind, number
from triax.sandbox.protocol import Result

GRACE_S = 5.0  # from SIGKILL to the end of a process


class GuestProcess:
    """A process in a guest.

    Args:
        stream: Its stream, already started.
        terminal: Whether it has a terminal; none if it was started earlier and only the guest knows.
    """

    def __init__(self, stream: Stream, *, terminal: bool | None) -> None:
        self._stream = stream
        self._terminal = terminal
        self._begun = time.monotonic()

    @property
    def pid(self) -> int:
        """Its number inside the guest."""
        return self._stream.started.result()

    async def output(self) -> AsyncIterator[tuple[Name, bytes]]:
        """Yield what it writes until it ends."""
        while (piece := await self._stream.next()) is not None:
            yield piece

    async def write(self, data: bytes) -> None:
        """Send to its standard input.

        Raises:
            SandboxError: It reads no more; kind `refused`.
        """
        if self._stream.ended.done() or self._stream.finished or not await self._stream.write(data):
            raise SandboxError("write: the process has closed its standard input or ended", "refused", status=409)

    async def close_stdin(self) -> None:
        """Say that no more input comes; on a terminal that is its end-of-file key."""
        if not self._terminal:
            self._stream.finish()
        elif not self._stream.ended.done():
            await self._stream.write(b"\x04")

    async def kill(self, signal: int = 9) -> None:
        """Send a signal; 9 reaches everything that it started."""
        signal_number(signal)
        if not self._stream.ended.done():
            self._stream.channel.send(Kind.SIGNAL, self._stream.id, number(signal))

    async def resize(self, rows: int, columns: int) -> None:
        """Set the size of its terminal.

        Raises:
            SandboxError: It has none.
        """
        if self._terminal is False:
            raise SandboxError("resize: the process has no terminal; start it with `terminal`", "refused")
        window(rows, columns)
        self._stream.channel.send(Kind.RESIZE, self._stream.id, number(rows) + number(columns))

    async def wait(self) -> Result:
        """Wait for its end; output that nobody takes is dropped only once somebody asks for the end."""
        waiting = asyncio.ensure_future(asyncio.shield(self._stream.ended))
        try:
            await waiting
        except SandboxError as problem:
            return Result("infrastructure", detail=str(problem), duration_s=time.monotonic() - self._begun)
        return ended(self._stream, time.monotonic() - self._begun)


def ended(stream: Stream, duration_s: float, **more: object) -> Result:
    """Put into words how a stream's process ended."""
    code, signal, killed = stream.ended.result()
    out_of_memory = killed and (signal == 9 or code in (137, 1))
    return Result(
        outcome="out_of_memory" if out_of_memory else "ok",
        exit_code=None if signal else code,
        signal=signal or None,
        duration_s=duration_s,
        detail="the guest ran out of memory and its kernel ended a process; raise `memory_mib`"
        if out_of_memory
        else "",
        **more,  # type: ignore[arg-type]
    )


def refusal(problem: AgentRefusal, program: str, cwd: str | None, user: str | None) -> Result | SandboxError:
    """Tell why a command did not start: the shell's exit codes for its program, an error for all else."""
    if problem.step == "exec":
        said = f"{program}: {os.strerror(problem.code)}\n".encode(errors="replace")
        return Result("ok", exit_code=exit_code(problem.code), stderr=said)
    if problem.step == "cwd":
        return folder_refusal(problem.code, cwd)
    if problem.step == "user":
        return SandboxError(f"user {user!r}: the image has no such user; add it or leave it out", "refused")
    return start_refusal(problem.code)


def home_of(account: str, users: bytes) -> str:
    """Return the home of a user, by name or number, as a guest's file of users tells it; `/` for one without."""
    for line in users.split(b"\n"):
        fields = line.split(b":")
        if len(fields) == 7 and os.fsencode(account) in (fields[0], fields[2]):
            return os.fsdecode(fields[5]) or "/"
    return "/root" if account in ("root", "0") else "/"


async def finish(stream: Stream, stdin: bytes, timeout_s: float | None, limit: int) -> Result:
    """Feed a process, keep what it writes up to a limit, and wait for its end; one over its time is ended, it alone."""
    begun = time.monotonic()
    kept: dict[Name, bytearray] = {"stdout": bytearray(), "stderr": bytearray()}
    truncated = False

    async def collect() -> None:
        nonlocal truncated
        while (piece := await stream.next()) is not None:
            name, data = piece
            room = max(0, limit - len(kept[name]))
            kept[name] += data[:room]
            if len(data) > room:
                truncated = True
                stream.channel.send(Kind.MUTE, stream.id, number(1 if name == "stdout" else 2))

    async def feed() -> None:
        with suppress(SandboxError):
            await stream.write(stdin)
        stream.finish()

    collecting = asyncio.ensure_future(collect())
    feeding = asyncio.ensure_future(feed()) if stdin else None
    if feeding is None:
        stream.finish()
    timed_out, stuck = False, ""
    try:
        await asyncio.wait_for(asyncio.shield(collecting), timeout_s)
    except TimeoutError:
        timed_out = True
        stream.channel.send(Kind.SIGNAL, stream.id, number(9))
        try:
            await asyncio.wait_for(asyncio.shield(collecting), GRACE_S)
        except TimeoutError:
            # a guest that says nothing any more is at fault, not the command that it was asked to end
            try:
                await stream.channel.ask(Kind.PING, Kind.PONG, within_s=GRACE_S)
            except SandboxError as problem:
                stuck = str(problem)
    except asyncio.CancelledError:
        stream.channel.send(Kind.SIGNAL, stream.id, number(9))
        raise
    finally:
        for task in (feeding, collecting):
            if task is not None:
                task.cancel()
                with suppress(asyncio.CancelledError, SandboxError):
                    await task
        if not stream.ended.done():
            stream.close()
    duration_s = time.monotonic() - begun
    streams = {"stdout": bytes(kept["stdout"]), "stderr": bytes(kept["stderr"]), "truncated": truncated}
    if stuck:
        return Result("infrastructure", duration_s=duration_s, detail=stuck, **streams)
    if timed_out:
        return Result(
            "timeout", signal=9, duration_s=duration_s, detail=f"ended after its limit of {timeout_s:g} s", **streams
        )
    if (problem := stream.ended.exception()) is not None:
        return Result("infrastructure", duration_s=duration_s, detail=str(problem), **streams)
    return ended(stream, duration_s, **streams)
