"""The owner of all sandboxes of one folder: makes them, watches their time, and finds them again after a crash."""

import asyncio
import dataclasses
import time
from collections import Counter, defaultdict
from collections.abc import Coroutine, Mapping
from contextlib import suppress
from pathlib import Path

from triax.errors import SandboxError
from triax.log import logger
from triax.sandbox.command import positive, sane_path, variables
from triax.sandbox.protocol import Backend, Machine, Spec
from triax.sandbox.sandbox import Sandbox
from triax.sandbox.store import Record, Snapshot, Store, backend_of, new_id

RETRY_S = 10.0  # until a time limit that could not be kept is tried again
HEALTH_S = 5.0  # between two looks at whether machines still live
UNHARMED = ("suspending", "snapshotting", "forking")
"""Statuses in which a sandbox that has a snapshot to resume from is as good as suspended."""


class Host:
    """Owner of the sandboxes of one folder, all of one backend; `await Host.open(...)` makes it.

    Args:
        store: The folder, owned.
        backend: What makes machines.
        step_limit_s: Seconds that one step of a machine may take before it counts as failed.

    Attributes:
        counts: How many operations ended how: (operation, outcome) to a number.
        seconds: Time that operations took together, by operation.
        ended: What an owner that died had left and `open` ended, in words.
    """

    def __init__(self, store: Store, backend: Backend, *, step_limit_s: float = 120.0) -> None:
        self.store = store
        self.backend = backend
        self.step_limit_s = step_limit_s
        self.active: set[str] = set()
        self.counts: Counter[tuple[str, str]] = Counter()
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self.ended: list[str] = []
        self._sandboxes: dict[str, Sandbox] = {}
        self.starting: set[str] = set()
        self._coming: dict[str, Record] = {}
        self._news = asyncio.Event()
        self._watcher: asyncio.Task[None] | None = None
        self._deeds: set[asyncio.Task[None]] = set()

    @classmethod
    async def open(cls, root: Path, backend: Backend, *, step_limit_s: float = 120.0) -> "Host":
        """Own a folder: end what an owner that died left running, and find its suspended sandboxes.

        Args:
            root: The folder; made if it is not there.
            backend: What makes machines.
            step_limit_s: Seconds that one step of a machine may take before it counts as failed.

        Raises:
            SandboxError: Another process owns the folder, it holds sandboxes of another backend, or it cannot be
                written.
        """
        store = Store(root)
        host = cls(store, backend, step_limit_s=step_limit_s)
        try:
            before = backend_of(store.root)
            if before not in (None, backend.name):
                raise SandboxError(
                    f"sandboxes {root}: hold sandboxes of the backend `{before}`; found `{backend.name}`; "
                    f"take `{before}`, or choose another folder",
                    "refused",
                    status=409,
                )
            host.ended = await backend.reap(frozenset())
            for words in host.ended:
                logger("sandbox").warning("left by an owner that died, ended: %s", words)
            for record in store.records():
                host._find_again(record)
            store.empty(store.sweep(host._records())[1])
        except BaseException:
            store.close()
            raise
        host._watcher = asyncio.create_task(host._watch())
        return host

    async def close(self, *, keep: bool = True) -> None:
        """Give the folder up.

        Args:
            keep: Suspend those whose time limit would, and list those that cannot be as failed; otherwise end all.
        """
        if self._watcher is not None:
            self._watcher.cancel()
            with suppress(asyncio.CancelledError):
                await self._watcher
        if self._deeds:
            await asyncio.gather(*self._deeds, return_exceptions=True)
        await asyncio.gather(*(self._put_away(sandbox, keep) for sandbox in self.sandboxes()))
        self.store.empty(self.store.sweep(self._records())[1])
        self.store.close()

    async def create(self, spec: Spec | None = None, *, snapshot: str | None = None, id: str | None = None) -> Sandbox:
        """Make a sandbox.

        Args:
            spec: What is wanted; none for the defaults, or for what the snapshot's sandbox was.
            snapshot: Id of a snapshot to start from, taken by this or another owner of the folder.
            id: Its id; a new one if none.

        Raises:
            SandboxError: The wish cannot be met (`refused`), or the machine did not start (`infrastructure`).
        """
        started = time.monotonic()
        outcome = "infrastructure"
        try:
            sandbox = await self._create(spec, snapshot, id or new_id())
            outcome = "ok"
            return sandbox
        except SandboxError as error:
            outcome = error.kind
            raise
        finally:
            self.count("create", outcome, time.monotonic() - started)

    async def _create(self, spec: Spec | None, snapshot: str | None, id: str) -> Sandbox:
        held = self._held(snapshot) if snapshot is not None else None
        wanted = spec or (held.spec if held else Spec())
        check(wanted, self.backend)
        if id in self._sandboxes or id in self.starting:
            raise SandboxError(f"sandbox {id}: there is one already; leave the id out", "refused", status=409)
        record = Record(id, self.backend.name, wanted, origin=snapshot, latest=snapshot)
        self.starting.add(id)
        self._coming[id] = record  # its snapshot must stay while it starts
        machine: Machine | None = None
        try:
            self.store.save(record)
            machine = await self._started(record, held)
            record.status, record.generation = "running", machine.generation
            if wanted.timeout_s is not None:
                record.expires_s = time.time() + wanted.timeout_s
            self.store.save(record)
            return self.adopt(record, machine)
        except BaseException:
            if machine is not None:
                await machine.kill()
            self.store.forget(id)
            raise
        finally:
            self.starting.discard(id)
            del self._coming[id]

    async def _started(self, record: Record, held: Snapshot | None) -> Machine:
        if held is None:
            making = self.backend.create(record.spec, record.id)
        else:
            making = self.backend.restore(self.store.folder(held.id), record.spec, record.id, held.generation + 1)
        try:
            return await asyncio.wait_for(making, self.step_limit_s)
        except SandboxError:
            raise
        except TimeoutError as error:
            raise SandboxError(f"sandbox {record.id}: did not start within {self.step_limit_s:g} s") from error
        except Exception as error:
            raise SandboxError(f"sandbox {record.id}: did not start; {type(error).__name__}: {error}") from error

    def _held(self, id: str) -> Snapshot:
        found = self.store.snapshot(id)
        if found.backend != self.backend.name:
            raise SandboxError(
                f"snapshot {id}: was taken by the backend `{found.backend}`; found `{self.backend.name}`; "
                "start a host of that backend",
                "refused",
                status=409,
            )
        return found

    def get(self, id: str) -> Sandbox:
        """Return a sandbox, whatever its status.

        Raises:
            SandboxError: There is none with this id; status 404.
        """
        try:
            return self._sandboxes[id]
        except KeyError:
            raise SandboxError(
                f"sandbox {id[:80]!r}: there is none; list what there is", "refused", status=404
            ) from None

    def sandboxes(self, metadata: Mapping[str, str] | None = None) -> list[Sandbox]:
        """Return sandboxes, the oldest first; `metadata` asks for those with these labels. Dead ones are left out."""
        wanted = dict(metadata or {}).items()
        living = [one for one in self._sandboxes.values() if one.status != "dead"]
        return sorted(
            (one for one in living if wanted <= dict(one.spec.metadata).items()), key=lambda one: one.created_s
        )

    def snapshots(self) -> list[Snapshot]:
        """Return snapshots that were asked for, the oldest first."""
        kept = [snapshot for snapshot in self.store.snapshots() if snapshot.kind == "kept"]
        return sorted(kept, key=lambda snapshot: snapshot.created_s)

    def snapshot(self, id: str) -> Snapshot:
        """Return one snapshot.

        Raises:
            SandboxError: There is none with this id; status 404.
        """
        return self.store.snapshot(id)

    async def remove_snapshot(self, id: str) -> None:
        """Remove a snapshot that was asked for; its bytes go once no sandbox and no other snapshot needs them.

        Raises:
            SandboxError: There is none (404), or it is what a suspended sandbox resumes from (409).
        """
        if self.store.snapshot(id).kind != "kept":
            raise SandboxError(f"snapshot {id}: a suspended sandbox resumes from it; end that", "refused", status=409)
        self.store.retire(id)
        await asyncio.to_thread(self.store.empty, self.store.sweep(self._records(), self.active)[1])

    async def gc(self, *, forget_lost: bool = False) -> list[str]:
        """Free what nobody holds: machines without a sandbox, half-written snapshots, records of the dead.

        Args:
            forget_lost: Also drop sandboxes that are lost or failed, which are otherwise listed until they are killed.

        Returns:
            What was freed, in words.
        """
        gone = ("dead", "lost", "failed") if forget_lost else ("dead",)
        freed = []
        for sandbox in [one for one in self._sandboxes.values() if one.status in gone]:
            del self._sandboxes[sandbox.id]
            self.store.forget(sandbox.id)
            freed.append(f"record of sandbox {sandbox.id}, {sandbox.status}")
        live = frozenset(
            one.id for one in self._sandboxes.values() if one.status not in ("lost", "failed", "suspended")
        )
        freed += await self.backend.reap(live | self.starting)
        words, doomed = self.store.sweep(self._records(), self.active)
        await asyncio.to_thread(self.store.empty, doomed)
        return freed + words

    def adopt(self, record: Record, machine: Machine | None) -> Sandbox:
        """Own a sandbox that was made elsewhere, such as a copy."""
        sandbox = Sandbox(self, record, machine)
        self._sandboxes[record.id] = sandbox
        self.changed()
        return sandbox

    def count(self, operation: str, outcome: str, seconds: float) -> None:
        """Note that an operation ended."""
        self.counts[operation, outcome] += 1
        self.seconds[operation] += seconds

    def changed(self) -> None:
        """Look at time limits again."""
        self._news.set()

    def tidy(self) -> None:
        """Remove snapshots that nobody needs any more, soon."""
        if self._watcher is not None and not self._watcher.done():
            self._do(asyncio.to_thread(self.store.empty, self.store.sweep(self._records(), self.active)[1]))

    def _records(self) -> list[Record]:
        return [*(one.record for one in self._sandboxes.values()), *self._coming.values()]

    def _find_again(self, record: Record) -> None:
        if record.status in UNHARMED and record.snapshot and self.store.exists(record.snapshot):
            record.status = "suspended"  # its owner died after it was put away, or while it was copied from there
            record.origin, record.latest = None, record.snapshot
        if record.status == "dead":
            self.store.forget(record.id)
            return
        if record.status == "suspended":
            if record.snapshot is None or not self.store.exists(record.snapshot):
                record.status, record.reason = "lost", f"its snapshot `{record.snapshot}` is gone"
        elif record.status not in ("lost", "failed"):
            how = "only paused in place" if record.status == "paused" else record.status
            record.status, record.reason = "lost", f"it was {how} when its owner died"
        if record.status != "suspended":
            record.snapshot = record.origin = None
        self.adopt(record, None)
        with suppress(SandboxError):
            self.store.save(record)

    async def _put_away(self, sandbox: Sandbox, keep: bool) -> None:
        await sandbox.settled()
        if sandbox.status not in ("running", "paused"):
            return
        if not keep or sandbox.spec.on_timeout != "suspend":
            await sandbox.kill()
            return
        try:
            await sandbox.suspend()
        except SandboxError as error:
            logger("sandbox").warning("sandbox %s could not be put away and is lost: %s", sandbox.id, error)
            if sandbox.status in ("running", "paused"):
                await sandbox.give_up(f"its owner ended and could not put it away: {error}")

    async def _watch(self) -> None:
        looked = time.monotonic()
        while True:
            self._news.clear()
            for sandbox in list(self._sandboxes.values()):
                if sandbox.is_expired():
                    sandbox.postpone(RETRY_S)
                    self._do(self._expire(sandbox))
            if time.monotonic() - looked >= HEALTH_S:
                looked = time.monotonic()
                for sandbox in self.sandboxes():
                    self._do(sandbox.check())
            limits = [one.expires_s for one in self._sandboxes.values() if one.status in ("running", "paused")]
            nearest = min((limit for limit in limits if limit is not None), default=time.time() + HEALTH_S)
            with suppress(TimeoutError):  # not wait_for: Python 3.11's loses a cancellation that comes with the news
                async with asyncio.timeout(max(0.0, min(HEALTH_S, nearest - time.time()))):
                    await self._news.wait()

    async def _expire(self, sandbox: Sandbox) -> None:
        try:
            if sandbox.spec.on_timeout == "suspend":
                await sandbox.suspend()
            else:
                await sandbox.kill()
        except SandboxError as error:
            logger("sandbox").warning("time limit of sandbox %s, tried again in %g s: %s", sandbox.id, RETRY_S, error)

    def _do(self, deed: Coroutine[None, None, None]) -> None:
        task = asyncio.create_task(_without_refusals(deed))
        self._deeds.add(task)
        task.add_done_callback(self._deeds.discard)


def check(spec: Spec, backend: Backend) -> None:
    """Refuse a wish that no machine of a backend could meet.

    Raises:
        SandboxError: A quota is not above 0, a name cannot be, or the backend cannot do it; kind `refused`.
    """
    for field in dataclasses.fields(spec.resources):
        positive(f"resources.{field.name}", getattr(spec.resources, field.name))
    positive("timeout_s", spec.timeout_s)
    variables(spec.env)
    if spec.cwd is not None:
        sane_path(spec.cwd)
    if spec.on_timeout not in ("suspend", "kill"):
        raise SandboxError(f"on_timeout: is `suspend` or `kill`; found `{spec.on_timeout}`", "refused")
    if spec.timeout_s is not None and spec.on_timeout == "suspend" and not backend.capabilities.suspend:
        raise SandboxError(f"on_timeout: the backend `{backend.name}` cannot suspend; ask for `kill`", "refused")
    if spec.network.allow_out and not backend.capabilities.network_policy:
        raise SandboxError(
            f"network.allow_out: the backend `{backend.name}` cannot allow single destinations; use `qemu`", "refused"
        )


async def _without_refusals(deed: Coroutine[None, None, None]) -> None:
    """Do something that another operation may have got ahead of."""
    with suppress(SandboxError):
        await deed
