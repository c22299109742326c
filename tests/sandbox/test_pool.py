"""Rollouts that share a bounded number of sandboxes."""

import asyncio
import random
from pathlib import Path

import pytest

from triax.errors import SandboxError
from triax.sandbox.backend.process import ProcessBackend
from triax.sandbox.host import Host
from triax.sandbox.pool import Pool
from triax.sandbox.protocol import Spec


class Unsteady(ProcessBackend):
    """A service that fails a share of its creates and deletes, as remote ones do."""

    def __init__(self, root: Path, share: float) -> None:
        super().__init__(root, unsafe=True)
        self.share = share
        self.random = random.Random(0)
        self.most = self.live = 0

    def falter(self, what: str) -> None:
        if self.random.random() < self.share:
            raise SandboxError(f"{what}: the service had a bad moment")

    async def create(self, spec, id):
        self.falter("create")
        machine = await super().create(spec, id)
        self.live += 1
        self.most = max(self.most, self.live)
        kill = machine.kill

        async def unsteady_kill():
            self.live -= 1
            self.falter("kill")
            await kill()

        machine.kill = unsteady_kill
        return machine


def test_fifty_episodes_finish_though_a_third_of_creates_and_deletes_fail(tmp_path):
    async def run():
        backend = Unsteady(tmp_path / "machines", 0.3)
        host = await Host.open(tmp_path, backend)
        async with Pool(host, most=6, ahead=2, tries=12) as pool:

            async def episode(number):
                async with pool.lease() as sandbox:
                    await sandbox.write("answer", str(number).encode())
                    return int((await sandbox.exec(["cat", "answer"])).stdout)

            assert await asyncio.gather(*map(episode, range(50))) == list(range(50))
            assert pool.counts.leased == 0
            assert pool.counts.acquired == 50
            assert pool.counts.failed > 0
        assert backend.most <= 6, "never more machines than allowed"
        backend.share = 0
        await host.gc()
        assert list((tmp_path / "machines").iterdir()) == [], "no folder is left of a sandbox whose deletion failed"
        await host.close()

    asyncio.run(run())


def test_callers_wait_in_line_and_are_told_when_their_patience_ends(until, tmp_path):
    async def run():
        host = await Host.open(tmp_path, ProcessBackend(tmp_path / "machines", unsafe=True))
        async with Pool(host, most=1) as pool:
            first = await pool.acquire()
            with pytest.raises(SandboxError) as caught:
                await pool.acquire(timeout_s=0.05)
            assert (caught.value.kind, caught.value.status) == ("timeout", 503)
            order = []

            async def wait(number):
                async with pool.lease():
                    order.append(number)

            waiting = [asyncio.create_task(wait(number)) for number in range(3)]
            await until(lambda: pool.counts.waiting == 3)
            await pool.release(first)
            await pool.release(first)
            await asyncio.gather(*waiting)
            held = await pool.acquire(timeout_s=20)
            with pytest.raises(SandboxError, match="in use"):  # what is given back twice is one turn
                await pool.acquire(timeout_s=0.01)
            await pool.release(held)
            assert order == [0, 1, 2]
            assert pool.counts.leased == 0
        await host.close()

    asyncio.run(run())


def test_what_is_made_ahead_is_handed_out_at_once_and_only_if_it_lives(tmp_path):
    async def run():
        host = await Host.open(tmp_path, ProcessBackend(tmp_path / "machines", unsafe=True))
        async with Pool(host, Spec(timeout_s=77.0), most=3, ahead=2) as pool:
            while pool.counts.warm < 2:
                await asyncio.sleep(0.01)
            assert all(sandbox.expires_s is None for sandbox in host.sandboxes())
            broken = pool._warm[0]
            assert broken._life.machine is not None
            await broken._life.machine.kill()
            sandbox = await pool.acquire()
            assert sandbox.id != broken.id
            assert sandbox.expires_s is not None, "its time begins when it is handed out"
            assert pool.counts.unhealthy == 1
            assert pool.counts.from_warm == 1
            assert (await sandbox.exec("true")).exit_code == 0
            while pool.counts.warm < 2:
                await asyncio.sleep(0.01)  # the places that were emptied are filled again
            await pool.release(sandbox)
        assert [one.status for one in host.sandboxes()] == []
        await host.close()

    asyncio.run(run())


def test_one_that_was_made_ahead_and_cannot_be_kept_is_ended(brittle, tmp_path, monkeypatch):
    monkeypatch.setattr("triax.sandbox.pool.CALM_S", 0.01)

    async def run():
        host = await Host.open(tmp_path, brittle.BrittleBackend())
        real, writes = host.store.save, iter(range(1000))

        def full_at_the_third(record, **more):
            if next(writes) == 2:  # two for its creation, this one to let it wait without end
                raise SandboxError("record: cannot be written; free some disk")
            real(record, **more)

        host.store.save = full_at_the_third
        async with Pool(host, Spec(timeout_s=77.0), most=1, ahead=1) as pool:
            async with asyncio.timeout(10):
                while pool.counts.warm < 1:
                    await asyncio.sleep(0.01)
            assert len(host.sandboxes()) == 1
            await pool.release(await pool.acquire(timeout_s=10))
        await host.close()

    asyncio.run(run())


def test_a_sandbox_put_away_is_taken_up_by_the_next_owner(tmp_path):
    async def run():
        host = await Host.open(tmp_path, ProcessBackend(tmp_path / "machines", unsafe=True))
        async with Pool(host, most=1) as pool:
            sandbox = await pool.acquire()
            await sandbox.write("half", b"done")
            kept = await pool.put_away(sandbox)
            assert pool.counts.leased == 0
            async with pool.lease():
                pass  # its place is free meanwhile
        host.store.close()  # the owner is gone without a word
        host._watcher.cancel()
        host = await Host.open(tmp_path, ProcessBackend(tmp_path / "machines", unsafe=True))
        async with Pool(host, most=1) as pool, pool.lease(snapshot=kept) as sandbox:
            assert await sandbox.read("half") == b"done"
        await host.close()

    asyncio.run(run())


def test_a_wish_that_no_machine_meets_is_not_tried_again(tmp_path):
    async def run():
        host = await Host.open(tmp_path, ProcessBackend(tmp_path / "machines", unsafe=True))
        async with Pool(host, Spec(image="nowhere"), most=1) as pool:
            with pytest.raises(SandboxError, match="image"):
                await pool.acquire()
            assert pool.counts.failed == 1
        with pytest.raises(SandboxError, match="ahead"):
            Pool(host, most=1, ahead=2)
        await host.close()

    asyncio.run(run())


def test_a_turn_that_came_to_nothing_is_the_next_callers(brittle, tmp_path):
    async def run():
        backend = brittle.BrittleBackend()
        host = await Host.open(tmp_path, backend)
        async with Pool(host, most=1, tries=1) as pool:
            for _ in range(3):
                backend.faults = {"create": "before"}
                with pytest.raises(SandboxError, match="broken on purpose"):
                    await pool.acquire(timeout_s=20)
                with pytest.raises(SandboxError, match="there is none"):
                    await pool.acquire(snapshot="nowhere", timeout_s=20)
                backend.faults = {"create": "hang"}
                waiting = asyncio.create_task(pool.acquire())
                await asyncio.sleep(0.01)
                waiting.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await waiting
                backend.faults = {}
                assert (pool.counts.leased, pool.counts.making, pool._live) == (0, 0, 0)
                sandbox = await pool.acquire(timeout_s=20)
                await pool.release(sandbox)
        await host.close()

    asyncio.run(run())


def test_one_that_cannot_be_put_away_is_still_the_callers(brittle, tmp_path):
    async def run():
        backend = brittle.BrittleBackend()
        host = await Host.open(tmp_path, backend)
        async with Pool(host, most=1) as pool:
            sandbox = await pool.acquire()
            backend.faults = {"suspend": "before"}
            with pytest.raises(SandboxError, match="broken on purpose"):
                await pool.put_away(sandbox)
            backend.faults = {}
            assert (sandbox.status, pool.counts.leased) == ("running", 1)
            with pytest.raises(SandboxError, match="in use"):
                await pool.acquire(timeout_s=0.01)
            kept = await pool.put_away(sandbox)
            assert pool.counts.leased == 0
            async with pool.lease(snapshot=kept, timeout_s=20) as again:
                assert again.status == "running"
        await host.close()

    asyncio.run(run())
