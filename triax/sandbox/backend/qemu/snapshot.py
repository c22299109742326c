"""What a snapshot of a virtual machine is on disk, and whether it fits this host.

qemu.json      what it was made with, and the names of all else
state          registers and devices
memory         the whole memory of the template it descends from; a second name of one shared file
pages-N.bin    pages that differ from `memory`, later files over earlier ones, with their numbers in pages-N.index
disk.ext4      the image; a second name of one shared file
layer-N.qcow2  what was written to it since
"""

import json
import os
import zlib
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from triax.errors import SandboxError
from triax.sandbox.backend.qemu.memory import Pages

MANIFEST = "qemu.json"
LAYOUT = 1
CLOCK_TOLERANCE = 0.001


@dataclass(frozen=True, slots=True)
class Fit:
    """What must be the same where a snapshot is restored.

    Args:
        emulator: Version of QEMU.
        accelerator: `kvm` or `tcg`.
        machine: Machine type and its options.
        processor: Model of the host's processor under `kvm`, of the emulated one otherwise.
        clock_khz: Rate of the time stamp counter; may differ by a thousandth.
        memory_mib: Memory of the guest.
        cpus: Its processors.
        agent: Version of the agent's protocol.
    """

    emulator: str
    accelerator: str
    machine: str
    processor: str
    clock_khz: int
    memory_mib: int
    cpus: int
    agent: int


@dataclass(slots=True)
class Saved:
    """A snapshot's description.

    Args:
        fit: What it fits.
        disk_bytes: Size of the disk as the guest sees it.
        pages: Number of files with pages.
        layers: Names of the disk's layers, lowest first.
        state_check: CRC-32 of the state.
        layout: Version of this layout.
    """

    fit: Fit
    disk_bytes: int
    pages: int
    layers: list[str] = field(default_factory=list)
    state_check: int = 0
    layout: int = LAYOUT


def write(folder: Path, saved: Saved) -> None:
    """Write the description, last of all files."""
    (folder / MANIFEST).write_text(json.dumps(asdict(saved), indent=1))


def read(folder: Path) -> Saved:
    """Read the description of a snapshot.

    Raises:
        SandboxError: There is none, or it is of another layout.
    """
    try:
        tree: dict[str, Any] = json.loads((folder / MANIFEST).read_text())
        if tree.get("layout") != LAYOUT:
            raise SandboxError(
                f"snapshot {folder.name}: has layout {tree.get('layout')!r}; this version reads {LAYOUT}; make it anew",
                "refused",
                status=409,
            )
        return Saved(**(tree | {"fit": Fit(**tree["fit"])}))
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as problem:
        raise SandboxError(f"snapshot {folder.name}: is no snapshot of a virtual machine; {problem!r}") from None


def check_fit(name: str, made: Fit, here: Fit) -> None:
    """Refuse a snapshot that was made where another machine would go on.

    Raises:
        SandboxError: Something differs; the message says what.
    """
    for what, there in asdict(made).items():
        present = getattr(here, what)
        same = there == present
        if what == "clock_khz":
            same = abs(made.clock_khz - here.clock_khz) <= CLOCK_TOLERANCE * made.clock_khz
        if not same:
            raise SandboxError(
                f"snapshot {name}: was made with {what.replace('_', ' ')} `{there}`; found `{present}` here; "
                "restore it where it was made, or create the sandbox anew",
                "refused",
                status=409,
            )


def pages_of(folder: Path, saved: Saved) -> list[Pages]:
    """Return all files with pages, oldest first, held against their indices."""
    return [Pages.load(folder / f"pages-{place}.bin", folder / f"pages-{place}.index") for place in range(saved.pages)]


def state_of(folder: Path, saved: Saved) -> bytes:
    """Return registers and devices.

    Raises:
        SandboxError: They are damaged.
    """
    try:
        state = (folder / "state").read_bytes()
    except OSError as problem:
        raise SandboxError(f"snapshot {folder.name}: has no state; {problem.strerror}; use another") from None
    if zlib.crc32(state) != saved.state_check:
        raise SandboxError(f"snapshot {folder.name}: its state is not what was written; it is damaged, use another")
    return state


def make_durable(folder: Path) -> None:
    """Wait until all files of a folder, and its names, are on disk."""
    for path in [*sorted(folder.iterdir()), folder]:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
