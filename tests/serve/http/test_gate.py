"""Who may pass, tried at the gate itself: keys, rates, sizes and the queue's bound."""

import asyncio

import pytest

from triax.config.serve import Serve
from triax.config.vision import Images
from triax.data.kimi import KimiTokenizer
from triax.serve.http.face import Face
from triax.serve.http.fault import Fault
from triax.serve.http.limits import MAX_CALLERS, Gate, Rates
from triax.serve.http.model import Model
from triax.serve.link import Link

from .conftest import TEXT


def passed(http: dict, path="/v1/models", key=None, client=("10.0.0.1", 1), method="GET", gate=None, **headers):
    """Return the status of a request; 200 where it reaches the application."""
    told = []

    async def app(scope, receive, send):
        await send({"type": "http.response.start", "status": 200, "headers": []})

    async def send(message):
        if message["type"] == "http.response.start":
            told.append(message["status"])

    async def receive():
        return {"type": "http.request", "body": b"", "more_body": False}

    gate = gate or Gate(app, Serve.model_validate({"http": http}).http, lambda scope, status: None)
    given = [
        (b"host", b"localhost"),
        *((name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()),
    ]
    if key is not None:
        given.append((b"authorization", f"Bearer {key}".encode()))
    scope = {"type": "http", "path": path, "method": method, "headers": given, "client": client}
    asyncio.run(gate(scope, receive, send))
    return told[0]


KEYS = {"api_keys": ["secret-one", "secret-two"], "admin_keys": ["boss-key"]}


@pytest.mark.parametrize(
    "key", ["s", "secret-on", "secret-one1", "SECRET-ONE", "", None, "secret-onesecret-two", "boss-key"]
)
def test_only_a_whole_key_opens_the_api(key):
    assert passed(KEYS, key=key) == 401
    assert passed(KEYS, key="secret-one") == passed(KEYS, key="secret-two") == 200


@pytest.mark.parametrize("key", ["b", "boss-ke", "boss-key2", "", None, "secret-one"])
def test_only_a_whole_admin_key_opens_the_admin_endpoints(key):
    assert passed(KEYS, "/admin/pause", key) == 401
    assert passed(KEYS, "/admin/pause", "boss-key") == 200
    assert passed({"api_keys": ["secret-one"]}, "/admin/pause", "secret-one") == 403


def test_another_scheme_is_no_key():
    assert passed(KEYS, authorization="Basic secret-one") == 401
    assert passed(KEYS, authorization="bearer   secret-one ") == 200


@pytest.mark.parametrize(
    "path", ["/v1/models", "/v1/cache", "/tokenize", "/healthy", "/health/", "//health", "/metrics/x"]
)
def test_all_but_the_open_paths_need_a_key(path):
    assert passed(KEYS, path) == 401
    for is_open in ("/", "/health", "/metrics", "/openapi.json", "/favicon.ico"):
        assert passed(KEYS, is_open) == 200


def gate_of(**http):
    async def app(scope, receive, send):
        await send({"type": "http.response.start", "status": 200, "headers": []})

    return Gate(app, Serve.model_validate({"http": http}).http, lambda scope, status: None)


def test_a_rate_is_each_keys_own_or_an_address_s_where_there_are_none():
    gate = gate_of(requests_per_minute=2, api_keys=["one", "two"])
    assert [passed({}, key="one", gate=gate) for _ in range(3)] == [200, 200, 429]
    assert passed({}, key="one", client=("10.0.0.2", 1), gate=gate) == 429, "another address of the same key"
    assert passed({}, key="two", gate=gate) == 200
    gate = gate_of(requests_per_minute=2)
    assert [passed({}, client=("10.0.0.1", port), gate=gate) for port in range(3)] == [200, 200, 429]
    assert passed({}, key="one", client=("10.0.0.1", 9), gate=gate) == 429, "a made-up key buys nothing"
    assert passed({}, client=("10.0.0.2", 1), gate=gate) == 200
    assert passed({}, "/health", client=("10.0.0.1", 1), gate=gate) == 200


def test_a_wrong_key_takes_nothing_from_a_rate():
    gate = gate_of(requests_per_minute=1, api_keys=["one"])
    assert [passed({}, key="wrong", gate=gate) for _ in range(3)] == [401] * 3
    assert passed({}, key="one", gate=gate) == 200


def test_a_refused_request_takes_nothing_from_a_bucket():
    now = [0.0]
    rates = Rates(60.0, clock=lambda: now[0])
    assert [rates.take("a") for _ in range(60)] == [0.0] * 60
    assert rates.take("a") == 1.0
    now[0] = 0.5
    assert rates.take("a") == 0.5
    now[0] = 1.0
    assert rates.take("a") == 0.0
    assert rates.take("a") == 1.0


def test_callers_are_forgotten_oldest_first():
    rates = Rates(1.0, clock=lambda: 0.0)
    assert rates.take("first") == 0
    assert rates.take("second") == 0
    rates.take("first")  # seen again, so it is not the oldest any more
    for number in range(MAX_CALLERS - 1):
        rates.take(str(number))
    assert rates.take("first") > 0
    assert rates.take("second") == 0


def test_a_body_may_have_just_as_many_bytes_as_are_allowed():
    assert passed({"max_body_bytes": 10}, content_length="10") == 200
    assert passed({"max_body_bytes": 10}, content_length="11") == 413


@pytest.fixture
def face(tmp_path):
    """What the endpoints share, with an engine that is not started."""
    tokenizer = KimiTokenizer.train([TEXT * 40], 300)
    settings = Serve.model_validate({"http": {"max_queue": 2}})
    link = Link(tmp_path, settings)
    face = Face(link, tokenizer, settings)
    face._model = Model("m", tokenizer, "k3", Images(), 4096, tokenizer.vocab_size, None)
    yield face
    asyncio.run(link.stop())


@pytest.mark.parametrize(
    ("waiting", "choices", "status"), [(0, 2, None), (1, 1, None), (1, 2, 429), (2, 1, 429), (0, 3, 400)]
)
def test_every_choice_takes_a_place_in_the_queue(face, waiting, choices, status):
    face.link.waiting = {str(number) for number in range(waiting)}
    if status is None:
        face.admit("m", choices)
    else:
        with pytest.raises(Fault) as problem:
            face.admit("m", choices)
        assert problem.value.status == status


def test_nobody_comes_in_once_the_server_drains(face):
    face.admit("m")
    face.is_draining = True
    with pytest.raises(Fault) as problem:
        face.admit("m")
    assert (problem.value.status, problem.value.code) == (503, "server_stopping")
