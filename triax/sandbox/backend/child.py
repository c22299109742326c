"""A process of the host that stands for one inside a sandbox: what it is fed, its end, its limits."""

import asyncio
import fcntl
import os
import struct
import subprocess
import termios
import time
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Literal, Protocol, runtime_checkable

from triax.errors import SandboxError
from triax.sandbox.backend.streams import BEGUN, Ends, Pieces, Reader
from triax.sandbox.command import signal_number, window
from triax.sandbox.protocol import OUTPUT_LIMIT, Result

GRACE_S = 5.0  # from SIGKILL to the end of a process; only a stuck kernel takes longer


@runtime_checkable
class Handle(Protocol):
    """A process that runs; `ended` becomes its exit code, or less than 0 for the signal that ended it."""

    pid: int
    ended: "asyncio.Future[int]"


class Spawned:
    """A process that the host itself started.

    Args:
        argv: Command of the host.
        ends: Its streams.
        env: All its variables.
        cwd: Where it starts.
        pass_fds: Descriptors that it keeps.

    Raises:
        SandboxError: It cannot be started.
    """

    def __init__(
        self,
        argv: Sequence[str],
        ends: Ends,
        *,
        env: Mapping[str, str],
        cwd: str | None = None,
        pass_fds: Sequence[int] = (),
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self.ended: asyncio.Future[int] = self._loop.create_future()
        try:
            stdin, stdout, stderr = ends.theirs
            self.popen = subprocess.Popen(
                list(argv),
                stdin=stdin,
                stdout=stdout,
                stderr=stderr,
                env=dict(env),
                cwd=cwd,
                start_new_session=True,
                pass_fds=pass_fds,
            )
        except OSError as error:
            ends.close()
            raise SandboxError(f"exec: the host could not start `{argv[0]}`; {error.strerror}") from error
        ends.close_theirs()
        self.pid = self.popen.pid
        self._pidfd = os.pidfd_open(self.pid)
        self._loop.add_reader(self._pidfd, self._on_end)

    def _on_end(self) -> None:
        self._loop.remove_reader(self._pidfd)
        os.close(self._pidfd)
        self.ended.set_result(self.popen.wait())

    def send(self, number: int) -> None:
        """Send a signal to it alone."""
        with suppress(ProcessLookupError):
            self.popen.send_signal(number)


class Child:
    """A started process; one of `finish` (to its end) or `output` and `wait` (long-lived) is used.

    Args:
        handle: The process.
        ends: Its streams.
        keep: Bytes of each stream to keep for `finish`; none to hand them on by `output`.
        signal: Sends a signal to what the process stands for; 9 must also reach all that it started.
        number: Its number inside the sandbox; none for its number on the host.
        marked: Whether `BEGUN` comes first on its second stream, and `begun` tells if it came.
        describe: Corrects a result by what the backend knows.
    """

    def __init__(
        self,
        handle: Handle,
        ends: Ends,
        *,
        keep: int | None,
        signal: Callable[[int], None],
        number: int | None = None,
        marked: bool = False,
        describe: Callable[[Result], Result] | None = None,
    ) -> None:
        self.started = time.monotonic()
        self.timed_out = False
        self.handle = handle
        self._number = number
        self._signal = signal
        self._describe = describe
        self._loop = asyncio.get_running_loop()
        self._pieces = Pieces()
        self._terminal = ends.ours[0] if ends.terminal else None
        self._stdin: int | None = ends.ours[0]
        self._writing = asyncio.Lock()  # what two send at once arrives one after the other
        self._room: asyncio.Future[None] | None = None
        os.set_blocking(ends.ours[0], False)
        self._out = Reader(ends.ours[1], "stdout", keep, self._pieces)
        self._err = None if ends.terminal else Reader(ends.ours[2], "stderr", keep, self._pieces)
        self._pieces.readers = [reader for reader in (self._out, self._err) if reader]
        if marked and self._err is not None:
            self._err.marker, self._err.begun = BEGUN, False
        self._ended = handle.ended
        self._ended.add_done_callback(lambda _: self._pieces.wake())

    @property
    def pid(self) -> int:
        """Its number inside the sandbox."""
        return self.handle.pid if self._number is None else self._number

    @property
    def begun(self) -> bool:
        """Whether the command itself ever ran, where that is marked."""
        return self._err is None or self._err.begun

    @property
    def running(self) -> bool:
        """Whether it has not ended yet."""
        return not self._ended.done()

    async def output(self) -> AsyncIterator[tuple[Literal["stdout", "stderr"], bytes]]:
        """Yield what it writes until it ends."""
        while True:
            piece = self._pieces.take()
            if piece is not None:
                yield piece
                continue
            if self._ended.done():
                if not any(reader.take() for reader in self._pieces.readers if reader.open):
                    return
                continue
            if not any(reader.open for reader in self._pieces.readers):
                await asyncio.shield(self._ended)
                continue
            self._pieces.changed.clear()
            await self._pieces.changed.wait()

    async def write(self, data: bytes) -> None:
        """Send to its standard input.

        Raises:
            SandboxError: It reads no more; kind `refused`.
        """
        if not await self._feed(data):
            raise SandboxError("write: the process has closed its standard input or ended", "refused", status=409)

    async def close_stdin(self) -> None:
        """Say that no more input comes; on a terminal that is its end-of-file key."""
        if self._terminal is not None:
            await self._feed(b"\x04")
        else:
            self._close_stdin()

    async def kill(self, signal: int = 9) -> None:
        """Send a signal; one that has ended already is fine."""
        signal_number(signal)
        if self.running:
            self._signal(signal)

    async def resize(self, rows: int, columns: int) -> None:
        """Set the size of its terminal.

        Raises:
            SandboxError: It has none; kind `refused`.
        """
        if self._terminal is None:
            raise SandboxError("resize: the process has no terminal; start it with `terminal`", "refused")
        if self._stdin is not None:
            fcntl.ioctl(self._terminal, termios.TIOCSWINSZ, struct.pack("HHHH", *window(rows, columns), 0, 0))

    async def wait(self) -> Result:
        """Wait for its end."""
        await asyncio.shield(self._ended)
        return self._result()

    async def finish(self, stdin: bytes, timeout_s: float | None) -> Result:
        """Feed it, wait for its end or its limit, and return what it wrote; if cancelled, it is killed."""
        feeding = asyncio.ensure_future(self._feed_and_close(stdin))
        try:
            await asyncio.wait_for(asyncio.shield(self._ended), timeout_s)
        except TimeoutError:
            self.timed_out = True
            self._signal(9)
            with suppress(TimeoutError):
                await asyncio.wait_for(asyncio.shield(self._ended), GRACE_S)
        except asyncio.CancelledError:
            self._signal(9)
            raise
        finally:
            feeding.cancel()
            self._close_stdin()
            truncated = any([reader.drain() for reader in self._pieces.readers])
        return self._result(timeout_s, truncated)

    def release(self) -> None:
        """Close what is still open of it, when the sandbox is gone."""
        self._close_stdin()
        for reader in self._pieces.readers:
            reader.close()

    def _close_stdin(self) -> None:
        if self._stdin is not None:
            # before it is closed: its number is soon another file's, whose readiness would be lost
            self._wake_writer()
            os.close(self._stdin)
            self._stdin = None

    async def _feed_and_close(self, data: bytes) -> None:
        await self._feed(data)
        await self.close_stdin()

    async def _feed(self, data: bytes) -> bool:
        view = memoryview(data)
        async with self._writing:
            while view:
                if self._stdin is None or not self.running:
                    return False
                try:
                    view = view[os.write(self._stdin, view) :]
                except BlockingIOError:
                    await self._writable(self._stdin)
                except OSError:
                    return False
        return self._stdin is not None

    async def _writable(self, fd: int) -> None:
        """Wait until the process takes more, its input is closed, or it has ended."""
        self._room = self._loop.create_future()
        self._loop.add_writer(fd, self._wake_writer)
        try:
            await asyncio.wait({self._room, self._ended}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            self._wake_writer()

    def _wake_writer(self) -> None:
        """Wake who waits for room, and look for it no longer."""
        if self._room is not None and self._stdin is not None:
            if not self._loop.is_closed():
                self._loop.remove_writer(self._stdin)
            if not self._room.done():
                self._room.set_result(None)
            self._room = None

    def _result(self, limit_s: float | None = None, truncated: bool = False) -> Result:
        code = self._ended.result() if self._ended.done() else None
        # a shell between the sandbox and us reports a signal as 128 + its number only if the shell itself saw it
        result = Result(
            outcome="timeout" if self.timed_out else "ok",
            exit_code=code if code is not None and code >= 0 else None,
            signal=-code if code is not None and code < 0 else None,
            stdout=bytes(self._out.kept),
            stderr=bytes(self._err.kept) if self._err else b"",
            truncated=truncated,
            duration_s=time.monotonic() - self.started,
            detail=f"ended after its limit of {limit_s:g} s" if self.timed_out and limit_s is not None else "",
        )
        return self._describe(result) if self._describe else result


async def ran(argv: Sequence[str], *, timeout_s: float = 30.0, stdin: bytes = b"") -> Result:
    """Run a short command of the host itself, never a guest's, with the host's own variables."""
    ends = Ends(None)
    spawned = Spawned(argv, ends, env=os.environ)
    child = Child(spawned, ends, keep=OUTPUT_LIMIT, signal=spawned.send)
    result = await child.finish(stdin, timeout_s)
    child.release()
    return result


async def gone(children: Iterable[Child]) -> None:
    """Wait until processes that were told to end have done so and the host has taken them back."""
    if ends := [child.handle.ended for child in children if child.running]:
        await asyncio.wait(ends, timeout=GRACE_S)
