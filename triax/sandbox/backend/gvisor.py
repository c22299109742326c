"""Sandboxes on gVisor: a kernel in user space between the task and the host's, with memory that can be put away."""

import asyncio
import hashlib
import itertools
import json
import os
import secrets
import shutil
import signal
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from triax.errors import SandboxError
from triax.sandbox.backend.child import Child, Spawned, ran
from triax.sandbox.backend.disk import copy_disk, empty_disk, flush, ground_program, keep_disk, until_released
from triax.sandbox.backend.group import Group, Hierarchies
from triax.sandbox.backend.layout import PATH, refuse_image, skeleton
from triax.sandbox.backend.owned import COMMAND
from triax.sandbox.backend.process import ended_meanwhile
from triax.sandbox.backend.streams import Ends
from triax.sandbox.backend.tree import Tree
from triax.sandbox.command import variables, words
from triax.sandbox.guest.build import cache_folder, compiled
from triax.sandbox.protocol import OUTPUT_LIMIT, Capabilities, Check, Entry, Machine, Result, Spec, Usage

SOURCE = Path(__file__).with_name("relay.c")
TOOLS = {"runsc": "runsc", "mke2fs": "e2fsprogs"}
RELAY = "/run/triax/relay"
FIRST_PATH = f"/run/triax:{PATH}"  # `ls` and `stat` of today ask old gVisor kernels in a way that those refuse
USERS = {"root": 0, "user": 1000}
HOME = "/root"
OWN_MEMORY_MIB = 96  # what gVisor's kernel takes itself, beside the task's memory
OWN_PROCESSES = 160  # its threads
START_S = 30.0
NAME_CAPABILITY = "CAP_SYS_ADMIN"
# what a container usually may do; none of it reaches the host's kernel
ALLOWED = ["CAP_CHOWN", "CAP_DAC_OVERRIDE", "CAP_FOWNER", "CAP_FSETID", "CAP_KILL", "CAP_SETGID", "CAP_SETUID"]
ALLOWED += ["CAP_SETPCAP", "CAP_NET_BIND_SERVICE", "CAP_SYS_CHROOT", "CAP_SETFCAP"]


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
    capabilities = Capabilities(memory_snapshot=True, disk_snapshot=True, fork_running=True, suspend=True)

    def __init__(self, root: Path, *, platform: str = "ptrace", hierarchies: Hierarchies | None = None) -> None:
        self.root = root
        self.platform = platform
        self.hierarchies = hierarchies or Hierarchies.found()
        self.prefix = hashlib.sha256(str(root.resolve()).encode()).hexdigest()[:8] + "-g-"

    def runsc(self, *words: str) -> list[str]:
        """Return a command of `runsc` for this backend's machines."""
        flags = [f"--root={self.root / 'state'}", f"--platform={self.platform}", "--network=none"]
        return ["runsc", *flags, "--ignore-cgroups", "--file-access=shared", *words]

    async def create(self, spec: Spec, id: str) -> "GvisorMachine":
        """Start a machine with an empty disk, or with an image below it."""
        refuse_image(spec)
        # a file in /tmp keeps gVisor from putting memory there, which the host could not reach
        empty = await empty_disk(
            self.root / "templates", spec.resources.disk_mib, {**skeleton(spec.image), **_extra(spec.image)}
        )
        return await self._start(GvisorMachine(self, spec, id, 0), empty, None)

    async def restore(self, folder: Path, spec: Spec, id: str, generation: int) -> "GvisorMachine":
        """Start a machine from a snapshot's memory, with a copy of its disk."""
        held = json.loads((folder / "gvisor.json").read_text())
        found = {"image": spec.image, "resources": _resources(spec), "version": await self.version()}
        for name, value in found.items():
            if held[name] != value:
                raise SandboxError(
                    f"snapshot {folder.name}: was taken with {name} `{held[name]}`; found `{value}`; ask for the same",
                    "refused",
                    status=409,
                )
        return await self._start(GvisorMachine(self, spec, id, generation), folder / "disk.img", folder)

    async def _start(self, machine: "GvisorMachine", disk: Path, memory: Path | None) -> "GvisorMachine":
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
        held = {label.removeprefix(self.prefix) for label in self.hierarchies.labels(self.prefix)}
        if self.root.is_dir():
            held |= {entry.name for entry in os.scandir(self.root)} - {"templates", "state"}
        ended = []
        for id in sorted(held - live):
            group = Group(self.hierarchies, self.prefix + id)
            count = len(group.pids())
            await group.kill()
            await group.remove()
            await until_released(self.root / id / "disk.img")
            await asyncio.to_thread(self.forget, id)
            ended.append(f"gvisor machine {id}: {count} processes, its groups and its disk")
        return ended

    def forget(self, id: str) -> None:
        """Remove a machine's files, and what `runsc` wrote down about it."""
        shutil.rmtree(self.root / id, ignore_errors=True)
        for path in (self.root / "state").glob(f"{self.prefix}{id}*"):
            path.unlink(missing_ok=True)

    async def checks(self) -> list[Check]:
        """Look for its tools and its rights."""
        found = []
        for tool, package in TOOLS.items():
            path = shutil.which(tool)
            found.append(
                Check(tool, path is not None, path or "not found", "" if path else f"apt-get install {package}")
            )
        is_root = os.geteuid() == 0
        found.append(Check("root", is_root, f"user {os.geteuid()}", "" if is_root else "run as root"))
        found.append(self.hierarchies.check())
        try:
            found.append(Check("relay", True, str(await asyncio.to_thread(_relay))))
        except SandboxError as error:
            found.append(Check("relay", False, str(error), "apt-get install gcc libc6-dev"))
        return found


class GvisorMachine:
    """One gVisor kernel with its processes."""

    def __init__(self, backend: GvisorBackend, spec: Spec, id: str, generation: int) -> None:
        self.backend = backend
        self.spec = spec
        self.id = id
        self.generation = generation
        self.folder = backend.root / id
        self.disk = self.folder / "disk.img"
        self.name = backend.prefix + id  # the host has one space of names for all its owners
        self.group = Group(backend.hierarchies, self.name)
        self._holder: Spawned | None = None
        self._paused = False
        self._ended = False
        self._epoch = 0
        self._children: set[Child] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._numbers = itertools.count()

    async def boot(self, memory: Path | None) -> None:
        """Start the kernel, afresh or from a snapshot's folder.

        Raises:
            SandboxError: It did not start.
        """
        own = self.spec.resources
        self.group.make(
            replace(own, memory_mib=own.memory_mib + OWN_MEMORY_MIB, processes=own.processes + OWN_PROCESSES)
        )
        relay = await asyncio.to_thread(_relay)
        bundle = self.folder / "bundle"
        bundle.mkdir(exist_ok=True)
        (bundle / "config.json").write_text(json.dumps(self._configuration(relay.parent, relay.name)))
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
        def write() -> None:
            for path, text in {
                "/etc/hostname": f"{self.id}\n",
                "/etc/hosts": f"127.0.0.1 localhost {self.id}\n::1 localhost\n",
                "/etc/machine-id": f"{secrets.token_hex(16)}\n",
            }.items():
                with suppress(SandboxError):  # an image may have a folder there; it keeps it
                    self.tree.write(path, text.encode())

        await asyncio.to_thread(write)
        if not afresh:
            named = await ran(
                self.backend.runsc("exec", f"--cap={NAME_CAPABILITY}", self.name, RELAY, "name", self.id),
                timeout_s=START_S,
            )
            if named.exit_code != 0:
                said = named.stderr.decode(errors="replace").strip()
                raise SandboxError(f"sandbox {self.id}: does not answer after its restore; {said[:300]}")

    @property
    def tree(self) -> Tree:
        """Its files, as the host reaches them."""
        assert self._holder is not None
        root = f"/proc/{self._holder.pid}/root/mnt" + ("/root" if self.spec.image else "")
        return Tree(root, home=self.spec.cwd or HOME)

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
        folder = cwd or self.spec.cwd or ("/root" if number == 0 else "/home/user")
        if not folder.startswith(("/proc", "/dev", "/sys", "/usr")):
            await asyncio.to_thread(self._enter, folder)
        own = {
            "PATH": FIRST_PATH,
            "HOME": "/root" if number == 0 else "/home/user",
            "LANG": "C.UTF-8",
            "TERM": "xterm-256color",
        }
        own |= {"TRIAX_SANDBOX": self.id, "TRIAX_GENERATION": str(self.generation)}
        token = str(next(self._numbers))
        whole = own | variables(self.spec.env) | variables(env) | {COMMAND: token}
        inside = [f"--env={name}={value}" for name, value in whole.items()]
        capabilities = [f"--cap={name}" for name in ALLOWED]
        run = [
            f"--user={number}:{number}",
            "--cwd=/",
            *capabilities,
            *inside,
            self.name,
            RELAY,
            "run",
            token,
            folder,
            *words(argv),
        ]
        ends = Ends(None)
        spawned = Spawned(self.backend.runsc("exec", *run), ends, env={"PATH": os.defpath})

        def send(number: int) -> None:
            # the relay hands signals on; for the one that ends all it has a word of its own
            sent = signal.SIGUSR2 if number == signal.SIGKILL else number
            task = asyncio.ensure_future(self._tell(int(sent), token))
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
            raise SandboxError(
                f"cwd {folder!r}: cannot be entered; make the folder first", "refused", status=404
            ) from error

    async def _tell(self, number: int, token: str) -> None:
        await ran(self.backend.runsc("exec", self.name, RELAY, "tell", str(number), token), timeout_s=START_S)

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

    async def read(self, path: str, offset: int = 0, limit: int | None = None) -> bytes:
        """Return bytes of a file."""
        return await asyncio.to_thread(self._files(path).read, path, offset, limit)

    async def write(self, path: str, data: bytes, mode: int = 0o644) -> None:
        """Replace a file."""
        await asyncio.to_thread(self._files(path).write, path, data, mode)

    async def list(self, path: str) -> list[Entry]:
        """Return what a folder holds."""
        return await asyncio.to_thread(self._files(path).list, path)

    async def stat(self, path: str) -> Entry:
        """Return one entry."""
        return await asyncio.to_thread(self._files(path).stat, path)

    async def remove(self, path: str) -> None:
        """Remove a file or folder."""
        await asyncio.to_thread(self._files(path).remove, path)

    async def rename(self, source: str, destination: str) -> None:
        """Move a file or folder."""
        await asyncio.to_thread(self._files(source, destination).rename, source, destination)

    async def make_directory(self, path: str) -> None:
        """Make a folder and those above it."""
        await asyncio.to_thread(self._files(path).make_directory, path)

    def _files(self, *paths: str) -> Tree:
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

    async def fork(self, ids: Sequence[str]) -> "Sequence[Machine | SandboxError]":
        """Write memory and files once, go on from them, and start every copy from them."""
        held = self.folder / "copy"
        held.mkdir()
        try:
            was_paused = self._paused
            await self._checkpoint(held)
            await self._go_on(held)
            if was_paused:
                await self.pause()
            return await asyncio.gather(*(self._copy(held, id) for id in ids))
        finally:
            await asyncio.to_thread(shutil.rmtree, held, ignore_errors=True)

    async def _copy(self, folder: Path, id: str) -> "Machine | SandboxError":
        try:
            return await self.backend.restore(folder, self.spec, id, self.generation + 1)
        except SandboxError as error:
            return error

    async def _checkpoint(self, folder: Path) -> None:
        """End the kernel with its memory and disk in a folder; until the kernel has ended a failure changes nothing."""
        self._must_live()
        if self._paused:
            self.group.thaw()
            self._paused = False
        await self._detach()
        held = {"image": self.spec.image, "resources": _resources(self.spec), "version": await self.backend.version()}
        (folder / "gvisor.json").write_text(json.dumps(held))
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
        await self.boot(folder)

    async def _detach(self) -> None:
        """Make every relay let go of the host, without which the sandbox could not be restored."""
        waiting = [child for child in self._children if child.running]
        if waiting:
            await self._tell(signal.SIGUSR1, "all")
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
        await self._stop()
        for child in self._children:
            child.release()
        await asyncio.to_thread(self.backend.forget, self.id)

    async def is_alive(self) -> bool:
        """Tell whether its kernel is there."""
        if self._ended or self._holder is None or self._holder.ended.done():
            return False
        return any(_is_kernel(pid) for pid in self.group.pids())

    async def usage(self) -> Usage:
        """Return what it uses, its kernel included."""
        used = self.group.usage()
        disk = self.disk.stat().st_blocks * 512 if self.disk.exists() else None
        return Usage(used.cpu_s, used.memory_bytes, disk, used.processes)

    def _must_live(self) -> None:
        if self._ended or self._holder is None or self._holder.ended.done():
            raise SandboxError(f"sandbox {self.id}: has ended; create another")

    def _configuration(self, relay_folder: Path, relay: str) -> dict[str, object]:
        sets = dict.fromkeys(("bounding", "effective", "inheritable", "permitted"), ALLOWED)
        shown = [{"destination": "/usr", "type": "bind", "source": "/usr", "options": ["ro", "bind"]}]
        if self.spec.image is not None:
            shown = []
        limit = self.spec.resources.memory_mib * 2**20
        return {
            "ociVersion": "1.0.0",
            "process": {
                "terminal": False,
                "user": {"uid": 0, "gid": 0},
                "args": [f"/run/triax/{relay}", "first"],
                "env": [f"PATH={PATH}"],
                "cwd": "/",
                "capabilities": sets,
                "noNewPrivileges": False,
                "rlimits": [{"type": "RLIMIT_DATA", "hard": limit, "soft": limit}],
            },
            "root": {"path": "/mnt/root" if self.spec.image else "/mnt", "readonly": False},
            "hostname": self.id,
            "mounts": [
                {"destination": "/proc", "type": "proc", "source": "proc"},
                *shown,
                {"destination": "/run/triax", "type": "bind", "source": str(relay_folder), "options": ["ro", "bind"]},
            ],
            "linux": {"namespaces": [{"type": name} for name in ("pid", "network", "ipc", "uts", "mount")]},
        }


def _relay() -> Path:
    """Return the relay in a folder that holds nothing else, since that folder is shown inside."""
    built = compiled([SOURCE], "relay", cache_folder())
    folder = built.with_name(f"{built.name}.shown")
    shown = folder / "relay"
    if not shown.exists():
        folder.mkdir(exist_ok=True, mode=0o755)
        busybox = shutil.which("busybox")
        for name in ("ls", "stat", "dir") if busybox else ():
            with suppress(FileExistsError):
                (folder / name).symlink_to("busybox")
        if busybox:
            shutil.copy2(busybox, folder / "busybox")
        draft = folder / f".relay-{os.getpid()}"
        shutil.copy2(built, draft)
        draft.replace(shown)
    return shown


def _extra(image: str | None) -> dict[str, str | bytes | None]:
    below = "upper/" if image else ""
    return {f"{below}tmp/.keep": b"", f"{below}run/triax/": None}


def _resources(spec: Spec) -> dict[str, float]:
    own = spec.resources
    return {"cpus": own.cpus, "memory_mib": own.memory_mib, "disk_mib": own.disk_mib, "processes": own.processes}


def _is_kernel(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            return file.read(16).startswith(b"runsc-sandbox")
    except OSError:
        return False
