"""What no well-behaved client sends, and what only machines read."""

import asyncio
import json
import ssl
import struct
import subprocess
import time

import httpx
import pytest

from triax.config.sandbox import Quotas, Server, Template, read
from triax.errors import ConfigError
from triax.sandbox.backend.process import ProcessBackend
from triax.sandbox.server.session import Running

web = httpx.Client(timeout=120, limits=httpx.Limits(max_keepalive_connections=0))


@pytest.fixture
def made(server):
    told = web.post(f"{server.url}/sandboxes", json={"templateID": "base"}).json()
    yield told
    web.delete(f"{server.url}/sandboxes/{told['sandboxID']}")


def aimed(told, **more):
    return {"E2b-Sandbox-Id": told["sandboxID"], "X-Access-Token": told["envdAccessToken"], **more}


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b"{", "JSON"),
        (b"[]", "body"),
        (b"\xff\xfe", "body"),
        (b"{}", "templateID"),
        (b'{"templateID": 3}', "templateID"),
        (b'{"templateID": "base", "timeout": -1}', "timeout"),
        (b'{"templateID": "base", "timeout": 99999999}', "timeout"),
        (b'{"templateID": "base", "warp": 9}', "warp"),
        (b'{"templateID": "base", "mcp": {"a": 1}}', "mcp"),
        (b'{"templateID": "base", "volumeMounts": [{"name": "v"}]}', "volume_mounts"),
        (b'{"templateID": "base", "metadata": {"triax.x": "1"}}', "triax."),
        (b'{"templateID": "base", "envVars": {"a": "\\u0000"}}', "envVars"),
        (b'{"templateID": "base", "network": {"egressProxy": {"address": "a:1"}}}', "egress_proxy"),
        (b'{"templateID": "base", "network": {"denyOut": ["1.2.3.4"]}}', "denyOut"),
    ],
)
def test_a_body_that_asks_for_what_cannot_be_is_refused_with_its_place(server, body, words):
    answer = web.post(f"{server.url}/sandboxes", content=body, headers={"content-type": "application/json"})
    assert answer.status_code == 400
    assert answer.json()["code"] == 400
    assert words in answer.json()["message"]


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/sandboxes/nobody", 404),
        ("DELETE", "/sandboxes/nobody", 404),
        ("POST", "/sandboxes/nobody/pause", 404),
        ("POST", "/sandboxes/nobody/fork", 404),
        ("POST", "/sandboxes/nobody/snapshots", 404),
        ("GET", "/sandboxes/%00", 404),
        ("GET", "/sandboxes/..%2F..%2Fetc", 404),
        ("DELETE", "/templates/..%2F..%2Fetc", 404),
        ("DELETE", "/templates/base", 403),
        ("GET", "/templates/nothing", 404),
        ("GET", "/nodes/nothing", 404),
        ("GET", "/v2/sandboxes?state=asleep", 400),
        ("GET", "/v2/sandboxes?limit=0", 400),
        ("GET", "/v2/sandboxes?nextToken=zz", 400),
        ("GET", "/no/such/route", 404),
        ("PATCH", "/sandboxes", 405),
    ],
)
def test_unknown_names_and_odd_questions_get_a_plain_answer(server, method, path, status):
    answer = web.request(method, server.url + path)
    assert answer.status_code == status
    assert answer.json()["message"]


def test_a_running_sandbox_cannot_be_resumed_nor_a_body_be_endless(server, made):
    at = f"{server.url}/sandboxes/{made['sandboxID']}"
    assert web.post(f"{at}/resume", json={}).status_code == 409
    assert web.post(f"{at}/fork", json={"count": 1000}).status_code == 400
    assert web.put(f"{at}/network", json={"allowOut": ["example.com"]}).status_code in (400, 501)
    assert web.post(f"{at}/timeout", content=b" " * (2**20 + 1)).status_code == 413


def test_an_image_of_the_host_cannot_be_named(server):
    answer = web.post(f"{server.url}/sandboxes-cold", json={"image": "/"})
    assert answer.status_code == 403
    assert web.post(f"{server.url}/sandboxes-cold", json={"image": "../../etc"}).status_code == 403


def call(server, told, method, content, kind="application/json", **headers):
    return web.post(f"{server.url}/{method}", content=content, headers=aimed(told, **{"content-type": kind, **headers}))


@pytest.mark.parametrize(
    ("method", "content", "headers", "status"),
    [
        ("process.Process/List", b"{", {}, 400),
        ("process.Process/List", b"{}", {"Connect-Timeout-Ms": "soon"}, 400),
        ("process.Process/List", b"{}", {"Connect-Timeout-Ms": "-5"}, 400),
        ("process.Process/List", b"\x1f\x8bbroken", {"Content-Encoding": "gzip"}, 400),
        ("process.Process/List", b"{}", {"Content-Encoding": "zstd"}, 501),
        ("process.Process/Guess", b"{}", {}, 404),
        ("process.Process/SendSignal", b'{"process": {"pid": 1}, "signal": 3}', {}, 400),
        ("process.Process/SendInput", b'{"process": {"pid": 77777777}}', {}, 404),
        ("filesystem.Filesystem/Stat", b"{}", {}, 400),
        ("filesystem.Filesystem/Stat", b'{"path": "no/such"}', {}, 404),
        ("filesystem.Filesystem/Stat", json.dumps({"path": "x" * 5000}).encode(), {}, 400),
        ("filesystem.Filesystem/ListDir", b'{"path": ".", "depth": 99}', {}, 400),
        ("filesystem.Filesystem/GetWatcherEvents", b'{"watcherId": "?"}', {}, 404),
    ],
)
def test_a_call_that_makes_no_sense_is_a_typed_fault(server, made, method, content, headers, status):
    answer = call(server, made, method, content, **headers)
    assert answer.status_code == status
    assert isinstance(answer.json()["code"], str)


def test_a_stream_that_breaks_off_is_a_fault_inside_the_stream(server, made):
    for content in (b"", b"\0\0\0\0", struct.pack(">BI", 0, 100) + b"{}", struct.pack(">BI", 0, 2**31) + b"{}"):
        answer = call(server, made, "process.Process/Start", content, kind="application/connect+json")
        flags, size = struct.unpack(">BI", answer.content[:5])
        assert (flags, size) == (2, len(answer.content) - 5)
        assert json.loads(answer.content[5:])["error"]["code"] in ("invalid_argument", "resource_exhausted")


def test_the_binary_form_of_messages_is_spoken_too(server, made):
    from triax.sandbox.server.messages import message, message_class

    asked = message("filesystem.StatRequest", path=".").SerializeToString()
    answer = call(server, made, "filesystem.Filesystem/Stat", asked, kind="application/proto")
    read_back = message_class("filesystem.StatResponse")()
    read_back.ParseFromString(answer.content)
    assert answer.headers["content-type"] == "application/proto"
    assert read_back.entry.type == 2


def test_what_a_program_inside_serves_comes_as_it_wrote_it(server, made):
    heard = []

    async def answer(reader, writer):
        heard.append(await reader.readuntil(b"\r\n\r\n"))
        writer.write(b"HTTP/1.1 200 OK\r\nSet-Cookie: a=1\r\nSet-Cookie: b=2\r\nContent-Length: 2\r\n\r\nhi")
        writer.close()

    async def listen():
        return await asyncio.start_server(answer, "127.0.0.1", 0)

    async def close(listening):
        listening.close()

    listening = server.call(listen())
    port = listening.sockets[0].getsockname()[1]
    told = web.get(server.url, headers=aimed(made, **{"E2b-Sandbox-Port": str(port)}))
    assert told.text == "hi"
    assert told.headers.get_list("set-cookie") == ["a=1", "b=2"]
    assert b"transfer-encoding" not in heard[0].lower(), "a request without a body has none there either"
    assert b"token" not in heard[0].lower()
    server.call(close(listening))


def test_figures_and_nodes_are_told(server, made):
    figures = web.get(f"{server.url}/metrics").text
    assert 'triax_sandboxes{status="running"}' in figures
    assert 'triax_sandbox_creations_total{outcome="created"}' in figures
    (node,) = web.get(f"{server.url}/nodes").json()
    assert node["sandboxCount"] >= 1
    assert web.get(f"{server.url}/health").status_code == 204


def test_a_repeated_request_gets_the_sandbox_of_the_first(server):
    headers = {"Idempotency-Key": "once-only"}
    one, two = (web.post(f"{server.url}/sandboxes", json={"templateID": "base"}, headers=headers) for _ in "ab")
    assert one.json()["sandboxID"] == two.json()["sandboxID"]
    other = web.post(f"{server.url}/sandboxes", json={"templateID": "base", "timeout": 9}, headers=headers)
    assert other.status_code == 409
    web.delete(f"{server.url}/sandboxes/{one.json()['sandboxID']}")


def test_more_than_the_quotas_is_refused_until_something_ends(serve, tmp_path):
    settings = Server(folder=tmp_path / "s", port=0, backend="process", unsafe=True, quotas=Quotas(sandboxes=1))
    with serve(settings, ProcessBackend(tmp_path / "m", unsafe=True)) as small:
        first = web.post(f"{small.url}/sandboxes", json={"templateID": "base"}).json()["sandboxID"]
        refused = web.post(f"{small.url}/sandboxes", json={"templateID": "base"})
        assert refused.status_code == 429
        assert "quota sandboxes" in refused.json()["message"]
        assert web.post(f"{small.url}/sandboxes/{first}/pause", json={}).is_success
        assert small.plane.find(first).status == "paused"
        assert web.post(f"{small.url}/sandboxes", json={"templateID": "base"}).status_code == 429, (
            "it holds its machine"
        )
        web.delete(f"{small.url}/sandboxes/{first}")
        assert web.post(f"{small.url}/sandboxes", json={"templateID": "base"}).status_code == 201


def test_a_server_that_ends_finds_its_sandboxes_again(serve, tmp_path):
    settings = Server(folder=tmp_path / "s", port=0, backend="process", unsafe=True)
    with serve(settings, ProcessBackend(tmp_path / "m", unsafe=True)) as first:
        told = web.post(f"{first.url}/sandboxes", json={"templateID": "base"}).json()
        web.post(f"{first.url}/files?path=kept", content=b"here", headers=aimed(told)).raise_for_status()
    with serve(settings, ProcessBackend(tmp_path / "m", unsafe=True)) as second:
        at = f"{second.url}/sandboxes/{told['sandboxID']}"
        assert web.get(at).json()["state"] == "paused"
        again = web.post(f"{at}/connect", json={"timeout": 60})
        assert again.status_code == 201
        assert again.json()["envdAccessToken"] == told["envdAccessToken"]
        assert web.get(f"{second.url}/files?path=kept", headers=aimed(told)).text == "here"


def test_a_booted_machine_becomes_the_next_clients(serve, tmp_path):
    settings = Server(
        folder=tmp_path / "s", port=0, backend="process", unsafe=True, templates={"base": Template(warm=1)}
    )
    with serve(settings, ProcessBackend(tmp_path / "m", unsafe=True)) as warm:
        deadline = time.monotonic() + 120
        while not warm.plane.warm.count():
            assert time.monotonic() < deadline
            time.sleep(0.02)
        (held,) = warm.plane.host.sandboxes()
        assert web.get(f"{warm.url}/v2/sandboxes").json() == []
        at = f"{warm.url}/sandboxes/{held.id}"
        hidden = [web.get(at), web.delete(at), web.post(f"{at}/connect", json={}), web.post(f"{at}/pause", json={})]
        assert [answer.status_code for answer in hidden] == [404] * 4, "nobody was told of it"
        token = warm.plane.access.token(held.id)
        inside = web.get(f"{warm.url}/files?path=a", headers={"E2b-Sandbox-Id": held.id, "X-Access-Token": token})
        assert inside.status_code == 502
        assert held.status == "running"
        wish = {"templateID": "base", "envVars": {"A": "mine"}, "metadata": {"for": "me"}}
        told = web.post(f"{warm.url}/sandboxes", json=wish).json()
        assert told["sandboxID"] == held.id
        result = warm.call(warm.plane.find(told["sandboxID"]).exec('echo "$A"'))
        assert result.stdout == b"mine\n"
        listed = web.get(f"{warm.url}/v2/sandboxes").json()
        assert [one["metadata"] for one in listed] == [{"for": "me"}]


def test_one_port_speaks_both_versions_of_http_over_tls(serve, tmp_path):
    certificate, key = tmp_path / "c.pem", tmp_path / "k.pem"
    subject = ["-subj", "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1"]
    made = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", *subject]
    subprocess.run([*made, "-keyout", str(key), "-out", str(certificate)], check=True, capture_output=True)
    settings = Server(folder=tmp_path / "s", port=0, backend="process", unsafe=True, certificate=certificate, key=key)
    with serve(settings, ProcessBackend(tmp_path / "m", unsafe=True)) as safe:
        trust = ssl.create_default_context(cafile=str(certificate))
        for is_second, version in ((True, "HTTP/2"), (False, "HTTP/1.1")):
            with httpx.Client(http2=is_second, verify=trust) as client:
                answer = client.post(f"{safe.url}/sandboxes", json={"templateID": "base"})
                assert (answer.http_version, answer.status_code) == (version, 201)
                start = json.dumps({"process": {"cmd": "/bin/echo", "args": ["over TLS"]}, "stdin": False}).encode()
                told = client.post(
                    f"{safe.url}/process.Process/Start",
                    content=struct.pack(">BI", 0, len(start)) + start,
                    headers=aimed(answer.json(), **{"content-type": "application/connect+json"}),
                )
                assert b'"exited": true' in told.content


@pytest.mark.parametrize(
    ("words", "found"),
    [
        (["host=0.0.0.0"], "can be reached from other machines"),
        (["backend=process"], "isolates nothing"),
        (["quotas.sandbox=3"], "quotas.sandboxes"),
        (["certificate=a.pem"], "belong together"),
        (["templates.big.cpus=2"], "base"),
    ],
)
def test_settings_that_cannot_serve_are_refused(words, found):
    with pytest.raises(ConfigError, match=found):
        read(words)


def test_what_was_written_before_the_first_client_listens_is_not_lost(hosting, tmp_path):
    async def run():
        async with hosting("process", tmp_path) as host:
            process = await (await host.create()).start("echo all")
            await asyncio.sleep(0.3)  # it wrote all and ended
            running = Running(process, {})
            await asyncio.sleep(0.05)
            return [event async for event in running.listen()]

    (name, data), end = asyncio.run(run())
    assert (name, data, end.exit_code) == ("stdout", b"all\n", 0)


def test_a_sandbox_on_its_way_out_is_gone_for_its_clients(serve, tmp_path):
    backend = ProcessBackend(tmp_path / "machines", unsafe=True)
    with serve(Server(folder=tmp_path / "state", port=0, backend="process", unsafe=True), backend) as server:
        made = web.post(f"{server.url}/v2/sandboxes", json={"templateID": "base"}).json()
        sandbox = server.plane.find(made["sandboxID"])
        sandbox.record.status = "killing"
        at = f"{server.url}/sandboxes/{sandbox.id}"
        assert web.get(at).status_code == 404
        assert web.post(f"{at}/pause", json={}).status_code == 404
        assert (
            web.get(
                f"{server.url}/health", headers={"E2B-Sandbox-Id": sandbox.id, "E2B-Sandbox-Port": "49983"}
            ).status_code
            == 502
        )
        assert web.get(f"{server.url}/v2/sandboxes").json() == []
        sandbox.record.status = "running"
        assert web.get(at).status_code == 200


def test_f35_a_foreign_name_is_refused_on_every_plane_and_named_ones_are_not(server, made):
    for headers in ({}, {**aimed(made)}, {"X-API-Key": "any"}):
        for name in ("evil.example", "127.0.0.1.evil.example", f"49983-{made['sandboxID']}.evil.example"):
            for path in ("/health", "/sandboxes", "/files?path=x", "/metrics"):
                answer = web.get(server.url + path, headers={**headers, "Host": name})
                assert answer.status_code == 403, (path, name)
                assert "allowed_hosts" in answer.json()["message"]
    for name in ("localhost", "127.0.0.1:1", "[::1]", f"49983-{made['sandboxID']}.localhost"):
        assert web.get(f"{server.url}/health", headers={"Host": name}).status_code == 204, name


def test_f35_names_below_the_domain_and_allowed_ones_are_answered(serve, tmp_path):
    settings = Server(
        folder=tmp_path / "state", port=0, backend="process", unsafe=True, domain="box.test", allowed_hosts=["a.test"]
    )
    with serve(settings, ProcessBackend(tmp_path / "machines", unsafe=True)) as running:
        told = web.post(f"{running.url}/sandboxes", json={"templateID": "base"}).json()
        for name, status in {
            "box.test": 204,
            f"49983-{told['sandboxID']}.box.test": 204,
            "a.test:80": 204,
            "b.test": 403,
        }.items():
            assert web.get(f"{running.url}/health", headers={"Host": name}).status_code == status, name
        web.delete(f"{running.url}/sandboxes/{told['sandboxID']}")
