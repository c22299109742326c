"""Which calls an answer may have: those that were asked for, as many as were asked for, and whole ones."""

import json

import pytest

from .conftest import add_up, called, said, tool

BROKEN = (
    "t<|close|>think<|sep|><|open|>response<|sep|>So.<|close|>response<|sep|><|open|>tools<|sep|>"
    '<|open|>call tool="f" index="1"<|sep|><|open|>argument key="a" type="object"<|sep|>{"b": <|close|>argument<|sep|>'
    "<|close|>call<|sep|>{}<|close|>tools<|sep|><|close|>message<|sep|><|end_of_msg|>"
)
WHOLE = '<|open|>call tool="g" index="2"<|sep|><|close|>call<|sep|>'


def both(ask, answer, **options):
    """Ask in one piece and as a stream; return names of calls, finish reason and warnings of each."""
    choice = ask(answer, **options).choices[0]
    calls = [call.function.name for call in choice.message.tool_calls or ()]
    kinds = [one["kind"] for one in getattr(choice, "warnings", ())]
    message, reason, _, warnings = add_up(ask(answer, stream=True, **options))
    streamed = [call["name"] for call in message["calls"].values()]
    return (calls, choice.finish_reason, kinds), (streamed, reason, [one["kind"] for one in warnings])


def test_f18_without_parallel_calls_an_answer_ends_with_its_first_call(ask):
    answer = called(("f", {"a": "1"}), ("f", {"a": "2"}), ("g", {}))
    tools = [tool("f"), tool("g")]
    one = (["f"], "tool_calls", [])
    assert both(ask, answer, tools=tools, parallel_tool_calls=False) == (one, one)
    every = (["f", "f", "g"], "tool_calls", [])
    assert both(ask, answer, tools=tools) == (every, every)


def test_f18_a_response_tells_and_keeps_to_one_call(server):
    name = server.script("f18", called(("f", {"a": "1"}), ("f", {"a": "2"})))
    declared = {"type": "function", "name": "f", "parameters": {"type": "object", "properties": {}}}
    for is_parallel, count in ((False, 1), (True, 2)):
        response = server.client().responses.create(
            model="m", input=name, tools=[declared], parallel_tool_calls=is_parallel
        )
        assert response.parallel_tool_calls is is_parallel
        assert sum(item.type == "function_call" for item in response.output) == count


@pytest.mark.parametrize("options", [{}, {"tools": [tool("f")], "tool_choice": "none"}], ids=["no tools", "none"])
def test_f19_a_call_that_nobody_asked_for_is_none(ask, options):
    told = ([], "stop", ["unasked_call"])
    assert both(ask, called(("f", {"a": "1"})), **options) == (told, told)


def test_f21_a_broken_call_is_text_and_a_warning(ask):
    choice = ask(BROKEN, tools=[tool("f")]).choices[0]
    assert choice.message.tool_calls is None
    assert choice.finish_reason == "stop"
    assert choice.message.content == 'So.f {"a": {"b": }'
    assert "invalid_call" in [one["kind"] for one in choice.warnings]


def test_f21_a_whole_call_beside_a_broken_one_is_made(ask):
    answer = BROKEN.replace("{}<|close|>tools", f"{WHOLE}<|close|>tools")
    choice = ask(answer, tools=[tool("f"), tool("g")]).choices[0]
    assert [call.function.name for call in choice.message.tool_calls] == ["g"]
    assert json.loads(choice.message.tool_calls[0].function.arguments) == {}
    assert choice.finish_reason == "tool_calls"


def test_f21_a_stream_tells_that_a_call_is_broken_where_it_ends(ask):
    _, reason, _, warnings = add_up(ask(BROKEN, tools=[tool("f")], stream=True))
    assert reason == "stop"
    assert {"kind": "invalid_call", "detail": "0"} in warnings


def test_f21_a_broken_call_of_a_response_is_incomplete(server):
    declared = {"type": "function", "name": "f", "parameters": {"type": "object", "properties": {}}}
    response = server.client().responses.create(model="m", input=server.script("f21", BROKEN), tools=[declared])
    assert response.output[-1].type == "function_call"
    assert response.output[-1].status == "incomplete"


def test_f54_the_last_chunk_of_a_choice_tells_its_usage(ask):
    whole = ask(said("Four.", "2 and 2"))
    choices = [chunk.choices[0] for chunk in ask(said("Four.", "2 and 2"), stream=True)]
    assert [getattr(choice, "usage", None) is not None for choice in choices] == [False] * (len(choices) - 1) + [True]
    assert choices[-1].usage["completion_tokens"] == whole.usage.completion_tokens
    assert choices[-1].usage["prompt_tokens"] == whole.usage.prompt_tokens
