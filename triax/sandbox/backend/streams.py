"""The three streams of a process: both their ends, and what was read of them and not yet taken."""

import asyncio
import errno
import fcntl
import os
import pty
import struct
import termios
from collections import deque
from contextlib import suppress
from typing import Literal

CHUNK = 65536
PIPE = 2**20
WAITING_LIMIT = 2**20  # bytes read but not yet taken; beyond it the process waits, as on a full pipe
DROP_PAUSE_S = 0.01  # between two reads of output that nobody keeps, so that a flood costs the host little
BEGUN = b"\0begun\0"  # what a process inside writes to its second stream before it becomes the command


class Reader:
    """One stream, read as it comes: kept up to a limit, or handed on piece by piece.

    Args:
        fd: Our end of it; closed at its end.
        name: Which one it is.
        keep: Bytes to keep; none to hand them on.
        pieces: Where to hand them on.
    """

    def __init__(self, fd: int, name: Literal["stdout", "stderr"], keep: int | None, pieces: "Pieces") -> None:
        self.fd = fd
        self.name: Literal["stdout", "stderr"] = name
        self.keep = keep
        self.kept = bytearray()
        self.truncated = False
        self.pieces = pieces
        self.marker = b""
        self.begun = True
        self.loop = asyncio.get_running_loop()
        self.open = True
        self.paused = False
        os.set_blocking(fd, False)
        if keep is not None:
            with suppress(OSError):  # a terminal has no size, and a user may have used up what pipes may hold
                fcntl.fcntl(fd, fcntl.F_SETPIPE_SZ, PIPE)
        self.loop.add_reader(fd, self._on_bytes)

    def _on_bytes(self) -> None:
        if not self.take():
            return
        if self.keep is not None and self.truncated:
            self.pause()
            self.loop.call_later(DROP_PAUSE_S, self.go_on)

    def take(self) -> bool:
        """Read once; return whether something came."""
        try:
            data = os.read(self.fd, PIPE if self.truncated else CHUNK)
        except BlockingIOError:
            return False
        except OSError as error:  # a terminal whose other side is gone says EIO
            if error.errno != errno.EIO:
                raise
            data = b""
        if not data:
            self.close()
            return False
        if self.marker:
            # written whole and before all else, so it is at the start of what is read first, or it never came
            begun, self.marker = data.startswith(self.marker), b""
            self.begun = begun
            data = data[len(BEGUN) :] if begun else data
            if not data:
                return True
        if self.keep is None:
            self.pieces.put(self.name, data)
        else:
            room = max(0, self.keep - len(self.kept))
            self.kept += data[:room]
            self.truncated |= len(data) > room
        return True

    def drain(self) -> bool:
        """Read what lies ready, then let what still comes go by: a child in the background may keep the stream.

        Returns:
            Whether anything that was meant to be kept was dropped.
        """
        while self.open and not self.truncated and self.take():
            pass
        truncated = self.truncated
        if self.open:
            self.keep, self.truncated = 0, True
            self.go_on()
        return truncated

    def pause(self) -> None:
        """Read no more for now."""
        if self.open and not self.paused:
            self.paused = True
            self.loop.remove_reader(self.fd)

    def go_on(self) -> None:
        """Read again after a pause."""
        if self.open and self.paused:
            self.paused = False
            self.loop.add_reader(self.fd, self._on_bytes)

    def close(self) -> None:
        """Read no more, ever."""
        if self.open:
            self.open = False
            if not self.paused and not self.loop.is_closed():
                self.loop.remove_reader(self.fd)
            os.close(self.fd)
            self.pieces.wake()


class Pieces:
    """What was read and not yet taken."""

    def __init__(self) -> None:
        self.waiting: deque[tuple[Literal["stdout", "stderr"], bytes]] = deque()
        self.size = 0
        self.readers: list[Reader] = []
        self.changed = asyncio.Event()

    def put(self, name: Literal["stdout", "stderr"], data: bytes) -> None:
        """Add what was read; too much stops all readers."""
        self.waiting.append((name, data))
        self.size += len(data)
        if self.size > WAITING_LIMIT:
            for reader in self.readers:
                reader.pause()
        self.wake()

    def take(self) -> tuple[Literal["stdout", "stderr"], bytes] | None:
        """Return what was read first and let stopped readers go on; none if nothing waits."""
        if not self.waiting:
            return None
        name, data = self.waiting.popleft()
        self.size -= len(data)
        if self.size <= WAITING_LIMIT:
            for reader in self.readers:
                reader.go_on()
        return name, data

    def wake(self) -> None:
        """Let whoever waits for more look again."""
        self.changed.set()


class Ends:
    """Both ends of the three streams of a process that is about to start.

    Args:
        terminal: Rows and columns of a terminal; none for three pipes.
    """

    def __init__(self, terminal: tuple[int, int] | None) -> None:
        self.terminal = terminal is not None
        if terminal is None:
            (in_r, in_w), (out_r, out_w), (err_r, err_w) = os.pipe(), os.pipe(), os.pipe()
            self.ours, self.theirs = [in_w, out_r, err_r], [in_r, out_w, err_w]
        else:
            master, slave = pty.openpty()
            fcntl.ioctl(master, termios.TIOCSWINSZ, struct.pack("HHHH", *terminal, 0, 0))
            self.ours, self.theirs = [master, os.dup(master)], [slave, slave, slave]

    def close_theirs(self) -> None:
        """Close what the process has its own copies of."""
        for fd in set(self.theirs):
            os.close(fd)
        self.theirs = []

    def close(self) -> None:
        """Close all: the process did not start."""
        self.close_theirs()
        for fd in self.ours:
            os.close(fd)
