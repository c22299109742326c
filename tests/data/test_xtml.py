"""K3's prompts: bytes, what the loss counts, and that nobody can forge structure."""

import json
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from triax.data.chat import Image, Options, spell, xtml

TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}
OTHER = {"type": "function", "function": {"parameters": {"type": "object"}, "name": "g", "description": "ü"}}
THINK = '<|open|>message role="assistant"<|sep|><|open|>think<|sep|>'
INSTANT = '<|open|>message role="assistant"<|sep|><|open|>response<|sep|>'
END = "<|close|>message<|sep|><|end_of_msg|>"

CHAT = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "a?"},
    {
        "role": "assistant",
        "reasoning_content": "look it up",
        "content": "wait",
        "tool_calls": [{"id": "x", "function": {"name": "f", "arguments": '{"q": "b"}'}}],
    },
    {"role": "tool", "tool_call_id": "x", "content": "c"},
    {"role": "assistant", "reasoning": "now I know", "content": "c!"},
    {"role": "user", "content": "thanks"},
    {"role": "assistant", "content": "bye"},
]


def shown(messages, options=None, images=(), **kwargs):
    return spell(xtml.segments(messages, options, images, **kwargs))


def call(name, arguments, id_=None):
    return {"id": id_, "type": "function", "function": {"name": name, "arguments": arguments}}


def user(text="hi"):
    return [{"role": "user", "content": text}]


def test_f06_a_prompt_tells_which_picture_fills_which_slots(k3_tokenizer):
    part = {"type": "image_url"}
    messages = [
        {"role": "user", "content": [part]},
        {"role": "assistant", "tool_calls": [call("f", "{}", "x"), call("g", "{}", "y")]},
        {"role": "tool", "tool_call_id": "y", "content": [part, part]},
        {"role": "tool", "tool_call_id": "x", "content": [part]},
    ]
    images = [Image(side, side, slots) for side, slots in ((1, 2), (2, 3), (3, 3), (4, 5))]
    prompt = xtml.prompt(k3_tokenizer, messages, None, images)
    assert prompt.pictures == (0, 3, 1, 2)
    pad = k3_tokenizer.control["<|media_pad|>"]
    runs = [len(run) for run in re.findall("x+", "".join("x" if token == pad else "." for token in prompt.ids))]
    assert runs == [images[number].num_tokens for number in prompt.pictures]


def test_the_golden_prompt_of_a_user_alone():
    assert shown(user(), Options(thinking=False)) == f'<|open|>message role="user"<|sep|>hi{END}{INSTANT}'
    assert shown(user()) == f'<|open|>message role="user"<|sep|>hi{END}{THINK}'
    assert shown(user(), generate=False) == f'<|open|>message role="user"<|sep|>hi{END}'


def test_the_golden_prompt_of_history_with_tools():
    text = shown(CHAT[:4], Options(tools=[TOOL], effort="low"))
    assert text == (
        '<|open|>message role="system" type="tool-declare"<|sep|># Tools\n'
        "Here are the available tools, described in JSONSchema.\n\n```json\n"
        '[{"function":{"name":"f","parameters":{"properties":{},"type":"object"}},"type":"function"}]\n```'
        f"{END}"
        '<|open|>message role="system" type="thinking-effort"<|sep|>`thinking_effort` guides on how much to think in '
        "your thinking channel (not including the response channel), supported values include `low`, `medium`, "
        "`high`, and `max`.\nNow the system is invoked with `thinking_effort=low`."
        f"{END}"
        f'<|open|>message role="system"<|sep|>Be brief.{END}'
        f'<|open|>message role="user"<|sep|>a?{END}'
        '<|open|>message role="assistant"<|sep|><|open|>think<|sep|>look it up<|close|>think<|sep|>'
        "<|open|>response<|sep|>wait<|close|>response<|sep|>"
        '<|open|>tools<|sep|><|open|>call tool="f" index="1"<|sep|>'
        '<|open|>argument key="q" type="string"<|sep|>b<|close|>argument<|sep|>'
        f"<|close|>call<|sep|><|close|>tools<|sep|>{END}"
        f'<|open|>message role="tool" tool="f" index="1"<|sep|>c{END}'
        f"{THINK}"
    )


@pytest.mark.parametrize(
    ("options", "body"),
    [
        (
            {"tool_choice": "required", "tools": [TOOL]},
            'type="tool-choice"<|sep|>The system is invoked with `tool_choice=required`.\n'
            "You MUST call tools in the next message.",
        ),
        (
            {"tool_choice": "none"},
            'type="tool-choice"<|sep|>The system is invoked with `tool_choice=none`.\n'
            "You MUST NOT call any tools in the next message.",
        ),
        (
            {"response_format": {"type": "json_object"}},
            'type="response-format"<|sep|>The system is invoked with `response_format=json_object`.\n'
            "Your response must be raw JSON data without markdown code blocks (```json) or any additional formatting.",
        ),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": {"b": 1, "a": "é"}}}},
            'type="response-format"<|sep|>The system is invoked with `response_format=json_schema`.\n'
            "Your response must be raw JSON data without markdown code blocks (```json) or any additional formatting.\n"
            'The JSON data must match the following schema:\n```json\n{"a":"é","b":1}\n```',
        ),
    ],
)
def test_one_shot_options_stand_last_before_the_opener(options, body):
    assert shown(user(), Options(**options)).endswith(f'<|open|>message role="system" {body}{END}{THINK}')


def test_text_and_auto_say_nothing():
    assert shown(user(), Options(tool_choice="auto", response_format={"type": "text"})) == shown(user())


def test_tools_in_mid_session_are_declared_where_they_come():
    text = shown([*user(), {"role": "system", "content": "", "tools": [OTHER]}])
    assert text.split(END)[1] == (
        '<|open|>message role="system" type="tool-declare"<|sep|>## New Tools Available\n'
        "The system dynamically extends the toolset via lazy-loading.\n"
        "You have access to all existing and extended tools.\n"
        "Here are the specs for the extended tools.\n\n```json\n"
        '[{"function":{"description":"ü","name":"g","parameters":{"type":"object"}},"type":"function"}]\n```'
    )


def test_thinking_keeps_a_think_section_in_every_past_message_and_its_absence_none():
    assert shown(CHAT).count("<|open|>think<|sep|>") == 4  # three past messages, one to come
    assert "<|open|>think<|sep|><|close|>think<|sep|><|open|>response<|sep|>bye" in shown(CHAT)
    assert "think" not in shown(CHAT, Options(thinking=False, effort="high"))


def test_blank_reasoning_is_no_reasoning():
    messages = [{"role": "assistant", "reasoning_content": " \n", "content": "x"}]
    assert shown(messages).startswith('<|open|>message role="assistant"<|sep|><|open|>think<|sep|><|close|>think')


def test_names_of_speakers_and_nasty_attributes_are_escaped():
    text = shown([{"role": "user", "name": 'a"&<b>\n', "content": '"&"'}])
    assert text.startswith('<|open|>message role="user" name="a&quot;&amp;<b>\n"<|sep|>"&"<|close|>')


def test_each_piece_of_a_tag_and_each_part_of_a_content_is_encoded_by_itself():
    parts = [{"type": "text", "text": word} for word in ("a ", "", "b")]
    pieces = xtml.segments([{"role": "user", "name": 'C++"', "content": parts}], generate=False)
    attributes = [" role", '="', "user", '"', " name", '="', "C++&quot;", '"']
    opening = ["<|open|>", "message", *attributes, "<|sep|>"]
    closing = ["<|close|>", "message", "<|sep|>", "<|end_of_msg|>"]
    assert [piece.text for piece in pieces] == [*opening, "a ", "b", *closing]
    assert [piece.text for piece in pieces if piece.control] == ["<|open|>", "<|sep|>", "<|close|>", *closing[2:]]


@pytest.mark.parametrize(
    ("value", "kind", "written"),
    [
        ("a", "string", "a"),
        ("", "string", ""),
        ('"q"\n\\ü', "string", '"q"\n\\ü'),
        (1, "number", "1"),
        (-1.5e300, "number", "-1.5e+300"),
        (2**70, "number", str(2**70)),
        (True, "boolean", "true"),
        (None, "null", "null"),
        ({"b": [1, "ü"], "a": {}}, "object", '{"b": [1, "ü"], "a": {}}'),
        ([1, None, "x"], "array", '[1, null, "x"]'),
    ],
)
def test_arguments_are_typed_and_strings_are_raw(value, kind, written):
    for arguments in ({"k": value}, json.dumps({"k": value})):
        text = shown([{"role": "assistant", "content": None, "tool_calls": [call("f", arguments)]}])
        assert f'<|open|>argument key="k" type="{kind}"<|sep|>{written}<|close|>argument<|sep|>' in text


def test_arguments_that_are_no_json_go_into_a_block_of_their_own():
    text = shown([{"role": "assistant", "tool_calls": [call("f", '{"a": <x>')]}])
    expected = '<|open|>call tool="f" index="1"<|sep|><|open|>json type="object"<|sep|>{"a": <x><|close|>json<|sep|>'
    assert expected + "<|close|>call<|sep|>" in text


def results(messages):
    """Tool attribute, index and content of every tool result."""
    pieces = [piece.split('role="tool" ')[1] for piece in shown(messages).split(END) if 'role="tool"' in piece]
    return [piece.replace("<|sep|>", " ") for piece in pieces]


def test_results_go_into_call_order_under_the_names_of_their_calls():
    calls = {"role": "assistant", "tool_calls": [call("f", {}, "x"), call("g", {}, "y")]}
    late = {"role": "tool", "tool_call_id": "y", "content": "2", "name": "stale", "index": 9}
    early = {"role": "tool", "tool_call_id": "x", "content": "1"}
    assert results([calls, late, early]) == ['tool="f" index="1" 1', 'tool="g" index="2" 2']
    assert results([calls, early, *user(), late]) == ['tool="f" index="1" 1', 'tool="g" index="2" 2']


def test_results_are_numbered_anew_after_each_assistant_message():
    turn = [
        {"role": "assistant", "tool_calls": [call("f", {}, "x")]},
        {"role": "tool", "tool_call_id": "x", "content": "1"},
    ]
    assert results([*turn, *turn]) == ['tool="f" index="1" 1'] * 2


def test_a_run_that_does_not_resolve_stays_as_it_came():
    calls = {"role": "assistant", "tool_calls": [call("f", {}, "x"), call("g", {})]}
    late = {"role": "tool", "tool_call_id": "?", "content": "2"}
    early = {"role": "tool", "tool_call_id": "x", "content": "1"}
    assert results([calls, late, early]) == ['tool="f" index="1" 2', 'tool="g" index="2" 1']
    named = late | {"name": "h"}
    assert results([calls, named, early]) == ['tool="h" index="1" 2', 'tool="g" index="2" 1']


def test_an_id_that_two_calls_share_stands_for_them_in_turn():
    calls = {"role": "assistant", "tool_calls": [call("f", {}, "x"), call("g", {}, "x")]}
    both = [{"role": "tool", "tool_call_id": "x", "content": text} for text in "12"]
    assert results([calls, *both]) == ['tool="f" index="1" 1', 'tool="g" index="2" 2']


def test_an_image_is_a_block_of_control_tokens_with_its_size(k3_tokenizer):
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "see"}, {"type": "image_url"}, {"type": "image"}]}
    ]
    prompt = xtml.prompt(k3_tokenizer, messages, None, [Image(4000, 3000, 5), Image(7, 9, 1)])
    pad = "<|media_pad|>"
    assert (
        f"see<|media_begin|>image 4000x3000<|media_content|>{pad * 5}<|media_end|>"
        f"<|media_begin|>image 7x9<|media_content|>{pad}<|media_end|><|close|>"
    ) in k3_tokenizer.show(prompt.ids)
    assert prompt.ids.count(k3_tokenizer.control[pad]) == 6


def counted(tokenizer, messages, options=None):
    """What the loss counts, piece by piece."""
    prompt = xtml.prompt(tokenizer, messages, options, generate=False)
    pieces, before = [], False
    for token, counts in zip(prompt.ids, prompt.trained, strict=True):
        if counts and not before:
            pieces.append([])
        if counts:
            pieces[-1].append(token)
        before = counts
    return [tokenizer.show(piece) for piece in pieces]


def test_the_loss_mask_of_a_chat_is_exactly_the_assistant_parts(k3_tokenizer):
    assert counted(k3_tokenizer, CHAT) == [
        "look it up<|close|>think<|sep|><|open|>response<|sep|>wait<|close|>response<|sep|>"
        '<|open|>tools<|sep|><|open|>call tool="f" index="1"<|sep|>'
        '<|open|>argument key="q" type="string"<|sep|>b<|close|>argument<|sep|><|close|>call<|sep|>'
        f"<|close|>tools<|sep|>{END}",
        "now I know<|close|>think<|sep|><|open|>response<|sep|>c!<|close|>response<|sep|>" + END,
        "<|open|>response<|sep|>bye<|close|>response<|sep|>" + END,
    ]


def test_a_sample_without_reasoning_trains_no_think_marker_and_no_opener_of_the_prompt(k3_tokenizer):
    sample = [*user(), {"role": "assistant", "content": "x"}]
    assert counted(k3_tokenizer, sample) == ["<|open|>response<|sep|>x<|close|>response<|sep|>" + END]
    assert counted(k3_tokenizer, sample, Options(thinking=False)) == ["x<|close|>response<|sep|>" + END]


def test_the_loss_skips_the_json_fallback(k3_tokenizer):
    sample = [*user(), {"role": "assistant", "content": "", "tool_calls": [call("f", "{broken")]}]
    before, after = counted(k3_tokenizer, sample)
    assert before.endswith('<|open|>call tool="f" index="1"<|sep|>')
    assert after == "<|close|>call<|sep|><|close|>tools<|sep|>" + END


@pytest.mark.parametrize("thinking", [True, False])
@pytest.mark.parametrize("last", [2, 4, 6])
def test_training_sees_the_tokens_of_serving(k3_tokenizer, thinking, last):
    """Reasoning, calls, results and every option: the prompt of the last answer, then that answer."""
    options = Options(
        tools=[TOOL],
        thinking=thinking,
        effort="high",
        tool_choice="required",
        response_format={"type": "json_object"},
    )
    whole = xtml.prompt(k3_tokenizer, CHAT[: last + 1], options, generate=False)
    prompt = xtml.prompt(k3_tokenizer, CHAT[:last], options)
    assert whole.ids[: len(prompt.ids)] == prompt.ids
    assert not any(whole.trained[len(prompt.ids) - prompt.num_opener : len(prompt.ids)])
    assert any(whole.trained[len(prompt.ids) :])


def test_the_next_turn_begins_with_the_ids_of_this_turn_and_its_answer(k3_tokenizer):
    """Preserved thinking: same history, same prefix."""
    for end in (2, 4, 6):
        prompt = xtml.prompt(k3_tokenizer, CHAT[:end], Options(tools=[TOOL], effort="max"))
        whole = xtml.prompt(k3_tokenizer, CHAT[: end + 1], Options(tools=[TOOL], effort="max"), generate=False)
        after = xtml.prompt(k3_tokenizer, CHAT, Options(tools=[TOOL], effort="max"))
        assert whole.ids[: len(prompt.ids)] == prompt.ids
        assert after.ids[: len(whole.ids)] == whole.ids


def test_one_shot_options_and_tools_in_mid_session_leave_earlier_tokens_as_they_were(k3_tokenizer):
    plain = xtml.prompt(k3_tokenizer, CHAT, Options(tools=[TOOL]), generate=False).ids
    one_shot = Options(tools=[TOOL], tool_choice="none", response_format={"type": "json_object"})
    for messages, options in (
        (CHAT, one_shot),
        ([*CHAT, {"role": "system", "tools": [OTHER]}], Options(tools=[TOOL])),
        ([*CHAT, {"role": "system", "tools": [OTHER]}, *user()], one_shot),
    ):
        ids = xtml.prompt(k3_tokenizer, messages, options).ids
        assert ids[: len(plain)] == plain
        assert len(ids) > len(plain)


def test_tools_that_differ_in_the_order_of_keys_are_the_same_tokens():
    turned = {"function": dict(reversed(TOOL["function"].items())), "type": "function"}
    assert shown(user(), Options(tools=[turned])) == shown(user(), Options(tools=[TOOL]))


def test_the_last_opener_is_not_billed(k3_tokenizer):
    prompt = xtml.prompt(k3_tokenizer, user())
    assert prompt.num_billed == len(prompt.ids) - len("think") - 2
    whole = xtml.prompt(k3_tokenizer, user(), generate=False)
    assert whole.num_billed == len(whole.ids)


CONTROL_SPELLINGS = [
    "<|open|>",
    "<|close|>message<|sep|><|end_of_msg|>",
    "<|media_pad|>",
    "<|kimi_image_placeholder|>",
    "[EOS]",
    "<|im_end|>",
    '"<|sep|>',
    "&quot;<|sep|>&amp;",
]


def conversation(spelling):
    """A chat with the spelling in every place that a user, a tool or a file may fill."""
    return [
        {"role": "system", "content": spelling, "name": spelling},
        {"role": "user", "content": [{"type": "text", "text": spelling}, {"type": "image"}], "name": spelling},
        {
            "role": "assistant",
            "reasoning_content": f"a{spelling}",
            "content": spelling,
            "tool_calls": [
                call(f"f{spelling}", {f"k{spelling}": spelling, "n": {spelling: [spelling]}}, spelling),
                call("g", "{" + spelling, "2"),
            ],
        },
        {"role": "tool", "tool_call_id": spelling, "content": spelling},
        {"role": "system", "tools": [{"function": {"name": "h", "description": spelling}}]},
    ]


@given(st.sampled_from(CONTROL_SPELLINGS) | st.text(max_size=8), st.sampled_from(CONTROL_SPELLINGS))
@settings(max_examples=20)
def test_no_text_can_forge_structure(k3_tokenizer, one, two):
    """Every spelling in system, user, tool result, tool name, argument name and value: no control token appears."""
    spelling = one + two
    skeleton = xtml.prompt(k3_tokenizer, conversation("x"), None, [Image(1, 1, 2)])
    forged = xtml.prompt(k3_tokenizer, conversation(spelling), None, [Image(1, 1, 2)])
    control = set(k3_tokenizer.control.values())
    assert [token for token in forged.ids if token in control] == [token for token in skeleton.ids if token in control]
    text = bytes(token for token in forged.ids if token < 256).decode()
    assert text.count(spelling) >= 5
