"""What this host needs for gVisor, and how its machines are started, found and ended."""

import asyncio
import shutil
from pathlib import Path

from triax.errors import SandboxError
from triax.sandbox.backend import grounded
from triax.sandbox.backend.child import ran
from triax.sandbox.backend.disk import copy_disk, empty_disk
from triax.sandbox.backend.group import Hierarchies
from triax.sandbox.backend.gvisor.bundle import extra, held, relay, resources
from triax.sandbox.backend.gvisor.machine import GvisorMachine
from triax.sandbox.backend.layout import placed, skeleton
from triax.sandbox.protocol import Capabilities, Check, Spec

TOOLS = {"runsc": "runsc", "mke2fs": "e2fsprogs"}


class GvisorBackend:
    """Sandboxes whose system calls a user-space kernel answers, with durable snapshots of memory and files.

    A snapshot ends the kernel and starts it again from what was written: commands that run meanwhile go on, but whoever
    waits for one is told that the machine changed. It needs root on the host, to mount disks and make control groups.

    Args:
        root: Where its machines' files lie; on the file system that snapshots lie on.
        platform: How gVisor intercepts system calls, such as `ptrace` (works everywhere) or `kvm`.
        hierarchies: Control groups; those found on this host if none.
    """

    name = "gvisor"
    capabilities = Capabilities(
        memory_snapshot=True, disk_snapshot=True, fork_running=True, suspend=True, oci_images=True
    )

    def __init__(self, root: Path, *, platform: str = "ptrace", hierarchies: Hierarchies | None = None) -> None:
        self.root = root
        self.platform = platform
        self.hierarchies = hierarchies or Hierarchies.found()
        self.prefix = grounded.prefix_of(root, "g")

    def runsc(self, *words: str) -> list[str]:
        """Return a command of `runsc` for this backend's machines."""
        flags = [f"--root={self.root / 'state'}", f"--platform={self.platform}", "--network=none"]
        return ["runsc", *flags, "--ignore-cgroups", "--file-access=shared", *words]

    async def create(self, spec: Spec, id: str) -> GvisorMachine:
        """Start a machine with an empty disk, or with an image below it."""
        spec = await asyncio.to_thread(placed, spec)
        # a file in /tmp keeps gVisor from putting memory there, which the host could not reach
        empty = await empty_disk(
            self.root / "templates", spec.resources.disk_mib, {**skeleton(spec.image), **extra(spec.image)}
        )
        return await self._start(GvisorMachine(self, spec, id, 0), empty, None)

    async def restore(
        self, folder: Path, spec: Spec, id: str, generation: int, *, deterministic: bool = False
    ) -> GvisorMachine:
        """Start a machine from a snapshot's memory, with a copy of its disk."""
        spec = await asyncio.to_thread(placed, spec)
        made = held(folder)
        found = {"image": spec.image, "resources": resources(spec), "version": await self.version()}
        for name, value in found.items():
            if made[name] != value:
                raise SandboxError(
                    f"snapshot {folder.name}: was taken with {name} `{made[name]}`; found `{value}`; ask for the same",
                    "refused",
                    status=409,
                )
        machine = GvisorMachine(self, spec, id, generation, deterministic=deterministic)
        return await self._start(machine, folder / "disk.img", folder)

    async def _start(self, machine: GvisorMachine, disk: Path, memory: Path | None) -> GvisorMachine:
        try:
            machine.folder.mkdir(parents=True, mode=0o700)
            await copy_disk(disk, machine.disk)
            await machine.boot(memory)
        except BaseException:
            await asyncio.shield(machine.kill())
            raise
        return machine

    async def version(self) -> str:
        """Return the version of `runsc`; memory written by one is not read by another."""
        told = await ran(["runsc", "--version"])
        return told.stdout.decode(errors="replace").splitlines()[0].strip() if told.exit_code == 0 else "unknown"

    async def reap(self, live: frozenset[str]) -> list[str]:
        """End what is labelled with an id that is not live."""
        kept = {"templates", "state"}
        ended = await grounded.reap(self.hierarchies, self.prefix, self.root, live, kept, self.forget)
        return [f"gvisor machine {id}: {count} processes, its groups and its disk" for id, count in ended]

    def forget(self, id: str) -> None:
        """Remove a machine's files, and what `runsc` wrote down about it."""
        shutil.rmtree(self.root / id, ignore_errors=True)
        for path in (self.root / "state").glob(f"{self.prefix}{id}*"):
            path.unlink(missing_ok=True)

    async def checks(self) -> list[Check]:
        """Look for its tools and its rights."""
        return await grounded.checks(self.hierarchies, TOOLS, "relay", relay)
