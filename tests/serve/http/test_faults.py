"""What must not hurt anybody else: engines that die, clients that leave or do not read, servers that end."""

import json
import os
import signal
import socket
import time
from pathlib import Path

import httpx
import openai
import pytest

from .conftest import Beside

MESSAGES = [{"role": "user", "content": "hi"}]


def until(condition, limit_s=120.0):
    """Wait for something; the limit is there to end what hangs, and says nothing of how fast it should be."""
    end = time.monotonic() + limit_s
    while not (found := condition()):
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.02)
    return found


def figure(server, name):
    lines = server.get("/metrics").text.splitlines()
    return next((float(line.split()[1]) for line in lines if line.startswith(f"{name} ")), 0.0)


def body(name, **fields):
    return {"model": "m", "messages": [{"role": "user", "content": name}], **fields}


def raw(text):
    """Return a request as bytes, for clients that behave badly."""
    head = "POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    return f"{head}Content-Length: {len(text)}\r\n\r\n{text}".encode()


def is_running(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().split()[2] != "Z"
    except OSError:
        return False


def test_a_killed_engine_is_told_to_its_clients_and_started_again(start, ask):
    server = start()
    slow = server.script("slow", ask.said("word " * 3000), hold_at=20)
    results = []

    def stream():
        try:
            for _ in server.client().chat.completions.create(**body(slow, stream=True)):
                pass
        except openai.APIError as problem:
            results.append(problem)

    def wait():
        results.append(server.post("/v1/chat/completions", body(slow)))

    clients = [Beside(work) for work in (stream, wait) for _ in range(4)]
    until(lambda: figure(server, "triax_engine_running") == 8)
    os.kill(server.engine_pid(), signal.SIGKILL)
    for client in clients:
        client.result()
    assert len(results) == 8
    for result in results:
        if isinstance(result, httpx.Response):
            assert (result.status_code, result.headers["retry-after"]) == (503, "2")
            assert result.json()["error"]["code"] == "engine_lost"
            result = result.json()["error"]["message"]
        assert "SIGKILL" in str(result)
        assert "send the request again" in str(result)
    until(lambda: server.get("/health").status_code == 200)
    answer = server.client().chat.completions.create(model="m", messages=MESSAGES)
    assert answer.choices[0].message.content == "Hello there!"
    assert figure(server, "triax_engine_deaths") == 1
    assert figure(server, "triax_active_requests") == 0


def test_an_engine_that_dies_at_every_request_does_not_end_the_server(start, ask):
    server = start()
    deadly = server.script("deadly", ask.said("words and words"), die_at=3)
    for _ in range(2):
        response = server.post("/v1/chat/completions", body(deadly))
        assert response.json()["error"]["code"] == "engine_lost"
        until(lambda: server.get("/health").status_code == 200)
    assert server.post("/v1/chat/completions", body("hi")).status_code == 200


def test_a_broken_row_ends_alone(server, ask):
    broken = server.script("broken", ask.said("words and words"), break_at=3)
    slow = server.script("beside", ask.said("fine"), hold_at=3)
    beside = Beside(server.post, "/v1/chat/completions", body(slow))
    until(lambda: figure(server, "triax_engine_running") == 1)
    response = server.post("/v1/chat/completions", body(broken))
    assert (response.status_code, response.json()["error"]["code"]) == (500, "invalid_output")
    assert figure(server, "triax_engine_running") == 1
    server.let_go("beside")
    assert beside.result().json()["choices"][0]["message"]["content"] == "fine"


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_ends_its_request(server, ask, stream):
    before = figure(server, "triax_engine_aborted")
    name = server.script("left", ask.said("word " * 3000), hold_at=20)
    host, port = server.url.removeprefix("http://").split(":")
    text = json.dumps(body(name, stream=stream))
    with socket.create_connection((host, int(port))) as connection:
        connection.sendall(raw(text))
        until(lambda: figure(server, "triax_engine_running") == 1)
        if stream:
            connection.recv(100)
    until(lambda: figure(server, "triax_engine_aborted") == before + 1)
    assert figure(server, "triax_engine_running") == 0
    assert figure(server, "triax_active_requests") == 0


def test_a_client_that_leaves_before_its_body_is_no_fault_of_ours(server):
    host, port = server.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port))) as connection:
        connection.sendall(raw("{}" + " " * 50)[:-50])
    until(lambda: 'status="499"' in server.get("/metrics").text)
    assert "Traceback" not in server.log.read_text()


def test_a_reader_that_does_not_read_holds_up_nobody(server, ask):
    name = server.script("unread", ask.said("word " * 20_000), per_step=64)
    host, port = server.url.removeprefix("http://").split(":")
    text = json.dumps(body(name, stream=True, logprobs=True, top_logprobs=20, max_tokens=3000, n=8))
    with socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.connect((host, int(port)))
        connection.sendall(raw(text))
        until(lambda: figure(server, "triax_active_requests") == 8)
        until(lambda: figure(server, "triax_engine_running") == 0)  # the engine has long gone on
        assert server.post("/v1/chat/completions", body("hi")).status_code == 200
        assert figure(server, "triax_active_requests") == 8
    until(lambda: figure(server, "triax_active_requests") == 0)


def test_a_signal_lets_running_requests_finish(start, ask):
    server = start()
    slow = server.script("slow", ask.said("to the end"), hold_at=3)
    running = Beside(server.post, "/v1/chat/completions", body(slow))
    until(lambda: figure(server, "triax_engine_running") == 1)
    server.process.send_signal(signal.SIGTERM)
    until(lambda: server.get("/health").json()["status"] == "draining")
    assert server.get("/health").status_code == 503
    late = server.post("/v1/chat/completions", body("hi"))
    assert (late.status_code, late.json()["error"]["code"]) == (503, "server_stopping")
    assert "retry-after" in late.headers
    server.let_go("slow")
    assert running.result().json()["choices"][0]["message"]["content"] == "to the end"
    assert server.process.wait(100) == 0


def test_what_is_not_done_in_time_is_ended_with_an_error(start, ask):
    server = start("http.drain_s=0.5")
    slow = server.script("slow", ask.said("word " * 3000), hold_at=20)
    running = Beside(server.post, "/v1/chat/completions", body(slow))
    until(lambda: figure(server, "triax_engine_running") == 1)
    server.process.send_signal(signal.SIGTERM)
    response = running.result()
    assert (response.status_code, response.json()["error"]["type"]) == (503, "server_error")
    assert server.process.wait(100) == 0


def test_the_engine_ends_with_its_server(start):
    server = start()
    pid = server.engine_pid()
    server.process.kill()
    server.process.wait()
    until(lambda: not is_running(pid))


def test_an_engine_that_is_still_loading_ends_with_its_server_too(start):
    server = start(facts={"holds_load": True}, wait=False)
    pid = until(lambda: server.get("/health").json()["progress"] > 0 and server.engine_pid())
    server.process.kill()
    server.process.wait()
    until(lambda: not is_running(pid))


def test_a_signal_that_comes_before_the_engine_has_begun_ends_the_server(start):
    server = start(facts={"holds_load": True}, wait=False)
    server.process.send_signal(signal.SIGTERM)
    assert server.process.wait(100) in (0, -signal.SIGTERM)


def test_loading_is_told_and_requests_wait_outside(start):
    server = start(facts={"holds_load": True}, wait=False)
    told = until(lambda: (tree := server.get("/health").json())["progress"] > 0 and tree)
    assert (told["status"], told["stage"], told["progress"]) == ("loading", "weights", 0.5)
    assert server.get("/health").status_code == 503
    response = server.post("/v1/chat/completions", body("hi"))
    assert (response.status_code, response.json()["error"]["code"]) == (503, "engine_not_ready")
    assert "triax_up 0.0" in server.get("/metrics").text
    server.let_go("load")
    until(lambda: server.get("/health").status_code == 200)
    assert server.post("/v1/chat/completions", body("hi")).status_code == 200


def test_a_model_that_cannot_be_loaded_ends_the_server_with_its_message(start):
    server = start(facts={"cannot_load": "model: is broken; found nothing; copy it again"}, wait=False)
    assert server.process.wait(100) == 1
    assert "error: model: is broken; found nothing; copy it again" in server.log.read_text()
