"""Light sandboxes on the host's kernel: bubblewrap's namespaces, a disk of their own, control groups for quotas."""

import asyncio
import json
import os
import secrets
import shutil
import socket
from collections.abc import AsyncGenerator, Generator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from pathlib import Path

from triax.errors import SandboxError
from triax.sandbox.backend import grounded, init, seccomp
from triax.sandbox.backend.child import Child, Spawned, ran
from triax.sandbox.backend.disk import copy_disk, empty_disk, flush, ground_program, keep_disk, own, until_released
from triax.sandbox.backend.files import ReachedFiles
from triax.sandbox.backend.group import Group, Hierarchies
from triax.sandbox.backend.inward import Forwards
from triax.sandbox.backend.layout import HOME, USER, USER_NUMBER, bubblewrap, placed, skeleton, variables_of
from triax.sandbox.backend.owned import end_below
from triax.sandbox.backend.process import ended_meanwhile
from triax.sandbox.backend.streams import Ends
from triax.sandbox.backend.tree import Tree
from triax.sandbox.command import start_folder, variables, words
from triax.sandbox.errnos import exit_code, folder_refusal, start_refusal
from triax.sandbox.protocol import OUTPUT_LIMIT, Capabilities, Check, Machine, Outcome, Result, Spec, Usage

FIRST_OWNER = 2_000_000  # users of the host that nobody else has; each sandbox and its copies have one
OWNERS = 1_000_000
TOOLS = {
    "bwrap": "bubblewrap",
    "unshare": "util-linux",
    "setpriv": "util-linux",
    "mke2fs": "e2fsprogs",
    "mount": "mount",
}


class NamespaceBackend:
    """Sandboxes that share the host's kernel, for light tasks: start in milliseconds, files survive, memory does not.

    Each has namespaces of its own, no network but its own loopback, one user without privileges, a filter of system
    calls, quotas by control groups, and a disk of exactly the size asked for. It needs root on the host, to mount that
    disk and to make control groups; what runs inside never has it.

    Args:
        root: Where its machines' files lie; on the file system that snapshots lie on.
        hierarchies: Control groups; those found on this host if none.
    """

    name = "namespace"
    capabilities = Capabilities(disk_snapshot=True, suspend=True, terminals=True, expose=True, oci_images=True)

    def __init__(self, root: Path, *, hierarchies: Hierarchies | None = None) -> None:
        self.root = root
        self.hierarchies = hierarchies or Hierarchies.found()
        self.prefix = grounded.prefix_of(root, "n")

    async def create(self, spec: Spec, id: str) -> "NamespaceMachine":
        """Start a machine with an empty disk, or with an image below it."""
        spec = await asyncio.to_thread(placed, spec)
        if spec.network.allow_internet:
            raise SandboxError("network: a namespace sandbox reaches nothing; leave it out, or use `qemu`", "refused")
        empty = await empty_disk(self.root / "templates", spec.resources.disk_mib, skeleton(spec.image))
        owner = FIRST_OWNER + secrets.randbelow(OWNERS)
        return await self.start(spec, id, generation=0, owner=owner, disk=empty, fresh=True)

    async def restore(
        self, folder: Path, spec: Spec, id: str, generation: int, *, deterministic: bool = False
    ) -> "NamespaceMachine":
        """Start a machine with a copy of a snapshot's disk."""
        spec = await asyncio.to_thread(placed, spec)
        held = json.loads((folder / "namespace.json").read_text())
        if spec.image != held["image"] or spec.resources.disk_mib != held["disk_mib"]:
            raise SandboxError(
                f"snapshot {folder.name}: has image `{held['image']}` and a disk of {held['disk_mib']} MiB; found "
                f"`{spec.image}` and {spec.resources.disk_mib} MiB; ask for the same",
                "refused",
            )
        disk = folder / "disk.img"
        return await self.start(spec, id, generation=generation, owner=held["owner"], disk=disk, fresh=False)

    async def start(
        self, spec: Spec, id: str, *, generation: int, owner: int, disk: Path, fresh: bool
    ) -> "NamespaceMachine":
        """Start a machine on a copy of a disk; nothing is left if that fails."""
        machine = NamespaceMachine(self, spec, id, generation, owner)
        try:
            machine.folder.mkdir(parents=True, mode=0o700)
            await copy_disk(disk, machine.disk)
            await machine.boot(fresh=fresh)
        except BaseException:
            await asyncio.shield(machine.kill())
            raise
        return machine

    async def reap(self, live: frozenset[str]) -> list[str]:
        """End what is labelled with an id that is not live."""

        def forget(id: str) -> None:
            shutil.rmtree(self.root / id, ignore_errors=True)

        ended = await grounded.reap(self.hierarchies, self.prefix, self.root, live, {"templates"}, forget)
        return [f"namespace machine {id}: {count} processes, its groups and its disk" for id, count in ended]

    async def checks(self) -> list[Check]:
        """Look for its tools, its rights, and whether bubblewrap really starts."""
        found = await grounded.checks(self.hierarchies, TOOLS, "first process", init.program)
        if shutil.which("bwrap"):
            tried = await ran(["bwrap", "--unshare-all", "--ro-bind", "/", "/", "true"])
            said = tried.stderr.decode(errors="replace").strip() or "it starts"
            to_do = "" if tried.exit_code == 0 else "allow user namespaces: sysctl kernel.unprivileged_userns_clone=1"
            found.append(Check("bubblewrap starts", tried.exit_code == 0, said, to_do))
        return found


class NamespaceMachine(ReachedFiles):
    """Processes in namespaces of their own, with a disk of their own."""

    def __init__(self, backend: NamespaceBackend, spec: Spec, id: str, generation: int, owner: int) -> None:
        self.backend = backend
        self.spec = spec
        self.id = id
        self.generation = generation
        self.owner = owner
        self.folder = backend.root / id
        self.disk = self.folder / "disk.img"
        self.group = Group(backend.hierarchies, backend.prefix + id)
        self._init: init.Init | None = None
        self._outer: Spawned | None = None
        self._pid = 0
        self._paused = False
        self._ended = False
        self._children: set[Child] = set()
        self._forwards = Forwards()

    async def boot(self, *, fresh: bool) -> None:
        """Start the first process on the disk, and give the machine its identity.

        Raises:
            SandboxError: The host does not allow it.
        """
        self.group.make(self.spec.resources)
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        program, enter = await asyncio.gather(asyncio.to_thread(init.program), asyncio.to_thread(ground_program))
        filter_program = seccomp.program()
        ends = Ends(None)
        with theirs, open(program, "rb") as first, _memory(filter_program) as filtering:
            inner = bubblewrap(self.spec, self.id, theirs.fileno(), first.fileno(), filtering)
            entrances = self.group.entrances()
            ground = [str(enter), str(self.disk), self.spec.image or "-", str(self.owner), "become"]
            argv = [*ground, str(len(entrances)), *entrances, *inner]
            fds = [fd for fd in (theirs.fileno(), first.fileno(), filtering) if fd is not None]
            self._init = init.Init(ours)
            self._outer = Spawned(argv, ends, env={"PATH": os.defpath + ":/usr/sbin:/sbin"}, pass_fds=fds)
        outer = Child(self._outer, ends, keep=4096, signal=self._outer.send)
        ready = self._init.ready
        await asyncio.wait(
            {ready, self._init.gone, self._outer.ended}, timeout=init.START_S, return_when=asyncio.FIRST_COMPLETED
        )
        if not ready.done() or ready.cancelled():
            self._outer.send(9)
            said = (await outer.finish(b"", 1)).stderr.decode(errors="replace").strip()
            raise SandboxError(
                f"sandbox {self.id}: bubblewrap did not start; {said[:300] or 'it said nothing'}; see `doctor`"
            )
        self._pid = ready.result()
        await outer.close_stdin()
        await asyncio.to_thread(self._identify, fresh)

    def _identify(self, fresh: bool) -> None:
        if fresh:
            own(f"/proc/{self._pid}/root", self.owner)
        grounded.identify(self.tree, self.id, secrets.token_hex(16))

    @property
    def tree(self) -> Tree:
        """Its files, as the host reaches them."""
        return Tree(f"/proc/{self._pid}/root", home=start_folder(None, self.spec.cwd, HOME), owner=self.owner)

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
        """Run a command to its end; if memory ran out meanwhile and it failed, that is its outcome."""
        ooms, refusals = self.group.out_of_memory(), self.group.refused_processes()
        child, command = await self._child(argv, env, cwd, user, None, output_limit)
        result = await child.finish(stdin, timeout_s)
        return self._judged(
            result, command, self.group.out_of_memory() - ooms, self.group.refused_processes() - refusals
        )

    async def start(
        self,
        argv: Sequence[str] | str,
        *,
        env: Mapping[str, str] | None = None,
        cwd: str | None = None,
        user: str | None = None,
        terminal: tuple[int, int] | None = None,
    ) -> Child:
        """Start a process that lives on."""
        child, _ = await self._child(argv, env, cwd, user, terminal, None)
        return child

    async def _child(
        self,
        argv: Sequence[str] | str,
        env: Mapping[str, str] | None,
        cwd: str | None,
        user: str | None,
        terminal: tuple[int, int] | None,
        keep: int | None,
    ) -> tuple[Child, init.Command]:
        if self._ended or self._init is None:
            raise SandboxError(f"sandbox {self.id}: has ended; create another")
        if user not in (None, USER, str(USER_NUMBER)):
            raise SandboxError(f"user {user!r}: a namespace sandbox has one, `{USER}`; leave it out", "refused")
        parts = words(argv)
        whole = variables_of(self.spec, self.id, self.generation) | variables(env)
        folder = start_folder(cwd, self.spec.cwd, HOME)
        ends = Ends(terminal)
        command = await self._init.run(parts, whole, folder, ends)

        def send(number: int) -> None:
            command.send(number)
            if number == 9 and command.above:
                asyncio.get_running_loop().run_in_executor(None, end_below, command.above)

        def describe(result: Result) -> Result:
            return self._judged(result, command, 0, 0) if keep is None else result

        child = Child(command, ends, keep=keep, signal=send, number=command.number, describe=describe)
        self._children = {kept for kept in self._children if kept.running} | {child}
        return child, command

    def _judged(self, result: Result, command: init.Command, ooms: int, refusals: int) -> Result:
        outcome, exit_code, stderr, detail = result.outcome, result.exit_code, result.stderr, result.detail
        if self._ended or (self._init and self._init.gone.done()):
            return ended_meanwhile(result)
        if command.failure is not None:
            outcome, exit_code, stderr = _unstarted(command.failure, command.folder, stderr)
        if ooms and outcome == "ok":
            detail = f"memory ran out: all processes together had {self.spec.resources.memory_mib} MiB"
            if exit_code != 0:
                outcome = "out_of_memory"
        elif refusals and not detail:
            detail = f"{refusals} processes could not be started: the limit is {self.spec.resources.processes}"
        return Result(
            outcome, exit_code, result.signal, result.stdout, stderr, result.truncated, result.duration_s, detail
        )

    def files_at(self, *paths: str) -> Tree:
        """Return its files, as the host reaches them."""
        return self.tree

    async def expose(self, port: int) -> tuple[str, int]:
        """Return a port of the host's loopback that reaches one of the sandbox's."""
        return await self._forwards.open(self._pid, port)

    async def pause(self) -> None:
        """Stop every process in the kernel; memory stays."""
        self._must_live()
        await self.group.freeze()
        self._paused = True

    async def resume(self) -> None:
        """Let every process go on; the clock is the host's and never stood still."""
        self._must_live()
        self.group.thaw()
        self._paused = False

    async def suspend(self, folder: Path) -> None:
        """Keep the disk, end the processes."""
        async with self._still():
            await asyncio.to_thread(flush, f"/proc/{self._pid}/root")
            keep_disk(self.disk, folder)
            self._describe_into(folder)
            # from here on nothing can fail that would still need the machine: the kept file is the disk itself
            await self.kill()

    async def snapshot(self, folder: Path, parent: Path | None = None) -> None:
        """Copy the disk while the processes stand still."""
        async with self._still():
            await asyncio.to_thread(flush, f"/proc/{self._pid}/root")
            await copy_disk(self.disk, folder / "disk.img")
        self._describe_into(folder)

    async def fork(self, ids: Sequence[str], *, deterministic: bool = False) -> "Sequence[Machine | SandboxError]":
        """Start machines on copies of the disk, without the source's processes."""
        held = self.folder / "copy.img"
        async with self._still():
            await asyncio.to_thread(flush, f"/proc/{self._pid}/root")
            await copy_disk(self.disk, held)
        try:
            return await asyncio.gather(*(self._copy(held, id) for id in ids))
        finally:
            held.unlink(missing_ok=True)

    async def _copy(self, disk: Path, id: str) -> "Machine | SandboxError":
        generation = self.generation + 1
        try:
            return await self.backend.start(
                self.spec, id, generation=generation, owner=self.owner, disk=disk, fresh=False
            )
        except SandboxError as error:
            return error

    async def kill(self) -> None:
        """End every process, and remove the disk."""
        self._ended = True
        self._forwards.close()
        if self._init is not None:
            self._init.close()
        if self._outer is not None:
            self._outer.send(9)
        await self.group.kill()
        if self._outer is not None:
            with suppress(TimeoutError):
                await asyncio.wait_for(asyncio.shield(self._outer.ended), 5)
        for child in self._children:
            child.release()
        await self.group.remove()
        await until_released(self.disk)
        await asyncio.to_thread(shutil.rmtree, self.folder, ignore_errors=True)

    async def is_alive(self) -> bool:
        """Tell whether its first process is there."""
        return not self._ended and self._init is not None and not self._init.gone.done()

    async def usage(self) -> Usage:
        """Return what it uses."""
        return grounded.usage(self.group, self.disk)

    def _describe_into(self, folder: Path) -> None:
        held = {"owner": self.owner, "image": self.spec.image, "disk_mib": self.spec.resources.disk_mib}
        (folder / "namespace.json").write_text(json.dumps(held))

    def _must_live(self) -> None:
        if self._ended or self._init is None or self._init.gone.done():
            raise SandboxError(f"sandbox {self.id}: has ended; create another")

    @asynccontextmanager
    async def _still(self) -> AsyncGenerator[None]:
        """Stop every process for as long as the block takes, unless they are stopped already."""
        self._must_live()
        await self.group.freeze()
        try:
            yield
        finally:
            if not self._ended and not self._paused:
                self.group.thaw()


@contextmanager
def _memory(content: bytes | None) -> Generator[int | None]:
    """Hold bytes in a descriptor that reads them from the start."""
    if content is None:
        yield None
        return
    fd = os.memfd_create("filter", os.MFD_CLOEXEC)
    try:
        os.write(fd, content)
        os.lseek(fd, 0, os.SEEK_SET)
        yield fd
    finally:
        os.close(fd)


def _unstarted(failure: tuple[int, int], folder: str, stderr: bytes) -> tuple[Outcome, int | None, bytes]:
    code, step = failure
    if step == init.AT_FOLDER:
        raise folder_refusal(code, folder)
    if step == init.AT_PROGRAM:
        return "ok", exit_code(code), stderr + f"exec: {os.strerror(code)}\n".encode()
    raise start_refusal(code)
