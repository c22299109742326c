"""One machine on gVisor: its kernel in user space, its commands, and how it is put away and comes back."""

import asyncio
import json
import os
import posixpath
import secrets
import shutil
import signal
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from triax.errors import SandboxError
from triax.sandbox.backend import grounded
from triax.sandbox.backend.child import Child, Spawned, gone, ran
from triax.sandbox.backend.disk import copy_disk, flush, ground_program, keep_disk, until_released
from triax.sandbox.backend.files import ReachedFiles
from triax.sandbox.backend.group import Group
from triax.sandbox.backend.gvisor.bundle import ALLOWED, HELD, configuration, held, is_kernel, relay, resources
from triax.sandbox.backend.layout import PATH
from triax.sandbox.backend.owned import COMMAND
from triax.sandbox.backend.process import ended_meanwhile
from triax.sandbox.backend.streams import Ends
from triax.sandbox.backend.tree import Tree
from triax.sandbox.command import start_folder, variables, words
from triax.sandbox.protocol import OUTPUT_LIMIT, Entry, Machine, Result, Spec, Usage

if TYPE_CHECKING:
    from triax.sandbox.backend.gvisor.backend import GvisorBackend

RELAY = "/run/triax/relay"
FIRST_PATH = f"/run/triax:{PATH}"  # `ls` and `stat` of today ask old gVisor kernels in a way that those refuse
USERS = {"root": 0, "user": 1000}
HOME = "/root"
OWN_MEMORY_MIB = 96  # what gVisor's kernel takes itself, beside the task's memory
OWN_PROCESSES = 160  # its threads
TASKS_OF_ONE = 32  # at most, that the host counts for each process inside; refused one, the kernel of gVisor ends
START_S = 30.0
LOOK_S = 0.02  # between two looks at whether a command has begun
NAME_CAPABILITY = "CAP_SYS_ADMIN"
GENERATION = "/etc/triax/generation"  # beside the programs that are shown, `/run/triax/generation` leads there
HOOKS = "/etc/triax/restore.d"
HOOK_S = 2.0


class GvisorMachine(ReachedFiles):
    """One gVisor kernel with its processes."""

    def __init__(
        self, backend: "GvisorBackend", spec: Spec, id: str, generation: int, *, deterministic: bool = False
    ) -> None:
        self.backend = backend
        self.spec = spec
        self.id = id
        self.generation = generation
        self._tells = not deterministic
        self.folder = backend.root / id
        self.disk = self.folder / "disk.img"
        self.name = backend.prefix + id  # the host has one space of names for all its owners
        self.group = Group(backend.hierarchies, self.name)
        self.relay = Path()
        self._holder: Spawned | None = None
        self._paused = False
        self._ended = False
        self._epoch = 0
        self._open = asyncio.Event()
        self._open.set()
        self._children: set[Child] = set()
        self._tasks: set[asyncio.Task[object]] = set()

    async def boot(self, memory: Path | None) -> None:
        """Start the kernel, afresh or from a snapshot's folder.

        Raises:
            SandboxError: It did not start.
        """
        own = self.spec.resources
        tasks = own.processes * TASKS_OF_ONE + OWN_PROCESSES
        self.group.make(replace(own, memory_mib=own.memory_mib + OWN_MEMORY_MIB, processes=tasks))
        self.relay = await asyncio.to_thread(relay, held(memory)["relay"] if memory else None)
        bundle = self.folder / "bundle"
        bundle.mkdir(exist_ok=True)
        (bundle / "config.json").write_text(json.dumps(configuration(self.spec, self.id, self.relay)))
        entrances = self.group.entrances()
        deed = ["restore", f"--image-path={memory}"] if memory else ["run"]
        inner = self.backend.runsc(*deed, "--detach", f"--bundle={bundle}", self.name)
        enter = await asyncio.to_thread(ground_program)
        ground = [str(enter), str(self.disk), self.spec.image or "-", "-", "stay"]
        ends = Ends(None)
        argv = [*ground, str(len(entrances)), *entrances, *inner]
        self._holder = Spawned(argv, ends, env={"PATH": os.defpath + ":/usr/sbin:/sbin"})
        holder = Child(self._holder, ends, keep=None, signal=self._holder.send)
        said = b""
        try:
            async with asyncio.timeout(START_S):
                async for _, data in holder.output():
                    said += data
                    if said.endswith(b"up\n"):
                        break
        except TimeoutError:
            said += b"it took too long"
        if not said.endswith(b"up\n"):
            lines = said.decode(errors="replace").strip().splitlines() or ["it said nothing"]
            raise SandboxError(f"sandbox {self.id}: gVisor did not start; {lines[0][:300]}; see `doctor`")
        holder.release()
        await self._identify(afresh=memory is None)

    async def _identify(self, *, afresh: bool) -> None:
        await asyncio.to_thread(grounded.identify, self.tree, self.id, secrets.token_hex(16))
        if not afresh:
            named = await ran(
                self.backend.runsc("exec", f"--cap={NAME_CAPABILITY}", self.name, RELAY, "name", self.id),
                timeout_s=START_S,
            )
            if named.exit_code != 0:
                said = named.stderr.decode(errors="replace").strip()
                raise SandboxError(f"sandbox {self.id}: does not answer after its restore; {said[:300]}")
        if self._tells:
            await self._tell_generation()
        self._tells = True

    async def _tell_generation(self) -> None:
        """Let hooks run where this is another machine than before, and write its number last, as a guest of qemu does.

        What was restored runs already: gVisor has no moment at which its processes stand still.
        """
        now, before = f"{self.generation}\n".encode(), b""
        with suppress(SandboxError):
            before = await asyncio.to_thread(self.tree.read, GENERATION)
        if before == now:
            return
        hooks: list[Entry] = []
        with suppress(SandboxError):
            hooks = await asyncio.to_thread(self.tree.list, HOOKS)
        number = f"--env=TRIAX_GENERATION={self.generation}"
        for hook in (one.path for one in hooks if not posixpath.basename(one.path).startswith(".")):
            run = [f"--env=PATH={FIRST_PATH}", number, *[f"--cap={name}" for name in ALLOWED], "--cwd=/", self.name]
            await ran(self.backend.runsc("exec", *run, RELAY, "hook", hook), timeout_s=HOOK_S + START_S)
        with suppress(SandboxError):  # an image may have a folder there; it keeps it
            await asyncio.to_thread(self.tree.write, GENERATION, now)

    @property
    def tree(self) -> Tree:
        """Its files, as the host reaches them."""
        assert self._holder is not None
        root = f"/proc/{self._holder.pid}/root/mnt" + ("/root" if self.spec.image else "")
        home = "/root" if USERS.get(self.spec.user or "root") == 0 else HOME
        return Tree(root, home=start_folder(None, self.spec.cwd, home))

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
        """Run a command to its end; one that a signal ended has exit code 128 and its number."""
        child = await self._child(argv, env, cwd, user, output_limit)
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
        """Start a process that lives on; it has no terminal."""
        if terminal is not None:
            raise SandboxError("start: gvisor sandboxes have no terminals here; leave it out, or use `qemu`", "refused")
        return await self._child(argv, env, cwd, user, None)

    async def _child(
        self,
        argv: Sequence[str] | str,
        env: Mapping[str, str] | None,
        cwd: str | None,
        user: str | None,
        keep: int | None,
    ) -> Child:
        self._must_live()
        number = USERS.get(user or self.spec.user or "root")
        if number is None and (user or "").isdecimal():
            number = int(user or "0")
        if number is None:
            raise SandboxError(f"user {user!r}: found no such user; give a number, `root` or `user`", "refused")
        home = "/root" if number == 0 else HOME
        folder = start_folder(cwd, self.spec.cwd, home)
        if not folder.startswith(("/proc", "/dev", "/sys", "/usr")):
            await asyncio.to_thread(self._enter, folder)
        own = {
            "PATH": FIRST_PATH,
            "HOME": home,
            "LANG": "C.UTF-8",
            "TERM": "xterm-256color",
        }
        own |= {"TRIAX_SANDBOX": self.id, "TRIAX_GENERATION": str(self.generation)}
        token = secrets.token_hex(8)  # unlike that of any command that came along from before a restore
        whole = own | variables(self.spec.env) | variables(env) | {COMMAND: token}
        inside = [f"--env={name}={value}" for name, value in whole.items()]
        capabilities = [f"--cap={name}" for name in ALLOWED]
        run = [f"--user={number}:{number}", "--cwd=/", *capabilities, *inside, self.name]
        run += [RELAY, "run", token, folder, *words(argv)]
        await self._open.wait()  # what starts while memory is written would take the host's descriptors into it
        self._must_live()
        ends = Ends(None)
        spawned = Spawned(self.backend.runsc("exec", *run), ends, env={"PATH": os.defpath})

        def send(number: int) -> None:
            # the relay hands signals on; for the one that ends all it has a word of its own
            sent = signal.SIGUSR2 if number == signal.SIGKILL else number
            task: asyncio.Task[object] = asyncio.ensure_future(self._hand_on(int(sent), token, child))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

        epoch = self._epoch

        def describe(result: Result) -> Result:
            return self._described(result, epoch, child.begun)

        child = Child(spawned, ends, keep=keep, signal=send, marked=True, describe=describe)
        self._children = {kept for kept in self._children if kept.running} | {child}
        return child

    def _enter(self, folder: str) -> None:
        try:
            self.tree.stat(f"{folder}/.")
        except SandboxError as error:
            words = f"cwd {folder!r}: cannot be entered, {error}; make the folder first"
            raise SandboxError(words, error.kind, status=error.status) from error

    async def _hand_on(self, number: int, token: str, child: Child) -> None:
        await self._open.wait()
        with suppress(TimeoutError):
            async with asyncio.timeout(START_S):
                while child.running and not child.begun:  # before that nobody inside has the token
                    await asyncio.sleep(LOOK_S)
        if child.running and not self._ended:
            await self._tell(number, token)

    async def _tell(self, number: int, token: str) -> Result:
        return await ran(self.backend.runsc("exec", self.name, RELAY, "tell", str(number), token), timeout_s=START_S)

    def _described(self, result: Result, epoch: int, begun: bool) -> Result:
        if self._ended or self._epoch != epoch or self.group.out_of_memory():
            lost = ended_meanwhile(result)
            if self.group.out_of_memory():
                limit = self.spec.resources.memory_mib
                return replace(
                    lost, outcome="out_of_memory", detail=f"memory ran out, and the machine ended: {limit} MiB"
                )
            return lost
        if not begun and result.outcome == "ok":
            said = result.stderr.decode(errors="replace").strip()[:300]
            return Result(
                "infrastructure", duration_s=result.duration_s, detail=f"gVisor did not run the command: {said}"
            )
        return result

    def files_at(self, *paths: str) -> Tree:
        """Return its files, but what its kernel makes up."""
        self._must_live()
        for path in paths:
            if path.split("/")[1:2] in (["proc"], ["sys"], ["dev"]):
                raise SandboxError(f"file {path!r}: belongs to gVisor's kernel; use a command inside", "refused")
        return self.tree

    async def expose(self, port: int) -> tuple[str, int]:
        """Refuse: its network is gVisor's own and not reached from the host."""
        raise SandboxError(
            "expose: gvisor sandboxes have no network here; use `qemu` or `namespace`", "refused", status=501
        )

    async def pause(self) -> None:
        """Stop its kernel, and with it every process; memory stays."""
        self._must_live()
        await self.group.freeze()
        self._paused = True

    async def resume(self) -> None:
        """Let it go on; its clock is the host's."""
        self._must_live()
        self.group.thaw()
        self._paused = False
        if not await self.is_alive():
            raise SandboxError(f"sandbox {self.id}: has ended; create another")

    async def suspend(self, folder: Path) -> None:
        """Write memory and files, end the kernel."""
        await self._checkpoint(folder)
        await self.kill()

    async def snapshot(self, folder: Path, parent: Path | None = None) -> None:
        """Write memory and files, and go on from them."""
        was_paused = self._paused
        await self._checkpoint(folder)
        await self._go_on(folder)
        if was_paused:
            await self.pause()

    async def fork(self, ids: Sequence[str], *, deterministic: bool = False) -> "Sequence[Machine | SandboxError]":
        """Write memory and files once, go on from them, and start every copy from them."""
        copy = self.folder / "copy"
        copy.mkdir()
        try:
            was_paused = self._paused
            await self._checkpoint(copy)
            await self._go_on(copy)
            if was_paused:
                await self.pause()
            return await asyncio.gather(*(self._copy(copy, id, deterministic) for id in ids))
        finally:
            await asyncio.to_thread(shutil.rmtree, copy, ignore_errors=True)

    async def _copy(self, folder: Path, id: str, deterministic: bool) -> "Machine | SandboxError":
        try:
            return await self.backend.restore(folder, self.spec, id, self.generation + 1, deterministic=deterministic)
        except SandboxError as error:
            return error

    async def _checkpoint(self, folder: Path) -> None:
        """End the kernel with its memory and disk in a folder; until the kernel has ended a failure changes nothing."""
        self._must_live()
        while self._tasks:
            await asyncio.wait(self._tasks)
        self._open.clear()
        try:
            await self._write(folder)
        except BaseException:
            self._open.set()
            raise

    async def _write(self, folder: Path) -> None:
        if self._paused:
            self.group.thaw()
            self._paused = False
        await self._detach()
        wanted = {"image": self.spec.image, "resources": resources(self.spec), "version": await self.backend.version()}
        # the memory goes on in the very program that is written in it
        (folder / HELD).write_text(json.dumps(wanted | {"relay": self.relay.parent.name}))
        written = await ran(
            self.backend.runsc("checkpoint", f"--image-path={folder}", self.name), timeout_s=START_S * 2
        )
        if written.exit_code != 0:
            said = written.stderr.decode(errors="replace").strip().splitlines() or ["it said nothing"]
            raise SandboxError(f"sandbox {self.id}: gVisor could not write its memory; {said[-1][:300]}")
        assert self._holder is not None
        await asyncio.to_thread(flush, f"/proc/{self._holder.pid}/root/mnt")
        keep_disk(self.disk, folder)

    async def _go_on(self, folder: Path) -> None:
        """Start the kernel again from what was written, on a copy of its disk."""
        await self._stop()
        self.disk.unlink()
        await copy_disk(folder / "disk.img", self.disk)
        try:
            await self.boot(folder)
        finally:
            self._open.set()

    async def _detach(self) -> None:
        """Make every relay let go of the host, without which the sandbox could not be restored.

        Raises:
            SandboxError: One did not; nothing changed for those that did but that the host hears no more of them.
        """
        waiting = [child for child in self._children if child.running]
        # a relay that is only on its way in would hear nothing, and take the host's descriptors into the memory
        give_up = asyncio.get_running_loop().time() + START_S
        while any(child.running and not child.begun for child in waiting):
            if asyncio.get_running_loop().time() > give_up:
                raise SandboxError(
                    f"sandbox {self.id}: a command that was started has not begun in {START_S:g} s; the host is "
                    "overloaded, or the sandbox has no process left to give; try again"
                )
            await asyncio.sleep(0.005)
        if waiting:
            told = await self._tell(signal.SIGUSR1, "all")
            if told.outcome != "ok" or told.exit_code != 0:
                said = told.stderr.decode(errors="replace").strip()[:300] or told.detail or "it said nothing"
                raise SandboxError(f"sandbox {self.id}: a command does not let go of the host; {said}; try again")
        self._epoch += 1

    async def _stop(self) -> None:
        if self._holder is not None:
            self._holder.send(9)
        await self.group.kill()
        if self._holder is not None:
            with suppress(TimeoutError):
                await asyncio.wait_for(asyncio.shield(self._holder.ended), 5)
        await self.group.remove()
        await until_released(self.disk)
        for path in (self.backend.root / "state").glob(f"{self.name}*"):
            path.unlink(missing_ok=True)

    async def kill(self) -> None:
        """End its kernel, and remove the disk."""
        self._ended = True
        self._open.set()
        await self._stop()
        for child in self._children:
            child.release()
        await gone(self._children)
        await asyncio.to_thread(self.backend.forget, self.id)

    async def is_alive(self) -> bool:
        """Tell whether its kernel is there."""
        if self._ended or self._holder is None or self._holder.ended.done():
            return False
        return any(is_kernel(pid) for pid in self.group.pids())

    async def usage(self) -> Usage:
        """Return what it uses, its kernel included."""
        return grounded.usage(self.group, self.disk)

    def _must_live(self) -> None:
        if self._ended or self._holder is None or self._holder.ended.done():
            raise SandboxError(f"sandbox {self.id}: has ended; create another")
