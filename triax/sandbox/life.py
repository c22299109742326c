"""The life of a sandbox: its operations, one at a time, and what becomes of it when a step fails."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, TypeVar, runtime_checkable

from triax.errors import SandboxError
from triax.log import logger
from triax.sandbox.protocol import STABLE, Backend, Machine, Status
from triax.sandbox.rules import USABLE, allow
from triax.sandbox.store import Record, Store, new_id

if TYPE_CHECKING:
    from triax.sandbox.sandbox import Sandbox

T = TypeVar("T")


@runtime_checkable
class Owner(Protocol):
    """What a sandbox needs of the host that owns it."""

    store: Store
    backend: Backend
    step_limit_s: float
    active: set[str]
    starting: set[str]

    def adopt(self, record: Record, machine: Machine | None) -> "Sandbox":
        """Own another sandbox."""
        ...

    def count(self, operation: str, outcome: str, seconds: float) -> None:
        """Note that an operation ended."""
        ...

    def changed(self) -> None:
        """Note that a time limit or a status changed."""
        ...

    def tidy(self) -> None:
        """Remove snapshots that nobody needs any more, soon."""
        ...


class Life:
    """What is known of a sandbox, its machine, and the operations that change its status.

    One operation at a time; each ends in a status that lasts and is true, whatever fails.

    Args:
        owner: The host that owns it.
        record: What is known of it.
        machine: Its machine, if it has one.
    """

    def __init__(self, owner: Owner, record: Record, machine: Machine | None) -> None:
        self.owner = owner
        self.record = record
        self.machine = machine
        self.settled = asyncio.Event()
        self.settled.set()

    @property
    def status(self) -> Status:
        """Where it is in its life."""
        return self.record.status

    async def pause(self) -> None:
        """Stop the machine in place."""
        await self._change("pause", "pausing", self._pause)

    async def resume(self) -> None:
        """Let it go on, from in place or from its snapshot."""
        await self._change("resume", "resuming", self._resume)

    async def suspend(self) -> str:
        """Put it away and return the id of its snapshot."""
        return await self._change("suspend", "suspending", self._suspend)

    async def snapshot(self) -> str:
        """Take a snapshot, go on, and return its id."""
        return await self._change("snapshot", "snapshotting", self._snapshot)

    async def fork(self, count: int, *, deterministic: bool = False) -> "Sequence[Sandbox | SandboxError]":
        """Make copies."""
        return await self._change("fork", "forking", lambda before: self._fork(before, count, deterministic))

    async def kill(self) -> None:
        """End the machine and all that was kept."""
        await self._change("kill", "killing", self._kill)

    async def bury(self, reason: str) -> None:
        """End the machine, if it has not ended by itself, and note that the sandbox failed, and why."""
        await self._change("kill", "killing", lambda before: self._bury(reason))

    def allow(self, operation: str) -> None:
        """Refuse an operation that the present status does not take; HTTP status 409."""
        # copies are made of suspended sandboxes too, and those have no machine to use meanwhile
        status = "suspended" if operation == "use" and self.status in USABLE and not self.machine else self.status
        allow(operation, self.record.id, status, self.record.reason)

    async def _change(self, operation: str, during: Status, act: "Callable[[Status], Awaitable[T]]") -> T:
        self.allow(operation)
        before = self.status
        self.record.status = during
        self.settled.clear()
        # a caller who gives up must not leave a machine half stopped: the operation runs to its end by itself
        return await asyncio.shield(asyncio.ensure_future(self._carry_out(operation, before, act)))

    async def _carry_out(self, operation: str, before: Status, act: "Callable[[Status], Awaitable[T]]") -> T:
        started = time.monotonic()
        outcome = "infrastructure"
        try:
            answer = await act(before)
            outcome = "ok"
            return answer
        except SandboxError as error:
            outcome = error.kind
            raise
        except Exception as error:
            raise SandboxError(
                f"sandbox {self.record.id}: {operation} failed; {type(error).__name__}: {error}"
            ) from error
        finally:
            if self.status not in STABLE:
                if self.machine is not None:
                    await self._end(self.machine)
                self._settle("failed", f"{operation} broke off")
            self.settled.set()
            self.owner.count(operation, outcome, time.monotonic() - started)
            self.owner.changed()

    def _settle(self, status: Status, reason: str = "") -> None:
        self.record.status = status
        self.record.reason = reason
        # on disk only what must be told after a crash matters, and that was saved before: see `_resume`, `_suspend`
        with suppress(SandboxError):
            self.owner.store.save(self.record)

    async def _step(self, what: str, step: Awaitable[T]) -> T:
        try:
            return await asyncio.wait_for(step, self.owner.step_limit_s)
        except SandboxError:
            raise
        except TimeoutError as error:
            limit = self.owner.step_limit_s
            raise SandboxError(f"sandbox {self.record.id}: {what} did not end within {limit:g} s") from error
        except Exception as error:
            raise SandboxError(f"sandbox {self.record.id}: {what} failed; {type(error).__name__}: {error}") from error

    async def _run_again(self, machine: Machine, error: SandboxError) -> None:
        """Make a machine run after a step failed, or bury it: nothing between the two is ever reported."""
        try:
            await self._step("resume", machine.resume())
            alive = await self._step("probe", machine.is_alive())
        except SandboxError as second:
            logger("sandbox").warning("sandbox %s could not be made to run again: %s", self.record.id, second)
            alive = False
        if alive:
            self._settle("running")
        else:
            await self._end(machine)
            self._settle("failed", f"{error}; the machine could not be made to run again")

    async def _end(self, machine: Machine) -> None:
        try:
            await self._step("kill", machine.kill())
        except SandboxError as error:
            logger("sandbox").warning(
                "sandbox %s: its machine could not be ended, `gc` will: %s", self.record.id, error
            )
        self.machine = None

    async def _pause(self, before: Status) -> None:
        machine = self.machine
        assert machine is not None
        try:
            await self._step("pause", machine.pause())
        except SandboxError as error:
            await self._run_again(machine, error)
            raise
        self._settle("paused")

    async def _resume(self, before: Status) -> None:
        if before == "paused":
            machine = self.machine
            assert machine is not None
            try:
                await self._step("resume", machine.resume())
            except SandboxError as error:
                await self._run_again(machine, error)
                if self.status == "running":
                    return
                raise
            self._restart_time()
            self._settle("running")
            return
        await self._resume_from_snapshot()

    async def _resume_from_snapshot(self) -> None:
        record, store = self.record, self.owner.store
        assert record.snapshot is not None
        try:
            snapshot = store.snapshot(record.snapshot)
            folder = store.folder(snapshot.id)
            started = self.owner.backend.restore(folder, record.spec, record.id, record.generation + 1)
            machine = await self._step("restore", started)
        except SandboxError:
            self._settle("suspended")
            raise
        held = (record.snapshot, record.origin, record.expires_s)
        record.generation, record.origin, record.latest = machine.generation, record.snapshot, record.snapshot
        record.snapshot, record.status = None, "running"
        self._restart_time()
        try:
            # from here on the snapshot is the past: a crash must report the sandbox lost, not bring the past back
            store.save(record)
        except SandboxError:
            await self._end(machine)
            record.snapshot, record.origin, record.expires_s = held
            self._settle("suspended")
            raise
        self.machine = machine

    async def _suspend(self, before: Status) -> str:
        machine, record, store = self.machine, self.record, self.owner.store
        assert machine is not None
        id = new_id()
        self.owner.active.add(id)
        committed = False
        try:
            # the name is on disk before the snapshot is: a crash in between finds one, or finds none
            record.snapshot = id
            store.save(record)
            folder = store.begin(id, record, "suspended")
            await self._step("suspend", machine.suspend(folder))
            store.commit(id)
            committed = True
        except SandboxError as error:
            record.snapshot = None
            store.discard(id)
            await self._run_again(machine, error)
            raise
        finally:
            self.owner.active.discard(id)
            if committed:
                self.machine = None
                record.origin, record.latest = None, id
                self._settle("suspended")
                self.owner.tidy()
        return id

    async def _snapshot(self, before: Status) -> str:
        record, store = self.record, self.owner.store
        id = new_id()
        self.owner.active.add(id)
        try:
            if before == "suspended":
                assert record.snapshot is not None
                await asyncio.to_thread(store.copy, record.snapshot, id, record)
                return id
            machine = self.machine
            assert machine is not None
            try:
                folder = store.begin(id, record, "kept")
                await self._step("snapshot", machine.snapshot(folder, self._parent()))
                store.commit(id)
            except SandboxError as error:
                await self._run_again(machine, error)
                raise
            record.latest = id
            await self._stay(machine, before)
            return id
        finally:
            store.discard(id)
            self.owner.active.discard(id)
            if before == "suspended":
                self._settle("suspended")

    def _parent(self) -> Path | None:
        latest = self.record.latest
        if latest is None or not self.owner.backend.capabilities.incremental_snapshot:
            return None
        return self.owner.store.folder(latest) if self.owner.store.exists(latest) else None

    async def _stay(self, machine: Machine, before: Status) -> None:
        """Be again what it was before an operation after which machines go on."""
        if before == "paused":
            try:
                await self._step("pause", machine.pause())
            except SandboxError as error:
                # what was asked for is done: its status, now `running`, tells that it did not stay paused
                logger("sandbox").warning("sandbox %s could not be paused again: %s", self.record.id, error)
                await self._run_again(machine, error)
                return
        self._settle(before)

    async def _fork(self, before: Status, count: int, deterministic: bool) -> "Sequence[Sandbox | SandboxError]":
        ids = [new_id() for _ in range(count)]
        self.owner.starting.update(ids)
        try:
            return await self._forked(before, ids, deterministic)
        finally:
            self.owner.starting.difference_update(ids)

    async def _forked(
        self, before: Status, ids: Sequence[str], deterministic: bool
    ) -> "Sequence[Sandbox | SandboxError]":
        record = self.record
        if before == "suspended":
            assert record.snapshot is not None
            try:
                copies = await self._copies_of_snapshot(record.snapshot, ids, deterministic)
                return [await self._adopt(id, one, record.snapshot) for id, one in zip(ids, copies, strict=True)]
            finally:
                self._settle("suspended")
        machine = self.machine
        assert machine is not None
        try:
            copies = await self._step("fork", machine.fork(ids, deterministic=deterministic))
        except SandboxError as error:
            await self._run_again(machine, error)
            raise
        children = [await self._adopt(id, one, record.origin) for id, one in zip(ids, copies, strict=True)]
        await self._stay(machine, before)
        return children

    async def _copies_of_snapshot(
        self, snapshot: str, ids: Sequence[str], deterministic: bool
    ) -> "Sequence[Machine | SandboxError]":
        self.owner.store.snapshot(snapshot)
        folder = self.owner.store.folder(snapshot)
        record = self.record

        async def one(id: str) -> "Machine | SandboxError":
            try:
                started = self.owner.backend.restore(
                    folder, record.spec, id, record.generation + 1, deterministic=deterministic
                )
                return await self._step("restore", started)
            except SandboxError as error:
                return error

        return await asyncio.gather(*(one(id) for id in ids))

    async def _adopt(self, id: str, copy: "Machine | SandboxError", origin: str | None) -> "Sandbox | SandboxError":
        if isinstance(copy, SandboxError):
            return copy
        record = Record(
            id,
            self.record.backend,
            self.record.spec,
            "running",
            copy.generation,
            origin=origin,
            latest=self.record.latest,
        )
        if self.record.spec.timeout_s is not None:
            record.expires_s = time.time() + self.record.spec.timeout_s
        try:
            self.owner.store.save(record)
        except SandboxError as error:
            with suppress(SandboxError):
                await self._step("kill", copy.kill())
            return error
        return self.owner.adopt(record, copy)

    async def _kill(self, before: Status) -> None:
        machine = self.machine
        if machine is not None:
            await self._end(machine)
        self.record.snapshot = self.record.origin = None
        self.record.status, self.record.reason = "dead", "it was ended"
        with suppress(SandboxError):
            self.owner.store.save(self.record)
        self.owner.tidy()

    async def _bury(self, reason: str) -> None:
        machine = self.machine
        if machine is not None:
            await self._end(machine)
        self._settle("failed", reason)

    def _restart_time(self) -> None:
        limit = self.record.spec.timeout_s
        self.record.expires_s = None if limit is None else time.time() + limit
