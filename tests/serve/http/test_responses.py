"""`/v1/responses` through the official client, in one piece and as events."""

import openai
import pytest
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
