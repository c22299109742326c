"""Who may ask, how often and how much, and what an operator sees and steers."""

import json
import os
import signal
from pathlib import Path

import httpx
import numpy
import openai
import pytest
from safetensors.numpy import save_file

from triax.serve.http.limits import Rates

from .conftest import Beside, add_up
from .test_faults import body, figure, until


def test_a_bucket_fills_evenly_and_is_never_fuller_than_a_minute():
    now = 0.0
    rates = Rates(60.0, lambda: now)
    assert [rates.take("a") for _ in range(60)] == [0.0] * 60
    assert rates.take("a") == pytest.approx(1.0)
    assert rates.take("b") == 0.0
    now = 1.0
    assert rates.take("a") == 0.0
    assert rates.take("a") == pytest.approx(1.0)
    now = 1000.0
    assert [rates.take("a") for _ in range(61)][-1] > 0


def test_keys_open_the_api_and_only_the_admins_key_the_admin_endpoints(start):
    server = start('http.api_keys=["one","two"]', 'http.admin_keys=["boss"]', "http.requests_per_minute=5")
    with pytest.raises(openai.AuthenticationError, match="key is needed"):
        server.client("wrong").models.list()
    assert server.client("one").models.list().data[0].id == "m"
    assert server.get("/health").status_code == 200
    assert server.get("/v1/models").headers["www-authenticate"] == "Bearer"
    as_client, as_admin = {"authorization": "Bearer one"}, {"authorization": "Bearer boss"}
    assert server.post("/admin/resume", {}, headers=as_client).status_code == 401
    assert server.post("/admin/resume", {}, headers=as_admin).json() == {"status": "running"}
    for _ in range(4):
        server.client("one").models.list()
    with pytest.raises(openai.RateLimitError, match="more than 5 a minute") as problem:
        server.client("one").models.list()
    assert 1 <= int(problem.value.response.headers["retry-after"]) <= 12
    assert server.client("two").models.list().data  # another key has its own rate
    assert server.get("/health").status_code == 200


def test_admin_endpoints_are_closed_without_a_key(server):
    response = server.post("/admin/pause", {"mode": "abort"})
    assert (response.status_code, response.json()["error"]["code"]) == (403, "admin_closed")


def test_f35_a_page_elsewhere_whose_name_resolves_to_this_machine_is_refused(server):
    for path in ("/health", "/v1/models", "/", "/metrics"):
        refused = server.get(path, headers={"host": "evil.example:8000"})
        assert (refused.status_code, refused.json()["error"]["code"]) == (403, "host_not_allowed"), path
        assert "http.allowed_hosts" in refused.json()["error"]["message"]
        assert server.get(path, headers={"host": "localhost:1"}).status_code == 200


def test_f35_named_hosts_are_answered(start):
    server = start('http.allowed_hosts=["*.example.org"]')
    assert server.get("/health", headers={"host": "box.example.org"}).status_code == 200
    assert server.get("/health", headers={"host": "example.net"}).status_code == 403


def test_more_than_the_queue_are_told_to_come_again(start, ask):
    server = start("http.max_queue=2", facts={"max_running": 1})
    slow = server.script("slow", ask.said("word " * 3000), hold_at=3)
    clients = [Beside(server.post, "/v1/chat/completions", body(slow, max_tokens=600))]
    until(lambda: figure(server, "triax_engine_running") == 1 and figure(server, "triax_waiting_requests") == 0)
    for number in (1, 2):
        clients.append(Beside(server.post, "/v1/chat/completions", body(slow, max_tokens=5)))
        until(lambda number=number: figure(server, "triax_waiting_requests") == number)
    response = server.post("/v1/chat/completions", body(slow))
    assert (response.status_code, response.json()["error"]["code"]) == (429, "queue_full")
    assert int(response.headers["retry-after"]) >= 1
    many = server.post("/v1/chat/completions", body("hi", n=3))
    assert many.status_code == 400, "it would wait for ever"
    server.let_go("slow")
    assert [client.result().status_code for client in clients] == [200] * 3
    assert server.post("/v1/chat/completions", body("hi")).status_code == 200


@pytest.mark.parametrize("chunked", [False, True])
def test_large_bodies_are_cut_off(start, chunked):
    server = start("http.max_body_bytes=10000")
    data = json.dumps(body("x" * 20_000)).encode()
    content = (data[at : at + 1000] for at in range(0, len(data), 1000)) if chunked else data
    headers = {"content-type": "application/json"}
    try:
        response = httpx.post(f"{server.url}/v1/chat/completions", content=content, headers=headers)
        assert (response.status_code, response.json()["error"]["code"]) == (413, "request_too_large")
    except (httpx.WriteError, httpx.ReadError, httpx.RemoteProtocolError):
        pass  # cut off before all was sent
    assert server.post("/v1/chat/completions", body("x" * 1000)).status_code == 200


def test_pages_of_named_origins_may_ask(start):
    server = start('http.cors_origins=["https://a.example"]')
    asked = {"access-control-request-method": "POST", "access-control-request-headers": "content-type"}
    allowed = httpx.options(f"{server.url}/v1/chat/completions", headers=asked | {"origin": "https://a.example"})
    assert allowed.headers["access-control-allow-origin"] == "https://a.example"
    refused = httpx.options(f"{server.url}/v1/chat/completions", headers=asked | {"origin": "https://b.example"})
    assert "access-control-allow-origin" not in refused.headers


def test_fixed_sampling_refuses_all_other_options(start):
    server = start("http.has_fixed_sampling=true")
    for name, value in {
        "temperature": 1.5,
        "top_p": 0.8,
        "presence_penalty": 0.5,
        "frequency_penalty": 0.5,
        "n": 2,
    }.items():
        with pytest.raises(openai.BadRequestError, match=f"^Error code: 400.*{name}: this server keeps"):
            server.client().chat.completions.create(**body("hi", **{name: value}))
    own = {"temperature": 0.6, "top_p": 0.95, "presence_penalty": 0, "frequency_penalty": 0, "n": 1}
    assert server.client().chat.completions.create(**body("hi", **own)).choices[0].message.content == "Hello there!"


def test_an_operator_pauses_updates_and_resumes(start, ask, tmp_path):
    server = start('http.admin_keys=["boss"]')
    boss = {"authorization": "Bearer boss"}
    slow = server.script("slow", ask.said("word " * 3000), hold_at=20)
    client = Beside(server.post, "/v1/chat/completions", body(slow))
    until(lambda: figure(server, "triax_engine_running") == 1)
    assert server.post("/admin/pause", {"mode": "abort"}, headers=boss).json() == {"status": "paused", "mode": "abort"}
    assert client.result().json()["choices"][0]["finish_reason"] == "abort"
    waiting = Beside(server.post, "/v1/chat/completions", body("hi"))
    until(lambda: figure(server, "triax_waiting_requests") == 1)
    assert server.post("/admin/update_weights", {"path": str(tmp_path)}, headers=boss).json() == {"weight_version": 1}
    assert server.post("/admin/resume", {}, headers=boss).status_code == 200
    assert waiting.result().json()["system_fingerprint"] == "triax-1"
    assert server.get("/health").json()["weight_version"] == 1
    for wrong in ({"path": str(tmp_path / "no")}, {"shared_memory": "../no"}, {}, {"path": "a", "shared_memory": "b"}):
        response = server.post("/admin/update_weights", wrong, headers=boss)
        assert response.status_code == 400, wrong


@pytest.mark.parametrize("mode", ["keep", "wait"])
def test_a_pause_keeps_what_runs_or_waits_for_it(start, ask, mode):
    server = start('http.admin_keys=["boss"]')
    boss = {"authorization": "Bearer boss"}
    words = "word " * (600 if mode == "keep" else 20)
    slow = server.script("slow", ask.said(words), delay_s=0.01)
    stream = iter(server.client().chat.completions.create(**body(slow, stream=True)))
    told = [next(stream) for _ in range(4)]
    pieces = []
    reader = Beside(pieces.extend, stream)
    assert server.post("/admin/pause", {"mode": mode}, headers=boss).status_code == 200
    if mode == "wait":
        reader.result()  # what runs is answered before the pause begins
    else:
        assert figure(server, "triax_engine_running") == 1
        sent = server.get("/v1/cache").json()["sent"]
    held = Beside(server.post, "/v1/chat/completions", body("hi"))
    until(lambda: figure(server, "triax_waiting_requests") == 1)
    if mode == "keep":
        assert server.get("/v1/cache").json()["sent"] == sent, "nothing is said meanwhile"
    assert held.is_alive()
    server.let_go("slow")
    if mode == "keep":  # a pause that waits lets what is frozen go on
        assert server.post("/admin/pause", {"mode": "wait"}, headers=boss).status_code == 200
        assert held.is_alive()
    assert server.post("/admin/resume", {}, headers=boss).status_code == 200
    reader.result()
    assert add_up([*told, *pieces])[0]["content"] == words
    assert held.result().status_code == 200


def test_a_pause_that_cannot_be_is_none(start):
    server = start('http.admin_keys=["boss"]', facts={"holds_load": True}, wait=False)
    boss = {"authorization": "Bearer boss"}
    assert server.post("/admin/pause", {"mode": "wait"}, headers=boss).status_code == 503
    server.let_go("load")
    until(lambda: server.get("/health").status_code == 200)
    assert server.post("/v1/chat/completions", body("hi")).status_code == 200


def test_a_new_process_gets_the_weights_of_the_one_before_it_or_answers_nobody(start, tmp_path):
    server = start('http.admin_keys=["boss"]')
    boss = {"authorization": "Bearer boss"}
    segment = Path("/dev/shm") / f"triax-test-{os.getpid()}"

    def die():
        deaths = figure(server, "triax_engine_deaths")
        os.kill(server.engine_pid(), signal.SIGKILL)
        until(lambda: figure(server, "triax_engine_deaths") == deaths + 1)
        until(lambda: server.get("/health").json()["status"] in ("ok", "lacks weights"))
        return server.get("/health")

    for version in (1, 2):
        told = server.post("/admin/update_weights", {"path": str(tmp_path)}, headers=boss)
        assert told.json() == {"weight_version": version}
    assert die().json()["weight_version"] == 2
    assert server.post("/v1/chat/completions", body("hi")).json()["system_fingerprint"] == "triax-2"
    try:
        save_file({"x": numpy.zeros(1)}, segment)
        told = server.post("/admin/update_weights", {"shared_memory": segment.name}, headers=boss)
        assert told.json() == {"weight_version": 3}
    finally:
        segment.unlink(missing_ok=True)
    health = die()
    assert (health.status_code, health.json()["status"]) == (503, "lacks weights")
    refused = server.post("/v1/chat/completions", body("hi"))
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "engine_not_ready")
    assert "no such segment" in refused.json()["error"]["message"]
    told = server.post("/admin/update_weights", {"path": str(tmp_path)}, headers=boss)
    assert told.json() == {"weight_version": 4}
    assert server.get("/health").status_code == 200
    assert server.post("/v1/chat/completions", body("hi")).json()["system_fingerprint"] == "triax-4"


def test_a_deadline_ends_a_request(start, ask):
    server = start("http.deadline_s=0.5")
    slow = server.script("slow", ask.said("word " * 3000), per_step=40, hold_at=40)
    choice = server.post("/v1/chat/completions", body(slow)).json()["choices"][0]
    assert choice["finish_reason"] == "deadline"
    assert choice["message"]["content"].startswith("word")


def test_figures_are_told_in_the_form_of_prometheus(server, ask):
    from prometheus_client.parser import text_string_to_metric_families

    before = figure(server, "triax_ttft_seconds_count")
    ask(ask.said("x"))
    text = server.get("/metrics").text
    families = {family.name for family in text_string_to_metric_families(text)}
    assert {"triax_requests", "triax_tokens", "triax_ttft_seconds", "triax_itl_seconds", "triax_up"} <= families
    assert figure(server, "triax_ttft_seconds_count") == before + 1


def test_an_address_that_is_taken_is_told(server, tmp_path):
    import subprocess
    import sys

    port = server.url.rsplit(":", 1)[1]
    command = [sys.executable, "-m", "triax", "serve", str(server.folder), f"http.port={port}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200)
    assert done.returncode == 2
    assert f"cannot listen on 127.0.0.1 port {port}" in done.stderr
