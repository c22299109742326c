"""`/v1/responses` through the official client, in one piece and as events."""

import base64
import io

import openai
import pytest
from PIL import Image
from pydantic import BaseModel

from .conftest import called, said

TOOL = {"type": "function", "name": "f", "parameters": {"type": "object", "properties": {"a": {"type": "string"}}}}


def shape(response):
    """Return what a response says, without ids and what the client adds."""
    items = [item.model_dump(exclude={"id", "parsed_arguments"}) for item in response.output]
    for item in items:
        for part in item.get("content") or ():
            part.pop("parsed", None)
    return items


def test_an_answer_is_thinking_and_a_message(server):
    name = server.script("r1", said("Four.", "2 and 2"))
    response = server.client().responses.create(model="m", input=name, instructions="be brief")
    assert response.output_text == "Four."
    assert [item.type for item in response.output] == ["reasoning", "message"]
    assert response.output[0].content[0].text == "2 and 2"
    assert (response.status, response.error) == ("completed", None)
    assert response.usage.output_tokens_details.reasoning_tokens > 0
    assert 'role="system"<|sep|>be brief<|close|>' in server.last()["words"]


@pytest.mark.parametrize(
    "answer",
    [said("Four.", "2 and 2"), called(("f", {"a": "1"}), ("f", {"a": "2"})), "straight<|close|>response<|sep|>"],
)
def test_events_add_up_to_the_response(server, answer):
    name = server.script(f"r{abs(hash(answer)) % 10**9}", answer)
    whole = server.client().responses.create(model="m", input=name, tools=[TOOL])
    with server.client().responses.stream(model="m", input=name, tools=[TOOL]) as stream:
        events = list(stream)
        final = stream.get_final_response()
    assert shape(final) == shape(whole)
    assert [event.sequence_number for event in events] == list(range(len(events)))
    kinds = [event.type for event in events]
    assert kinds[:2] == ["response.created", "response.in_progress"]
    assert kinds[-1] == "response.completed"
    assert kinds.count("response.output_item.added") == kinds.count("response.output_item.done") == len(whole.output)


def test_items_of_an_answer_can_be_sent_back(server):
    client = server.client()
    name = server.script("r3", called(("f", {"a": "1"}), thought="need f"))
    first = client.responses.create(model="m", input=name, tools=[TOOL])
    call = first.output[-1]
    assert (call.type, call.name, call.arguments, call.call_id) == (
        "function_call",
        "f",
        '{"a": "1"}',
        "functions.f:0",
    )
    history = [{"role": "user", "content": "x"}, *[item.model_dump() for item in first.output]]
    history.append({"type": "function_call_output", "call_id": call.call_id, "output": "done"})
    history.append({"role": "user", "content": server.script("r4", said("ok"))})
    second = client.responses.create(model="m", input=history, tools=[TOOL])
    assert second.output_text == "ok"
    words = server.last()["words"]
    assert words.count('role="assistant"') == 2  # the answer is one message, and the one that is written now
    assert "need f<|close|>think" in words
    assert 'tool="f" index="1"<|sep|>done' in words


class Colour(BaseModel):
    name: str


def test_a_form_is_asked_of_the_engine(server):
    name = server.script("r5", said('{"name":"red"}'))
    response = server.client().responses.parse(model="m", input=name, text_format=Colour)
    assert response.output_parsed == Colour(name="red")
    assert server.last()["structure"][0] == "json_schema"
    server.client().responses.create(
        model="m", input=name, reasoning={"effort": "low"}, tools=[TOOL], tool_choice="required"
    )
    assert server.last()["structure"][0] == "tools"
    assert "thinking_effort=low" in server.last()["words"]


def test_an_answer_that_is_cut_says_so(server):
    name = server.script("r6", said("a long answer", "thought"))
    response = server.client().responses.create(model="m", input=name, max_output_tokens=3)
    assert (response.status, response.incomplete_details.reason) == ("incomplete", "max_output_tokens")


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"background": True}, "background"),
        ({"include": ["everything"]}, "include[0]"),
        ({"input": [{"type": "function_call_output", "call_id": "c"}]}, "input[0].output"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0].type"),
        ({"input": [{"type": "function_call_output", "output": "x"}]}, "input[0].call_id"),
        ({"reasoning": {"effort": "medium"}}, "reasoning_effort"),
        ({"temperature": 3}, "temperature"),
        ({"input": [{"type": "function_call", "name": "f" * 300, "call_id": "x"}]}, "input[0].name"),
        ({"metadata": {"a": "\ud83d"}}, "metadata"),
        (
            {"text": {"format": {"type": "json_schema", "name": "\ud83d", "schema": {}}}},
            "text.format",
        ),
    ],
)
def test_what_is_not_supported_is_refused(server, fields, param):
    response = server.post("/v1/responses", {"model": "m", "input": "x"} | fields)
    assert (response.status_code, response.json()["error"]["param"]) == (400, param), response.text


def test_a_wrong_model_is_not_found(server):
    with pytest.raises(openai.NotFoundError):
        server.client().responses.create(model="other", input="x")


def png():
    picture = io.BytesIO()
    Image.new("RGB", (28, 28), "red").save(picture, "PNG")
    return f"data:image/png;base64,{base64.b64encode(picture.getvalue()).decode()}"


def test_f17_a_calls_output_may_be_parts(server):
    name = server.script("f17", said("ok"))
    parts = [{"type": "input_text", "text": "a cat: "}, {"type": "input_image", "image_url": png()}]
    items = [
        {"role": "user", "content": "x"},
        {"type": "function_call", "name": "f", "call_id": "c", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c", "output": parts},
        {"role": "user", "content": name},
    ]
    server.client().responses.create(model="m", input=items, tools=[TOOL])
    told = server.last()
    assert "<|sep|>a cat: <|media_begin|>image 28x28<|media_content|>" in told["words"]
    assert len(told["media"]) == 1
    assert "base64" not in told["words"]
    items[2]["output"] = [{"type": "input_text", "text": "one, "}, {"type": "input_text", "text": "two"}]
    server.client().responses.create(model="m", input=items, tools=[TOOL])
    assert "<|sep|>one, two<|close|>" in server.last()["words"]


def test_f17_a_picture_of_a_call_is_refused_where_the_model_does_not_see(k2_server):
    items = [
        {"type": "function_call", "name": "f", "call_id": "c", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c", "output": [{"type": "input_image", "image_url": png()}]},
    ]
    response = k2_server.post("/v1/responses", {"model": "m", "input": items})
    assert response.status_code == 400
    assert "does not see" in response.json()["error"]["message"]


def test_f18_log_probabilities_come_where_they_are_included(server):
    name = server.script("f18i", said("Four."))
    include = ["message.output_text.logprobs"]
    response = server.client().responses.create(model="m", input=name, include=include)
    assert response.output[-1].content[0].logprobs
    response = server.client().responses.create(model="m", input=name, include=["reasoning.encrypted_content"])
    assert not response.output[-1].content[0].logprobs
