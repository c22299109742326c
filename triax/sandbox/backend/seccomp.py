"""System calls that no light task needs and that reach deep into a shared kernel, refused by the kernel's own filter.

The filter is a program of the classic Berkeley Packet Filter, as `bwrap --seccomp` reads it.
"""

import errno
import platform
import struct
from typing import NamedTuple

CLONE_NEW = 0x7E020000  # every kind of namespace
ALLOW = 0x7FFF0000
REFUSE = 0x00050000  # with an error number
KILL = 0x80000000

LOAD, JUMP_EQUAL, JUMP_AT_LEAST, JUMP_ANY_BIT, RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
AT_NUMBER, AT_ARCHITECTURE, AT_FIRST_ARGUMENT = 0, 4, 16

# mounts, namespaces of others, keys, tracing of the kernel, modules, swap, clocks of the host, asynchronous rings
NEWER = {"io_uring": (425, 426, 427), "mounts": (428, 429, 430, 431, 432, 433, 442)}


class Calls(NamedTuple):
    """Numbers of system calls on one architecture."""

    architecture: int
    clone: int
    unshare: int
    refused: tuple[int, ...]


NUMBERS = {
    "x86_64": Calls(
        architecture=0xC000003E,
        clone=56,
        unshare=272,
        refused=(
            *(165, 166, 155, 308),  # mount, umount2, pivot_root, setns
            *(248, 249, 250),  # add_key, request_key, keyctl
            *(321, 298, 323, 103),  # bpf, perf_event_open, userfaultfd, syslog
            *(246, 320, 175, 313, 176),  # kexec_load, kexec_file_load, init_module, finit_module, delete_module
            *(167, 168, 169, 179, 163, 304),  # swapon, swapoff, reboot, quotactl, acct, open_by_handle_at
            *(172, 173),  # iopl, ioperm
        ),
    ),
    "aarch64": Calls(
        architecture=0xC00000B7,
        clone=220,
        unshare=97,
        refused=(
            *(40, 39, 41, 268),
            *(217, 218, 219),
            *(280, 241, 282, 116),
            *(104, 294, 105, 273, 106),
            *(224, 225, 142, 60, 89, 265),
        ),
    ),
}
CLONE3 = 435


def program(machine: str | None = None) -> bytes | None:
    """Return the filter for a kind of processor, this one's by default; none where the numbers are not known here."""
    numbers = NUMBERS.get(machine or platform.machine())
    if numbers is None:
        return None
    refuse = _return(REFUSE | errno.EPERM)
    steps = [
        _step(LOAD, AT_ARCHITECTURE),
        _step(JUMP_EQUAL, numbers.architecture, yes=1, no=0),
        _return(KILL),
        _step(LOAD, AT_NUMBER),
    ]
    if numbers.architecture == NUMBERS["x86_64"].architecture:
        steps += [_step(JUMP_AT_LEAST, 0x40000000, yes=0, no=1), refuse]  # the x32 face of the same calls
    for number in (*numbers.refused, *NEWER["mounts"]):
        steps += [_step(JUMP_EQUAL, number, yes=0, no=1), refuse]
    # libraries fall back to `clone` and to plain reads when these are unknown; their arguments no filter can see
    for number in (CLONE3, *NEWER["io_uring"]):
        steps += [_step(JUMP_EQUAL, number, yes=0, no=1), _return(REFUSE | errno.ENOSYS)]
    for number in (numbers.clone, numbers.unshare):
        steps += [
            _step(JUMP_EQUAL, number, yes=0, no=4),
            _step(LOAD, AT_FIRST_ARGUMENT),
            _step(JUMP_ANY_BIT, CLONE_NEW, yes=0, no=1),
            refuse,
            _return(ALLOW),
        ]
    return b"".join([*steps, _return(ALLOW)])


def _step(code: int, value: int, yes: int = 0, no: int = 0) -> bytes:
    return struct.pack("<HBBI", code, yes, no, value)


def _return(value: int) -> bytes:
    return _step(RETURN, value)
