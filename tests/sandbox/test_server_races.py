"""What clients ask of a server at the same time, or in the middle of what another asked for."""

import asyncio

import httpx
import pytest
from e2b import AsyncSandbox, Sandbox, SandboxState, TimeoutException

from triax.config.sandbox import Quotas, Server
from triax.errors import SandboxError
from triax.sandbox import sandbox as ours
from triax.sandbox.host import Host
from triax.sandbox.server import schema
from triax.sandbox.server.access import Access
from triax.sandbox.server.app import _Drained
from triax.sandbox.server.catalog import Catalog
from triax.sandbox.server.plane import Plane

WAKING = schema.AutoResume(enabled=True)


@pytest.fixture
def on_plane(brittle, tmp_path):
    """Run a coroutine with the plane of a server whose machines break where told."""

    def run(test, **settings):
        async def whole():
            host = await Host.open(tmp_path / "s", brittle.BrittleBackend())
            server = Server(folder=tmp_path / "s", port=0, **settings)
            plane = Plane(host, server, Access([], b"s" * 32), Catalog(tmp_path / "catalog.json", server.templates))
            await test(plane)
            await plane.close()
            await host.close()

        asyncio.run(whole())

    return run


def wanted(**more):
    return schema.NewSandbox(template_id="base", **more)


async def reached(sandbox, status):
    """Wait until a task that was just begun has brought a sandbox there."""
    async with asyncio.timeout(60):
        while sandbox.status != status:
            await asyncio.sleep(0)


async def server_suspends(server, sandbox_id):
    """Put a sandbox away as its time limit would."""
    await asyncio.to_thread(server.call, server.plane.find(sandbox_id).suspend())


def refusals(answers):
    return [answer.status for answer in answers if isinstance(answer, SandboxError)]


def test_no_more_than_the_quota_is_made_however_many_ask_at_once(on_plane):
    async def test(plane):
        answers = await asyncio.gather(*(plane.create(wanted()) for _ in range(6)), return_exceptions=True)
        assert refusals(answers) == [429] * 4
        first, second = (answer for answer in answers if isinstance(answer, ours.Sandbox))
        await plane.kill(second.id)
        split = schema.Fork(count=1)
        answers = await asyncio.gather(*(plane.fork(first.id, split) for _ in range(2)), return_exceptions=True)
        assert len(plane.admission.live()) == 2
        assert refusals(answers) in ([429], [409]), "one found no place, or its source busy"

    on_plane(test, quotas=Quotas(sandboxes=2))


def test_traffic_wakes_no_sandbox_beyond_the_quota(on_plane):
    async def test(plane):
        first = await plane.create(wanted(auto_resume=WAKING))
        await plane.pause(first.id, memory=None)
        second = await plane.create(wanted())
        for wake in (plane.session(first.id), plane.connect(first.id, None)):
            with pytest.raises(SandboxError, match="quota sandboxes"):
                await wake
        await plane.kill(second.id)
        await plane.session(first.id)
        assert first.status == "running"

    on_plane(test, quotas=Quotas(sandboxes=1))


def test_a_suspended_sandbox_takes_its_disk_only_once_when_it_comes_back(on_plane):
    async def test(plane):
        sandbox = await plane.create(wanted())
        await plane.pause(sandbox.id, memory=None)
        with pytest.raises(SandboxError, match="quota disk_mib"):
            await plane.create(wanted())
        await plane.connect(sandbox.id, None)
        assert sandbox.status == "running"

    on_plane(test, quotas=Quotas(disk_mib=600))


def test_copies_whose_time_cannot_be_given_are_not_made(on_plane):
    async def test(plane):
        sandbox = await plane.create(wanted())
        with pytest.raises(SandboxError, match="timeout: this server gives"):
            await plane.fork(sandbox.id, schema.Fork(count=3, timeout=90_000))
        assert plane.sandboxes() == [sandbox]

    on_plane(test)


@pytest.mark.parametrize("during", ["suspending", "resuming", "forking"])
def test_who_connects_meanwhile_gets_a_sandbox_that_runs(on_plane, during):
    async def test(plane):
        sandbox = await plane.create(wanted())
        acts = {"suspending": sandbox.suspend, "resuming": sandbox.resume, "forking": sandbox.fork}
        if during != "suspending":
            await sandbox.suspend()
        going = asyncio.create_task(acts[during]())
        await reached(sandbox, during)
        statuses = []

        async def connect():
            connected, _ = await plane.connect(sandbox.id, 100)
            statuses.append(connected.status)

        await asyncio.gather(connect(), connect(), connect())
        assert statuses == ["running"] * 3
        await going

    on_plane(test)


@pytest.mark.parametrize("during", ["suspending", "resuming", "forking"])
def test_traffic_that_comes_meanwhile_waits_and_wakes(on_plane, during):
    async def test(plane):
        sandbox = await plane.create(wanted(auto_resume=WAKING))
        acts = {"suspending": sandbox.suspend, "resuming": sandbox.resume, "forking": sandbox.fork}
        if during != "suspending":
            await sandbox.suspend()
        going = asyncio.create_task(acts[during]())
        await reached(sandbox, during)
        first, second, third = await asyncio.gather(*(plane.session(sandbox.id) for _ in range(3)))
        assert first is second is third
        assert (await first.sandbox.exec("true")).exit_code == 0
        await going

    on_plane(test)


def test_a_page_goes_on_where_the_last_one_ended_though_that_sandbox_is_gone(server):
    made = [httpx.post(f"{server.url}/sandboxes", json={"templateID": "base"}).json()["sandboxID"] for _ in range(3)]
    asked = {"limit": 1, "order": "asc"}
    first = httpx.get(f"{server.url}/v2/sandboxes", params=asked)
    assert [one["sandboxID"] for one in first.json()] == made[:1]
    httpx.delete(f"{server.url}/sandboxes/{made[0]}")
    again = httpx.get(f"{server.url}/v2/sandboxes", params={**asked, "nextToken": first.headers["x-next-token"]})
    assert [one["sandboxID"] for one in again.json()] == made[1:2]
    for one in made[1:]:
        httpx.delete(f"{server.url}/sandboxes/{one}")


def test_a_command_that_runs_as_the_time_ends_breaks_off_with_the_reason(server):
    sandbox = Sandbox.create(timeout=600, **server.options)
    running = sandbox.commands.run("sleep 1000", background=True, timeout=200)
    sandbox.set_timeout(1)
    with pytest.raises(TimeoutException, match="put away or ended while the command ran"):
        running.wait()
    assert sandbox.get_info().state == SandboxState.PAUSED
    sandbox.kill()


def test_who_watches_a_folder_is_told_that_its_sandbox_was_stopped(server):
    async def run():
        sandbox = await AsyncSandbox.create(**server.options)
        ended = asyncio.get_running_loop().create_future()
        await sandbox.files.make_dir("seen")
        await sandbox.files.watch_dir("seen", on_event=lambda event: None, on_exit=ended.set_result, timeout=0)
        await server_suspends(server, sandbox.sandbox_id)
        await AsyncSandbox.connect(sandbox.sandbox_id, **server.options)
        await sandbox.files.list("seen")
        assert isinstance(await asyncio.wait_for(ended, 120), Exception)
        await sandbox.kill()

    asyncio.run(run())


def test_a_refusal_begins_only_once_the_body_is_read_and_a_stream_at_once():
    """A client that sees an answer begin while it still sends may close the connection, and then reads no answer."""

    async def run():
        pieces, sent = asyncio.Queue(), []

        async def send(message):
            sent.append(message["type"])

        refused = _Drained(pieces.get, send)
        await refused.send({"type": "http.response.start", "status": 400})
        ending = asyncio.create_task(refused.send({"type": "http.response.body", "body": b"no"}))
        await asyncio.sleep(0.01)
        assert sent == []
        await pieces.put({"type": "http.request", "body": b"x", "more_body": True})
        await pieces.put({"type": "http.request", "body": b"", "more_body": False})
        await asyncio.wait_for(ending, 20)
        assert sent == ["http.response.start", "http.response.body"]
        sent.clear()
        streamed = _Drained(pieces.get, send)
        await streamed.send({"type": "http.response.start", "status": 200})
        await streamed.send({"type": "http.response.body", "body": b"1", "more_body": True})
        assert sent == ["http.response.start", "http.response.body"]

    asyncio.run(run())


def test_an_answer_ends_though_who_listens_takes_the_last_piece_of_the_body():
    """A streamed refusal: one task sends it and reads what is left of the body, another waits for the client to go."""

    async def run():
        pieces, sent = asyncio.Queue(), []

        async def send(message):
            sent.append(message)

        drained = _Drained(pieces.get, send)
        listening = asyncio.create_task(drained.receive())
        await asyncio.sleep(0)
        ending = asyncio.create_task(drained.send({"type": "http.response.body", "body": b"", "more_body": False}))
        await asyncio.sleep(0.01)
        assert not sent, "the answer ends once the body is read"
        await pieces.put({"type": "http.request", "body": b"last", "more_body": False})
        await asyncio.wait_for(ending, 20)
        assert (await listening)["body"] == b"last"
        assert [message["type"] for message in sent] == ["http.response.body"]
        endless = _Drained(
            lambda: asyncio.sleep(0, {"type": "http.request", "body": b"x" * 2**20, "more_body": True}), send
        )
        await asyncio.wait_for(endless.send({"type": "http.response.body", "body": b""}), 20)
        assert len(sent) == 2, "a body without end does not hold it up"

    asyncio.run(run())
