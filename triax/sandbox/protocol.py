"""The words that every backend, the server and its clients share."""

from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, Protocol, runtime_checkable

from triax.errors import SandboxError

Outcome = Literal["ok", "timeout", "out_of_memory", "infrastructure", "refused"]
"""How a command ended. A command that ran and exited 1 is `ok` with exit code 1: the sandbox did its work."""

Status = Literal[
    "creating",
    "running",
    "pausing",
    "paused",
    "suspending",
    "suspended",
    "resuming",
    "snapshotting",
    "forking",
    "killing",
    "dead",
    "lost",
    "failed",
]
"""Where a sandbox is in its life.

`paused`: in place, its memory stays in its process. `suspended`: a durable snapshot, no process. `lost`: it was only
running or paused in place when its owner died. `failed`: a step went wrong and the machine could not be made to run.
"""

STABLE: tuple[Status, ...] = ("running", "paused", "suspended", "dead", "lost", "failed")
"""Statuses that last; each of the others belongs to an operation in progress."""

OUTPUT_LIMIT = 10 * 2**20
"""Bytes kept of each stream of a command unless the caller says otherwise; the rest is read and dropped."""

ARGUMENT_LIMIT = 128 * 1024 - 1
"""Bytes that one argument or variable may have: Linux refuses longer ones (`MAX_ARG_STRLEN`)."""

SNAPSHOT_VERSION = 1
"""Layout of snapshot folders; a folder that says otherwise is refused."""


@dataclass(frozen=True, slots=True)
class Result:
    """What a command left behind.

    Args:
        outcome: How it ended; see `Outcome`.
        exit_code: Its exit code; none if a signal ended it or it never ran.
        signal: The signal that ended it, such as 9; none if it exited.
        stdout: What it wrote, up to the limit.
        stderr: What it wrote to its second stream, up to the limit.
        truncated: Whether output beyond the limit was dropped.
        duration_s: Wall-clock seconds from request to end.
        detail: For an outcome other than `ok`, what happened, in words.
    """

    outcome: Outcome
    exit_code: int | None = None
    signal: int | None = None
    stdout: bytes = b""
    stderr: bytes = b""
    truncated: bool = False
    duration_s: float = 0.0
    detail: str = ""


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What a backend can do; asking for what it cannot is refused, never ignored.

    Args:
        memory_snapshot: Suspended machines and snapshots keep memory and processes, not files alone.
        incremental_snapshot: A snapshot may hold only what changed since its parent.
        disk_snapshot: Files can be frozen and brought back.
        fork_running: Copies go on with the processes of their source; otherwise with its files alone.
        suspend: The machine can be put away without a process.
        network_policy: Single destinations can be allowed.
        terminals: Processes may have a terminal.
        expose: A port inside can be reached from the host.
        oci_images: Root filesystems come from OCI images.
        attach: Processes from before a suspend or fork can be listened to again.
        network_change: What a sandbox may reach can be changed while it runs.
    """

    memory_snapshot: bool = False
    incremental_snapshot: bool = False
    disk_snapshot: bool = False
    fork_running: bool = False
    suspend: bool = False
    network_policy: bool = False
    terminals: bool = False
    expose: bool = False
    oci_images: bool = False
    attach: bool = False
    network_change: bool = False


@dataclass(frozen=True, slots=True)
class Resources:
    """How much of the host a sandbox may use.

    Args:
        cpus: Cores, fractions allowed, above 0.
        memory_mib: Memory of all its processes together, files in memory included.
        disk_mib: What it may write to its root filesystem.
        processes: Processes and threads at a time.
    """

    cpus: float = 1.0
    memory_mib: int = 128
    disk_mib: int = 512
    processes: int = 256


@dataclass(frozen=True, slots=True)
class Network:
    """What a sandbox may reach; nothing unless said.

    Args:
        allow_out: Destinations, each an address, a network such as `10.0.0.0/8`, or a host name.
        allow_internet: Whether everything may be reached.
    """

    allow_out: tuple[str, ...] = ()
    allow_internet: bool = False


@dataclass(frozen=True, slots=True)
class Spec:
    """The sandbox that is wanted.

    Args:
        image: Name of a prepared image, path of a root filesystem or of an OCI layout; none for the backend's own.
        resources: Quotas.
        network: What it may reach.
        env: Variables of every command.
        metadata: Labels for the owner's use; kept, never read.
        timeout_s: Seconds until `on_timeout` happens; none for never.
        on_timeout: Put it away with its files and memory, or end it.
        user: Who runs commands inside; none for the backend's own choice.
        cwd: Where commands start; none for the home of that user.
    """

    image: str | None = None
    resources: Resources = field(default_factory=Resources)
    network: Network = field(default_factory=Network)
    env: Mapping[str, str] = field(default_factory=dict)
    metadata: Mapping[str, str] = field(default_factory=dict)
    timeout_s: float | None = 300.0
    on_timeout: Literal["suspend", "kill"] = "suspend"
    user: str | None = None
    cwd: str | None = None


@dataclass(frozen=True, slots=True)
class Entry:
    """A file or folder inside a sandbox.

    Args:
        path: Absolute path.
        kind: What it is; symlinks are not followed.
        size: Bytes.
        mode: Permission bits, such as 0o644.
        modified_s: Seconds since 1970.
        target: Where a symlink points, as written in it; none for others.
    """

    path: str
    kind: Literal["file", "directory", "symlink", "other"]
    size: int
    mode: int
    modified_s: float
    target: str | None = None


@dataclass(frozen=True, slots=True)
class Usage:
    """What a machine uses of its host at this moment; none where a backend cannot tell.

    Args:
        cpu_s: Seconds of processor time since it started.
        memory_bytes: Memory that would be free without it.
        disk_bytes: What it wrote, on the host's disk or in its memory.
        processes: Its processes and threads.
    """

    cpu_s: float | None = None
    memory_bytes: int | None = None
    disk_bytes: int | None = None
    processes: int | None = None


@dataclass(frozen=True, slots=True)
class Check:
    """One thing that a backend needs of its host.

    Args:
        name: What is needed.
        ok: Whether it is there.
        found: What was found.
        to_do: How to get it, such as a command; empty if it is there.
    """

    name: str
    ok: bool
    found: str
    to_do: str = ""


@runtime_checkable
class Process(Protocol):
    """A long-lived process inside a sandbox."""

    @property
    def pid(self) -> int:
        """Its number inside the sandbox."""
        ...

    def output(self) -> AsyncIterator[tuple[Literal["stdout", "stderr"], bytes]]:
        """Yield what it writes, as it writes, until it ends; a terminal has one stream, `stdout`."""
        ...

    async def write(self, data: bytes) -> None:
        """Send to its standard input; waits while the process does not read."""
        ...

    async def close_stdin(self) -> None:
        """Say that no more input comes."""
        ...

    async def kill(self, signal: int = 9) -> None:
        """Send a signal to it and, for 9, to everything it started."""
        ...

    async def resize(self, rows: int, columns: int) -> None:
        """Set the size of its terminal."""
        ...

    async def wait(self) -> Result:
        """Wait for its end; output that was streamed is not repeated in the result."""
        ...


@runtime_checkable
class Machine(Protocol):
    """One live machine of a backend: raw operations, without a state machine.

    Every failure is a `SandboxError`; a failed `pause`, `suspend`, `snapshot` or `fork` leaves the machine running,
    or dead as `is_alive` then says, and never half stopped.
    """

    @property
    def generation(self) -> int:
        """How often it was restored or forked from; connections of an older generation are not used again."""
        ...

    async def exec(
        self,
        argv: Sequence[str] | str,
        *,
        stdin: bytes = b"",
        timeout_s: float | None = None,
        env: Mapping[str, str] | None = None,
        cwd: str | None = None,
        user: str | None = None,
        output_limit: int = OUTPUT_LIMIT,
    ) -> Result:
        """Run a command to its end; a text goes through `/bin/sh -c`, and a limit ends only this command."""
        ...

    async def start(
        self,
        argv: Sequence[str] | str,
        *,
        env: Mapping[str, str] | None = None,
        cwd: str | None = None,
        user: str | None = None,
        terminal: tuple[int, int] | None = None,
    ) -> Process:
        """Start a process that lives on; `terminal` is rows and columns."""
        ...

    async def read(self, path: str, offset: int = 0, limit: int | None = None) -> bytes:
        """Return bytes of a file."""
        ...

    async def write(self, path: str, data: bytes, mode: int = 0o644) -> None:
        """Replace a file, and make its folders."""
        ...

    async def list(self, path: str) -> list[Entry]:
        """Return what a folder holds, by name."""
        ...

    async def stat(self, path: str) -> Entry:
        """Return one entry; a symlink is not followed."""
        ...

    async def remove(self, path: str) -> None:
        """Remove a file, or a folder with all it holds."""
        ...

    async def rename(self, source: str, destination: str) -> None:
        """Move a file or folder, and make the folders above its new place."""
        ...

    async def make_directory(self, path: str) -> None:
        """Make a folder and those above it; one that is there already is fine."""
        ...

    async def expose(self, port: int) -> tuple[str, int]:
        """Return host and port on the host that reach a port inside."""
        ...

    async def pause(self) -> None:
        """Stop all its processes in place."""
        ...

    async def resume(self) -> None:
        """Let a machine that was paused in place go on, with its clock set."""
        ...

    async def suspend(self, folder: Path) -> None:
        """Write a durable snapshot, then end the machine; it may be paused before.

        The folder has only `manifest.json`, which is not the backend's, and is renamed once the call returns. One that
        cannot be read without other snapshots names their folders, which lie beside it, as a list in `parents.json`;
        they are kept as long as it is.
        """
        ...

    async def snapshot(self, folder: Path, parent: Path | None = None) -> None:
        """Write a durable snapshot and go on, running or paused as before.

        Args:
            folder: As for `suspend`.
            parent: An earlier snapshot of this machine or of its source to build on, where that helps.
        """
        ...

    async def fork(self, ids: Sequence[str], *, deterministic: bool = False) -> "Sequence[Machine | SandboxError]":
        """Split into one copy for each new id, and go on; a copy that failed is an error in its place.

        Args:
            ids: Ids of the copies.
            deterministic: Tell programs in the copies of no new generation, so that what they draw from generators in
                their own memory goes on alike in all of them; the kernel's entropy is fresh all the same.
        """
        ...

    async def kill(self) -> None:
        """End it and free all it held; may be called again."""
        ...

    async def is_alive(self) -> bool:
        """Tell whether it would answer, within a second; a paused machine is alive."""
        ...

    async def usage(self) -> Usage:
        """Return what it uses of its host."""
        ...


@runtime_checkable
class Backend(Protocol):
    """A way to make machines on this host."""

    @property
    def name(self) -> str:
        """One word, such as `qemu`."""
        ...

    @property
    def capabilities(self) -> Capabilities:
        """What its machines can do."""
        ...

    async def create(self, spec: Spec, id: str) -> Machine:
        """Start a machine; everything it holds on the host carries the id as its label."""
        ...

    async def restore(
        self, folder: Path, spec: Spec, id: str, generation: int, *, deterministic: bool = False
    ) -> Machine:
        """Start a machine from a snapshot's folder, which is only read and may start many.

        The folder stays where it is while a machine that was started from it lives. `deterministic` is as for `fork`.
        """
        ...

    async def reap(self, live: frozenset[str]) -> list[str]:
        """End processes, mounts and groups labelled with ids that are not `live`; return what was ended, in words."""
        ...

    async def checks(self) -> list[Check]:
        """Return what it needs of this host, and whether it is there."""
        ...
