"""A guest's disk: a read-only file system at the bottom, and layers of what was written since.

Each layer is a qcow2 file without a name of what lies below; the chain is told to the emulator instead, so that layers
can be linked from folder to folder. A layer that has another above it is never written again.
"""

import errno
import json
import os
import shutil
import struct
import subprocess
from pathlib import Path
from typing import Any

from triax.errors import SandboxError

CLUSTER_BITS = 16
CLUSTER = 1 << CLUSTER_BITS
PIECE = 2**20
MOST_LAYERS = 12  # each costs the emulator an open file and a look-up on every miss


def make_layer(path: Path, size: int) -> None:
    """Write an empty qcow2 layer.

    Args:
        path: The file; must not be there.
        size: Bytes of the disk, the same as of the layer below.
    """
    entries = -(-size // (CLUSTER * CLUSTER // 8))
    if entries * 8 > CLUSTER:
        raise SandboxError(f"disk: {size >> 30} GiB are more than a layer can describe; lower `disk_mib`", "refused")
    # header, reference table, reference block and first-level table take a cluster each
    head = struct.pack(
        ">4sIQIIQIIQQIIQ", b"QFI\xfb", 3, 0, 0, CLUSTER_BITS, size, 0, entries, 3 * CLUSTER, CLUSTER, 1, 0, 0
    )
    head += struct.pack(">QQQII", 0, 0, 0, 4, 104)
    with path.open("xb") as file:
        file.truncate(4 * CLUSTER)
        file.write(head)
        file.seek(CLUSTER)
        file.write(struct.pack(">Q", 2 * CLUSTER))
        file.seek(2 * CLUSTER)
        file.write(struct.pack(">4H", 1, 1, 1, 1))


def _file(path: Path, *, read_only: bool) -> dict[str, Any]:
    return {"driver": "file", "filename": str(path), "locking": "off", "read-only": read_only}


def layer_node(path: Path, name: str, below: dict[str, Any] | None, *, read_only: bool = False) -> dict[str, Any]:
    """Describe one qcow2 layer to the emulator; `below` is none to have it attached later."""
    return {
        "driver": "qcow2",
        "node-name": name,
        "file": _file(path, read_only=read_only),
        "backing": below,
        "read-only": read_only,
        "cache": {"direct": False, "no-flush": True},
        "discard": "unmap",
    }


def chain(base: Path, layers: list[Path]) -> dict[str, Any]:
    """Describe a whole disk: layers from the lowest to the one that is written, over a base."""
    node: dict[str, Any] = {"driver": "raw", "file": _file(base, read_only=True), "read-only": True}
    for place, layer in enumerate(layers):
        top = place == len(layers) - 1
        node = layer_node(layer, f"layer{place}", node, read_only=not top)
    return node


def link(source: Path, destination: Path) -> None:
    """Give a file that nobody writes a second name; a copy where the two lie on different file systems."""
    try:
        os.link(source, destination)
    except OSError:
        copy_sparse(source, destination)


def copy_sparse(source: Path, destination: Path) -> None:
    """Copy a file with its holes.

    Raises:
        SandboxError: There is no room, or the source is gone.
    """
    try:
        with source.open("rb") as old, destination.open("xb") as new:
            size = os.fstat(old.fileno()).st_size
            os.ftruncate(new.fileno(), size)
            at = 0
            while at < size:
                try:
                    at = os.lseek(old.fileno(), at, os.SEEK_DATA)
                except OSError:
                    break
                end = os.lseek(old.fileno(), at, os.SEEK_HOLE)
                while at < end:
                    at += _copy_part(old.fileno(), new.fileno(), at, end - at)
    except OSError as problem:
        raise SandboxError(f"disk: cannot copy {source.name} for another machine; {problem.strerror}") from None


def _copy_part(old: int, new: int, at: int, size: int) -> int:
    """Copy some bytes at a place, within the kernel where both file systems let it, and return how many."""
    try:
        return os.copy_file_range(old, new, size, at, at)
    except OSError as problem:
        if problem.errno not in (errno.EXDEV, errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP):
            raise
    return os.pwrite(new, os.pread(old, min(size, PIECE), at), at)


def flatten(layers: list[Path], base: Path, size: int, destination: Path) -> None:
    """Write all layers of a disk as one, over the same base.

    Raises:
        SandboxError: `qemu-img` is missing or failed.
    """
    program = shutil.which("qemu-img")
    if program is None:
        raise SandboxError("disk: found no `qemu-img` to join layers with; run `apt-get install qemu-utils`")
    make_layer(destination, size)
    source = "json:" + json.dumps(plain(chain(base, layers)))
    target = "json:" + json.dumps(plain(chain(base, [destination])))
    command = [program, "convert", "-n", "-t", "unsafe", "-O", "qcow2"]
    done = subprocess.run([*command, source, target], capture_output=True, text=True, check=False)
    if done.returncode:
        raise SandboxError(f"disk: layers cannot be joined; qemu-img said: {done.stderr.strip()[-300:]}")


def plain(node: dict[str, Any]) -> dict[str, Any]:
    """Return a chain as the disk tools take it, without what only the emulator needs."""
    kept = {name: value for name, value in node.items() if name not in ("node-name", "cache")}
    if isinstance(kept.get("backing"), dict):
        kept["backing"] = plain(kept["backing"])
    return kept
