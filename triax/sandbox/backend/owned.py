"""Which processes of the host belong together: by a label in their variables, or by descent."""

import os
import signal
from collections.abc import Iterator
from contextlib import suppress

LABEL = "TRIAX_SANDBOX"
COMMAND = "TRIAX_COMMAND"


def labelled(name: str, value: str | None = None) -> list[tuple[int, str]]:
    """Return processes that were started with a variable, and its value; `value` asks for one."""
    start = f"{name}=".encode()
    found = []
    for pid in _pids():
        with suppress(OSError):
            with open(f"/proc/{pid}/environ", "rb") as file:
                pairs = file.read().split(b"\0")
            for pair in pairs:
                if pair.startswith(start):
                    held = pair[len(start) :].decode(errors="replace")
                    if value is None or held == value:
                        found.append((pid, held))
                    break
    return found


def signal_all(name: str, value: str, number: int) -> int:
    """Send a signal to every process with a label, again until no new one appears; return how many had it."""
    reached: set[int] = set()
    # what forks while it is looked for shows up in the next round; the stop comes first so that rounds end
    for _ in range(50):
        fresh = [pid for pid, _ in labelled(name, value) if pid not in reached]
        if not fresh:
            break
        for pid in fresh:
            reached.add(pid)
            with suppress(ProcessLookupError, PermissionError):
                if number == signal.SIGKILL:
                    os.kill(pid, signal.SIGSTOP)
                os.kill(pid, number)
    return len(reached)


def parent_of(pid: int) -> int:
    """Return the number of a process's parent.

    Raises:
        OSError: There is no such process.
    """
    with open(f"/proc/{pid}/stat", "rb") as file:
        # the name in brackets may have blanks and brackets of its own
        return int(file.read().rpartition(b")")[2].split()[1])


def descendants(pid: int) -> list[int]:
    """Return what was started by a process, at any depth, without the process itself."""
    found: list[int] = []
    above = [pid]
    while above:
        parent = above.pop()
        with suppress(OSError):
            for thread in os.listdir(f"/proc/{parent}/task"):
                with open(f"/proc/{parent}/task/{thread}/children", "rb") as file:
                    below = [int(word) for word in file.read().split()]
                found += below
                above += below
    return found


def end_below(pid: int) -> None:
    """End everything that a process started, even what starts more meanwhile."""
    stopped: set[int] = set()
    # what is stopped starts nothing: once a round finds nobody new, all are known
    for _ in range(1000):
        fresh = set(descendants(pid)) - stopped
        if not fresh:
            break
        for one in fresh:
            with suppress(ProcessLookupError, PermissionError):
                os.kill(one, signal.SIGSTOP)
        stopped |= fresh
    for one in stopped:
        with suppress(ProcessLookupError, PermissionError):
            os.kill(one, signal.SIGKILL)


def _pids() -> Iterator[int]:
    own = os.getpid()
    for name in os.listdir("/proc"):
        if name.isdecimal() and int(name) != own:
            yield int(name)
