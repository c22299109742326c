"""Limits on all processes of a sandbox together, and a hand that stops them all: control groups, of either version."""

import asyncio
import os
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from triax.errors import SandboxError
from triax.sandbox.protocol import Check, Resources, Usage

PERIOD_US = 50_000  # of the processor quota: short, so that a throttled sandbox still answers
WAIT_S = 5.0  # until all processes stand still or are gone; only a stuck kernel takes longer
POLL_S = 0.0005
AGAIN_S = 0.25  # until a freezer that is not done is asked anew
FAMILY = "triax"
CONTROLLERS = ("freezer", "memory", "pids", "cpu")


@dataclass(frozen=True, slots=True)
class Hierarchies:
    """Where this host's control groups lie.

    Args:
        first: Folder of each controller of version 1, by its name.
        second: Folder of version 2; none if it is not mounted or has no controllers to give.
    """

    first: dict[str, Path]
    second: Path | None

    @classmethod
    def found(cls) -> "Hierarchies":
        """Look at what is mounted and can be written; version 2 is taken where it has all controllers."""
        first: dict[str, Path] = {}
        second = None
        for line in Path("/proc/self/mountinfo").read_text().splitlines():
            before, _, after = line.partition(" - ")
            folder, (kind, _, options) = Path(before.split()[4]), after.split()[:3]
            if kind == "cgroup2" and os.access(folder, os.W_OK):
                offered = (folder / "cgroup.controllers").read_text().split()
                if {"memory", "pids", "cpu"} <= set(offered):
                    second = folder
            elif kind == "cgroup" and os.access(folder, os.W_OK):
                first |= dict.fromkeys(set(options.split(",")) & set(CONTROLLERS), folder)
        return cls({} if second else first, second)

    @property
    def complete(self) -> bool:
        """Whether every quota can be kept and all processes be stopped."""
        return self.second is not None or set(CONTROLLERS) <= set(self.first)

    def check(self) -> Check:
        """Return what was found, as a line of a report."""
        found = (
            f"version 2 at {self.second}" if self.second else f"version 1: {', '.join(sorted(self.first)) or 'none'}"
        )
        to_do = "" if self.complete else "run as root, or let systemd delegate cpu, memory and pids to your user"
        return Check("control groups for quotas and pause", self.complete, found, to_do)

    def folders(self) -> list[Path]:
        """Return the folders that hold our groups, one a hierarchy."""
        every = [self.second] if self.second else sorted(set(self.first.values()))
        return [folder / FAMILY for folder in every]

    def labels(self, prefix: str) -> list[str]:
        """Return the names of our groups that begin with a prefix."""
        found: set[str] = set()
        for folder in self.folders():
            with suppress(FileNotFoundError):
                found |= {entry.name for entry in os.scandir(folder) if entry.is_dir()}
        return sorted(name for name in found if name.startswith(prefix))


class Group:
    """The control groups of one sandbox.

    Args:
        hierarchies: Where they lie.
        label: Their name.
    """

    def __init__(self, hierarchies: Hierarchies, label: str) -> None:
        self.label = label
        self.second = hierarchies.second / FAMILY / label if hierarchies.second else None
        self.first = {name: folder / FAMILY / label for name, folder in hierarchies.first.items()}

    def make(self, resources: Resources) -> None:
        """Make them, with their limits.

        Raises:
            SandboxError: The host does not allow it.
        """
        try:
            if self.second:
                self._make_second(self.second, resources)
            else:
                self._make_first(resources)
        except OSError as error:
            self.remove_now()
            raise SandboxError(
                f"control group {self.label}: cannot be made; {error.strerror}: {error.filename}; see `doctor`"
            ) from error

    def entrances(self) -> list[str]:
        """Return the files that a process writes `0` to in order to join."""
        if self.second:
            return [str(self.second / "main" / "cgroup.procs")]
        return [str(folder / "cgroup.procs") for folder in self.first.values()]

    async def freeze(self) -> None:
        """Stop every process, in the kernel and not by a signal that it could see.

        Raises:
            SandboxError: Some did not stop; all go on.
        """
        if self.second:
            events = self.second / "cgroup.events"
            _put(self.second / "cgroup.freeze", "1")
            stopped = await _until(lambda: "frozen 1" in _get(events))
        else:
            stopped = await self._freeze_first(self.first["freezer"] / "freezer.state")
        if not stopped:
            self.thaw()
            raise SandboxError(f"control group {self.label}: its processes did not stop within {WAIT_S:g} s")

    async def _freeze_first(self, state: Path) -> bool:
        """Return whether all stopped; this freezer may wait for ever for one that is caught in another's stop."""
        limit = time.monotonic() + WAIT_S
        while True:
            _put(state, "FROZEN")
            if await _until(lambda: _get(state).strip() == "FROZEN", wait_s=AGAIN_S):
                return True
            if time.monotonic() > limit:
                return False
            _put(state, "THAWED")
            await asyncio.sleep(POLL_S)

    def thaw(self) -> None:
        """Let every process go on."""
        if self.second:
            _put(self.second / "cgroup.freeze", "0")
        else:
            _put(self.first["freezer"] / "freezer.state", "THAWED")

    async def kill(self) -> None:
        """End every process.

        Raises:
            SandboxError: Some are still there.
        """
        top = self.second or self.first.get("freezer")
        if top is not None and top.is_dir():
            await _kill_all(top, self.second is not None)

    def pids(self) -> list[int]:
        """Return its processes, by their numbers on the host."""
        top = self.second or self.first.get("freezer")
        return _pids(top) if top is not None else []

    def out_of_memory(self) -> int:
        """Return how often a process was ended because memory ran out."""
        if self.second:
            return _number_after("oom_kill", _get(self.second / "memory.events"))
        return _number_after("oom_kill", _get(self.first["memory"] / "memory.oom_control")) if self.first else 0

    def refused_processes(self) -> int:
        """Return how often a process could not be started because there were too many."""
        folder = self.second or self.first.get("pids")
        return _number_after("max", _get(folder / "pids.events")) if folder else 0

    def usage(self) -> Usage:
        """Return what its processes use."""
        if self.second:
            cpu = _number_after("usage_usec", _get(self.second / "cpu.stat")) / 1e6
            memory, threads = _get(self.second / "memory.current"), _get(self.second / "pids.current")
        elif self.first:
            cpu = None
            memory = _get(self.first["memory"] / "memory.usage_in_bytes")
            threads = _get(self.first["pids"] / "pids.current")
        else:
            return Usage()
        return Usage(cpu, int(memory or 0), None, int(threads or 0))

    async def remove(self) -> None:
        """Remove the groups, once nothing is left in them."""
        await _until(self.remove_now)

    def remove_now(self) -> bool:
        """Remove the groups if nothing is left in them; return whether they are gone."""
        gone = True
        for folder in [self.second] if self.second else self.first.values():
            for above, names, _ in os.walk(folder, topdown=False):
                for name in names:
                    with suppress(OSError):
                        os.rmdir(os.path.join(above, name))
            with suppress(FileNotFoundError):
                try:
                    folder.rmdir()
                except OSError as error:
                    if isinstance(error, FileNotFoundError):
                        raise
                    gone = False
        return gone

    def _make_second(self, folder: Path, resources: Resources) -> None:
        family = folder.parent
        family.mkdir(exist_ok=True)
        for above in (family.parent, family):
            _put(above / "cgroup.subtree_control", "+memory +pids +cpu")
        folder.mkdir()
        _put(folder / "memory.max", str(resources.memory_mib * 2**20))
        with suppress(OSError):
            _put(folder / "memory.swap.max", "0")
        _put(folder / "pids.max", str(resources.processes))
        _put(folder / "cpu.max", f"{int(resources.cpus * PERIOD_US)} {PERIOD_US}")
        (folder / "main").mkdir()  # groups with limits have no processes of their own

    def _make_first(self, resources: Resources) -> None:
        for folder in set(self.first.values()):
            folder.parent.mkdir(exist_ok=True)
            folder.mkdir()
        if "memory" in self.first:
            limit = str(resources.memory_mib * 2**20)
            _put(self.first["memory"] / "memory.limit_in_bytes", limit)
            with suppress(OSError):  # not every kernel counts swap
                _put(self.first["memory"] / "memory.memsw.limit_in_bytes", limit)
        if "pids" in self.first:
            _put(self.first["pids"] / "pids.max", str(resources.processes))
        if "cpu" in self.first:
            _put(self.first["cpu"] / "cpu.cfs_period_us", str(PERIOD_US))
            _put(self.first["cpu"] / "cpu.cfs_quota_us", str(max(1000, int(resources.cpus * PERIOD_US))))


async def _kill_all(top: Path, second: bool) -> None:
    if second:
        with suppress(OSError):
            _put(top / "cgroup.kill", "1")
    state = top / "freezer.state"

    def gone() -> bool:
        left = _pids(top)
        if left and not second:
            # frozen processes cannot fork away from the signals, and die as they thaw
            with suppress(OSError):
                _put(state, "FROZEN")
            for pid in _pids(top):
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            with suppress(OSError):
                _put(state, "THAWED")
        return not left

    if not await _until(gone, POLL_S * 4):
        raise SandboxError(f"control group {top.name}: its processes did not end within {WAIT_S:g} s")


async def _until(done: Callable[[], bool], pause_s: float = POLL_S, wait_s: float = WAIT_S) -> bool:
    limit = time.monotonic() + wait_s
    while not done():
        if time.monotonic() > limit:
            return False
        await asyncio.sleep(pause_s)
    return True


def _pids(top: Path) -> list[int]:
    found: list[int] = []
    for above, _, _ in os.walk(top):
        found += [int(word) for word in _get(Path(above) / "cgroup.procs").split()]
    return [pid for pid in found if pid > 0]


def _number_after(word: str, text: str) -> int:
    for line in text.splitlines():
        if line.startswith(f"{word} "):
            return int(line.split()[1])
    return 0


def _get(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""


def _put(path: Path, text: str) -> None:
    with open(path, "w") as file:
        file.write(text)
