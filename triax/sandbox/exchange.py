"""Whole folders into a sandbox and out of it, with nothing that leads out of either."""

import os
import posixpath
import shutil
import stat
import tempfile
from pathlib import Path

from triax.errors import SandboxError
from triax.sandbox.protocol import Entry
from triax.sandbox.sandbox import Sandbox

MOST_BYTES = 2**30
MOST_ENTRIES = 100_000
CHUNK = 2**22


async def upload(sandbox: Sandbox, source: Path, destination: str) -> int:
    """Copy a folder, or one file, of the host into a sandbox.

    Args:
        sandbox: Where to.
        source: Folder or file of the host. Symlinks are kept as such and must stay below it.
        destination: What it is called inside.

    Returns:
        How many files and symlinks were copied.

    Raises:
        SandboxError: A symlink leads or may lead out of the folder, or something is neither file, folder nor symlink;
            kind `refused`, before anything is copied.
    """
    if not source.is_dir():
        await _send(sandbox, source, destination)
        return 1
    files: list[Path] = []
    links: list[tuple[str, str]] = []
    folders: list[str] = []
    for above, names, others in os.walk(source):
        for name in sorted([*names, *others]):
            place = Path(above) / name
            inside = place.relative_to(source).as_posix()
            mode = place.lstat().st_mode
            if stat.S_ISLNK(mode):
                target = os.readlink(place)
                if _leads_out(inside, target):
                    raise SandboxError(
                        f"upload {place}: the symlink leads out of {source}; found `{target}`", "refused"
                    )
                links.append((posixpath.join(destination, inside), target))
            elif stat.S_ISDIR(mode):
                folders.append(posixpath.join(destination, inside))
            elif stat.S_ISREG(mode):
                files.append(place)
            else:
                raise SandboxError(f"upload {place}: is neither file, folder nor symlink; leave it out", "refused")
    await sandbox.make_directory(destination)
    for folder in folders:
        await sandbox.make_directory(folder)
    for place in files:
        await _send(sandbox, place, posixpath.join(destination, place.relative_to(source).as_posix()))
    for link, target in links:
        made = await sandbox.exec(["ln", "-sfn", "--", target, link])
        if made.exit_code != 0:
            said = made.stderr.decode(errors="replace").strip()
            raise SandboxError(f"upload {link}: the sandbox could not make the symlink; {said[:200]}", "refused")
    return len(files) + len(links)


async def download(sandbox: Sandbox, source: str, destination: Path, *, most_bytes: int = MOST_BYTES) -> int:
    """Copy a folder, or one file, of a sandbox to the host.

    Nothing of it is there until all of it is.

    Args:
        sandbox: Where from.
        source: Folder or file inside. Symlinks are kept as such and must stay below it.
        destination: What it is called on the host; must not be there yet.
        most_bytes: More than this is refused.

    Returns:
        How many files and symlinks were copied.

    Raises:
        SandboxError: It is too much, or a symlink or a name leads or may lead out of the folder; kind `refused`.
    """
    if destination.exists():
        raise SandboxError(f"download {destination}: is there already; choose another name", "refused", status=409)
    top = await sandbox.stat(source)
    destination.parent.mkdir(parents=True, exist_ok=True)
    draft = Path(tempfile.mkdtemp(prefix=".download-", dir=destination.parent))
    try:
        if top.kind != "directory":
            await _fetch(sandbox, top, draft / "file", most_bytes)
            (draft / "file").rename(destination)
            return 1
        count = await _fetch_tree(sandbox, source, draft / "tree", most_bytes)
        (draft / "tree").rename(destination)
        return count
    finally:
        shutil.rmtree(draft, ignore_errors=True)


async def _fetch_tree(sandbox: Sandbox, source: str, destination: Path, most_bytes: int) -> int:
    destination.mkdir()
    count = entries = total = 0
    folders = [("", destination)]
    links: list[tuple[Path, str]] = []
    while folders:
        inside, folder = folders.pop()
        for entry in await sandbox.list(posixpath.join(source, inside) if inside else source):
            # what a sandbox calls its files is its own claim: no part of it may walk
            name = posixpath.basename(entry.path)
            if not name or name in (".", "..") or "/" in name or "\0" in name:
                raise SandboxError(f"download: {entry.path!r} is no name of a file here", "refused")
            entries += 1
            if entries > MOST_ENTRIES:
                raise SandboxError(f"download {source}: has more than {MOST_ENTRIES} entries; pack it first", "refused")
            place = folder / name
            path = posixpath.join(inside, name)
            if entry.kind == "directory":
                place.mkdir()
                folders.append((path, place))
            elif entry.kind == "symlink":
                if entry.target is None or _leads_out(path, entry.target):
                    raise SandboxError(f"download {entry.path!r}: the symlink leads out of {source}", "refused")
                links.append((place, entry.target))
                count += 1
            elif entry.kind == "file":
                total += entry.size
                if total > most_bytes:
                    raise SandboxError(
                        f"download {source}: is larger than most_bytes={most_bytes}; raise it", "refused"
                    )
                await _fetch(sandbox, entry, place, most_bytes)
                count += 1
    for place, target in links:  # last, so that nothing is ever written through one
        place.symlink_to(target)
    return count


async def _fetch(sandbox: Sandbox, entry: Entry, place: Path, most_bytes: int) -> None:
    done = 0
    with open(place, "xb") as file:
        while data := await sandbox.read(entry.path, done, CHUNK):
            done += len(data)
            if done > most_bytes:
                raise SandboxError(
                    f"download {entry.path!r}: is larger than most_bytes={most_bytes}; raise it", "refused"
                )
            file.write(data)
            if len(data) < CHUNK:
                break
    place.chmod(0o755 if entry.mode & 0o111 else 0o644)


async def _send(sandbox: Sandbox, place: Path, path: str) -> None:
    await sandbox.write(path, place.read_bytes(), stat.S_IMODE(place.stat().st_mode))


def _leads_out(inside: str, target: str) -> bool:
    """Whether a symlink leads, or may lead, out of the folder that it lies in, at the path `inside`."""
    if target.startswith("/"):
        return True
    parts = [part for part in target.split("/") if part not in ("", ".")]
    ups = next((place for place, part in enumerate(parts) if part != ".."), len(parts))
    # above its own folder the way up is known; behind a name, which may be a symlink too, it is not
    return ups > inside.count("/") or ".." in parts[ups:]
