"""From a port of the host's loopback to one inside a network namespace, without a network between the two."""

import asyncio
import ctypes
import os
import socket
import threading
from contextlib import suppress

from triax.errors import SandboxError

CLONE_NEWNET = 0x40000000
CHUNK = 65536

_libc = ctypes.CDLL(None, use_errno=True)


class Forwards:
    """Open ports of one sandbox."""

    def __init__(self) -> None:
        self._servers: dict[int, asyncio.Server] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    async def open(self, pid: int, port: int) -> tuple[str, int]:
        """Return host and port that reach a port of the namespace that a process is in; once opened they stay.

        Raises:
            SandboxError: The host does not allow to enter the namespace.
        """
        if port not in self._servers:
            (await asyncio.to_thread(socket_inside, pid)).close()

            async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
                task = asyncio.current_task()
                assert task is not None
                self._tasks.add(task)
                try:
                    await _join(pid, port, reader, writer)
                except asyncio.CancelledError:
                    pass  # the sandbox ended; nobody waits for this task
                finally:
                    self._tasks.discard(task)

            self._servers[port] = await asyncio.start_server(serve, "127.0.0.1", 0)
        return "127.0.0.1", self._servers[port].sockets[0].getsockname()[1]

    def close(self) -> None:
        """Close all: connections of a sandbox that ended are not used again."""
        for server in self._servers.values():
            server.close()
        for task in self._tasks:
            task.cancel()
        self._servers.clear()


def socket_inside(pid: int) -> socket.socket:
    """Return a socket that belongs to the network namespace of a process; it keeps it whoever uses it.

    Raises:
        SandboxError: The host does not allow it, or the process is gone.
    """
    made: list[socket.socket] = []
    failed: list[OSError] = []

    def enter() -> None:
        # only this thread changes its namespace, and it ends with this function
        try:
            fd = os.open(f"/proc/{pid}/ns/net", os.O_RDONLY | os.O_CLOEXEC)
            try:
                if _libc.setns(fd, CLONE_NEWNET):
                    code = ctypes.get_errno()
                    raise OSError(code, os.strerror(code))
            finally:
                os.close(fd)
            made.append(socket.socket(socket.AF_INET, socket.SOCK_STREAM))
        except OSError as error:
            failed.append(error)

    thread = threading.Thread(target=enter)
    thread.start()
    thread.join()
    if failed:
        raise SandboxError(f"expose: the sandbox's network cannot be entered; {failed[0].strerror}; run as root")
    return made[0]


async def _join(pid: int, port: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        inside = await asyncio.to_thread(socket_inside, pid)
        inside.setblocking(False)
        try:
            await asyncio.get_running_loop().sock_connect(inside, ("127.0.0.1", port))
            other_reader, other_writer = await asyncio.open_connection(sock=inside)
        except BaseException:
            inside.close()
            raise
        try:
            await asyncio.gather(_carry(reader, other_writer), _carry(other_reader, writer))
        finally:
            other_writer.close()
    except (OSError, SandboxError):
        pass  # nobody listens inside, or one side hung up: the other side sees its connection end
    finally:
        writer.close()


async def _carry(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while data := await reader.read(CHUNK):
        writer.write(data)
        await writer.drain()
    with suppress(OSError):
        writer.write_eof()
