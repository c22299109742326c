"""From a running machine to a snapshot's folder: stop, write what changed, go on."""

import asyncio
import errno
import os
import time
import zlib
from pathlib import Path

from triax.errors import SandboxError
from triax.sandbox.backend.qemu import disk, snapshot
from triax.sandbox.backend.qemu.machine import QemuMachine
from triax.sandbox.backend.qemu.memory import Pages, capture, region
from triax.sandbox.backend.qemu.parts import Parts

MOST_PAGE_FILES = 8


async def save(
    machine: QemuMachine,
    folder: Path,
    fit: snapshot.Fit,
    *,
    parent: Path | None = None,
    goes_on: bool,
    flat: bool = False,
    durable: bool = True,
) -> None:
    """Write a snapshot of a machine.

    Args:
        machine: The machine; on failure it runs on.
        folder: Where to write.
        fit: What the snapshot will fit.
        parent: An earlier snapshot to share with.
        goes_on: Whether the machine runs on; otherwise it stays frozen, to be killed.
        flat: Whether to join what changed with its base, so that copies share it.
        durable: Whether to wait for the disk.

    Raises:
        SandboxError: It could not be written.
    """
    parts, monitor = machine.parts, machine.emulator.monitor
    earlier = await asyncio.to_thread(_shared_pages, parent, parts)
    own = f"pages-{len(earlier)}"
    layers = list(parts.layers)
    begun = time.monotonic()
    await machine.freeze()
    stopped = True
    try:
        # the emulator's own migration would write all memory; this writes devices and registers alone
        await monitor.run("xen-save-devices-state", filename=str(folder / "state"), live=False)
        if goes_on:
            await _cover(machine)
        where = region(machine.emulator.process.pid, parts.memory)
        pages = await asyncio.to_thread(capture, where, folder / f"{own}.bin", earlier)
        if goes_on:
            stopped = False
            await machine.go_on()
        machine.freeze_s = time.monotonic() - begun
        saved = snapshot.Saved(
            fit=fit,
            disk_bytes=parts.disk_bytes,
            pages=0 if flat else len(earlier) + 1,
            layers=[f"layer-{place}.qcow2" for place in range(len(layers))],
            state_check=zlib.crc32((folder / "state").read_bytes()),
        )
        await asyncio.to_thread(_complete, folder, parts, layers, earlier, pages, saved)
        if durable:
            await asyncio.to_thread(snapshot.make_durable, folder)
    except BaseException as problem:
        if stopped:
            await machine.go_on()
        if isinstance(problem, OSError | SandboxError):
            words = problem.strerror if isinstance(problem, OSError) else str(problem)
            full = os.strerror(errno.ENOSPC) in str(problem)
            raise SandboxError(
                f"snapshot {folder.name}: cannot be written; {words}; {'free some disk' if full else 'try again'}",
                status=507 if full else None,
            ) from None
        raise


def join_memory(folder: Path) -> None:
    """Make changed pages and their base one file, which several copies then share."""
    saved = snapshot.read(folder)
    joined = folder / "memory.joined"
    disk.copy_sparse(folder / "memory", joined)
    with joined.open("r+b") as file:
        for pages in snapshot.pages_of(folder, saved):
            pages.put_into_file(file.fileno())
    joined.replace(folder / "memory")
    saved.pages = 0
    snapshot.write(folder, saved)


def _shared_pages(parent: Path | None, parts: Parts) -> list[Pages]:
    """Return the pages of a parent over the same memory file; none if it shares nothing."""
    if parent is None:
        return []
    try:
        saved = snapshot.read(parent)
        same = os.path.samestat((parent / "memory").stat(), parts.memory.stat())
        return snapshot.pages_of(parent, saved) if same and saved.pages < MOST_PAGE_FILES else []
    except (SandboxError, OSError):
        return []


def _complete(
    folder: Path, parts: Parts, layers: list[Path], earlier: list[Pages], pages: Pages, saved: snapshot.Saved
) -> None:
    """Give a snapshot its shared files, the index of its own, and last its description."""
    if saved.pages == 0:
        disk.copy_sparse(parts.memory, folder / "memory")
        with (folder / "memory").open("r+b") as file:
            pages.put_into_file(file.fileno())
        pages.path.unlink()
        (folder / "memory").chmod(0o444)
    else:
        disk.link(parts.memory, folder / "memory")
        pages.save_index(pages.path.with_suffix(".index"))
        for one in earlier:
            for path in (one.path, one.path.with_suffix(".index")):
                disk.link(path, folder / path.name)
    disk.link(parts.base, folder / "disk.ext4")
    for layer, name in zip(layers, saved.layers, strict=True):
        disk.link(layer, folder / name)
    snapshot.write(folder, saved)


async def _cover(machine: QemuMachine) -> None:
    """Put a new layer on the disk of a stopped machine: the one below is never written again."""
    parts, monitor = machine.parts, machine.emulator.monitor
    layer = parts.new_layer()
    disk.make_layer(layer, parts.disk_bytes)
    below, name = f"layer{len(parts.layers) - 1}", f"layer{len(parts.layers)}"
    try:
        await monitor.run("blockdev-add", **disk.layer_node(layer, name, None))
        await monitor.run("blockdev-snapshot", node=below, overlay=name)
    except SandboxError:
        layer.unlink(missing_ok=True)
        raise
    parts.layers.append(layer)
