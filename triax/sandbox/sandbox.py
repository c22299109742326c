"""One sandbox as its user holds it: what it can do when, and what becomes of it when a step fails."""

import asyncio
import dataclasses
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from typing import Protocol, TypeVar, cast

from triax.errors import SandboxError
from triax.sandbox.command import positive, sane_path, variables, window, words
from triax.sandbox.life import Life, Owner
from triax.sandbox.protocol import (
    OUTPUT_LIMIT,
    STABLE,
    Entry,
    Machine,
    Process,
    Result,
    Spec,
    Status,
    Usage,
)
from triax.sandbox.rules import USABLE
from triax.sandbox.store import Record

T = TypeVar("T")

MOST_COPIES = 1024
MOST_KILLED = 3  # commands in a row, before it is tried whether any lives
PROBE_S = 10.0


class Rejoined(Protocol):
    """A machine whose processes from before a suspend or fork can be listened to again."""

    async def attach(self, pid: int) -> Process:
        """Listen again to one."""
        ...

    async def processes(self) -> Sequence[int]:
        """Return the numbers of all that were started from outside and still run."""
        ...


class Sandbox:
    """A computer for an agent.

    It is made by `Host.create`. Whatever goes wrong in a step, its status afterwards is one that lasts, and true:
    a pause, suspend, snapshot or fork that failed leaves it running, or `failed` if it could not be made to run.

    Args:
        owner: The host that owns it.
        record: What is known of it.
        machine: Its machine, if it has one.
    """

    def __init__(self, owner: Owner, record: Record, machine: Machine | None) -> None:
        self._life = Life(owner, record, machine)
        self._own_env: Mapping[str, str] = {}
        self._killed = 0
        self._broken = ""

    @property
    def id(self) -> str:
        """Its id, also its host name."""
        return self._life.record.id

    @property
    def spec(self) -> Spec:
        """What was asked for."""
        return self._life.record.spec

    @property
    def status(self) -> Status:
        """Where it is in its life."""
        return self._life.record.status

    @property
    def is_usable(self) -> bool:
        """Whether commands and files are served now, be it after a moment."""
        return self._life.machine is not None and self.status in USABLE

    @property
    def reason(self) -> str:
        """Why it is lost, failed or dead, in words."""
        return self._life.record.reason

    @property
    def broken(self) -> str:
        """Why none of its commands lives, in words; empty while some do. Its files may well be whole."""
        return self._broken

    @property
    def generation(self) -> int:
        """How often it was restored or forked from; a connection is good for one generation."""
        return self._life.record.generation

    @property
    def backend(self) -> str:
        """Name of the backend that made it."""
        return self._life.record.backend

    @property
    def created_s(self) -> float:
        """When it was made, seconds since 1970."""
        return self._life.record.created_s

    @property
    def expires_s(self) -> float | None:
        """When its time is over, seconds since 1970; none for never."""
        return self._life.record.expires_s

    @property
    def snapshot_id(self) -> str | None:
        """While it is suspended, the snapshot that it resumes from."""
        return self._life.record.snapshot

    @property
    def record(self) -> Record:
        """What its owner keeps of it on disk."""
        return self._life.record

    async def settled(self) -> None:
        """Wait until no operation that changes its status is in progress."""
        await self._life.settled.wait()

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
        """Run a command to its end; a text goes through `/bin/sh -c`.

        Args:
            argv: Program and arguments, or a text for the shell.
            stdin: What it reads.
            timeout_s: Seconds until it is ended, it alone; none for no limit.
            env: Variables besides those of the sandbox.
            cwd: Where it starts.
            user: Who runs it.
            output_limit: Bytes kept of each stream.

        Raises:
            SandboxError: The sandbox does not run, or no Linux would start this command.
        """
        parts = words(argv)
        pairs = variables({**self._own_env, **(env or {})})
        positive("timeout_s", timeout_s)
        result = await self._use(
            lambda machine: machine.exec(
                parts, stdin=stdin, timeout_s=timeout_s, env=pairs, cwd=cwd, user=user, output_limit=output_limit
            )
        )
        await self.note_end(result)
        if result.outcome in ("infrastructure", "out_of_memory"):  # the machine may have ended with the command
            with suppress(SandboxError):
                await self.check()
        return result

    async def start(
        self,
        argv: Sequence[str] | str,
        *,
        env: Mapping[str, str] | None = None,
        cwd: str | None = None,
        user: str | None = None,
        terminal: tuple[int, int] | None = None,
    ) -> Process:
        """Start a process that lives on; `terminal` is rows and columns of one, none for pipes."""
        parts = words(argv)
        pairs = variables({**self._own_env, **(env or {})})
        if terminal is not None and not self._life.owner.backend.capabilities.terminals:
            raise self._cannot("terminals")
        if terminal is not None:
            window(*terminal)
        return await self._use(lambda machine: machine.start(parts, env=pairs, cwd=cwd, user=user, terminal=terminal))

    async def attach(self, pid: int) -> Process:
        """Listen again to a process from before its machine was put away or split; what it wrote meanwhile is gone."""
        if not self._life.owner.backend.capabilities.attach:
            raise self._cannot("attach")
        return await self._use(lambda machine: cast(Rejoined, machine).attach(pid))

    async def processes(self) -> Sequence[int]:
        """Return the numbers of processes that were started from outside and still run, from before a suspend too."""
        if not self._life.owner.backend.capabilities.attach:
            raise self._cannot("attach")
        return await self._use(lambda machine: cast(Rejoined, machine).processes())

    async def read(self, path: str, offset: int = 0, limit: int | None = None) -> bytes:
        """Return bytes of a file, from `offset` on and at most `limit`."""
        return await self._use(lambda machine: machine.read(sane_path(path), offset, limit))

    async def write(self, path: str, data: bytes, mode: int = 0o644) -> None:
        """Replace a file, and make its folders; `mode` is for a new file."""
        await self._use(lambda machine: machine.write(sane_path(path), data, mode))

    async def list(self, path: str) -> list[Entry]:
        """Return what a folder holds, by name."""
        return await self._use(lambda machine: machine.list(sane_path(path)))

    async def stat(self, path: str) -> Entry:
        """Return one entry; a symlink is not followed."""
        return await self._use(lambda machine: machine.stat(sane_path(path)))

    async def remove(self, path: str) -> None:
        """Remove a file, or a folder with all it holds."""
        await self._use(lambda machine: machine.remove(sane_path(path)))

    async def rename(self, source: str, destination: str) -> None:
        """Move a file or folder."""
        await self._use(lambda machine: machine.rename(sane_path(source), sane_path(destination)))

    async def make_directory(self, path: str) -> None:
        """Make a folder and those above it."""
        await self._use(lambda machine: machine.make_directory(sane_path(path)))

    async def expose(self, port: int) -> tuple[str, int]:
        """Return host and port that reach a port inside; good for one generation."""
        if not self._life.owner.backend.capabilities.expose:
            raise self._cannot("expose")
        if not 0 < port < 65536:
            raise SandboxError(f"port: is 1 to 65535; found `{port}`", "refused")
        return await self._use(lambda machine: machine.expose(port))

    async def usage(self) -> Usage:
        """Return what it uses of its host; nothing at all while it has no machine."""
        if self._life.machine is None:
            return Usage(0.0, 0, None, 0)
        return await self._life.machine.usage()

    async def is_alive(self) -> bool:
        """Tell whether its machine would answer; one without a machine is not."""
        machine = self._life.machine
        if machine is None:
            return False
        try:
            return await asyncio.wait_for(machine.is_alive(), 5)
        except (SandboxError, TimeoutError, OSError):
            return False

    async def set_timeout(self, seconds: float | None) -> None:
        """Let its time be over that many seconds from now; none for never."""
        positive("timeout_s", seconds)
        self._life.allow("set_timeout")
        before = self._life.record.expires_s
        self._life.record.expires_s = None if seconds is None else time.time() + seconds
        try:
            self._life.owner.store.save(self._life.record)
        except SandboxError:
            self._life.record.expires_s = before
            raise
        self._life.owner.changed()

    def dedicate(self, spec: Spec) -> None:
        """Make a sandbox that was made ahead the one that a user asked for: with labels, variables and a time limit.

        Args:
            spec: What was asked for.

        Raises:
            SandboxError: What is settled when a machine is made differs, or it does not run.
        """
        self._life.allow("set_timeout")
        record = self._life.record
        now = dataclasses.replace(
            record.spec, env=spec.env, metadata=spec.metadata, timeout_s=spec.timeout_s, on_timeout=spec.on_timeout
        )
        if now != spec:
            raise SandboxError(f"sandbox {self.id}: was made ahead as another; make one for this user", "refused")
        before = record.spec, record.created_s, record.expires_s
        record.spec, record.created_s = spec, time.time()
        record.expires_s = None if spec.timeout_s is None else time.time() + spec.timeout_s
        try:
            self._life.owner.store.save(record)
        except SandboxError:
            record.spec, record.created_s, record.expires_s = before
            raise
        self._own_env = spec.env  # its machine does not know them before it is restored
        self._life.owner.changed()

    async def pause(self) -> None:
        """Stop it in place: its memory stays, its owner's end loses it."""
        await self._life.pause()

    async def resume(self) -> None:
        """Let it go on, from in place or from its snapshot; its time starts anew."""
        await self._life.resume()

    async def suspend(self, *, keep_memory: bool | None = None) -> str:
        """Put it away durably: no process, no memory.

        Args:
            keep_memory: Whether processes go on after a resume; none for what the backend does. One that cannot do
                as asked refuses.

        Returns:
            The id of the snapshot that it resumes from.
        """
        capabilities = self._life.owner.backend.capabilities
        if not capabilities.suspend:
            raise self._cannot("suspend")
        if keep_memory is not None and keep_memory != capabilities.memory_snapshot:
            kept = "memory and files" if capabilities.memory_snapshot else "files alone"
            raise SandboxError(
                f"suspend: the backend `{self.backend}` keeps {kept}; found keep_memory `{keep_memory}`; leave it out",
                "refused",
            )
        return await self._life.suspend()

    async def snapshot(self) -> str:
        """Take a snapshot that others can start from, and go on; return its id."""
        capabilities = self._life.owner.backend.capabilities
        if not (capabilities.memory_snapshot or capabilities.disk_snapshot):
            raise self._cannot("snapshot")
        return await self._life.snapshot()

    async def fork(self, count: int = 1, *, deterministic: bool = False) -> "Sequence[Sandbox | SandboxError]":
        """Split into copies and go on; a copy that failed is an error in its place.

        Args:
            count: How many.
            deterministic: Do not tell programs inside that they are copies: what they draw from generators in their
                own memory stays the same in all of them. The kernel's entropy differs all the same.
        """
        capabilities = self._life.owner.backend.capabilities
        if not (capabilities.fork_running or capabilities.disk_snapshot):
            raise self._cannot("fork")
        if not 1 <= count <= MOST_COPIES:
            raise SandboxError(f"fork: makes 1 to {MOST_COPIES} copies; found `{count}`", "refused")
        return await self._life.fork(count, deterministic=deterministic)

    async def kill(self) -> None:
        """End it and free all it held; during another operation it waits for that one's end."""
        while self.status not in STABLE and self.status != "dead":
            await self._life.settled.wait()
        if self.status != "dead":
            await self._life.kill()

    def is_expired(self) -> bool:
        """Tell whether its time is over and it still holds a machine."""
        expires = self._life.record.expires_s
        return expires is not None and expires <= time.time() and self.status in ("running", "paused")

    def postpone(self, seconds: float) -> None:
        """Try again later what its time limit asks for, since it failed now."""
        self._life.record.expires_s = time.time() + seconds

    async def give_up(self, reason: str) -> None:
        """End its machine and keep what is known of it as `failed`: what cannot be kept is told, not dropped."""
        await self._life.bury(reason)

    async def note_end(self, result: Result) -> None:
        """Note how a command ended; after several that were killed, try whether any lives, see `broken`."""
        if not was_killed(result):
            if result.outcome == "ok":
                self._killed, self._broken = 0, ""
            return
        self._killed += 1
        machine = self._life.machine
        if self._killed < MOST_KILLED or machine is None or self.status != "running":
            return
        for _ in range(2):
            with suppress(SandboxError):
                if not was_killed(await machine.exec(["true"], timeout_s=PROBE_S)):
                    self._killed, self._broken = 0, ""
                    return
        self._broken = "each of its commands is killed as it starts; read its files and create another"

    async def check(self) -> None:
        """Find out whether its machine still lives; one that ended by itself becomes `failed`."""
        if self.status not in ("running", "paused") or await self.is_alive():
            return
        if self.status in ("running", "paused"):
            await self._life.bury("its machine ended by itself")

    async def _use(self, act: "Callable[[Machine], Awaitable[T]]") -> T:
        self._life.allow("use")
        machine = self._life.machine
        assert machine is not None, "a usable sandbox has a machine"
        try:
            return await act(machine)
        except SandboxError as error:
            if error.kind == "infrastructure" and self._life.machine is machine:
                with suppress(SandboxError):
                    await self.check()
            raise

    def _cannot(self, what: str) -> SandboxError:
        return SandboxError(
            f"{what}: the backend `{self.backend}` cannot do this; choose another", "refused", status=501
        )


def was_killed(result: Result) -> bool:
    """Tell whether a command ended by SIGKILL that no limit sent; gVisor tells signals as exit codes."""
    return result.outcome == "ok" and (result.signal == 9 or result.exit_code == 128 + 9)
