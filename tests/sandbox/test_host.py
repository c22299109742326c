"""An owner of sandboxes that ends, crashes or sweeps up while others still need what it has."""

import asyncio
from pathlib import Path
from types import ModuleType

import pytest

from triax.errors import SandboxError
from triax.sandbox.host import Host


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
