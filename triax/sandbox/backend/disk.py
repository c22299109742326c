"""A sandbox's own disk: a file with a file system of exactly the size that was asked for."""

import asyncio
import ctypes
import hashlib
import os
import stat
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

from triax.errors import SandboxError
from triax.sandbox.backend.child import ran
from triax.sandbox.guest.build import cache_folder, compiled

SMALLEST_MIB = 8  # below that mke2fs leaves no room for files
COPY = 2**26

_libc = ctypes.CDLL(None, use_errno=True)


async def empty_disk(cache: Path, size_mib: int, skeleton: Mapping[str, str | bytes | None]) -> Path:
    """Return a disk with only folders, symlinks and small files on it, made once and then copied.

    Args:
        cache: Where it is kept.
        size_mib: What may be written to it, with its own tables.
        skeleton: Path to content; a folder ends with `/` and has none, a content that begins with `->` is a symlink.

    Raises:
        SandboxError: It could not be made, as when `mke2fs` is missing.
    """
    digest = hashlib.sha256(repr((size_mib, sorted(skeleton.items()))).encode()).hexdigest()[:16]
    disk = cache / f"disk-{digest}.img"
    if disk.exists():
        return disk
    cache.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cache, prefix="making-") as held:
        tree, fresh = Path(held) / "tree", Path(held) / "disk.img"
        tree.mkdir()
        for path, content in skeleton.items():
            place = tree / path
            place.parent.mkdir(parents=True, exist_ok=True)
            if path.endswith("/"):
                place.mkdir(exist_ok=True)
            elif isinstance(content, str) and content.startswith("->"):
                place.symlink_to(content[2:])
            else:
                place.write_bytes(content.encode() if isinstance(content, str) else content or b"")
        with open(fresh, "wb") as file:
            file.truncate(max(size_mib, SMALLEST_MIB) * 2**20)
        # no journal: what a crash of the whole host leaves half written is lost with the sandbox anyway
        made = await ran(
            ["mke2fs", "-q", "-F", "-t", "ext4", "-O", "^has_journal", "-m", "0", "-d", str(tree), str(fresh)]
        )
        if made.exit_code != 0:
            said = made.stderr.decode(errors="replace").strip()
            raise SandboxError(f"disk: mke2fs failed; {said[:300]}; run `apt-get install e2fsprogs`")
        fresh.replace(disk)
    return disk


async def copy_disk(source: Path, destination: Path) -> None:
    """Copy a file without its holes, sharing blocks where the file system can; a failed copy leaves nothing.

    Raises:
        SandboxError: The host's disk is full or does not take it.
    """
    try:
        await asyncio.to_thread(_copy, source, destination)
    except OSError as error:
        destination.unlink(missing_ok=True)
        raise SandboxError(f"disk: cannot be copied to {destination}; {error.strerror}; free some disk") from error


def _copy(source: Path, destination: Path) -> None:
    with open(source, "rb") as old, open(destination, "xb") as new:
        end = os.fstat(old.fileno()).st_size
        os.ftruncate(new.fileno(), end)
        at = 0
        while at < end:
            try:
                at = os.lseek(old.fileno(), at, os.SEEK_DATA)
            except OSError:  # nothing but a hole is left
                break
            stop = os.lseek(old.fileno(), at, os.SEEK_HOLE)
            while at < stop:
                # copies inside the kernel, and shares blocks where the file system can
                done = os.copy_file_range(old.fileno(), new.fileno(), min(stop - at, COPY), at, at)
                if done == 0:
                    break
                at += done


def keep_disk(disk: Path, folder: Path) -> None:
    """Let a disk live on in a folder after its own name is gone.

    Raises:
        SandboxError: The folder lies on another file system.
    """
    try:
        os.link(disk, folder / disk.name)
    except OSError as error:
        raise SandboxError(
            f"snapshot: {folder} cannot share a file with {disk.parent}; {error.strerror}; keep both on one file system"
        ) from error


def flush(root: str) -> None:
    """Write what a file system holds in memory to its disk.

    Args:
        root: Any folder of it.

    Raises:
        SandboxError: The disk does not take it.
    """
    fd = os.open(root, os.O_RDONLY | os.O_DIRECTORY)
    try:
        if _libc.syncfs(fd):
            words = f"disk: cannot be written out; {os.strerror(ctypes.get_errno())}"
            raise SandboxError(f"{words}; what was written lately is lost if the host's disk was full: free some")
    finally:
        os.close(fd)


def ground_program() -> Path:
    """Return the program that mounts a disk and joins control groups, compiled when it is first needed.

    Raises:
        SandboxError: This host has no C compiler.
    """
    return compiled([Path(__file__).with_name("enter.c")], "enter", cache_folder())


async def until_released(disk: Path, limit_s: float = 5.0) -> bool:
    """Wait until no loop device holds a disk any more, as happens a moment after its last process ended."""
    name = str(disk)
    limit = time.monotonic() + limit_s
    while any(held == name for held in _held_by_loops()):
        if time.monotonic() > limit:
            return False
        await asyncio.sleep(0.001)
    return True


def _held_by_loops() -> list[str]:
    found = []
    for device in Path("/sys/block").glob("loop*/loop/backing_file"):
        try:
            found.append(device.read_text().strip().removesuffix(" (deleted)"))
        except OSError:
            continue
    return found


def own(root: str, owner: int) -> None:
    """Hand everything on a fresh disk, and only there, to a user of the host."""
    disk = os.stat(root).st_dev
    os.chown(root, owner, owner)
    for _, folders, names, fd in os.fwalk(f"{root}/"):
        found = {name: os.stat(name, dir_fd=fd, follow_symlinks=False) for name in [*folders, *names]}
        for name, entry in found.items():
            # whoever owns a folder owns its symlinks in all that matters
            if entry.st_dev == disk and not stat.S_ISLNK(entry.st_mode):
                os.chown(name, owner, owner, dir_fd=fd, follow_symlinks=False)
        folders[:] = [name for name in folders if found[name].st_dev == disk]
