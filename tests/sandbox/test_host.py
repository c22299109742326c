"""An owner of sandboxes that ends, crashes or sweeps up while others still need what it has."""

import asyncio
import dataclasses
import json
import os
import time
from pathlib import Path
from types import ModuleType

import pytest

from triax.errors import SandboxError
from triax.sandbox.host import Host
from triax.sandbox.protocol import Network, Resources, Spec
from triax.sandbox.store import PARENTS, Record, Store


def test_a_suspended_sandbox_that_is_copied_serves_nothing_meanwhile(brittle: ModuleType, tmp_path: Path) -> None:
    async def run() -> None:
        host, _, sandbox = await brittle.in_status(tmp_path, "suspended")
        for act in (sandbox.snapshot(), sandbox.fork()):
            going = asyncio.ensure_future(act)
            await asyncio.sleep(0)
            with pytest.raises(SandboxError, match="it is `suspended`; resume it first"):
                await sandbox.exec("true")
            await going
        await host.close()

    asyncio.run(run())


def test_a_suspended_sandbox_survives_a_crash_while_it_is_copied(brittle: ModuleType, tmp_path: Path) -> None:
    async def run() -> None:
        host, backend, sandbox = await brittle.in_status(tmp_path, "suspended")
        going = asyncio.ensure_future(sandbox.fork())
        await asyncio.sleep(0)
        await sandbox.set_timeout(50.0)  # writes what is known at this moment
        record = host.store.records_folder / f"{sandbox.id}.json"
        written = record.read_bytes()
        await going
        host.store.close()
        host._watcher.cancel()
        record.write_bytes(written)
        after = await Host.open(tmp_path, backend)
        again = after.get(sandbox.id)
        assert again.status == "suspended", again.reason
        await again.resume()
        await after.close()

    asyncio.run(run())


def test_a_snapshot_that_is_removed_while_a_sandbox_starts_from_it_stays_as_long(
    brittle: ModuleType, tmp_path: Path
) -> None:
    async def run() -> None:
        host, _, sandbox = await brittle.in_status(tmp_path, "running")
        kept = await sandbox.snapshot()
        making = asyncio.ensure_future(host.create(snapshot=kept))
        await asyncio.sleep(0)
        await host.remove_snapshot(kept)
        made = await making
        assert host.store.exists(kept)
        assert host.snapshots() == []
        await made.kill()
        await host.gc()
        assert not host.store.exists(kept)
        await host.close()

    asyncio.run(run())


def test_a_sandbox_that_cannot_be_put_away_as_its_owner_ends_is_told_as_failed(
    brittle: ModuleType, tmp_path: Path
) -> None:
    async def run() -> None:
        host, backend, sandbox = await brittle.in_status(tmp_path, "running")
        backend.faults = {"suspend": "before"}
        await host.close()
        assert backend.machines == {}
        backend.faults = {}
        after = await Host.open(tmp_path, backend)
        again = after.get(sandbox.id)
        assert again.status == "failed"
        assert "could not put it away: suspend: broken on purpose" in again.reason
        await after.close()

    asyncio.run(run())


@pytest.mark.parametrize("deed", ["suspend", "kill"])
@pytest.mark.parametrize("status", ["running", "paused"])
def test_the_time_of_one_that_is_paused_in_place_ends_too(
    brittle: ModuleType, tmp_path: Path, status: str, deed: str
) -> None:
    async def run() -> None:
        host, backend, sandbox = await brittle.in_status(tmp_path, status)
        sandbox.record.spec = dataclasses.replace(sandbox.spec, on_timeout=deed)
        assert not sandbox.is_expired()
        await sandbox.set_timeout(0.01)
        async with asyncio.timeout(60):
            while sandbox.status != {"suspend": "suspended", "kill": "dead"}[deed]:
                await asyncio.sleep(0.01)
        assert backend.machines == {}
        assert not sandbox.is_expired(), "what holds no machine has no time that ends"
        await host.close()

    asyncio.run(run())


@pytest.mark.parametrize("status", ["paused", "suspended"])
def test_a_resume_gives_a_whole_life_and_none_without_end(brittle: ModuleType, tmp_path: Path, status: str) -> None:
    async def run() -> None:
        host, _, sandbox = await brittle.in_status(tmp_path, status)
        limit = sandbox.spec.timeout_s
        assert limit == 1000.0
        for before in (1.0, 5000.0, None):
            await sandbox.set_timeout(before)
            begun = time.time()
            await sandbox.resume()
            assert sandbox.expires_s is not None
            assert begun + limit <= sandbox.expires_s <= time.time() + limit
            await (sandbox.pause() if status == "paused" else sandbox.suspend())
        sandbox.record.spec = dataclasses.replace(sandbox.spec, timeout_s=None)
        await sandbox.resume()
        assert sandbox.expires_s is None
        await host.close()

    asyncio.run(run())


@pytest.mark.parametrize("deed", ["snapshot", "suspend"])
def test_a_sweep_leaves_a_snapshot_that_is_being_written(brittle: ModuleType, tmp_path: Path, deed: str) -> None:
    async def run() -> None:
        host, backend, sandbox = await brittle.in_status(tmp_path, "running")
        backend.gates = {deed: asyncio.Event()}
        going = asyncio.ensure_future(sandbox.snapshot() if deed == "snapshot" else sandbox.suspend())
        async with asyncio.timeout(60):
            while not list(host.store.snapshots_folder.glob(".partial-*")):
                await asyncio.sleep(0)
        (stray := host.store.snapshots_folder / ".partial-of-the-dead").mkdir()
        freed = await host.gc()
        host.tidy()
        await asyncio.gather(*host._deeds)
        assert not stray.exists()
        assert freed == ["half-written snapshot of-the-dead"]
        assert len(list(host.store.snapshots_folder.glob(".partial-*"))) == 1
        backend.gates[deed].set()
        id = await going
        assert host.store.exists(id)
        await host.close()

    asyncio.run(run())


@pytest.mark.parametrize("deed", ["create", "restore", "fork"])
def test_gc_leaves_machines_that_are_being_started(brittle: ModuleType, tmp_path: Path, deed: str) -> None:
    async def run() -> None:
        host, backend, sandbox = await brittle.in_status(tmp_path, "running")
        kept = await sandbox.snapshot()
        backend.gates = {deed: asyncio.Event()}
        going = asyncio.ensure_future(
            {"create": host.create, "restore": lambda: host.create(snapshot=kept), "fork": sandbox.fork}[deed]()
        )
        async with asyncio.timeout(60):
            while len(backend.machines) < 2:
                await asyncio.sleep(0)
        assert await host.gc() == []
        assert len(backend.machines) == 2
        backend.gates[deed].set()
        made = await going
        (made,) = made if deed == "fork" else (made,)
        assert (await made.exec("true")).outcome == "ok"
        backend.machines["stray"] = backend.machines[made.id]
        assert await host.gc() == ["stray"]
        await host.close()

    asyncio.run(run())


def test_gc_ends_the_machine_of_one_that_has_none_by_its_record(brittle: ModuleType, tmp_path: Path) -> None:
    async def run() -> None:
        for status in ("suspended", "failed", "lost", "dead"):
            host, backend, sandbox = await brittle.in_status(tmp_path / status, status)
            brittle.BrittleMachine(backend, sandbox.id, 0, 0)
            assert sandbox.id in await host.gc(), status
            assert backend.machines == {}
            await host.close()

    asyncio.run(run())


def test_nothing_is_left_of_the_snapshots_of_one_that_was_lost(brittle: ModuleType, tmp_path: Path) -> None:
    async def run() -> None:
        host, backend, sandbox = await brittle.in_status(tmp_path, "suspended")
        await sandbox.resume()
        assert len(host.store.snapshots()) == 1, "a machine that runs from it needs it"
        for _ in range(2):
            host.store.close()
            host._watcher.cancel()
            host = await Host.open(tmp_path, backend)
            again = host.get(sandbox.id)
            assert again.status == "lost"
            assert host.store.snapshots() == []
            assert list(host.store.snapshots_folder.iterdir()) == []
            assert (again.record.snapshot, again.record.origin) == (None, None)
        await again.kill()
        await host.gc()
        assert list(host.store.records_folder.iterdir()) == []
        await host.close()

    asyncio.run(run())


@pytest.mark.parametrize("status", ["running", "paused", "suspended"])
def test_f34_copies_are_deterministic_where_that_is_asked_for_and_only_there(
    brittle: ModuleType, tmp_path: Path, status: str
) -> None:
    async def run() -> None:
        host, backend, sandbox = await brittle.in_status(tmp_path, status)
        for wanted in (False, True):
            backend.asked_deterministic.clear()
            await sandbox.fork(1, deterministic=wanted)
            assert backend.asked_deterministic == [wanted]
        backend.asked_deterministic.clear()
        if sandbox.status == "suspended":
            await sandbox.resume()
            assert backend.asked_deterministic == [False], "one that goes on is told of it"
        await host.close()

    asyncio.run(run())


@pytest.mark.parametrize("status", ["running", "paused", "suspended"])
def test_a_copy_has_a_whole_life_of_its_own(brittle: ModuleType, tmp_path: Path, status: str) -> None:
    async def run() -> None:
        host, _, sandbox = await brittle.in_status(tmp_path, status)
        await sandbox.set_timeout(5.0)
        begun = time.time()
        (copy,) = await sandbox.fork(1)
        assert copy.expires_s is not None
        assert begun + 1000.0 <= copy.expires_s <= time.time() + 1000.0
        assert copy.record.origin == (sandbox.record.snapshot if status == "suspended" else None)
        await sandbox.set_timeout(None)
        sandbox.record.spec = dataclasses.replace(sandbox.spec, timeout_s=None)
        (endless,) = await sandbox.fork(1)
        assert endless.expires_s is None
        await host.close()

    asyncio.run(run())


def test_what_a_snapshot_cannot_be_read_without_stays_as_long_as_it_does(brittle: ModuleType, tmp_path: Path) -> None:
    async def run() -> None:
        host, _, sandbox = await brittle.in_status(tmp_path, "running")
        store, record = host.store, sandbox.record
        for id, parents in (("first", []), ("second", ["first"]), ("third", ["second"]), ("other", [])):
            (store.begin(id, record, "kept") / PARENTS).write_text(json.dumps(parents))
            assert store.commit(id).parents == tuple(parents)
        for id in ("first", "second", "other"):
            await host.remove_snapshot(id)
        assert [store.exists(id) for id in ("first", "second", "third", "other")] == [True, True, True, False]
        await host.remove_snapshot("third")
        assert store.snapshots() == []
        await host.close()

    asyncio.run(run())


def test_a_record_is_replaced_as_a_whole_and_a_durable_one_is_on_disk_before_it_has_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, done = Store(tmp_path), []
    fsync, replace, rename = os.fsync, Path.replace, Path.rename

    def name_of(fd: int) -> str:
        return Path(os.readlink(f"/proc/self/fd/{fd}")).name

    monkeypatch.setattr(os, "fsync", lambda fd: (done.append(("fsync", name_of(fd))), fsync(fd))[1])
    monkeypatch.setattr(Path, "replace", lambda old, new: (done.append(("name", new.name)), replace(old, new))[1])
    monkeypatch.setattr(Path, "rename", lambda old, new: (done.append(("name", new.name)), rename(old, new))[1])
    record = Record("a", "brittle", Spec())
    store.save(record)
    assert done == [("name", "a.json")], "what need not survive a loss of power waits for no disk"
    done.clear()
    store.save(record, durable=True)
    assert done == [("fsync", "a.writing"), ("name", "a.json"), ("fsync", "sandboxes")]
    store.begin("s", record, "kept")
    done.clear()
    store.commit("s")
    assert done[-2:] == [("name", "s"), ("fsync", "snapshots")]
    assert done.index(("fsync", "manifest.writing")) < done.index(("name", "s"))
    before = (store.records_folder / "a.json").read_bytes()
    monkeypatch.setattr(json, "dump", lambda tree, file: file.write("half") and 1 / 0)
    with pytest.raises(ZeroDivisionError):
        store.save(record)
    assert (store.records_folder / "a.json").read_bytes() == before
    store.close()


@pytest.mark.parametrize(
    ("on_timeout", "keep", "left"), [("suspend", True, "suspended"), ("kill", True, None), ("suspend", False, None)]
)
@pytest.mark.parametrize("status", ["running", "paused"])
def test_an_owner_that_ends_keeps_what_its_time_limit_would_keep(
    brittle: ModuleType, tmp_path: Path, status: str, on_timeout: str, keep: bool, left: str | None
) -> None:
    async def run() -> None:
        host, backend, sandbox = await brittle.in_status(tmp_path, status)
        sandbox.record.spec = dataclasses.replace(sandbox.spec, on_timeout=on_timeout)
        await host.close(keep=keep)
        assert backend.machines == {}
        after = await Host.open(tmp_path, backend)
        assert [one.status for one in after.sandboxes()] == ([left] if left else [])
        assert len(after.store.snapshots()) == bool(left)
        await after.close()

    asyncio.run(run())


@pytest.mark.parametrize(
    "other",
    [
        {"image": "another"},
        {"resources": Resources(memory_mib=999)},
        {"network": Network(allow_internet=True)},
        {"user": "root"},
        {"cwd": "/else"},
    ],
)
def test_one_that_was_made_ahead_becomes_no_other_than_it_is(
    brittle: ModuleType, tmp_path: Path, other: dict[str, object]
) -> None:
    async def run() -> None:
        host, _, sandbox = await brittle.in_status(tmp_path, "running")
        before = sandbox.spec
        with pytest.raises(SandboxError, match="made ahead as another"):
            sandbox.dedicate(dataclasses.replace(before, **other))
        assert sandbox.spec == before
        wanted = dataclasses.replace(before, env={"A": "1"}, metadata={"b": "2"}, timeout_s=7.0, on_timeout="kill")
        sandbox.dedicate(wanted)
        assert sandbox.spec == wanted
        assert 0 < sandbox.expires_s - time.time() <= 7.0
        assert host.store.records()[0].spec == wanted
        await host.close()

    asyncio.run(run())


def test_the_next_snapshot_builds_on_the_last_one(brittle: ModuleType, tmp_path: Path) -> None:
    async def run() -> None:
        host, _, sandbox = await brittle.in_status(tmp_path, "running")
        assert sandbox.record.latest is None
        kept = await sandbox.snapshot()
        assert sandbox.record.latest == kept
        away = await sandbox.suspend()
        assert (sandbox.record.latest, sandbox.record.snapshot, sandbox.record.origin) == (away, away, None)
        await sandbox.resume()
        assert (sandbox.record.latest, sandbox.record.snapshot, sandbox.record.origin) == (away, None, away)
        (copy,) = await sandbox.fork(1)
        assert (copy.record.latest, copy.record.origin) == (away, away)
        assert {record.latest for record in host.store.records()} == {away}
        await host.close()

    asyncio.run(run())


def test_an_id_is_given_once_and_a_folder_has_one_owner(brittle: ModuleType, tmp_path: Path) -> None:
    async def run() -> None:
        host, backend, sandbox = await brittle.in_status(tmp_path, "running")
        backend.gates = {"create": asyncio.Event()}
        coming = asyncio.ensure_future(host.create(id="coming"))
        await asyncio.sleep(0)
        for id in (sandbox.id, "coming"):
            with pytest.raises(SandboxError, match="there is one already") as caught:
                await host.create(id=id)
            assert caught.value.status == 409
        backend.gates["create"].set()
        await coming
        assert host.get(sandbox.id) is sandbox
        assert (await sandbox.exec("true")).outcome == "ok"
        with pytest.raises(SandboxError, match=f"found process `{os.getpid()}`") as caught:
            await Host.open(tmp_path, backend)
        assert caught.value.status == 409
        assert len(backend.machines) == 2, "who may not own it ends nothing"
        await host.close()

    asyncio.run(run())


@pytest.mark.parametrize("writes", [0, 1])
def test_a_machine_that_cannot_be_written_down_is_ended(brittle: ModuleType, tmp_path: Path, writes: int) -> None:
    async def run() -> None:
        backend = brittle.BrittleBackend()
        host = await Host.open(tmp_path, backend)
        real, left = host.store.save, iter([True] * writes)

        def full(record: Record, **more: bool) -> None:
            if not next(left, False):
                raise SandboxError("record: cannot be written; free some disk")
            real(record, **more)

        host.store.save = full
        with pytest.raises(SandboxError, match="free some disk"):
            await host.create()
        assert (backend.machines, host.sandboxes(), host.store.records()) == ({}, [], [])
        assert (host.starting, host._coming) == (set(), {})
        host.store.save = real
        await host.close()

    asyncio.run(run())


def test_a_snapshot_is_removed_by_its_own_id_and_not_while_a_sandbox_resumes_from_it(
    brittle: ModuleType, tmp_path: Path
) -> None:
    async def run() -> None:
        host, _, sandbox = await brittle.in_status(tmp_path / "here", "suspended")
        (tmp_path / "here" / "snapshots" / "a").mkdir()
        with pytest.raises(SandboxError, match="resumes from it") as caught:
            await host.remove_snapshot(sandbox.snapshot_id)
        assert caught.value.status == 409
        for id in (
            "",
            ".",
            "..",
            f"a/../{sandbox.snapshot_id}",
            f"../snapshots/{sandbox.snapshot_id}",
            "A",
            "-a",
            "a" * 64,
        ):
            for deed in (lambda id=id: host.snapshot(id), lambda id=id: host._held(id)):
                with pytest.raises(SandboxError) as caught:
                    deed()
                assert caught.value.status == 404, id
            assert not host.store.exists(id)
        await sandbox.resume()
        await host.close()

    asyncio.run(run())
