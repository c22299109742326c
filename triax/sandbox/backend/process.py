"""No sandbox at all: commands run on the host, as the caller, for code that is trusted and asked for as `unsafe`."""

import asyncio
import itertools
import os
import shutil
import signal
from collections.abc import Mapping, Sequence
from pathlib import Path

from triax.errors import SandboxError
from triax.sandbox.backend.child import Child, Spawned, gone, ran
from triax.sandbox.backend.files import ReachedFiles
from triax.sandbox.backend.owned import COMMAND, LABEL, labelled, signal_all
from triax.sandbox.backend.streams import Ends
from triax.sandbox.backend.tree import Tree
from triax.sandbox.command import start_folder, variables, words
from triax.sandbox.protocol import OUTPUT_LIMIT, Capabilities, Check, Machine, Result, Spec, Usage


class ProcessBackend:
    """Commands of the host in a folder of their own: no isolation, no quotas, no network rules.

    Args:
        root: Where the folders of its machines lie.
        unsafe: Must be true: whoever uses it has read this.

    Raises:
        SandboxError: `unsafe` is not true; kind `refused`.
    """

    name = "process"
    capabilities = Capabilities(disk_snapshot=True, suspend=True, terminals=True, expose=True)

    def __init__(self, root: Path, *, unsafe: bool = False) -> None:
        if not unsafe:
            raise SandboxError(
                "backend process: runs commands on this host without any isolation; "
                "pass `unsafe=True` if all of them are trusted, or use `namespace`, `gvisor` or `qemu`",
                "refused",
            )
        self.root = root
        self.copying: set[str] = set()

    async def create(self, spec: Spec, id: str) -> "ProcessMachine":
        """Make an empty folder for a machine."""
        _refuse_what_it_cannot(spec)
        machine = ProcessMachine(self, spec, id, generation=0)
        machine.files.mkdir(parents=True)
        return machine

    async def restore(
        self, folder: Path, spec: Spec, id: str, generation: int, *, deterministic: bool = False
    ) -> "ProcessMachine":
        """Make a folder with a copy of the snapshot's files."""
        _refuse_what_it_cannot(spec)
        machine = ProcessMachine(self, spec, id, generation)
        machine.files.parent.mkdir(parents=True)
        try:
            await copy_tree(folder / "files", machine.files)
        except BaseException:
            shutil.rmtree(machine.files.parent, ignore_errors=True)
            raise
        return machine

    async def reap(self, live: frozenset[str]) -> list[str]:
        """End labelled processes and remove folders whose id is not live."""
        ended = []
        known = set(os.listdir(self.root)) if self.root.is_dir() else set()
        for id in sorted(known - live - self.copying):
            count = signal_all(LABEL, f"{self.root}/{id}", signal.SIGKILL)
            shutil.rmtree(self.root / id, ignore_errors=True)
            ended.append(f"process machine {id}: {count} processes and its folder")
        return ended

    async def checks(self) -> list[Check]:
        """It needs nothing."""
        return [Check("no isolation", True, "commands run on this host as the caller")]


class ProcessMachine(ReachedFiles):
    """A folder of the host and the processes that were started in it."""

    def __init__(self, backend: ProcessBackend, spec: Spec, id: str, generation: int) -> None:
        self.backend = backend
        self.spec = spec
        self.id = id
        self.generation = generation
        self.files = backend.root / id / "files"
        self.label = f"{backend.root}/{id}"
        self.tree = Tree("/", home=start_folder(None, spec.cwd, str(self.files)))
        self._numbers = itertools.count()
        self._children: set[Child] = set()
        self._ended = False

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
        """Run a command of the host to its end."""
        child = self._child(argv, env, cwd, user, None, output_limit)
        return await child.finish(stdin, timeout_s)

    async def start(
        self,
        argv: Sequence[str] | str,
        *,
        env: Mapping[str, str] | None = None,
        cwd: str | None = None,
        user: str | None = None,
        terminal: tuple[int, int] | None = None,
    ) -> Child:
        """Start a process of the host."""
        return self._child(argv, env, cwd, user, terminal, None)

    def _child(
        self,
        argv: Sequence[str] | str,
        env: Mapping[str, str] | None,
        cwd: str | None,
        user: str | None,
        terminal: tuple[int, int] | None,
        keep: int | None,
    ) -> Child:
        if self._ended:
            raise SandboxError(f"sandbox {self.id}: has ended; create another", "infrastructure")
        if user not in (None, "user", "root"):
            raise SandboxError(f"user {user!r}: the process backend runs all as the caller; leave it out", "refused")
        parts = words(argv)
        number = f"{self.label}/{next(self._numbers)}"
        inside = start_folder(cwd, self.spec.cwd, str(self.files))
        if not os.path.isdir(inside):
            raise SandboxError(f"cwd {cwd!r}: there is no such folder; make it first", "refused", status=404)
        own = {"PATH": os.environ.get("PATH", os.defpath), "HOME": str(self.files), "LANG": "C.UTF-8", "TERM": "xterm"}
        whole = own | variables(self.spec.env) | variables(env) | {LABEL: self.label, COMMAND: number}
        program = shutil.which(parts[0], path=whole["PATH"])
        if program is None and "/" not in parts[0]:
            parts = ["/bin/sh", "-c", 'exec "$@"', "sh", *parts]  # the shell says 127 as everywhere
        elif "/" in parts[0]:
            parts = ["/bin/sh", "-c", 'exec "$@"', "sh", *parts]

        ends = Ends(terminal)
        spawned = Spawned(parts, ends, env=whole, cwd=inside)

        def send(signal_number: int) -> None:
            if signal_number == signal.SIGKILL:
                signal_all(COMMAND, number, signal.SIGKILL)
            spawned.send(signal_number)

        child = Child(spawned, ends, keep=keep, signal=send, describe=self._describe)
        self._children = {kept for kept in self._children if kept.running} | {child}
        return child

    def _describe(self, result: Result) -> Result:
        return ended_meanwhile(result) if self._ended and result.outcome == "ok" else result

    def files_at(self, *paths: str) -> Tree:
        """Return the host's whole tree; an absolute path is one of the host."""
        return self.tree

    async def expose(self, port: int) -> tuple[str, int]:
        """Return the port itself: it is the host's."""
        return "127.0.0.1", port

    async def pause(self) -> None:
        """Stop its processes where they are."""
        signal_all(LABEL, self.label, signal.SIGSTOP)

    async def resume(self) -> None:
        """Let them go on."""
        signal_all(LABEL, self.label, signal.SIGCONT)

    async def suspend(self, folder: Path) -> None:
        """Keep the files and end the processes."""
        await self.snapshot(folder)
        await self.kill()

    async def snapshot(self, folder: Path, parent: Path | None = None) -> None:
        """Copy the files while the processes stand still."""
        await self.pause()
        try:
            await copy_tree(self.files, folder / "files")
        finally:
            await self.resume()

    async def fork(self, ids: Sequence[str], *, deterministic: bool = False) -> "Sequence[Machine | SandboxError]":
        """Copy the files once for each copy."""
        held = self.backend.root / f"copy-{self.id}"
        self.backend.copying.add(held.name)
        try:
            await self.snapshot(held)
            copies: list[Machine | SandboxError] = []
            for id in ids:
                try:
                    copies.append(await self.backend.restore(held, self.spec, id, self.generation + 1))
                except SandboxError as error:
                    copies.append(error)
            return copies
        finally:
            await asyncio.to_thread(shutil.rmtree, held, ignore_errors=True)
            self.backend.copying.discard(held.name)

    async def kill(self) -> None:
        """End its processes and remove its folder."""
        self._ended = True
        await asyncio.to_thread(signal_all, LABEL, self.label, signal.SIGKILL)
        await gone(self._children)
        await asyncio.to_thread(shutil.rmtree, self.files.parent, ignore_errors=True)

    async def is_alive(self) -> bool:
        """Tell whether its folder is there."""
        return not self._ended and self.files.is_dir()

    async def usage(self) -> Usage:
        """Return how many processes it has."""
        return Usage(processes=len(labelled(LABEL, self.label)))


def ended_meanwhile(result: Result) -> Result:
    """Tell that a command ended because its sandbox did: no fault of the command."""
    return Result(
        "infrastructure",
        stdout=result.stdout,
        stderr=result.stderr,
        truncated=result.truncated,
        duration_s=result.duration_s,
        detail="the sandbox ended while the command ran",
    )


async def copy_tree(source: Path, destination: Path) -> None:
    """Copy a folder with all kinds of files in it, sharing blocks where the file system can.

    Raises:
        SandboxError: The host's disk is full or does not take it; kind `infrastructure`.
    """
    destination.mkdir(parents=True)
    result = await ran(["cp", "-a", "--reflink=auto", "--", f"{source}/.", str(destination)], timeout_s=600.0)
    if result.exit_code != 0:
        raise SandboxError(f"copy of {source}: failed; {result.stderr.decode(errors='replace').strip()[:300]}")


def _refuse_what_it_cannot(spec: Spec) -> None:
    if spec.image is not None:
        raise SandboxError(f"image {spec.image!r}: the process backend has none; use `namespace` or `qemu`", "refused")
    if spec.network.allow_out:
        raise SandboxError("network: the process backend cannot hold `allow_out`; use `qemu`", "refused")
