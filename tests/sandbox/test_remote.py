"""The remote backend against our own server, through the same host that owns local machines."""

import asyncio
import random
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import httpx
import pytest

from triax.errors import SandboxError
from triax.sandbox.backend.remote import RemoteBackend
from triax.sandbox.backend.remote_calls import Service
from triax.sandbox.host import Host
from triax.sandbox.protocol import Spec


def lived(server, tmp_path, body, url=None, **options):
    """Run a test's body with a host whose machines a server keeps; nothing may be left there."""

    async def run():
        service = Service(url or server.url, "any", sandbox_url=server.url, **options)
        host = await Host.open(tmp_path, RemoteBackend(service, owner=tmp_path.name.replace("_", "-")))
        try:
            return await body(host)
        finally:
            await host.close(keep=False)
            await service.close()

    return asyncio.run(asyncio.wait_for(run(), 250))


def test_a_remote_machine_does_what_a_local_one_does(server, tmp_path):
    async def body(host):
        sandbox = await host.create(Spec(env={"A": "1"}))
        told = await sandbox.exec('echo "$A $B"; cat; echo err >&2; exit 4', stdin=b"fed", env={"B": "2"})
        assert (told.outcome, told.exit_code, told.stdout, told.stderr) == ("ok", 4, b"1 2\nfed", b"err\n")
        killed = await sandbox.exec("kill -9 $$")
        assert (killed.outcome, killed.exit_code, killed.signal) == ("ok", None, 9)
        late = await sandbox.exec(["sleep", "1000"], timeout_s=0.4)
        assert late.outcome == "timeout"
        assert late.duration_s >= 0.4
        flood = await sandbox.exec("head -c 300000 /dev/zero", output_limit=1000)
        assert (len(flood.stdout), flood.truncated) == (1000, True)

        await sandbox.write("a/b", bytes(range(256)) * 10)
        assert await sandbox.read("a/b", 250, 10) == bytes([250, 251, 252, 253, 254, 255, 0, 1, 2, 3])
        assert (await sandbox.read("a/b", 2550)) == bytes(range(246, 256))
        await sandbox.write("a/run", b"#!/bin/sh\necho ran", mode=0o755)
        assert (await sandbox.exec("./a/run")).stdout == b"ran\n"
        assert [entry.path.rsplit("/", 1)[1] for entry in await sandbox.list("a")] == ["b", "run"]
        await sandbox.rename("a/b", "a/c")
        assert (await sandbox.stat("a/c")).size == 2560
        await sandbox.make_directory("a/d")
        await sandbox.make_directory("a/d")
        await sandbox.remove("a")
        with pytest.raises(SandboxError) as gone:
            await sandbox.stat("a/c")
        assert gone.value.status == 404
        assert gone.value.kind == "refused"

    lived(server, tmp_path, body)


def test_a_remote_process_is_spoken_to_and_ended(server, tmp_path):
    async def body(host):
        sandbox = await host.create(Spec())
        echo = await sandbox.start(["cat"])
        await echo.write(b"hello")
        await echo.close_stdin()
        assert b"".join([chunk async for _, chunk in echo.output()]) == b"hello"
        assert (await echo.wait()).exit_code == 0
        sleeper = await sandbox.start(["sleep", "60"])
        await sleeper.kill(15)
        assert (await sleeper.wait()).signal == 15
        await sleeper.kill()
        shell = await sandbox.start(["/bin/sh"], terminal=(30, 101))
        await shell.resize(31, 102)
        await shell.write(b"stty size; exit\n")
        assert b"31 102" in b"".join([chunk async for _, chunk in shell.output()])

    lived(server, tmp_path, body)


def test_a_flood_that_nobody_reads_does_not_fill_our_memory(server, tmp_path):
    async def body(host):
        sandbox = await host.create(Spec())
        flood = await sandbox.start("head -c 30000000 /dev/zero; echo end")
        await asyncio.sleep(0.5)
        assert flood._size < 2 * 2**20
        total = 0
        async for _, chunk in flood.output():
            total += len(chunk)
        assert total == 30_000_004

    lived(server, tmp_path, body)


def test_a_remote_sandbox_is_put_away_brought_back_and_split(server, tmp_path):
    async def body(host):
        sandbox = await host.create(Spec())
        await sandbox.write("kept", b"1")
        await sandbox.suspend()
        assert await sandbox.is_alive() is False
        await sandbox.resume()
        assert await sandbox.read("kept") == b"1"
        await sandbox.pause()
        await sandbox.resume()
        assert await sandbox.read("kept") == b"1"
        one, two = await sandbox.fork(2)
        await one.write("kept", b"2")
        assert (await two.read("kept"), await sandbox.read("kept")) == (b"1", b"1")
        taken = await one.snapshot()
        again = await host.create(snapshot=taken)
        assert await again.read("kept") == b"2"

    lived(server, tmp_path, body)


def test_what_an_owner_that_died_left_at_the_service_is_ended(server, tmp_path):
    async def abandon():
        service = Service(server.url, sandbox_url=server.url)
        host = await Host.open(tmp_path / "state", RemoteBackend(service, owner="forgetful"))
        await host.create(Spec())
        host._watcher.cancel()
        host.store.close()
        await service.close()

    asyncio.run(abandon())
    assert len(server.plane.host.sandboxes({"owner": "forgetful"})) == 1

    async def return_later():
        service = Service(server.url, sandbox_url=server.url)
        host = await Host.open(tmp_path / "state", RemoteBackend(service, owner="forgetful"))
        assert [one.status for one in host.sandboxes()] == ["lost"]
        await host.close()
        await service.close()

    asyncio.run(return_later())
    assert server.plane.host.sandboxes({"owner": "forgetful"}) == []


class Flaky(BaseHTTPRequestHandler):
    """Hands requests on to a server, except that some fail: before it saw them, or after, with the answer lost."""

    protocol_version = "HTTP/1.1"
    luck = random.Random(7)
    target = ""
    failed = 0

    def _pass(self):
        body = self.rfile.read(int(self.headers.get("content-length", 0)))
        risky = self.command == "DELETE" or (self.path == "/v2/sandboxes" and self.command == "POST")
        fate = self.luck.random() if risky else 1.0
        if fate < 0.15:
            type(self).failed += 1
            return self._answer(503, b'{"code": 503, "message": "busy"}')
        headers = {k: v for k, v in self.headers.items() if k.lower() not in ("host", "connection", "content-length")}
        answer = httpx.request(self.command, self.target + self.path, headers=headers, content=body, timeout=60)
        if fate < 0.30:
            type(self).failed += 1
            return self._answer(502, b"bad gateway")
        return self._answer(answer.status_code, answer.content)

    def _answer(self, status, content):
        self.send_response(status)
        self.send_header("content-length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    do_GET = do_POST = do_DELETE = _pass

    def log_message(self, *args):
        pass


@pytest.mark.parametrize("count", [16, pytest.param(50, marks=pytest.mark.soak)])
def test_episodes_finish_and_leave_nothing_where_a_third_of_creates_and_ends_fail(count, server, tmp_path):
    Flaky.target = server.url
    with ThreadingHTTPServer(("127.0.0.1", 0), Flaky) as flaky:
        thread = threading.Thread(target=flaky.serve_forever)
        thread.start()

        async def episode(host, number, gate):
            async with gate:
                sandbox = await host.create(Spec(timeout_s=None))
                result = await sandbox.exec(f"echo {number}")
                await sandbox.kill()
                return result.stdout

        async def body(host):
            gate = asyncio.Semaphore(8)
            return await asyncio.gather(*(episode(host, number, gate) for number in range(count)))

        url = f"http://127.0.0.1:{flaky.server_port}"
        try:
            told = lived(server, tmp_path, body, url=url, patience_s=0.01)
        finally:
            flaky.shutdown()
            thread.join()
    assert told == [f"{number}\n".encode() for number in range(count)]
    assert Flaky.failed > count // 5
    assert server.plane.host.sandboxes({"owner": tmp_path.name.replace("_", "-")}) == []


def test_a_service_that_is_not_there_is_an_infrastructure_failure(tmp_path):
    async def run():
        service = Service("http://127.0.0.1:9", patience_s=0.001)
        backend = RemoteBackend(service, owner="nobody")
        with pytest.raises(SandboxError, match="cannot be reached") as failed:
            await backend.create(Spec(), "x")
        (check,) = await backend.checks()
        await service.close()
        return failed.value.kind, check.ok

    assert asyncio.run(run()) == ("infrastructure", False)


def test_a_template_that_is_not_there_is_the_callers_mistake(server, tmp_path):
    async def body(host):
        with pytest.raises(SandboxError) as refused:
            await host.create(Spec(image="no-such-template"))
        return refused.value.kind, refused.value.status

    assert lived(server, tmp_path, body) == ("refused", 404)


def test_a_sandbox_that_the_service_lost_is_no_fault_of_the_task(server, tmp_path):
    async def body(host):
        sandbox = await host.create(Spec())
        (there,) = server.plane.host.sandboxes({"owner": tmp_path.name.replace("_", "-")})
        process = await sandbox.start(["sleep", "60"])
        await asyncio.to_thread(server.call, server.plane.kill(there.id))
        with pytest.raises(SandboxError) as lost:
            await process.wait()
        with pytest.raises(SandboxError) as gone:
            await sandbox.exec("true")
        return lost.value.kind, gone.value.kind

    assert lived(server, tmp_path, body) == ("infrastructure", "infrastructure")


def test_a_list_of_many_pages_is_whole(server, tmp_path):
    async def body(host):
        made = [await host.create() for _ in range(5)]
        service = host.backend.service
        found = await service.every("/v2/sandboxes", {"limit": "2"})
        assert len({one["sandboxID"] for one in found}) == len(found) == len(made) == 5
        assert await service.every("/v2/sandboxes", {"limit": "2", "metadata": "nobody=has"}) == []

    lived(server, tmp_path, body)
