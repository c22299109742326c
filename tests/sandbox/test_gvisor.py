"""What gVisor alone could get wrong: commands hold descriptors of the host, and its kernel ends refused a process."""

import asyncio
import json
from contextlib import suppress

import pytest

from triax.errors import SandboxError
from triax.sandbox.protocol import Resources, Spec

ROOMY = Spec(resources=Resources(memory_mib=512, disk_mib=32, processes=64))


@pytest.fixture
def on_gvisor(hosting, available, tmp_path):
    """Run a coroutine with a host of gVisor sandboxes."""
    if reason := available("gvisor"):
        pytest.skip(reason)

    def run(test):
        async def whole():
            async with hosting("gvisor", tmp_path) as host:
                await test(await host.create(ROOMY), host)

        asyncio.run(whole())

    return run


def test_it_comes_back_though_many_commands_were_only_just_started(on_gvisor, grows):
    async def test(sandbox, host):
        for cycle in range(2):
            loop = "while :; do echo x >> /tmp/{}; sleep 0.2; done"
            await asyncio.gather(*(sandbox.start(loop.format(f"{cycle}-{n}")) for n in range(4)))
            waits = [asyncio.ensure_future(sandbox.exec("sleep 1000")) for _ in range(2)]
            await asyncio.sleep(0.01)
            await sandbox.suspend()
            for result in await asyncio.gather(*waits, return_exceptions=True):
                told = result.kind if isinstance(result, SandboxError) else result.outcome
                assert told == "infrastructure", f"{result}: who waits for a command is told that the machine changed"
            await sandbox.resume()
        for name in ("0-0", "0-3", "1-0", "1-3"):
            await grows(sandbox, f"/tmp/{name}")
        assert (await sandbox.exec("echo on")).stdout == b"on\n"

    on_gvisor(test)


def test_the_end_of_a_new_command_is_not_that_of_one_from_before(on_gvisor, grows):
    async def test(sandbox, host):
        await sandbox.start("while :; do echo x >> /tmp/old; sleep 0.2; done")
        await sandbox.suspend()
        await sandbox.resume()
        result = await sandbox.exec("sleep 1000", timeout_s=0.5)
        assert result.outcome == "timeout"
        await grows(sandbox, "/tmp/old")

    on_gvisor(test)


def test_as_many_commands_as_were_allowed_run_at_once(on_gvisor):
    async def test(sandbox, host):
        results = await asyncio.gather(*(sandbox.exec(f"sleep 1; echo {n}") for n in range(16)))
        assert [int(result.stdout) for result in results] == list(range(16))
        with suppress(SandboxError):
            await sandbox.pause()
        assert sandbox.status == "paused"

    on_gvisor(test)


def test_a_snapshot_whose_helper_is_gone_or_that_is_none_is_refused(on_gvisor, tmp_path):
    async def test(sandbox, host):
        snapshot = await sandbox.snapshot()
        (folder,) = [path.parent for path in tmp_path.rglob("gvisor.json") if "machines" not in path.parts]
        told = json.loads((folder / "gvisor.json").read_text())
        for change, words in [({"relay": "relay-of-another-time"}, "helper"), ({"version": "runsc 1"}, "version")]:
            (folder / "gvisor.json").write_text(json.dumps(told | change))
            with pytest.raises(SandboxError, match=words) as caught:
                await host.create(ROOMY, snapshot=snapshot)
            assert (caught.value.kind, caught.value.status) == ("refused", 409)
        (folder / "gvisor.json").write_text("{}")
        with pytest.raises(SandboxError, match="no snapshot"):
            await host.create(ROOMY, snapshot=snapshot)
        (folder / "gvisor.json").write_text(json.dumps(told))
        again = await host.create(ROOMY, snapshot=snapshot)
        assert (await again.exec("echo on")).stdout == b"on\n"

    on_gvisor(test)


def test_f34_live_programs_are_told_of_a_new_machine_unless_a_deterministic_copy_is_asked_for(
    on_gvisor, renewal, until
):
    listens, draws = renewal

    async def drew(sandbox, *wanted):
        await until(lambda: _are(sandbox, list(wanted)))

    async def _are(sandbox, wanted):
        return await draws(sandbox) == wanted

    async def test(sandbox, host):
        await listens(sandbox)
        assert await draws(sandbox) == [["0"], [], ["first"]]
        (copy,) = await sandbox.fork(1)
        await drew(copy, ["1"], ["1"], ["first", "again"])
        alike = await sandbox.fork(2, deterministic=True)
        ids = set()
        for one in alike:
            assert await draws(one) == [["0"], [], ["first"]]
            ids.add((await one.exec("head -c 8 /dev/urandom | od; hostname")).stdout)
        assert len(ids) == 2, "entropy and names differ all the same"
        assert await draws(sandbox) == [["0"], [], ["first"]]
        await copy.suspend()
        await copy.resume()
        await drew(copy, ["2"], ["1", "2"], ["first", "again", "again"])

    on_gvisor(test)
