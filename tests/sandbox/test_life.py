"""Every operation in every status, with failures at every step: no status is ever stuck, and none lies."""

import asyncio
import itertools
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import ModuleType

import pytest

from triax.errors import SandboxError
from triax.sandbox.host import Host
from triax.sandbox.protocol import STABLE, Capabilities, Spec, Status
from triax.sandbox.rules import ALLOWED
from triax.sandbox.sandbox import Sandbox

OPERATIONS: dict[str, Callable[[Sandbox], Awaitable[object]]] = {
    "exec": lambda sandbox: sandbox.exec("true"),
    "start": lambda sandbox: sandbox.start("cat"),
    "read": lambda sandbox: sandbox.read("/x"),
    "write": lambda sandbox: sandbox.write("/x", b""),
    "list": lambda sandbox: sandbox.list("/"),
    "stat": lambda sandbox: sandbox.stat("/x"),
    "remove": lambda sandbox: sandbox.remove("/x"),
    "rename": lambda sandbox: sandbox.rename("/x", "/y"),
    "make_directory": lambda sandbox: sandbox.make_directory("/d"),
    "expose": lambda sandbox: sandbox.expose(80),
    "pause": lambda sandbox: sandbox.pause(),
    "resume": lambda sandbox: sandbox.resume(),
    "suspend": lambda sandbox: sandbox.suspend(),
    "snapshot": lambda sandbox: sandbox.snapshot(),
    "fork": lambda sandbox: sandbox.fork(2),
    "set_timeout": lambda sandbox: sandbox.set_timeout(100.0),
    "kill": lambda sandbox: sandbox.kill(),
}
CHANGES = ("pause", "resume", "suspend", "snapshot", "fork", "kill")
BUSY: dict[Status, str] = {
    "pausing": "pause",
    "suspending": "suspend",
    "resuming": "resume",
    "snapshotting": "snapshot",
    "forking": "fork",
}
AFTER: dict[str, dict[Status, Status]] = {
    "pause": {"running": "paused"},
    "resume": {"paused": "running", "suspended": "running"},
    "suspend": {"running": "suspended", "paused": "suspended"},
    "kill": dict.fromkeys(("running", "paused", "suspended", "lost", "failed", "dead"), "dead"),
}


@pytest.mark.parametrize(("status", "operation"), list(itertools.product(STABLE, OPERATIONS)))
def test_every_operation_in_every_lasting_status_is_done_or_refused(
    brittle: ModuleType, tmp_path: Path, status: Status, operation: str
) -> None:
    async def run() -> None:
        host, backend, sandbox = await brittle.in_status(tmp_path, status)
        rule = operation if operation in ALLOWED else "use"
        if status in ALLOWED[rule] and operation != "start":
            await OPERATIONS[operation](sandbox)
            assert sandbox.status == AFTER.get(operation, {}).get(status, status)
        else:
            with pytest.raises(SandboxError) as caught:
                await OPERATIONS[operation](sandbox)
            assert caught.value.kind == "refused"
            if operation != "start":
                assert caught.value.status == 409
                assert status in str(caught.value)
            assert sandbox.status == status
        assert brittle.agrees(backend, sandbox)
        await host.close()

    asyncio.run(run())


@pytest.mark.parametrize(("during", "operation"), list(itertools.product(BUSY, OPERATIONS)))
def test_no_operation_gets_into_one_that_is_in_progress(
    brittle: ModuleType, tmp_path: Path, during: Status, operation: str
) -> None:
    async def run() -> None:
        host, backend, sandbox = await brittle.in_status(tmp_path, "suspended" if during == "resuming" else "running")
        going = asyncio.ensure_future(OPERATIONS[BUSY[during]](sandbox))
        await asyncio.sleep(0)
        assert sandbox.status == during
        allowed = during in ALLOWED[operation if operation in ALLOWED else "use"]
        if operation == "kill":
            await sandbox.kill()
            assert sandbox.status == "dead"
            await asyncio.gather(going, return_exceptions=True)
            assert sandbox.id not in backend.machines
        elif allowed:
            await asyncio.gather(OPERATIONS[operation](sandbox), return_exceptions=True)
            await going
        else:
            with pytest.raises(SandboxError) as caught:
                await OPERATIONS[operation](sandbox)
            assert caught.value.status == 409
            await going
        assert sandbox.status in STABLE
        assert brittle.agrees(backend, sandbox)
        await host.close()

    asyncio.run(run())


HANGS_S = 0.1
"""Limit of a step that never ends."""
ENDS_S = 60.0
"""Limit of one that does, however busy the machine is."""

FAULTS = list(
    itertools.product(
        ("pause", "resume", "suspend", "snapshot", "fork"),
        ("before", "after", "hang", "bug", "death"),
        ("running", "paused"),
    )
)


@pytest.mark.parametrize(("step", "how", "before"), FAULTS)
def test_a_step_that_fails_leaves_it_running_or_failed(
    brittle: ModuleType, tmp_path: Path, step: str, how: str, before: Status
) -> None:
    async def run() -> None:
        host, backend, sandbox = await brittle.in_status(tmp_path, before)
        if before not in ALLOWED[step]:
            await host.close()
            return
        backend.faults = {step: how}
        host.step_limit_s = HANGS_S if how == "hang" else ENDS_S
        memory = backend.machines[sandbox.id].memory
        (answer,) = await asyncio.gather(OPERATIONS[step](sandbox), return_exceptions=True)
        if isinstance(answer, SandboxError):
            assert answer.kind == "infrastructure"
        else:
            assert step == "resume", "only a resume can be found done after it said that it failed"
        assert sandbox.status in ("running", "failed"), "never stuck, never paused by a failure"
        assert brittle.agrees(backend, sandbox), f"says `{sandbox.status}`, and the machine says otherwise"
        if how != "death" and step != "resume":
            assert sandbox.status == "running"
        assert not list(host.store.snapshots_folder.glob(".partial-*"))
        assert host.store.snapshots() == []
        assert sandbox.record.snapshot is None
        assert [record.snapshot for record in host.store.records()] == [None], "no crash finds a snapshot that is not"
        backend.faults, host.step_limit_s = {}, ENDS_S
        if sandbox.status == "running":
            assert (await sandbox.exec("true")).stdout == str(memory + 1).encode()
            await sandbox.suspend()
            await sandbox.resume()
            assert (await sandbox.exec("true")).stdout == str(memory + 2).encode()
        else:
            assert (
                "broken on purpose" in sandbox.reason or "did not end" in sandbox.reason or "KeyError" in sandbox.reason
            )
            await sandbox.kill()
            assert sandbox.status == "dead"
        await host.gc()
        await host.close()
        assert set(backend.machines) == set()

    asyncio.run(run())


@pytest.mark.parametrize("how", ["before", "after", "hang", "bug"])
def test_a_restore_that_fails_leaves_it_suspended_and_works_later(
    brittle: ModuleType, tmp_path: Path, how: str
) -> None:
    async def run() -> None:
        host, backend, sandbox = await brittle.in_status(tmp_path, "suspended")
        backend.faults = {"restore": how}
        host.step_limit_s = HANGS_S if how == "hang" else ENDS_S
        with pytest.raises(SandboxError):
            await sandbox.resume()
        assert sandbox.status == "suspended"
        assert backend.machines == {}
        copies = await sandbox.fork(2)
        assert all(isinstance(copy, SandboxError) for copy in copies)
        assert sandbox.status == "suspended"
        backend.faults, host.step_limit_s = {}, ENDS_S
        await sandbox.resume()
        assert (await sandbox.exec("true")).stdout == b"1"
        await host.close()

    asyncio.run(run())


@pytest.mark.parametrize("how", ["before", "after", "hang", "bug"])
def test_a_machine_that_does_not_start_leaves_no_sandbox(brittle: ModuleType, tmp_path: Path, how: str) -> None:
    async def run() -> None:
        backend = brittle.BrittleBackend(faults={"create": how})
        host = await Host.open(tmp_path, backend, step_limit_s=HANGS_S if how == "hang" else ENDS_S)
        with pytest.raises(SandboxError) as caught:
            await host.create()
        assert caught.value.kind == "infrastructure"
        assert host.sandboxes() == []
        assert backend.machines == {}
        assert list(host.store.records_folder.iterdir()) == []
        await host.close()

    asyncio.run(run())


def test_a_copy_that_fails_is_an_error_in_its_place(brittle: ModuleType, tmp_path: Path) -> None:
    async def run() -> None:
        host, backend, sandbox = await brittle.in_status(tmp_path, "running")
        backend.faults = {"copy": "before"}
        first, second = await sandbox.fork(2)
        assert isinstance(first, SandboxError)
        assert isinstance(second, Sandbox)
        assert second.generation == 1
        assert sandbox.status == second.status == "running"
        await host.close()

    asyncio.run(run())


class FullDisk:
    """A store's writer that refuses from its n-th call on, as a disk does that filled up."""

    def __init__(self, host: Host, after: int) -> None:
        self.real = host.store._replace
        self.left = after
        host.store._replace = self  # type: ignore[method-assign]

    def __call__(self, path: Path, tree: object, *, durable: bool) -> None:
        self.left -= 1
        if self.left < 0:
            raise SandboxError(f"record {path}: cannot be written; No space left on device; free some disk")
        self.real(path, tree, durable=durable)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("operation", "before", "after"),
    [
        (operation, before, after)
        for operation in ("pause", "resume", "suspend", "snapshot", "fork", "set_timeout")
        for before in ("running", "paused", "suspended")
        for after in range(4)
        if before in ALLOWED[operation]
    ],
)
def test_a_full_disk_at_any_write_leaves_a_true_status(
    brittle: ModuleType, tmp_path: Path, operation: str, before: Status, after: int
) -> None:
    async def run() -> None:
        host, backend, sandbox = await brittle.in_status(tmp_path, before)
        disk = FullDisk(host, after)
        (answer,) = await asyncio.gather(OPERATIONS[operation](sandbox), return_exceptions=True)
        if isinstance(answer, BaseException):
            assert "No space left" in str(answer)
            assert sandbox.status in ("running", before)
        else:
            assert sandbox.status == AFTER.get(operation, {}).get(before, before)
            if operation == "fork":
                assert isinstance(answer, list)
                alive = [copy for copy in answer if isinstance(copy, Sandbox)]
                assert len(backend.machines) == len(alive) + (before != "suspended")
        assert brittle.agrees(backend, sandbox)
        host.store._replace = disk.real  # type: ignore[method-assign]
        if sandbox.status != "running":
            await sandbox.resume()
        assert (await sandbox.exec("true")).stdout == b"1"
        await host.close()

    asyncio.run(run())


@pytest.mark.parametrize("operation", CHANGES)
def test_a_caller_that_gives_up_leaves_no_half_done_operation(
    brittle: ModuleType, tmp_path: Path, operation: str
) -> None:
    async def run() -> None:
        host, backend, sandbox = await brittle.in_status(tmp_path, "paused" if operation == "resume" else "running")
        going = asyncio.ensure_future(OPERATIONS[operation](sandbox))
        await asyncio.sleep(0)
        going.cancel()
        with pytest.raises(asyncio.CancelledError):
            await going
        await sandbox.settled()
        assert sandbox.status in STABLE
        assert brittle.agrees(backend, sandbox)
        await host.close()

    asyncio.run(run())


def test_a_machine_that_ends_by_itself_is_told_as_failed(brittle: ModuleType, tmp_path: Path) -> None:
    async def run() -> None:
        host, backend, sandbox = await brittle.in_status(tmp_path, "running")
        backend.machines[sandbox.id].alive = False
        with pytest.raises(SandboxError) as caught:
            await sandbox.exec("true")
        assert caught.value.kind == "infrastructure"
        assert sandbox.status == "failed"
        assert "by itself" in sandbox.reason
        await host.close()

    asyncio.run(run())


def test_what_a_backend_cannot_do_is_refused_and_changes_nothing(brittle: ModuleType, tmp_path: Path) -> None:
    async def run() -> None:
        backend = brittle.BrittleBackend(capabilities=Capabilities())
        host = await Host.open(tmp_path, backend)
        with pytest.raises(SandboxError, match="cannot suspend"):
            await host.create(Spec(timeout_s=5.0))
        sandbox = await host.create(Spec(on_timeout="kill"))
        for act in (
            sandbox.suspend(),
            sandbox.snapshot(),
            sandbox.fork(),
            sandbox.expose(80),
            sandbox.start("sh", terminal=(24, 80)),
        ):
            with pytest.raises(SandboxError) as caught:
                await act
            assert (caught.value.kind, caught.value.status) == ("refused", 501)
            assert sandbox.status == "running"
        await host.close()

    asyncio.run(run())


def test_a_pause_without_memory_is_refused_where_memory_would_be_kept(brittle: ModuleType, tmp_path: Path) -> None:
    async def run() -> None:
        host, _, sandbox = await brittle.in_status(tmp_path, "running")
        with pytest.raises(SandboxError, match="keep_memory `False`"):
            await sandbox.suspend(keep_memory=False)
        assert sandbox.status == "running"
        await sandbox.suspend(keep_memory=True)
        await host.close()

    asyncio.run(run())
