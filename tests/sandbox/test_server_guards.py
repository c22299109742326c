"""Who may do what on a server, and what a sandbox may be and reach: each guard is tried from its wrong side."""

import asyncio
import time
from types import SimpleNamespace

import httpx
import pytest
from starlette.datastructures import Headers, QueryParams

from triax.config.sandbox import Server
from triax.errors import SandboxError
from triax.sandbox.backend.choose import tried
from triax.sandbox.backend.process import ProcessBackend
from triax.sandbox.protocol import Capabilities, Network
from triax.sandbox.server import schema
from triax.sandbox.server.access import Access, aim, load_secret, read_keys
from triax.sandbox.server.connect import Fault
from triax.sandbox.server.plane import Plane
from triax.sandbox.server.policy import network_of, refuse_unsupported

web = httpx.Client(timeout=120, limits=httpx.Limits(max_keepalive_connections=0))


def made(server, **more):
    answer = web.post(f"{server.url}/sandboxes", json={"templateID": "base", **more})
    assert answer.status_code == 201, answer.text
    return answer.json()


@pytest.fixture
def port(server):
    """A port that answers whatever it is asked with `hi`; with the process backend the host's are a sandbox's."""

    async def answer(reader, writer):
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nConnection: close\r\n\r\nhi")
        await writer.drain()
        writer.close()

    async def listen():
        return await asyncio.start_server(answer, "127.0.0.1", 0)

    async def close():
        listening.close()

    listening = server.call(listen())
    yield listening.sockets[0].getsockname()[1]
    server.call(close())


def at_port(server, told, port, token=None, name="E2B-Traffic-Access-Token"):
    headers = {"E2b-Sandbox-Id": told["sandboxID"], "E2b-Sandbox-Port": str(port)}
    return web.get(server.url, headers=headers if token is None else headers | {name: token})


def test_private_ports_open_for_their_own_token_alone(server, port):
    told, other = (made(server, network={"allowPublicTraffic": False}) for _ in "ab")
    assert told["trafficAccessToken"]
    refused = [
        at_port(server, told, port),
        at_port(server, told, port, ""),
        at_port(server, told, port, told["envdAccessToken"]),
        at_port(server, told, port, other["trafficAccessToken"]),
        at_port(server, told, port, told["trafficAccessToken"][:-1]),
        at_port(server, told, port, told["trafficAccessToken"], name="X-Access-Token"),
    ]
    assert [answer.status_code for answer in refused] == [401] * len(refused)
    assert not any(answer.text == "hi" for answer in refused)
    assert at_port(server, told, port, told["trafficAccessToken"]).text == "hi"
    public = made(server)
    assert at_port(server, public, port).text == "hi"
    for one in (told, other, public):
        web.delete(f"{server.url}/sandboxes/{one['sandboxID']}")


def test_the_two_tokens_of_a_sandbox_differ_and_open_each_its_own_door(server):
    told = made(server, network={"allowPublicTraffic": False})
    envd, traffic = told["envdAccessToken"], told["trafficAccessToken"]
    assert envd != traffic
    files = f"{server.url}/files?path=a"
    for token, status in ((envd, 200), (traffic, 401), (envd[:-1], 401), ("", 401), (None, 401)):
        headers = {"E2b-Sandbox-Id": told["sandboxID"]} | ({} if token is None else {"X-Access-Token": token})
        assert web.post(files, content=b"x", headers=headers).status_code == status, token
        called = web.post(f"{server.url}/process.Process/List", json={}, headers=headers)
        assert called.status_code == status
    web.delete(f"{server.url}/sandboxes/{told['sandboxID']}")


def test_a_token_is_of_one_sandbox_one_purpose_and_one_secret():
    access = Access([], b"s" * 32)
    tokens = {
        Access([], s).token(i, p) for s in (b"s" * 32, b"t" * 32) for i in ("a", "b") for p in ("envd", "traffic")
    }
    assert len(tokens) == 8
    assert min(map(len, tokens)) >= 40, "too long to be guessed"
    for purpose, other in (("envd", "traffic"), ("traffic", "envd")):
        access.check_token("a", access.token("a", purpose), purpose)
        for wrong in (None, "", access.token("a", other), access.token("b", purpose), access.token("a", purpose)[:-1]):
            with pytest.raises(Fault) as caught:
                access.check_token("a", wrong, purpose)
            assert caught.value.code == "unauthenticated"


def test_a_key_opens_the_control_plane_whole_and_nothing_like_it_does(tmp_path):
    access = Access(["open sesame", "second"], b"")
    for headers in (
        {"x-api-key": "open sesame"},
        {"authorization": "Bearer second"},
        {"authorization": "bearer second"},
    ):
        assert access.is_open(Headers(headers)), headers
    for headers in (
        {},
        {"x-api-key": ""},
        {"x-api-key": "open sesam"},
        {"x-api-key": "open sesame "},
        {"x-api-key": "OPEN SESAME"},
        {"x-api-key": "open sesamesecond"},
        {"authorization": "second"},
        {"authorization": "Basic second"},
    ):
        assert not access.is_open(Headers(headers)), headers
    assert Access([], b"").is_open(Headers({}))
    (tmp_path / "keys").write_text("# note\n\n  a key \n")
    assert read_keys(tmp_path / "keys") == ["a key"]
    (tmp_path / "keys").write_text("# none\n\n")
    with pytest.raises(SandboxError, match="holds no key"):
        read_keys(tmp_path / "keys")
    secret = load_secret(tmp_path / "deep" / "secret")
    assert len(secret) == 32
    assert load_secret(tmp_path / "deep" / "secret") == secret
    assert (tmp_path / "deep" / "secret").stat().st_mode & 0o777 == 0o600


def signed(access, sandbox, path, operation, expires=None, user=""):
    import base64
    import hashlib

    text = ":".join([path, operation, user, access.token(sandbox), *([] if expires is None else [str(expires)])])
    digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).rstrip(b"=").decode()
    more = {} if expires is None else {"signature_expiration": str(expires)}
    return {"path": path, "signature": f"v1_{digest}"} | ({"username": user} if user else {}) | more


def test_a_signed_address_is_good_for_one_file_one_deed_one_user_and_its_time():
    access, soon = Access([], b"s" * 32), int(time.time()) + 1000
    good = signed(access, "b", "/a", "read", soon)
    assert access.signed(["a", "b"], QueryParams(good), "read") == "b"
    assert access.signed(["a"], QueryParams(good), "read") is None
    assert access.signed(["b"], QueryParams(good), "write") is None
    for name, value in (
        ("path", "/b"),
        ("username", "root"),
        ("signature_expiration", str(soon + 1)),
        ("signature", ""),
    ):
        assert access.signed(["b"], QueryParams(good | {name: value}), "read") is None, name
    late = {name: value for name, value in good.items() if name != "signature_expiration"}
    assert access.signed(["b"], QueryParams(late), "read") is None, "a limit cannot be taken off"
    with pytest.raises(Fault, match="was valid until"):
        access.signed(["b"], QueryParams(signed(access, "b", "/a", "read", int(time.time()) - 2)), "read")
    with pytest.raises(Fault, match="was valid until"):
        access.signed(["b"], QueryParams(signed(access, "b", "/a", "read", "never")), "read")
    assert access.signed(["b"], QueryParams(signed(access, "b", "/a", "write")), "write") == "b"


def test_a_request_is_aimed_by_its_header_before_its_host():
    assert aim(Headers({"host": "49983-abc.box.test"})) == ("abc", 49983)
    assert aim(Headers({"host": "80-abc.box.test", "e2b-sandbox-id": "other"})) == ("other", 49983)
    assert aim(Headers({"e2b-sandbox-id": "a", "e2b-sandbox-port": "8080"})) == ("a", 8080)
    for odd in ("x", "-1", "123456", "\xb2"):
        assert aim(Headers({"e2b-sandbox-id": "a", "e2b-sandbox-port": odd})) == ("a", 0), odd
    for host in ("127.0.0.1:49980", "localhost", "box.test", "abc.80.test"):
        assert aim(Headers({"host": host})) is None, host


@pytest.fixture
def keeper(brittle):
    return brittle.BrittleBackend(capabilities=Capabilities(network_policy=True, memory_snapshot=True))


@pytest.fixture
def blind(brittle):
    return brittle.BrittleBackend(capabilities=Capabilities())


@pytest.mark.parametrize("internet", [False, True])
def test_a_client_that_says_nothing_reaches_nothing_whatever_the_server_allows(internet, keeper):
    settings = Server(internet=internet)
    for said in (None, False):
        assert network_of(schema.Network(), said, settings, keeper) == Network()
    named = schema.Network.model_validate({"allowOut": ["10.0.0.0/8", "example.org"]})
    assert network_of(named, None, settings, keeper) == Network(("10.0.0.0/8", "example.org"))


def test_everything_is_reached_only_where_the_server_and_the_client_say_so(keeper, blind):
    everywhere = schema.Network.model_validate({"allowOut": ["0.0.0.0/0"]})
    for wanted, said in ((schema.Network(), True), (everywhere, None)):
        with pytest.raises(SandboxError) as caught:
            network_of(wanted, said, Server(), keeper)
        assert caught.value.status == 403
        assert network_of(wanted, said, Server(internet=True), keeper).allow_internet
    shut = schema.Network.model_validate({"allowOut": ["example.org"], "denyOut": ["0.0.0.0/0"]})
    assert network_of(shut, True, Server(internet=True), keeper) == Network(("example.org",))
    for entry in ("not a name!", "a..b", "x" * 64):
        with pytest.raises(SandboxError, match="allowOut"):
            network_of(schema.Network.model_validate({"allowOut": [entry]}), None, Server(), keeper)
    with pytest.raises(SandboxError, match="cannot allow single"):
        network_of(schema.Network.model_validate({"allowOut": ["example.org"]}), None, Server(), blind)


def test_a_pause_without_memory_is_refused_where_memory_is_kept(keeper, blind):
    wanted = schema.NewSandbox.model_validate({"templateID": "base", "autoPause": True, "autoPauseMemory": False})
    with pytest.raises(SandboxError, match="autoPauseMemory"):
        refuse_unsupported(wanted, keeper)
    refuse_unsupported(wanted, blind)


def test_a_sandbox_made_without_a_word_about_networks_reaches_nothing_though_the_server_would_let_it(serve, tmp_path):
    settings = Server(folder=tmp_path / "s", port=0, backend="process", unsafe=True, internet=True)
    with serve(settings, ProcessBackend(tmp_path / "m", unsafe=True)) as open_server:
        for wish in ({}, {"network": {}}, {"network": {"allowPublicTraffic": True}}, {"allow_internet_access": False}):
            told = made(open_server, **wish)
            assert open_server.plane.find(told["sandboxID"]).spec.network == Network(), wish


def test_an_image_is_taken_from_the_folders_that_are_open_for_it_alone(tmp_path):
    images, outside = tmp_path / "images", tmp_path / "outside"
    for folder in (images / "good", outside, tmp_path / "images-too"):
        folder.mkdir(parents=True)
    (images / "link").symlink_to(outside)
    plane = SimpleNamespace(settings=Server(images=(images,)))
    assert Plane.image(plane, "good") == str(images / "good")
    assert Plane.image(plane, str(images / "good")) == str(images / "good")
    for name in ("../outside", str(outside), "link", "good/../../outside", "../images-too", "/", ".."):
        with pytest.raises(SandboxError) as caught:
            Plane.image(plane, name)
        assert (caught.value.kind, caught.value.status) == ("refused", 403), name
    with pytest.raises(SandboxError, match="no such folder"):
        Plane.image(SimpleNamespace(settings=Server()), "good")


def test_no_life_is_longer_than_the_server_gives_however_it_is_asked_for(serve, tmp_path):
    settings = Server(folder=tmp_path / "s", port=0, backend="process", unsafe=True, timeout_s=20, longest_timeout_s=30)
    with serve(settings, ProcessBackend(tmp_path / "m", unsafe=True)) as short:
        told = made(short)
        sandbox = short.plane.find(told["sandboxID"])
        assert sandbox.expires_s - time.time() <= 20
        at = f"{short.url}/sandboxes/{told['sandboxID']}"
        for path, body in (
            ("", {}),
            ("/connect", {"timeout": 31}),
            ("/timeout", {"timeout": 31}),
            ("/fork", {"timeout": 31}),
        ):
            wish = {"templateID": "base", "timeout": 31} if not path else body
            answer = web.post(f"{short.url}/sandboxes" if not path else at + path, json=wish)
            assert answer.status_code == 400, (path, answer.text)
            assert "30 s at a time" in answer.json()["message"]
        assert sandbox.expires_s - time.time() <= 20
        assert len(short.plane.sandboxes()) == 1
        assert web.post(f"{at}/connect", json={"timeout": 30}).is_success
        assert 20 < sandbox.expires_s - time.time() <= 30


def test_a_sandbox_whose_commands_all_die_is_told_by_health_until_one_lives(serve, tmp_path, brittle):
    backend = brittle.BrittleBackend()
    with serve(Server(folder=tmp_path / "s", port=0), backend) as running:
        told = made(running)
        sandbox = running.plane.find(told["sandboxID"])
        headers = {"E2b-Sandbox-Id": sandbox.id}

        def health():
            return web.get(f"{running.url}/health", headers=headers)

        backend.kills_commands = True
        for count in range(1, 5):
            assert running.call(sandbox.exec("true")).signal == 9
            assert health().status_code == (204 if count < 3 else 503), count
        assert "each of its commands is killed" in health().json()["message"]
        assert sandbox.status == "running", "its files can still be read"
        assert running.call(sandbox.read("/x"))
        backend.kills_commands = False
        running.call(sandbox.exec("true"))
        assert health().status_code == 204


def test_commands_that_were_killed_one_by_one_are_no_broken_sandbox(server):
    told = made(server)
    sandbox = server.plane.find(told["sandboxID"])
    for _ in range(5):
        assert server.call(sandbox.exec("kill -9 $$")).signal == 9
    assert sandbox.broken == ""
    web.delete(f"{server.url}/sandboxes/{told['sandboxID']}")


def test_doctor_tries_a_command_after_one_that_was_killed(brittle, tmp_path):
    async def run():
        backend = brittle.BrittleBackend(kills_commands=True)
        told = await tried(backend)
        assert not told.ok
        assert "signal 9" in told.found
        assert told.to_do
        assert backend.machines == {}, "it is ended whatever was found"
        backend.faults = {"create": "before"}
        assert "broken on purpose" in (await tried(backend)).found
        assert (await tried(ProcessBackend(tmp_path / "m", unsafe=True))).ok
        assert not list((tmp_path / "m").iterdir())

    asyncio.run(run())
