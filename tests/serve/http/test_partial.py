"""An answer that the client has begun is continued: what comes back is the rest."""

import pytest

from .conftest import add_up, said, tool

END = "<|close|>response<|sep|><|close|>message<|sep|><|end_of_msg|>"
K3 = {
    "thinking, text": ({"content": "Once"}, {}, "<|open|>think<|sep|><|close|>think<|sep|><|open|>response<|sep|>Once"),
    "thinking, thoughts and text": (
        {"content": "Once", "reasoning_content": "hm"},
        {},
        "<|open|>think<|sep|>hm<|close|>think<|sep|><|open|>response<|sep|>Once",
    ),
    "no thinking": ({"content": "Once"}, {"reasoning_effort": "none"}, "<|sep|><|open|>response<|sep|>Once"),
}
K2 = {
    "thinking, text": ({"content": "Once"}, {}, "<think></think>Once"),
    "thinking, thoughts and text": ({"content": "Once", "reasoning_content": "hm"}, {}, "<think>hm</think>Once"),
    "no thinking": ({"content": "Once"}, {"reasoning_effort": "none"}, "<|im_middle|>Once"),
}


def continued(server, begun, name, *, stream, **options):
    """Ask for the rest of an answer; return thinking, content and finish reason."""
    messages = [{"role": "user", "content": name}, {"role": "assistant", "partial": True} | begun]
    answer = server.client().chat.completions.create(model="m", messages=messages, stream=stream, **options)
    if stream:
        message, reason, _, _ = add_up(answer)
        return message["reasoning_content"], message["content"], reason
    message = answer.choices[0].message
    return getattr(message, "reasoning_content", None) or "", message.content, answer.choices[0].finish_reason


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("case", K3)
def test_f45_k3_continues_a_begun_answer(server, case, stream):
    begun, options, end = K3[case]
    name = server.script("partial", f" upon a time{END}")
    assert continued(server, begun, name, stream=stream, **options) == ("", " upon a time", "stop")
    words = server.last()["words"]
    assert words.endswith(end)
    assert words.count('role="assistant"') == 1


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("case", K2)
def test_f45_k2_continues_a_begun_answer(k2_server, case, stream):
    begun, options, end = K2[case]
    name = k2_server.script("partial", " upon a time<|im_end|>")
    assert continued(k2_server, begun, name, stream=stream, **options) == ("", " upon a time", "stop")
    words = k2_server.last()["words"]
    assert words.endswith(end)
    assert words.count("<|im_assistant|>") == 1


def test_f45_begun_thinking_goes_on(server, k2_server):
    begun = {"content": "", "reasoning_content": "Let me"}
    name = server.script("thinking", said("Four.", " see"))
    assert continued(server, begun, name, stream=False) == (" see", "Four.", "stop")
    assert server.last()["words"].endswith("<|open|>think<|sep|>Let me")
    name = k2_server.script("thinking", " see</think>Four.<|im_end|>")
    assert continued(k2_server, begun, name, stream=False) == (" see", "Four.", "stop")
    assert k2_server.last()["words"].endswith("<|im_middle|><think>Let me")


def test_f45_an_answer_that_is_begun_with_nothing_is_an_ordinary_one(server):
    name = server.script("nothing", said("Four.", "hm"))
    assert continued(server, {"content": ""}, name, stream=False) == ("hm", "Four.", "stop")


def test_f45_a_begun_answer_may_have_a_name(server, k2_server):
    for one, words, end in (
        (server, f" so{END}", 'role="assistant" name="Eve"<|sep|><|open|>response<|sep|>And'),
        (k2_server, " so<|im_end|>", "<|im_assistant|>Eve<|im_middle|>And"),
    ):
        begun = {"content": "And", "name": "Eve"}
        assert continued(one, begun, one.script("eve", words), stream=False, reasoning_effort="none")[1] == " so"
        assert one.last()["words"].endswith(end)


def test_f45_snapshots_are_kept_at_the_ends_of_whole_messages(server):
    user = {"role": "user", "content": server.script("ends", said("x"))}
    messages = [{"role": "system", "content": "s"}, user, {"role": "assistant", "content": "And", "partial": True}]
    server.client().chat.completions.create(model="m", messages=messages)
    begun = server.last()["borders"]
    server.client().chat.completions.create(model="m", messages=messages[:2])
    assert begun == server.last()["borders"]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"messages": [{"role": "user", "content": "x", "partial": True}]}, "messages[0].partial"),
        (
            {"messages": [{"role": "assistant", "content": "x", "partial": True}, {"role": "user", "content": "x"}]},
            "messages[0].partial",
        ),
        (
            {"messages": [{"role": "assistant", "partial": True, "tool_calls": [{"function": {"name": "f"}}]}]},
            "messages[0].tool_calls",
        ),
        (
            {
                "messages": [{"role": "assistant", "content": "x", "partial": True}],
                "response_format": {"type": "json_object"},
            },
            "messages",
        ),
        (
            {
                "messages": [{"role": "assistant", "content": "x", "partial": True}],
                "tools": [tool("f")],
                "tool_choice": "required",
            },
            "messages",
        ),
    ],
)
def test_f45_what_cannot_be_continued_is_refused(server, fields, param):
    response = server.post("/v1/chat/completions", {"model": "m"} | fields)
    assert (response.status_code, response.json()["error"]["param"]) == (400, param), response.text
