"""What the machines stand on that need root on the host: a mounted disk, control groups, and a name for both."""

import asyncio
import hashlib
import os
import shutil
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path

from triax.errors import SandboxError
from triax.sandbox.backend.disk import until_released
from triax.sandbox.backend.group import Group, Hierarchies
from triax.sandbox.backend.tree import Tree
from triax.sandbox.protocol import Check, Usage


def prefix_of(root: Path, letter: str) -> str:
    """Return what the names of a backend's control groups begin with; the host has one space of them for all.

    Args:
        root: Where the files of its machines lie.
        letter: Which backend it is.
    """
    return hashlib.sha256(str(root.resolve()).encode()).hexdigest()[:8] + f"-{letter}-"


async def reap(
    hierarchies: Hierarchies,
    prefix: str,
    root: Path,
    live: frozenset[str],
    kept: set[str],
    forget: Callable[[str], None],
) -> list[tuple[str, int]]:
    """End every machine whose id is not live, and remove its groups and its disk.

    Args:
        hierarchies: Control groups of the host.
        prefix: What the names of the backend's groups begin with.
        root: Where the files of its machines lie.
        live: Ids that stay.
        kept: Names in `root` that are no machines.
        forget: Removes the files of one.

    Returns:
        The id of each that ended, and how many processes it had.
    """
    held = {label.removeprefix(prefix) for label in hierarchies.labels(prefix)}
    if root.is_dir():
        held |= {entry.name for entry in os.scandir(root)} - kept
    ended = []
    for id in sorted(held - live):
        group = Group(hierarchies, prefix + id)
        count = len(group.pids())
        await group.kill()
        await group.remove()
        await until_released(root / id / "disk.img")
        await asyncio.to_thread(forget, id)
        ended.append((id, count))
    return ended


async def checks(
    hierarchies: Hierarchies, tools: Mapping[str, str], name: str, program: Callable[[], Path]
) -> list[Check]:
    """Look for tools and rights, and whether a program can be compiled.

    Args:
        hierarchies: Control groups of the host.
        tools: Tools, each with the package that has it.
        name: What the program is called.
        program: Compiles it.
    """
    found = []
    for tool, package in tools.items():
        path = shutil.which(tool)
        found.append(Check(tool, path is not None, path or "not found", "" if path else f"apt-get install {package}"))
    is_root = os.geteuid() == 0
    found.append(Check("root", is_root, f"user {os.geteuid()}", "" if is_root else "run as root"))
    found.append(hierarchies.check())
    try:
        found.append(Check(name, True, str(await asyncio.to_thread(program))))
    except SandboxError as error:
        found.append(Check(name, False, str(error), "apt-get install gcc libc6-dev"))
    return found


def identify(tree: Tree, id: str, machine_id: str) -> None:
    """Write a machine's names into its files.

    Args:
        tree: Its files.
        id: Its host name.
        machine_id: 32 hexadecimal digits that no other machine has.
    """
    for path, text in {
        "/etc/hostname": f"{id}\n",
        "/etc/hosts": f"127.0.0.1 localhost {id}\n::1 localhost\n",
        "/etc/machine-id": f"{machine_id}\n",
    }.items():
        with suppress(SandboxError):  # an image may have a folder there; it keeps it
            tree.write(path, text.encode())


def usage(group: Group, disk: Path) -> Usage:
    """Return what a machine uses by its control groups and its disk's file."""
    used = group.usage()
    blocks = disk.stat().st_blocks * 512 if disk.exists() else None
    return Usage(used.cpu_s, used.memory_bytes, blocks, used.processes)
