"""K2's format behind the same endpoints."""

import json

import pytest

from .conftest import Served, make_folder, tool

CALL = (
    "Looking.<|tool_calls_section_begin|><|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>"
    '{"a":"1"}<|tool_call_end|><|tool_calls_section_end|><|im_end|>'
)


def test_content_and_calls(k2_server):
    name = k2_server.script("k1", CALL)
    messages = [{"role": "user", "content": name}]
    options = {"model": "m", "messages": messages, "tools": [tool("f")], "reasoning_effort": "none"}
    response = k2_server.client().chat.completions.create(**options)
    message = response.choices[0].message
    assert (message.content, response.choices[0].finish_reason) == ("Looking.", "tool_calls")
    assert message.tool_calls[0].id == "functions.f:0"
    assert json.loads(message.tool_calls[0].function.arguments) == {"a": "1"}
    assert k2_server.last()["words"].endswith("<|im_assistant|>assistant<|im_middle|>")
    pieces = ""
    for chunk in k2_server.client().chat.completions.create(**options, stream=True):
        for call in chunk.choices[0].delta.tool_calls or ():
            pieces += call.function.arguments or ""
    assert pieces == '{"a":"1"}'


def test_thinking_is_apart(k2_server):
    name = k2_server.script("k2", "<think>hm</think>Yes.<|im_end|>")
    messages = [{"role": "user", "content": name}]
    message = k2_server.client().chat.completions.create(model="m", messages=messages).choices[0].message
    assert (message.reasoning_content, message.content) == ("hm", "Yes.")


def test_f07_earlier_thinking_is_kept_where_a_request_asks_for_it(k2_server):
    name = k2_server.script("k3", "<think>hm</think>Yes.<|im_end|>")
    history = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "reasoning_content": "first thought", "content": "b"},
        {"role": "user", "content": name},
    ]

    def words(**extra):
        response = k2_server.post("/v1/chat/completions", {"model": "m", "messages": history} | extra)
        assert response.status_code == 200, response.text
        return k2_server.last()["words"]

    assert "first thought" not in words()
    assert "first thought" not in words(chat_template_kwargs={"preserve_thinking": False})
    assert "first thought" in words(chat_template_kwargs={"thinking": True, "preserve_thinking": True})
    assert "first thought" in words(thinking={"type": "enabled", "keep": "all"})
    response = k2_server.post("/v1/chat/completions", {"model": "m", "messages": history, "thinking": {"keep": "few"}})
    assert (response.status_code, response.json()["error"]["param"]) == (400, "thinking.keep")


def test_f41_a_form_is_held_from_the_first_token_unless_the_model_thinks(k2_server):
    form = {"type": "json_object"}
    messages = [{"role": "user", "content": "x"}]
    k2_server.client().chat.completions.create(model="m", messages=messages, response_format=form)
    assert k2_server.last()["thinking"] == "may"


def test_added_tools_are_refused(k2_server):
    messages = [{"role": "system", "tools": [tool("f")]}, {"role": "user", "content": "x"}]
    response = k2_server.post("/v1/chat/completions", {"model": "m", "messages": messages})
    assert (response.status_code, response.json()["error"]["param"]) == (400, "messages[0].tools")


@pytest.fixture(scope="module")
def plain_k2(tmp_path_factory):
    """A K2 tokenizer as Kimi-K2-Instruct has it: without the tags of thinking."""
    folder = make_folder(tmp_path_factory.mktemp("plain"), "k2")
    path = folder / "tokenizer_config.json"
    tree = json.loads(path.read_text())
    added = tree["added_tokens_decoder"]
    tree["added_tokens_decoder"] = {
        number: entry for number, entry in added.items() if entry["content"] not in ("<think>", "</think>")
    }
    path.write_text(json.dumps(tree))
    served = Served(folder)
    yield served
    assert served.stop() == 0


def test_f40_a_model_without_the_tags_of_thinking_is_served(plain_k2):
    name = plain_k2.script("plain", CALL)
    messages = [
        {"role": "user", "content": "x"},
        {"role": "assistant", "content": "y", "reasoning_content": "z"},
        {"role": "user", "content": name},
    ]
    response = plain_k2.client().chat.completions.create(model="m", messages=messages, tools=[tool("f")])
    assert response.choices[0].message.tool_calls[0].function.name == "f"
    told = plain_k2.last()
    assert "think" not in told["words"]
    assert told["temperature"] == 0.6, "the published temperature of answers without thinking"


def test_f41_a_form_holds_from_the_first_token_where_the_model_does_not_think(plain_k2):
    messages = [{"role": "user", "content": "x"}]
    form = {"type": "json_object"}
    plain_k2.client().chat.completions.create(model="m", messages=messages, response_format=form)
    assert plain_k2.last()["structure"][0] == "json_object"
    assert plain_k2.last()["thinking"] == ""


def test_f40_a_setting_tells_that_a_model_never_learned_to_think(start, tmp_path):
    served = start("http.thinking=off", folder=make_folder(tmp_path / "k2", "k2"))
    messages = [
        {"role": "user", "content": "x"},
        {"role": "assistant", "content": "y"},
        {"role": "user", "content": "z"},
    ]
    served.client().chat.completions.create(model="m", messages=messages)
    assert "<think>" not in served.last()["words"]
