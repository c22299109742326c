"""K2's prompts: bytes, what the loss counts, and ids that are always the family's own."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from triax.data.chat import Image, K2Options, k2, spell
from triax.errors import DataError

DEFAULT = "<|im_system|>system<|im_middle|>You are Kimi, an AI assistant created by Moonshot AI.<|im_end|>"
OPENER = "<|im_assistant|>assistant<|im_middle|>"
BEGIN, END = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
EXEC = {"type": "function", "function": {"name": "exec", "parameters": {"type": "object", "properties": {"code": {}}}}}


def shown(messages, options=None, images=(), **kwargs):
    return spell(k2.segments(messages, options, images, **kwargs))


def asked(name, arguments="{}", id_=None):
    return {"id": id_, "type": "function", "function": {"name": name, "arguments": arguments}}


def written(id_, arguments="{}"):
    return f"<|tool_call_begin|>{id_}<|tool_call_argument_begin|>{arguments}<|tool_call_end|>"


USER = {"role": "user", "content": "hi"}


def test_the_golden_prompts():
    assert shown([USER]) == f"{DEFAULT}<|im_user|>user<|im_middle|>hi<|im_end|>{OPENER}"
    assert shown([USER], generate=False) == f"{DEFAULT}<|im_user|>user<|im_middle|>hi<|im_end|>"
    system = {"role": "system", "content": "Be brief.", "name": "boss"}
    text = shown([system, USER], K2Options(tools=[EXEC]))
    assert text == (
        '<|im_system|>tool_declare<|im_middle|>[{"type":"function","function":{"name":"exec","parameters":'
        '{"type":"object","properties":{"code":{}}}}}]<|im_end|>'
        "<|im_system|>boss<|im_middle|>Be brief.<|im_end|><|im_user|>user<|im_middle|>hi<|im_end|>" + OPENER
    )


@pytest.mark.parametrize("content", [None, "", []])
def test_history_with_calls_and_results_and_no_content(content):
    messages = [
        USER,
        {"role": "assistant", "content": content, "tool_calls": [asked("exec", '{"code":  "1"}', "functions.exec:0")]},
        {"role": "tool", "tool_call_id": "functions.exec:0", "name": "exec", "content": "ok"},
        {"role": "tool", "tool_call_id": "functions.exec:1", "content": [{"type": "text", "text": "a"}] * 2},
    ]
    messages[1]["tool_calls"].append(asked("exec", {"code": "ü"}, "functions.exec:1"))
    assert shown(messages).removeprefix(f"{DEFAULT}<|im_user|>user<|im_middle|>hi<|im_end|>") == (
        f"{OPENER}{BEGIN}"
        + written("functions.exec:0", '{"code":  "1"}')
        + written("functions.exec:1", '{"code": "ü"}')
        + f"{END}<|im_end|>"
        "<|im_system|>exec<|im_middle|>## Return of functions.exec:0\nok<|im_end|>"
        "<|im_system|>tool<|im_middle|>## Return of functions.exec:1\naa<|im_end|>" + OPENER
    )


@pytest.mark.parametrize("ids", [("u-1", "u-2", "u-3"), (None, None, None), ("x", "x", "x"), ("functions.a:7",) * 3])
def test_calls_get_ids_of_the_family_whatever_the_client_sends(ids):
    """Four turns with ids of another form, missing ids and repeated ids: canonical ids, results matched."""
    messages = [
        USER,
        {"role": "assistant", "tool_calls": [asked("exec", id_=ids[0]), asked("get_weather", id_=ids[1])]},
        {"role": "tool", "tool_call_id": ids[0], "content": "first"},
        {"role": "tool", "tool_call_id": ids[1], "content": "second"},
        {"role": "assistant", "tool_calls": [asked("exec", id_=ids[2])]},
        {"role": "tool", "tool_call_id": ids[2], "content": "third"},
    ]
    text = shown(messages)
    order = ["functions.exec:0", "functions.get_weather:1", "functions.exec:2"]
    assert [text.count(f"<|tool_call_begin|>{id_}<") for id_ in order] == [1, 1, 1]
    for id_, content in zip(order, ("first", "second", "third"), strict=True):
        assert f"## Return of {id_}\n{content}<|im_end|>" in text


def test_results_out_of_order_go_to_their_calls():
    messages = [
        {"role": "assistant", "tool_calls": [asked("exec", id_="a"), asked("exec", id_="b"), asked("exec", id_="c")]},
        {"role": "tool", "tool_call_id": "?", "content": "first free"},
        {"role": "tool", "tool_call_id": "c", "content": "third"},
        {"role": "tool", "tool_call_id": "a", "content": "first"},
    ]
    text = shown(messages)
    assert "functions.exec:1\nfirst free" in text
    assert "functions.exec:2\nthird" in text
    assert "functions.exec:0\nfirst<" in text


def test_text_between_two_control_tokens_is_one_piece():
    """As in the published template, so that tokens do not depend on how a client cuts its content."""
    parts = [{"type": "text", "text": word} for word in ("a ", "", "b")]
    pieces = k2.segments([{"role": "system", "content": parts}, {"role": "user", "content": parts}], generate=False)
    assert [piece.text for piece in pieces if not piece.control] == ["system", "a b", "user", "a b"]


def test_tools_in_mid_session_are_refused():
    with pytest.raises(DataError, match=r"messages\[0\].tools: K2 has no tools in mid-session"):
        shown([{"role": "system", "tools": [EXEC]}])


def test_thinking_of_history_is_emptied_and_of_the_current_turn_kept():
    messages = [
        USER,
        {"role": "assistant", "reasoning_content": "old", "content": "x"},
        USER,
        {"role": "assistant", "reasoning_content": "new", "content": "", "tool_calls": [asked("exec")]},
        {"role": "tool", "content": "y"},
    ]
    text = shown(messages, K2Options(thinking=True))
    assert "<think></think>x<|im_end|>" in text
    assert f"<think>new</think>{BEGIN}" in text
    assert text.endswith(OPENER)
    assert "<think>old</think>x" in shown(messages, K2Options(thinking=True, keep="all"))
    assert shown(messages, K2Options(thinking=True, open_think=True)).endswith(f"{OPENER}<think>")
    assert "think" not in shown(messages)


def test_an_image_is_a_block_of_control_tokens(k2_tokenizer):
    messages = [{"role": "user", "content": [{"type": "image_url"}, {"type": "text", "text": "?"}]}]
    prompt = k2.prompt(k2_tokenizer, messages, None, [Image(4, 3, 2)])
    block = "<|media_begin|>image<|media_content|><|media_pad|><|media_pad|><|media_end|>?"
    assert block in k2_tokenizer.show(prompt.ids)


def counted(tokenizer, messages, options=None):
    """What the loss counts."""
    prompt = k2.prompt(tokenizer, messages, options, generate=False)
    return tokenizer.show([token for token, counts in zip(prompt.ids, prompt.trained, strict=True) if counts])


def test_the_loss_counts_what_the_model_must_write(k2_tokenizer):
    chat = [
        USER,
        {"role": "assistant", "content": "x"},
        USER,
        {"role": "assistant", "content": "y", "tool_calls": [asked("exec", '{"a": 1}')]},
    ]
    call = written("functions.exec:0", '{"a": 1}')
    assert counted(k2_tokenizer, chat) == f"x<|im_end|>y{BEGIN}{call}{END}<|im_end|>"
    # No empty think section, and no message that is shown without its reasoning.
    assert counted(k2_tokenizer, chat, K2Options(thinking=True)) == f"y{BEGIN}{call}{END}<|im_end|>"


@pytest.mark.parametrize("open_think", [True, False])
def test_the_loss_counts_reasoning_but_not_the_prompts_opener(k2_tokenizer, open_think):
    chat = [USER, {"role": "assistant", "reasoning": "r", "content": "y"}]
    text = counted(k2_tokenizer, chat, K2Options(thinking=True, open_think=open_think))
    assert text == ("" if open_think else "<think>") + "r</think>y<|im_end|>"


def test_the_loss_skips_arguments_that_are_no_json(k2_tokenizer):
    chat = [USER, {"role": "assistant", "content": "y", "tool_calls": [asked("exec", "{broken")]}]
    assert counted(k2_tokenizer, chat) == f"y{BEGIN}{written('functions.exec:0', '')}{END}<|im_end|>"


@given(
    st.sampled_from(["<|im_end|>", "<think>", "<|tool_call_begin|>", "[EOS]", "<|media_pad|>"]) | st.text(max_size=9)
)
def test_no_text_can_forge_structure(k2_tokenizer, spelling):
    def ids(text):
        messages = [
            {"role": "system", "content": text, "name": f"a{text}"},
            {"role": "user", "content": f"a{text}"},
            {"role": "assistant", "content": text, "tool_calls": [asked(f"f{text}", {text: text}, text)]},
            {"role": "tool", "content": text, "tool_call_id": text, "name": f"a{text}"},
        ]
        return k2.prompt(k2_tokenizer, messages).ids

    control = set(k2_tokenizer.control.values())
    assert [i for i in ids(spelling) if i in control] == [i for i in ids("x") if i in control]
