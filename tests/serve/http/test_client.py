"""Every endpoint through the official client of the API."""

import json

import openai
import pytest
from pydantic import BaseModel

from .conftest import add_up


def whole(response):
    """Return an answer in one piece in the same form."""
    choice = response.choices[0]
    calls = {
        number: {"id": call.id, "name": call.function.name, "arguments": call.function.arguments}
        for number, call in enumerate(choice.message.tool_calls or ())
    }
    thought = getattr(choice.message, "reasoning_content", None) or ""
    message = {"content": choice.message.content or "", "reasoning_content": thought, "calls": calls}
    return message, choice.finish_reason, response.usage, getattr(choice, "warnings", None) or []


def test_an_answer_has_content_thinking_and_usage(ask):
    response = ask(ask.said("Four.", "2 and 2"), cached=5)
    message = response.choices[0].message
    assert (message.content, message.reasoning_content) == ("Four.", "2 and 2")
    assert response.choices[0].finish_reason == "stop"
    usage = response.usage
    assert usage.prompt_tokens_details.cached_tokens == 5
    assert 0 < usage.completion_tokens_details.reasoning_tokens < usage.completion_tokens
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens


@pytest.mark.parametrize("per_step", [1, 3, 1000])
def test_a_stream_adds_up_to_the_answer_in_one_piece(ask, per_step):
    words = ask.called(("f", {"a": '1 "q" \n ü'}), ("g", {"b": "2", "c": ""}))
    options = {"tools": [ask.tool("f"), ask.tool("g")], "per_step": per_step}
    told = whole(ask(words, **options))
    message, reason, usage, warnings = add_up(
        ask(words, stream=True, stream_options={"include_usage": True}, **options)
    )
    assert (message, reason, warnings) == (told[0], told[1], told[3])
    assert usage == told[2]
    assert reason == "tool_calls"
    assert [call["id"] for call in message["calls"].values()] == ["functions.f:0", "functions.g:1"]
    assert json.loads(message["calls"][0]["arguments"]) == {"a": '1 "q" \n ü'}


def test_ids_of_calls_count_on_through_the_conversation(ask):
    before = [
        {"role": "user", "content": "x"},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"id": "any", "type": "function", "function": {"name": "f", "arguments": "{}"}}],
        },
        {"role": "tool", "tool_call_id": "any", "content": "y"},
    ]
    response = ask(ask.called(("f", {})), messages=before, tools=[ask.tool("f")])
    assert response.choices[0].message.tool_calls[0].id == "functions.f:1"


def test_a_long_argument_streams_while_it_is_written(ask):
    words = ask.called(("write", {"text": "word " * 2000}))
    arrived = []
    for number, chunk in enumerate(ask(words, stream=True, tools=[ask.tool("write")], max_tokens=2000)):
        if chunk.choices[0].delta.tool_calls:
            arrived.append(number)
    assert len(arrived) > 100
    assert arrived[0] < 0.05 * arrived[-1] + 40


def test_too_few_tokens_for_the_thinking_are_told_as_that(ask):
    response = ask(ask.said("Four.", "thinking on and on"), max_tokens=4)
    choice = response.choices[0]
    assert (choice.finish_reason, choice.message.content) == ("length", None)
    assert response.usage.completion_tokens_details.reasoning_tokens == 4 == response.usage.completion_tokens


def test_several_choices_come_together(ask):
    response = ask(ask.said("x"), n=3)
    assert [(choice.index, choice.message.content) for choice in response.choices] == [(n, "x") for n in range(3)]
    seen = {chunk.choices[0].index for chunk in ask(ask.said("x"), n=3, stream=True)}
    assert seen == {0, 1, 2}


@pytest.mark.parametrize("stream", [False, True])
def test_logprobs_are_those_of_the_answer(ask, stream):
    response = ask(ask.said("Four is it.", "thought"), logprobs=True, top_logprobs=2, stream=stream)
    if stream:
        told = [one for chunk in response for one in (chunk.choices[0].logprobs or {"content": ()}).content or ()]
    else:
        told = response.choices[0].logprobs.content
    assert "".join(one.token for one in told) == "Four is it."
    assert {one.logprob for one in told} == {-0.5}
    assert all(len(one.top_logprobs) == 2 for one in told)
    assert bytes(told[0].bytes).decode() == told[0].token


@pytest.mark.parametrize("stream", [False, True])
def test_stop_strings_end_the_answer_and_are_not_looked_for_in_thinking(ask, stream):
    words = ask.said("one two three", "two thoughts")
    response = ask(words, stop=["two", "zzz"], stream=stream)
    message, reason, _, _ = add_up(response) if stream else whole(response)
    assert message == {"content": "one ", "reasoning_content": "two thoughts", "calls": {}}
    assert reason == "stop"


def test_a_stopped_answer_leaves_nothing_in_the_engine(ask, server):
    ask(ask.said("one two three " * 50), stop="two")
    assert server.get("/metrics").text.count("triax_engine_running 0.0") == 1


class Colour(BaseModel):
    name: str
    value: int


def test_parse_gives_an_object(ask, server):
    name = server.script("colour", ask.said('{"name":"red","value":3}'))
    response = server.client().chat.completions.parse(
        model="m", messages=[{"role": "user", "content": name}], response_format=Colour
    )
    assert response.choices[0].message.parsed == Colour(name="red", value=3)
    kind, text = server.last()["structure"]
    assert (kind, json.loads(text)["required"]) == ("json_schema", ["name", "value"])


def test_the_stream_helper_of_the_client_understands_calls(ask, server):
    name = server.script("helped", ask.called(("f", {"a": "1"})))
    messages = [{"role": "user", "content": name}]
    with server.client().chat.completions.stream(model="m", messages=messages, tools=[ask.tool("f")]) as stream:
        kinds = {event.type for event in stream}
        final = stream.get_final_completion()
    assert "tool_calls.function.arguments.delta" in kinds
    assert final.choices[0].message.tool_calls[0].function.arguments == '{"a": "1"}'


def test_texts_are_completed(server):
    client = server.client()
    response = client.completions.create(model="m", prompt=["@none x", "y"], max_tokens=4, logprobs=1, echo=True)
    assert [choice.index for choice in response.choices] == [0, 1]
    assert response.choices[0].text.startswith("@none xI think")
    told = response.choices[0].logprobs
    assert told.token_logprobs[0] is None
    assert "".join(told.tokens) == response.choices[0].text
    assert all(
        response.choices[0].text[at:].startswith(word) for at, word in zip(told.text_offset, told.tokens, strict=True)
    )
    assert response.usage.completion_tokens == 8
    pieces = client.completions.create(model="m", prompt="y", max_tokens=4, stream=True)
    assert "".join(chunk.choices[0].text for chunk in pieces if chunk.choices) == response.choices[1].text[1:]


def test_completions_take_tokens_and_stop_strings(server):
    client = server.client()
    tokens = server.post("/tokenize", {"text": "hello"}).json()["tokens"]
    response = client.completions.create(model="m", prompt=tokens, stop="so", max_tokens=50)
    assert response.choices[0].text == "I think "
    assert response.choices[0].stop_reason == "so"


def test_models_are_listed(server):
    client = server.client()
    assert [model.id for model in client.models.list()] == ["m"]
    assert client.models.retrieve("m").owned_by == "triax"
    with pytest.raises(openai.NotFoundError, match="use `m`"):
        client.models.retrieve("other")


def test_a_text_comes_back_from_its_tokens(server):
    told = server.post("/tokenize", {"text": "hello ü <|open|>"}).json()
    assert told["count"] == len(told["tokens"])
    assert server.post("/detokenize", {"tokens": told["tokens"]}).json() == {"text": "hello ü <|open|>"}
    chat = server.post("/tokenize", {"messages": [{"role": "user", "content": "hi"}]}).json()
    assert 3 <= chat["count"] - chat["prompt_tokens"] <= 5  # the opener of the thinking is not billed
