"""What a client adds up from a stream is what it gets in one piece, whatever a model writes."""

import re
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from triax.config.vision import Images
from triax.data.chat import xtml_parser
from triax.data.kimi import KimiTokenizer
from triax.serve.http.answer import Turn, Whole, usage_tree
from triax.serve.http.chat import delta_of
from triax.serve.http.model import Model
from triax.serve.http.prompt import Prepared, prepare_chat
from triax.serve.http.schema import ChatRequest
from triax.serve.request import Structure, TokenInfo, Update, Usage

from .conftest import TEXT, called, said

ANSWERS = [said("An answer.", "Some thought"), called(("f", {"a": "x", "b": "y ü"}), ("g", {}))]
MARKER = re.compile(r"(<\|\w+\|>)")


@pytest.fixture(scope="module")
def model():
    tokenizer = KimiTokenizer.train([TEXT * 40], 300)
    return Model("m", tokenizer, "k3", Images(), 4096, tokenizer.vocab_size, None)


def turn_of(model, stop=()):
    return Turn(model, Prepared([1], 1, parser=lambda: xtml_parser(model.tokenizer)), stop)


def add_up(events, whole):
    """Add up as a client does; only an answer inside the thinking cannot be taken back from a stream."""
    message = {"content": "", "reasoning_content": "", "calls": []}
    for event in events:
        delta = delta_of(event) or {}
        message["content"] += delta.get("content", "")
        message["reasoning_content"] += delta.get("reasoning_content", "")
        for call in delta.get("tool_calls", ()):
            if "id" in call:
                message["calls"].append(call["function"] | {"id": call["id"]})
            else:
                message["calls"][call["index"]]["arguments"] += call["function"]["arguments"]
        whole.add(event)
    return message


@given(data=st.data())
def test_a_stream_adds_up_to_the_message_whatever_markers_are_missing(model, data):
    words = data.draw(st.sampled_from(ANSWERS))
    parts = MARKER.split(words)
    kept = [part for part in parts if not MARKER.fullmatch(part) or data.draw(st.integers(0, 9)) > 0]
    tokens = model.tokenizer.encode("".join(kept), allow_control=True)
    ended = tokens[-1:] == [model.tokenizer.control["<|end_of_msg|>"]]
    tokens = tokens[:-1] if ended else tokens
    turn, whole, message = turn_of(model), Whole(), None
    events = []
    while tokens:
        size = data.draw(st.integers(1, 7))
        events += turn.read(Update("x", "", tuple(TokenInfo(token, -1.0) for token in tokens[:size])))
        tokens = tokens[size:]
    events += turn.read(Update("x", finish_reason="stop" if ended else "length"))
    message = add_up(events, whole)
    calls = [call["function"] | {"id": call["id"]} for call in whole.calls]
    assert (message["content"], message["calls"]) == (whole.content, calls)
    if not any(warning["kind"] == "answer_in_think" for warning in turn.warnings):
        assert message["reasoning_content"] == whole.reasoning
    assert turn.reason in ("stop", "tool_calls", "length")
    assert "<|" not in message["content"]


@given(cut=st.lists(st.integers(1, 9), min_size=1), stop=st.sampled_from(["wer", "answer.", "An", "n a", "x"]))
def test_a_stop_string_is_found_however_the_answer_is_cut(model, cut, stop):
    tokens = model.tokenizer.encode(said("An answer."), allow_control=True)
    turn, whole = turn_of(model, [stop]), Whole()
    at = 0
    for size in cut * len(tokens):
        if at >= len(tokens):
            break
        for event in turn.read(Update("x", "", tuple(TokenInfo(token, -1.0) for token in tokens[at : at + size]))):
            whole.add(event)
        at += size
    for event in turn.read(Update("x", finish_reason="stop")):
        whole.add(event)
    assert whole.content == "An answer.".split(stop)[0]
    assert turn.reason == "stop"


@given(cut=st.lists(st.integers(1, 9), min_size=1), stop=st.sampled_from(["wer", "answer.", "An", "n a", "x", "."]))
def test_the_tokens_with_logprobs_are_those_of_the_text_before_a_stop_string(model, cut, stop):
    tokens = model.tokenizer.encode(said("An answer.", "thought"), allow_control=True)
    turn, whole, told = turn_of(model, [stop]), Whole(), []
    at = 0
    for size in cut * len(tokens):
        if at >= len(tokens):
            break
        for event in turn.read(Update("x", "", tuple(TokenInfo(token, -1.0) for token in tokens[at : at + size]))):
            whole.add(event)
        told += turn.take_logprobs()
        assert len("".join(one["token"] for one in told)) <= len(whole.content) + 8
        at += size
    for event in turn.read(Update("x", finish_reason="stop")):
        whole.add(event)
    words = [one["token"] for one in told + turn.take_logprobs()]
    text = "".join(words)
    assert text.startswith(whole.content)
    assert "".join(words[:-1]) != whole.content or not words, "the last token has a part of what was told"


def test_an_answer_inside_the_thinking_becomes_the_content(model):
    tokens = model.tokenizer.encode("Yes.<|close|>response<|sep|>", allow_control=True)
    turn, whole = turn_of(model), Whole()
    events = turn.read(Update("x", "", tuple(TokenInfo(token, -1.0) for token in tokens), finish_reason="stop"))
    add_up(events, whole)
    assert (whole.reasoning, whole.content) == ("", "Yes.")
    assert [warning["kind"] for warning in turn.warnings] == ["answer_in_think"]


@pytest.mark.parametrize(("kind", "reason"), [("json_object", "length"), ("json_object", "stop"), ("auto", "length")])
def test_f43_a_form_that_breaks_off_is_told(model, kind, reason):
    words = '<|close|>think<|sep|><|open|>response<|sep|>{"a"' + ":1}" * (reason == "stop")
    tokens = model.tokenizer.encode(words, allow_control=True)
    turn = Turn(model, replace(turn_of(model).prepared, structure=Structure(kind, "", "open")))
    turn.read(Update("x", "", tuple(TokenInfo(token, -1.0) for token in tokens), finish_reason=reason))
    assert turn.reason == reason
    kinds = [warning["kind"] for warning in turn.warnings]
    assert ("unfinished_form" in kinds) == (kind == "json_object" and reason == "length")


@pytest.mark.parametrize(("line", "billed"), [(0, 36), (1, 119), (2, 99), (3, 545)])
def test_usage_tells_the_published_number_of_prompt_tokens(kimi_data, line, billed):
    """36, 119 and 99 are published; the last opener, which the model goes on from, is not billed."""
    import json

    tokenizer = KimiTokenizer.load(kimi_data / "kimi.tiktoken", family="k3")
    k3 = Model("m", tokenizer, "k3", Images(), 1 << 20, tokenizer.vocab_size, None)
    request = json.loads((kimi_data / "prompt_tokens.jsonl").read_text().splitlines()[line])["request"]
    body = ChatRequest.model_validate(request | {"model": "m"})
    prepared = prepare_chat(k3, body, {})
    assert (prepared.num_billed, len(prepared.tokens)) == (billed, billed + 3)
    turn = Turn(k3, prepared)
    turn.read(Update("x", finish_reason="length", usage=Usage(billed + 3, billed + 3, billed + 3, 0)))
    usage = usage_tree(prepared, [turn])
    assert usage["prompt_tokens"] == usage["prompt_tokens_details"]["cached_tokens"] == billed
