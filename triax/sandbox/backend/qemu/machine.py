"""One virtual machine: commands and files through its agent, and all that stops, saves and splits it."""

import asyncio
import hashlib
import os
import posixpath
import secrets
import shutil
import struct
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from triax.errors import SandboxError
from triax.log import logger
from triax.sandbox.backend.qemu.egress import PROXY_PORT, Egress, Exposed
from triax.sandbox.backend.qemu.entries import entries
from triax.sandbox.backend.qemu.launch import Emulator
from triax.sandbox.backend.qemu.parts import Parts
from triax.sandbox.command import sane_path, sane_range, start_folder, variables, words
from triax.sandbox.errnos import file_refusal
from triax.sandbox.guest.channel import AgentRefusal, Channel, Stream
from triax.sandbox.guest.process import GuestProcess, finish, home_of, refusal
from triax.sandbox.guest.wire import AS_BEFORE, OPERATION, TERMINAL, Kind, command, hello, number
from triax.sandbox.protocol import OUTPUT_LIMIT, Entry, Result, Spec, Usage

if TYPE_CHECKING:
    from triax.sandbox.backend.qemu.backend import QemuBackend

FREEZE_S = 10.0
ANSWER_S = 60.0
SILENCE_S = 60.0
WAIT_S = 30.0
PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


class QemuMachine:
    """A guest of its own kernel, under QEMU.

    Args:
        backend: What made it.
        spec: What was asked for.
        id: Its id.
        generation: How often it was restored or forked from.
        parts: Its files.
        emulator: Its process.

    Attributes:
        token: Credentials that only it and its host know; others after each restore and fork.
        freeze_s: Seconds that its processes stood still for the last snapshot or fork.
        started_s: Seconds from the wish for it to its processors running, if it was restored.
    """

    def __init__(
        self, backend: "QemuBackend", spec: Spec, id: str, generation: int, parts: Parts, emulator: Emulator
    ) -> None:
        self.backend = backend
        self.spec = spec
        self.id = id
        self.generation = generation
        self.parts = parts
        self.emulator = emulator
        self.token = secrets.token_hex(16)
        self.freeze_s = 0.0
        self.started_s = 0.0
        self._answered = time.monotonic()
        self._paused = False
        self._ended = False
        self._home: str | None = None
        self._exposed: dict[int, Exposed] = {}
        self._egress = Egress(spec.network) if spec.network.allow_internet or spec.network.allow_out else None
        emulator.channel.on_open = self._egress.serve if self._egress else None
        self._step = asyncio.Lock()

    async def greet(self, *, deterministic: bool = False) -> None:
        """Make the guest a machine of its own: entropy, names, credentials, clock, rules.

        Args:
            deterministic: Tell its programs of no new generation.

        Raises:
            SandboxError: Its agent gave no answer.
        """
        body = hello(
            AS_BEFORE if deterministic else self.generation,
            time.time_ns(),
            self.spec.resources.processes,
            name=self.id[:63],
            machine=hashlib.sha256(self.id.encode()).hexdigest()[:32],
            token=self.token,
            entropy=os.urandom(128),
        )
        channel = self.emulator.channel
        await channel.ask(Kind.HELLO, Kind.READY, body, within_s=ANSWER_S)
        if self._egress is not None:
            channel.send(Kind.LISTEN, 0, number(PROXY_PORT))

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
        """Run a command to its end."""
        parts = words(argv)
        stream = self._open(parts, env, cwd, user, None)
        result = await finish(stream, stdin, timeout_s, output_limit)
        problem = stream.ended.exception()
        if isinstance(problem, AgentRefusal):
            told = refusal(problem, parts[0], cwd or self.spec.cwd, user or self.spec.user)
            if isinstance(told, SandboxError):
                raise told
            return told
        return result

    async def start(
        self,
        argv: Sequence[str] | str,
        *,
        env: Mapping[str, str] | None = None,
        cwd: str | None = None,
        user: str | None = None,
        terminal: tuple[int, int] | None = None,
    ) -> GuestProcess:
        """Start a process that lives on."""
        parts = words(argv)
        stream = self._open(parts, env, cwd, user, terminal)
        try:
            await stream.started
        except AgentRefusal as problem:
            told = refusal(problem, parts[0], cwd or self.spec.cwd, user or self.spec.user)
            if isinstance(told, SandboxError):
                raise told from None
            # what is not there ends at once, as under a shell
            stream = self._open(
                ["/bin/sh", "-c", 'printf %s "$0" >&2; exit "$1"', told.stderr.decode(), str(told.exit_code)],
                env, None, user, terminal,
            )  # fmt: skip
            await stream.started
        return GuestProcess(stream, terminal=terminal is not None)

    async def processes(self) -> list[int]:
        """Return the numbers of processes that were started from outside and still run, of any generation."""
        stream = self._channel().open_stream(Kind.PROCESSES, b"")
        found = []
        while (piece := await stream.next()) is not None:
            found.append(struct.unpack("<I", piece[1])[0])
        stream.close()
        return sorted(found)

    async def attach(self, pid: int) -> GuestProcess:
        """Listen again to a process that was started before the machine was put away or split.

        What it wrote meanwhile is gone.

        Raises:
            SandboxError: There is no such process, or somebody listens to it.
        """
        stream = self._channel().open_stream(Kind.ATTACH, number(pid))
        try:
            await stream.started
        except AgentRefusal as problem:
            words_ = "no process" if problem.code == 3 else "somebody who listens to process"
            raise SandboxError(f"attach: there is {words_} {pid}", "refused", status=404) from None
        return GuestProcess(stream, terminal=None)

    def _open(
        self,
        parts: Sequence[str],
        env: Mapping[str, str] | None,
        cwd: str | None,
        user: str | None,
        terminal: tuple[int, int] | None,
    ) -> Stream:
        account = user or self.spec.user or ""
        own = {"PATH": PATH, "LANG": "C.UTF-8"}  # the agent adds what the guest's own files say of the user
        if terminal is not None:
            own["TERM"] = "xterm-256color"
        if self._egress is not None:
            own |= self._egress.variables()
        whole = own | variables(self.spec.env) | variables(env)
        flags = TERMINAL if terminal is not None else 0
        folder = start_folder(cwd, self.spec.cwd, "")  # the agent knows the home
        body = command(parts, whole, user=account, folder=folder, flags=flags, size=terminal or (0, 0))
        return self._channel().open_stream(Kind.RUN, body)

    async def _operation(self, path: str, *arguments: str, stdin: bytes = b"", to: str | None = None) -> bytes:
        """Run one file operation in the guest, as its superuser, and return what it wrote."""
        inside = await self._inside(path)
        body = command([arguments[0], inside, *arguments[1:]], {}, flags=OPERATION)
        stream = self._channel().open_stream(Kind.RUN, body)
        result = await finish(stream, stdin, None, 2**62)
        problem = stream.ended.exception()
        if isinstance(problem, AgentRefusal):
            raise SandboxError(f"file {path!r}: the guest has no room for another process; {problem}")
        if result.outcome != "ok":
            raise SandboxError(f"file {path!r}: {result.detail}", result.outcome)
        if result.exit_code != 0:
            code = struct.unpack_from("<I", result.stderr)[0] if len(result.stderr) >= 4 else 5
            raise file_refusal(OSError(code, os.strerror(code), path), path if to is None else f"{path} to {to}")
        return result.stdout

    async def _inside(self, path: str) -> str:
        if sane_path(path).startswith("/"):
            return path
        if self._home is None:
            users = b""
            with suppress(SandboxError):  # an image without a file of users still has its superuser
                users = await self._operation("/etc/passwd", "read", "0", str(2**20))
            self._home = home_of(self.spec.user or "root", users)
        return f"{start_folder(None, self.spec.cwd, self._home)}/{path}"

    async def _whole(self, path: str) -> str:
        """Return where a path leads, for what changes the folder above: the agent would empty a root it must keep."""
        whole = posixpath.normpath("/" + (await self._inside(path)).lstrip("/"))
        if whole == "/":
            raise SandboxError(f"file {path!r}: the root itself stays where it is", "refused")
        return whole

    async def read(self, path: str, offset: int = 0, limit: int | None = None) -> bytes:
        """Return bytes of a regular file."""
        sane_range(path, offset, limit)
        return await self._operation(path, "read", str(offset), str(2**63 if limit is None else limit))

    async def write(self, path: str, data: bytes, mode: int = 0o644) -> None:
        """Replace a file in one step, and make its folders."""
        await self._operation(path, "write", f"{mode & 0o7777:o}", stdin=data)

    async def list(self, path: str) -> list[Entry]:
        """Return what a folder holds, by name."""
        inside = await self._inside(path)
        return sorted(entries(await self._operation(inside, "list"), inside), key=lambda entry: entry.path)

    async def stat(self, path: str) -> Entry:
        """Return one entry."""
        inside = await self._inside(path)
        return entries(await self._operation(inside, "stat"), inside)[0]

    async def remove(self, path: str) -> None:
        """Remove a file, or a folder with all it holds."""
        await self._operation(await self._whole(path), "remove")

    async def rename(self, source: str, destination: str) -> None:
        """Move a file or folder."""
        await self._operation(await self._whole(source), "rename", await self._whole(destination), to=destination)

    async def make_directory(self, path: str) -> None:
        """Make a folder and those above it."""
        await self._operation(path, "mkdir")

    async def expose(self, port: int) -> tuple[str, int]:
        """Listen on the host for connections to a port inside; they go through the agent, so no network is needed."""
        if not 0 < port < 65536:
            raise SandboxError(f"port {port}: must lie between 1 and 65535", "refused")
        self._channel()
        if port not in self._exposed:
            self._exposed[port] = await Exposed.open(lambda: self._channel(), port)
        return self._exposed[port].address

    async def pause(self) -> None:
        """Stop its processors; memory stays where it is."""
        async with self._step:
            self._channel()
            await self.emulator.monitor.run("stop")
            self._paused = True

    async def resume(self) -> None:
        """Let its processors go on, with the clock set."""
        async with self._step:
            self._channel()
            await self.emulator.monitor.run("cont")
            self._paused = False
            self._answered = time.monotonic()
            self.emulator.channel.send(Kind.CLOCK, 0, struct.pack("<Q", time.time_ns()))

    async def suspend(self, folder: Path) -> None:
        """Write a snapshot, then end the machine."""
        async with self._step:
            await self.backend.save(self, folder, parent=None, goes_on=False)
        await self.kill()

    async def snapshot(self, folder: Path, parent: Path | None = None) -> None:
        """Write a snapshot and go on; what `parent` holds already is shared with it."""
        async with self._step:
            await self.backend.save(self, folder, parent=parent, goes_on=True)

    async def fork(self, ids: Sequence[str], *, deterministic: bool = False) -> "Sequence[QemuMachine | SandboxError]":
        """Split into copies that go on where this one is, each with a memory and disk of its own from now on."""
        async with self._step:
            return await self.backend.split(self, ids, deterministic=deterministic)

    @property
    def paused(self) -> bool:
        """Whether it is paused in place."""
        return self._paused

    async def freeze(self) -> None:
        """Stop its processes between two frames of the channel, then its processors.

        Raises:
            SandboxError: The guest gave no answer; it goes on.
        """
        if self._paused:
            await self.emulator.monitor.run("cont")
        await self.emulator.channel.freeze(FREEZE_S)
        try:
            await self.emulator.monitor.run("stop")
        except SandboxError:
            await self.emulator.channel.thaw(quietly=True)
            raise

    async def go_on(self) -> None:
        """Undo `freeze`; a machine that was paused is paused again.

        Raises:
            SandboxError: It cannot be made to run; it is dead then, never half stopped.
        """
        try:
            await self.emulator.monitor.run("cont")
            await self.emulator.channel.thaw()
            if self._paused:
                await self.emulator.monitor.run("stop")
        except SandboxError:
            await self.kill()
            raise

    async def kill(self) -> None:
        """End it and remove its files."""
        if self._ended:
            return
        self._ended = True
        for exposed in self._exposed.values():
            exposed.close()
        if self._egress is not None:
            self._egress.close()
        await self.emulator.end()
        await asyncio.to_thread(shutil.rmtree, self.parts.folder, ignore_errors=True)

    async def is_alive(self) -> bool:
        """Tell whether its process lives and, unless it is paused, its agent has answered within a minute.

        A guest that is busy, or on a busy host, may take more than a second; it is slow, not dead.
        """
        if self._ended or not self.emulator.is_running() or self.emulator.channel.lost is not None:
            return False
        if self._paused or self._step.locked():
            return True
        try:
            await self.emulator.channel.ask(Kind.PING, Kind.PONG, within_s=1.0)
        except SandboxError:
            if not await self._waits_for_disk():
                quiet_s = time.monotonic() - self._answered
                return self.emulator.is_running() and self.emulator.channel.lost is None and quiet_s < SILENCE_S
        self._answered = time.monotonic()
        return True

    async def _waits_for_disk(self) -> bool:
        """Tell whether it stands still since the host's disk is full, and let it try again."""
        with suppress(SandboxError):
            if (await self.emulator.monitor.run("query-status", within_s=WAIT_S))["status"] == "io-error":
                logger("sandbox").warning("sandbox %s stands still: the host's disk is full; free some", self.id)
                await self.emulator.monitor.run("cont", within_s=WAIT_S)
                return True
        return False

    async def usage(self) -> Usage:
        """Return what its process uses, and its own layers on disk."""
        pid = self.emulator.process.pid
        memory = None
        with suppress(OSError, ValueError):
            lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
            memory = sum(int(line.split()[1]) for line in lines if line.startswith("Private_")) * 1024
        disk = 0
        for path in self.parts.layers:
            with suppress(OSError):
                about = path.stat()
                disk += about.st_blocks * 512 if about.st_nlink == 1 else 0
        return Usage(cpu_s=self.emulator.cpu_s(), memory_bytes=memory, disk_bytes=disk)

    def _channel(self) -> Channel:
        channel = self.emulator.channel
        if self._ended:
            raise SandboxError(f"sandbox {self.id}: has ended; create another")
        channel.check()
        return channel
