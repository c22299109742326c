"""Frames between a host and the agent in its guest.

A frame is three little-endian 32-bit numbers (bytes of its body, kind, stream) and the body. Streams opened by the host
count up from 1, those opened by the guest have the highest bit set; stream 0 is the agent itself. On a stream each side
may send `WINDOW` bytes of data before the other grants more by `CREDIT`.
"""

import struct
from collections.abc import Mapping, Sequence
from enum import IntEnum

PROTOCOL = 1  # a snapshot's agent speaks the version it was made with; raise it when old ones would not understand
HEAD = struct.Struct("<III")
WINDOW = 256 * 1024
BODY_LIMIT = 1024 * 1024  # the agent's frames are far smaller; a guest that says otherwise is not our agent
CHUNK = 32 * 1024 - HEAD.size  # with its head, what a virtio port takes at once
OWN_STREAMS = 0x80000000  # set in streams that the guest opens


class Kind(IntEnum):
    """What a frame asks or tells; the agent's source has the same list."""

    HELLO = 1
    CLOCK = 2
    FREEZE = 3
    THAW = 4
    PING = 5
    LISTEN = 6
    RUN = 10
    DATA = 11
    END = 12
    SIGNAL = 13
    RESIZE = 14
    CREDIT = 15
    CLOSE = 16
    CONNECT = 17
    ATTACH = 18
    PROCESSES = 19
    MUTE = 20
    READY = 64
    FROZEN = 65
    THAWED = 66
    PONG = 67
    STARTED = 68
    OUT = 69
    ERR = 70
    EXIT = 71
    FAILED = 72
    OPEN = 73


TERMINAL = 1
OPERATION = 2


def frame(kind: Kind, stream: int = 0, body: bytes = b"") -> bytes:
    """Return one frame."""
    return HEAD.pack(len(body), kind, stream) + body


def number(value: int) -> bytes:
    """Return a 32-bit number as it stands in a body."""
    return struct.pack("<I", value)


def text(value: str | bytes) -> bytes:
    """Return a text as it stands in a body: its length, then its bytes."""
    raw = value.encode("utf-8", "surrogateescape") if isinstance(value, str) else value
    return struct.pack("<I", len(raw)) + raw


def texts(values: Sequence[str]) -> bytes:
    """Return a list of texts: their number, then each."""
    return number(len(values)) + b"".join(map(text, values))


def command(
    arguments: Sequence[str],
    variables: Mapping[str, str],
    *,
    user: str = "",
    folder: str = "",
    flags: int = 0,
    size: tuple[int, int] = (0, 0),
) -> bytes:
    """Return the body of `RUN`.

    Args:
        arguments: Program and its arguments, or the name and arguments of a file operation.
        variables: The whole environment.
        user: Name or number; empty for the superuser.
        folder: Where it starts; empty for the home of that user.
        flags: `TERMINAL`, `OPERATION`.
        size: Rows and columns of the terminal.
    """
    pairs = [f"{name}={value}" for name, value in variables.items()]
    return struct.pack("<III", flags, *size) + text(user) + text(folder) + texts(arguments) + texts(pairs)


AS_BEFORE = 2**64 - 1


def hello(
    generation: int, clock_ns: int, processes: int, *, name: str, machine: str, token: str, entropy: bytes
) -> bytes:
    """Return the body of `HELLO`, which makes a guest a machine of its own.

    Args:
        generation: How often it was restored or forked from; `AS_BEFORE` tells its programs of no new one.
        clock_ns: Nanoseconds since 1970.
        processes: Most processes and threads of its commands.
        name: Its host name.
        machine: Its machine id, 32 hexadecimal digits.
        token: Its credentials, a text only it and its host know.
        entropy: At most 256 fresh bytes for the kernel's pool.
    """
    start = struct.pack("<QQI", generation, clock_ns, processes)
    return start + text(name) + text(machine) + text(token) + number(len(entropy)) + entropy
