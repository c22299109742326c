"""A backend of machines that break where told, so that every step of a life can fail."""

import asyncio
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from triax.errors import SandboxError
from triax.sandbox.host import Host
from triax.sandbox.protocol import (
    OUTPUT_LIMIT,
    Capabilities,
    Check,
    Entry,
    Machine,
    Process,
    Result,
    Spec,
    Status,
    Usage,
)
from triax.sandbox.sandbox import Sandbox

How = Literal["before", "after", "hang", "bug", "death"]


EVERYTHING = Capabilities(
    memory_snapshot=True, disk_snapshot=True, fork_running=True, suspend=True, terminals=True, expose=True
)


@dataclass
class BrittleBackend:
    """Machines of one number, their memory, that break where told: before a step, after it, or for ever."""

    name: str = "brittle"
    capabilities: Capabilities = EVERYTHING
    faults: dict[str, How] = field(default_factory=dict)
    machines: dict[str, "BrittleMachine"] = field(default_factory=dict)
    gates: dict[str, asyncio.Event] = field(default_factory=dict)
    created: int = 0
    kills_commands: bool = False
    asked_deterministic: list[bool] = field(default_factory=list)

    async def step(self, name: str, *, machine: "BrittleMachine | None" = None, done: bool = False) -> None:
        how = self.faults.get(name)
        if how == "death" and machine is not None and not done:
            machine.alive = False
        if (how in ("before", "death") and not done) or (how == "after" and done):
            raise SandboxError(f"{name}: broken on purpose")
        if how == "bug" and not done:
            raise KeyError(name)
        if how == "hang" and not done:
            await asyncio.sleep(3600)
        if done and name in self.gates:  # half way, until the test has looked
            await self.gates[name].wait()
        await asyncio.sleep(0)

    async def create(self, spec: Spec, id: str) -> "BrittleMachine":
        await self.step("create")
        machine = BrittleMachine(self, id, 0, 0)
        try:
            await self.step("create", done=True)
        except SandboxError:
            await machine.kill()
            raise
        return machine

    async def restore(
        self, folder: Path, spec: Spec, id: str, generation: int, *, deterministic: bool = False
    ) -> "BrittleMachine":
        self.asked_deterministic.append(deterministic)
        await self.step("restore")
        machine = BrittleMachine(self, id, generation, json.loads((folder / "memory.json").read_text()))
        try:
            await self.step("restore", done=True)
        except SandboxError:
            await machine.kill()
            raise
        return machine

    async def reap(self, live: frozenset[str]) -> list[str]:
        gone = [id for id in self.machines if id not in live]
        for id in gone:
            del self.machines[id]
        return gone

    async def checks(self) -> list[Check]:
        return []


class BrittleMachine:
    def __init__(self, backend: BrittleBackend, id: str, generation: int, memory: int) -> None:
        self.backend = backend
        self.id = id
        self.generation = generation
        self.memory = memory
        self.frozen = False
        self.alive = True
        backend.machines[id] = self
        backend.created += 1

    def _must_run(self) -> None:
        if not self.alive or self.frozen:
            raise SandboxError("the machine does not run")

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
        self._must_run()
        self.memory += 1
        if self.backend.kills_commands:
            return Result("ok", signal=9)
        return Result("ok", 0, stdout=str(self.memory).encode())

    async def start(
        self,
        argv: Sequence[str] | str,
        *,
        env: Mapping[str, str] | None = None,
        cwd: str | None = None,
        user: str | None = None,
        terminal: tuple[int, int] | None = None,
    ) -> Process:
        raise SandboxError("start: has no processes", "refused")

    async def read(self, path: str, offset: int = 0, limit: int | None = None) -> bytes:
        self._must_run()
        return str(self.memory).encode()

    async def write(self, path: str, data: bytes, mode: int = 0o644) -> None:
        self._must_run()

    async def list(self, path: str) -> list[Entry]:
        self._must_run()
        return []

    async def stat(self, path: str) -> Entry:
        self._must_run()
        return Entry(path, "file", 1, 0o644, 0.0)

    async def remove(self, path: str) -> None:
        self._must_run()

    async def rename(self, source: str, destination: str) -> None:
        self._must_run()

    async def make_directory(self, path: str) -> None:
        self._must_run()

    async def expose(self, port: int) -> tuple[str, int]:
        return "127.0.0.1", port

    async def pause(self) -> None:
        await self.backend.step("pause", machine=self)
        self.frozen = True
        await self.backend.step("pause", machine=self, done=True)

    async def resume(self) -> None:
        if not self.alive:
            raise SandboxError("the machine is dead")
        await self.backend.step("resume", machine=self)
        self.frozen = False
        await self.backend.step("resume", machine=self, done=True)

    async def suspend(self, folder: Path) -> None:
        self.frozen = True
        await self.backend.step("suspend", machine=self)
        (folder / "memory.json").write_text(str(self.memory))
        await self.backend.step("suspend", machine=self, done=True)
        await self.kill()

    async def snapshot(self, folder: Path, parent: Path | None = None) -> None:
        before = self.frozen
        self.frozen = True
        await self.backend.step("snapshot", machine=self)
        (folder / "memory.json").write_text(str(self.memory))
        await self.backend.step("snapshot", machine=self, done=True)
        self.frozen = before

    async def fork(self, ids: Sequence[str], *, deterministic: bool = False) -> "Sequence[Machine | SandboxError]":
        before = self.frozen
        self.frozen = True
        self.backend.asked_deterministic.append(deterministic)
        await self.backend.step("fork", machine=self)
        copies: list[Machine | SandboxError] = [
            BrittleMachine(self.backend, id, self.generation + 1, self.memory) for id in ids
        ]
        if self.backend.faults.get("copy"):
            await self.backend.machines[ids[0]].kill()
            copies[0] = SandboxError("copy: broken on purpose")
        await self.backend.step("fork", machine=self, done=True)
        self.frozen = before
        return copies

    async def kill(self) -> None:
        self.alive = False
        self.backend.machines.pop(self.id, None)
        await self.backend.step("kill", machine=self)

    async def is_alive(self) -> bool:
        return self.alive

    async def usage(self) -> Usage:
        return Usage()


async def in_status(root: Path, status: Status, step_limit_s: float = 5.0) -> tuple[Host, BrittleBackend, Sandbox]:
    backend = BrittleBackend()
    host = await Host.open(root, backend, step_limit_s=step_limit_s)
    sandbox = await host.create(Spec(timeout_s=1000.0))
    if status == "paused":
        await sandbox.pause()
    elif status == "suspended":
        await sandbox.suspend()
    elif status == "dead":
        await sandbox.kill()
    elif status == "failed":
        backend.machines[sandbox.id].alive = False
        await sandbox.check()
    elif status == "lost":
        host.store.close()
        assert host._watcher is not None
        host._watcher.cancel()
        host = await Host.open(root, backend, step_limit_s=step_limit_s)
        sandbox = host.get(sandbox.id)
    assert sandbox.status == status
    return host, backend, sandbox


def agrees(backend: BrittleBackend, sandbox: Sandbox) -> bool:
    """Whether the machine is as the status says."""
    machine = backend.machines.get(sandbox.id)
    if sandbox.status == "running":
        return machine is not None and machine.alive and not machine.frozen
    if sandbox.status == "paused":
        return machine is not None and machine.alive and machine.frozen
    return machine is None
