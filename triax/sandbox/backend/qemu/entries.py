"""Entries of folders as the agent in a guest writes them down."""

import os
import posixpath
import stat
import struct

from triax.errors import SandboxError
from triax.sandbox.protocol import Entry

RECORD = struct.Struct("<IIIIQQ")


def entries(raw: bytes, folder: str) -> list[Entry]:
    """Read the records that the agent writes for folders and single entries.

    Args:
        raw: What it wrote.
        folder: The folder that their names are in.

    Raises:
        SandboxError: They are cut short.
    """
    found, at = [], 0
    kinds = {stat.S_IFREG: "file", stat.S_IFDIR: "directory", stat.S_IFLNK: "symlink"}
    try:
        while at < len(raw):
            mode, name_size, target_size, nanoseconds, size, seconds = RECORD.unpack_from(raw, at)
            at += RECORD.size
            name = os.fsdecode(raw[at : at + name_size])
            target = os.fsdecode(raw[at + name_size : at + name_size + target_size])
            at += name_size + target_size
            found.append(
                Entry(
                    path=posixpath.normpath(f"{folder}/{name}"),
                    kind=kinds.get(stat.S_IFMT(mode), "other"),  # type: ignore[arg-type]
                    size=size,
                    mode=stat.S_IMODE(mode),
                    modified_s=seconds + nanoseconds / 1e9,
                    target=target if stat.S_ISLNK(mode) else None,
                )
            )
    except struct.error:
        raise SandboxError(f"file {folder!r}: the guest sent a broken list") from None
    return found
