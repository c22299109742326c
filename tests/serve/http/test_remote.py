"""Talking to servers of others: what is not of this API is told in words, and the talk goes on."""

import json

import pytest

from triax.errors import ConfigError
from triax.serve.remote import Remote

ASKED = [{"role": "user", "content": "hi"}]


def event(**choice):
    return f"data:{json.dumps({'choices': [choice]})}\n\n"


@pytest.mark.parametrize("card", ["[1]", "{}", '{"data": []}', '{"data": [{}]}', '{"data": ["x"]}'])
def test_a_server_without_a_model_is_told(odd, card):
    odd.card = 200, card
    with pytest.raises(ConfigError, match="not a server of this API"):
        Remote(odd.url)


@pytest.mark.parametrize(
    ("answer", "told"),
    [
        ((502, "<html>bad gateway"), "status 502"),
        ((200, "data: {bad\n\n"), "not of this API"),
        ((200, "data: [1]\n\n"), "not of this API"),
        ((200, event(delta={"tool_calls": [{"index": 3, "function": {"arguments": "x"}}]})), "not of this API"),
        ((200, 'data: {"error": "overloaded"}\n\n'), "overloaded"),
        ((200, event(delta={"content": "half"})), "no end"),
        ((200, ""), "no end"),
    ],
)
def test_what_cannot_be_read_is_told_in_words(odd, answer, told):
    odd.answer = answer
    remote = Remote(odd.url)
    with pytest.raises(ConfigError, match=told):
        list(remote.reply(ASKED, {}))
    remote.close()


def test_events_without_a_blank_and_without_a_delta_are_read(odd):
    odd.answer = 200, event(delta={"content": "yes"}) + event(delta=None, finish_reason="stop") + "data:[DONE]\n\n"
    remote = Remote(odd.url)
    pieces = list(remote.reply(ASKED, {}))
    assert [piece.text for piece in pieces] == ["yes", ""]
    assert pieces[-1].reason == "stop"
    remote.close()
