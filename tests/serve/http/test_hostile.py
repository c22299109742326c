"""Bodies made to break a server: each is refused in words, and nobody else notices."""

import base64
import io
import json
import socket

import pytest
from PIL import Image

from .conftest import Beside
from .test_faults import figure, until

HALF = "\ud800"  # of a character


def deep(levels):
    return json.loads('{"a":' * levels + "1" + "}" * levels)


def tool(parameters):
    return {"type": "function", "function": {"name": "f", "parameters": parameters}}


@pytest.mark.parametrize("levels", [200, 500, 900])
@pytest.mark.parametrize(
    "body",
    [
        lambda tree: {"tools": [tool(tree)]},
        lambda tree: {"messages": [{"role": "system", "tools": [tool(tree)]}, {"role": "user", "content": "x"}]},
        lambda tree: {
            "messages": [
                {"role": "assistant", "tool_calls": [{"id": "1", "function": {"name": "f", "arguments": tree}}]}
            ]
        },
        lambda tree: {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": tree}}},
        lambda tree: {"metadata": tree},
    ],
)
def test_nesting_without_end_is_read_or_refused(server, body, levels):
    asked = {"model": "m", "messages": [{"role": "user", "content": "hi"}]} | body(deep(levels))
    response = server.post("/v1/chat/completions", asked)
    assert response.status_code in (200, 400), response.text
    if response.status_code == 400:
        assert response.json()["error"]["message"]


@pytest.mark.parametrize(
    "text",
    [
        {"format": {"type": "text", "x": HALF}},
        {"format": {"type": "text"}, "verbosity": HALF},
        {"format": {"type": "json_schema", "name": "a", "schema": {"type": "object"}, "description": HALF}},
    ],
)
def test_half_a_character_that_an_answer_would_repeat_is_refused_at_once(server, text):
    response = server.post("/v1/responses", {"model": "m", "input": "hi", "text": text})
    assert response.status_code == 400
    assert response.json()["error"]["param"].startswith("text")


def test_a_picture_that_is_only_named_is_refused_and_not_passed_over(server):
    parts = [{"type": "input_image", "file_id": "file-1"}, {"type": "input_text", "text": "what is this?"}]
    response = server.post("/v1/responses", {"model": "m", "input": [{"role": "user", "content": parts}]})
    assert response.status_code == 400
    assert "image_url" in response.json()["error"]["message"]


def test_a_word_does_not_switch_thinking_on(server):
    asked = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
    response = server.post("/v1/chat/completions", asked | {"chat_template_kwargs": {"enable_thinking": "no"}})
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "chat_template_kwargs.enable_thinking"


def test_unpacking_a_small_file_into_a_large_picture_holds_up_nobody(server):
    file = io.BytesIO()
    Image.new("1", (9000, 9000)).save(file, "PNG")
    address = f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"
    body = {"model": "m", "messages": [{"role": "user", "content": [{"type": "image_url", "image_url": address}]}]}
    assert len(json.dumps(body)) < 1 << 16
    slow, answered = Beside(server.post, "/v1/chat/completions", body), 0
    while slow.is_alive():
        assert server.get("/v1/models").status_code == 200
        answered += slow.is_alive()
    assert slow.result().status_code == 400
    assert answered > 3, "one may come before it, and one wait for its end"


def test_a_choice_that_met_its_stop_string_costs_nothing_while_others_go_on(server, ask):
    before = figure(server, "triax_engine_aborted")
    words = [ask.said("a STOP " + "x" * 2000), ask.said("b" * 2000)]
    name = server.script("two", words, hold_at=100)
    stream = server.client().chat.completions.create(
        model="m", messages=[{"role": "user", "content": name}], n=2, stop="STOP", stream=True
    )
    reasons = {}
    for chunk in stream:
        reasons |= {choice.index: choice.finish_reason for choice in chunk.choices if choice.finish_reason}
        if 0 in reasons:
            break
    assert reasons == {0: "stop"}
    until(lambda: figure(server, "triax_engine_aborted") == before + 1)
    assert figure(server, "triax_engine_running") == 1
    stream.close()


@pytest.mark.parametrize("mode", ["abort", "wait"])
def test_a_pause_does_not_wait_for_a_client_that_does_not_read(start, mode):
    served = start('http.admin_keys=["admin"]')
    name = served.script("long", "x" * 3000, per_step=100)
    body = {
        "model": "m",
        "prompt": name,
        "stream": True,
        "ignore_eos": True,
        "max_tokens": 3000,
        "logprobs": 20,
        "n": 8,
    }
    text = json.dumps(body).encode()
    head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json"
    head += f"\r\nContent-Length: {len(text)}"
    with socket.create_connection(("127.0.0.1", int(served.url.rsplit(":", 1)[1]))) as deaf:
        deaf.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
        deaf.sendall(head.encode() + b"\r\n\r\n" + text)
        until(lambda: served.get("/v1/cache").json()["sent"] > 20_000)
        response = served.post("/admin/pause", {"mode": mode}, headers={"authorization": "Bearer admin"})
        assert response.status_code == 200
        assert served.get("/metrics").text.split("\ntriax_active_requests ")[1].split()[0] != "0.0", "it still waits"
