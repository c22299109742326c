"""The host's end of a namespace sandbox's first process: what starts commands there and tells of their end."""

import asyncio
import os
import signal
import socket
import struct
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from triax.errors import SandboxError
from triax.sandbox.backend.owned import parent_of
from triax.sandbox.backend.streams import Ends
from triax.sandbox.guest.build import cache_folder, compiled

SOURCE = Path(__file__).with_name("init.c")
RUN, READY, HERE, FAILED, EXIT = 1, 16, 17, 18, 19
TERMINAL = 1
AT_FOLDER, AT_PROGRAM = 1, 2
CREDENTIALS = struct.Struct("iII")
START_S = 10.0


def program() -> Path:
    """Return the first process, compiled when it is first needed.

    Raises:
        SandboxError: This host has no C compiler.
    """
    return compiled([SOURCE], "init", cache_folder())


class Command:
    """A process that the first process started.

    Attributes:
        ended: Its exit code, or less than 0 for the signal that ended it.
        pid: Its number on the host, 0 until it is there.
        number: Its number inside.
        above: Number on the host of the process that stands above it and all it leaves behind.
        folder: Where it starts.
        failure: Why it did not become the command, as error number and step; none if it did.
    """

    def __init__(self, id: int, folder: str) -> None:
        self.id = id
        self.folder = folder
        self.pid = 0
        self.number = 0
        self.failure: tuple[int, int] | None = None
        self.above = 0
        self.pidfd = -1
        loop = asyncio.get_running_loop()
        self.here: asyncio.Future[None] = loop.create_future()
        self.ended: asyncio.Future[int] = loop.create_future()

    def send(self, number: int) -> None:
        """Send a signal to it alone."""
        if self.pidfd >= 0:
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(self.pidfd, signal.Signals(number))

    def end(self, code: int) -> None:
        """Note its end."""
        if self.pidfd >= 0:
            os.close(self.pidfd)
            self.pidfd = -1
        if not self.here.done():
            self.here.set_result(None)
        if not self.ended.done():
            self.ended.set_result(code)


class Init:
    """The socket to a first process.

    Args:
        sock: Our end of a pair of sockets that keep messages whole.
    """

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._loop = asyncio.get_running_loop()
        self._next = 1
        self._commands: dict[int, Command] = {}
        self.ready: asyncio.Future[int] = self._loop.create_future()
        self.gone: asyncio.Future[None] = self._loop.create_future()
        sock.setblocking(False)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
        self._loop.add_reader(sock, self._on_message)

    async def run(
        self,
        argv: Sequence[str],
        env: Mapping[str, str],
        cwd: str,
        ends: Ends,
    ) -> Command:
        """Start a command.

        Raises:
            SandboxError: The first process is gone, or could start nothing.
        """
        command = Command(self._next, cwd)
        self._next += 1
        fds = [_written(argv, env, cwd), *ends.theirs[:3]]
        waits, go = os.pipe()
        try:
            if self.gone.done():
                raise SandboxError("exec: the sandbox has ended")
            self._commands[command.id] = command
            await self._send(struct.pack("III", RUN, command.id, TERMINAL if ends.terminal else 0), [*fds, waits])
            await asyncio.wait({command.here, self.gone}, return_when=asyncio.FIRST_COMPLETED)
            if self.gone.done():
                raise SandboxError("exec: the sandbox ended before the command began")
            if not command.ended.done():
                os.write(go, b"g")
            return command
        except BaseException:
            ends.close()
            raise
        finally:
            for fd in (fds[0], waits, go):
                os.close(fd)
            ends.close_theirs()

    def close(self) -> None:
        """Let go of it: it ends by itself, and with it all that it started."""
        self._lose()

    async def _send(self, message: bytes, fds: list[int]) -> None:
        while True:
            try:
                socket.send_fds(self._sock, [message], fds)
                return
            except BlockingIOError:
                await asyncio.sleep(0.001)
            except OSError as error:
                self._lose()
                raise SandboxError("exec: the sandbox has ended") from error

    def _on_message(self) -> None:
        while not self.gone.done():
            try:
                message, control, _, _ = self._sock.recvmsg(16, socket.CMSG_SPACE(CREDENTIALS.size))
            except BlockingIOError:
                return
            except OSError:
                message, control = b"", []
            if not message:
                self._lose()
                return
            pid = next((CREDENTIALS.unpack(data)[0] for _, kind, data in control if kind == socket.SCM_CREDENTIALS), 0)
            if len(message) == 16:
                self._hear(struct.unpack("IIII", message), pid)

    def _hear(self, words: tuple[int, ...], pid: int) -> None:
        kind, id, first, second = words
        if kind == READY and not self.ready.done():
            self.ready.set_result(pid)
        command = self._commands.get(id)
        if command is None:
            return
        if kind == HERE and not command.here.done():
            command.pid, command.number = pid, first
            with suppress(OSError):
                command.pidfd = os.pidfd_open(pid)
                command.above = parent_of(pid)
            command.here.set_result(None)
        elif kind == FAILED:
            command.failure = (first, second)
            if command.pid == 0:  # there never was a process
                del self._commands[id]
                command.end(127)
        elif kind == EXIT:
            del self._commands[id]
            command.end(-second if second else first)

    def _lose(self) -> None:
        if not self.gone.done():
            self._loop.remove_reader(self._sock)
            self._sock.close()
            self.gone.set_result(None)
            if not self.ready.done():
                self.ready.cancel()
            for command in list(self._commands.values()):
                command.end(-signal.SIGKILL)
            self._commands.clear()


def _written(argv: Sequence[str], env: Mapping[str, str], cwd: str) -> int:
    texts = [cwd, *argv, *(f"{name}={value}" for name, value in env.items())]
    body = b"".join(text.encode("utf-8", "surrogateescape") + b"\0" for text in texts)
    fd = os.memfd_create("command", os.MFD_CLOEXEC)
    view = memoryview(struct.pack("II", len(argv), len(env)) + body)
    while view:
        view = view[os.write(fd, view) :]
    return fd
