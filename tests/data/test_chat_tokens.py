"""The chat formats with the released vocabulary: published token counts, round trips, and user text stays text."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from triax.data.chat import K2Options, Options, k2, k2_parser, request_options, xtml, xtml_parser
from triax.data.kimi import KimiTokenizer

MARKERS = {"<|end_of_msg|>": 163586, "<|open|>": 163587, "<|close|>": 163588, "<|sep|>": 163589}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}


@pytest.fixture(scope="module")
def k3(kimi_data):
    return KimiTokenizer.load(kimi_data / "kimi.tiktoken", family="k3")


@pytest.fixture(scope="module")
def k2_(kimi_data):
    return KimiTokenizer.load(kimi_data / "kimi.tiktoken", family="k2")


@pytest.mark.parametrize(("line", "billed"), [(0, 36), (1, 119), (2, 99), (3, 545)])
def test_prompts_have_the_published_number_of_tokens(k3, kimi_data, line, billed):
    """36, 119 and 99 are published; of 539 an empty think block is missing: 545. The last opener is not billed."""
    case = json.loads((kimi_data / "prompt_tokens.jsonl").read_text().splitlines()[line])
    request = case["request"]
    prompt = xtml.prompt(k3, request["messages"], request_options(request))
    assert (prompt.num_billed, len(prompt.ids)) == (billed, billed + 3)
    empty_block = ["<|open|>", "think", "<|sep|>", "<|close|>", "think", "<|sep|>"]
    assert billed - case["expected_prompt_tokens"] == (len(empty_block) if line == 3 else 0)


def test_the_markers_and_tag_words_are_the_published_tokens(k3):
    ids = xtml.prompt(k3, [{"role": "user", "content": "hi"}]).ids
    assert {name: k3.control[name] for name in MARKERS} == MARKERS
    assert ids[:2] == [163587, 2778]  # open, message
    assert ids[-3:] == [163587, 39964, 163589]  # open, think, sep
    assert xtml.prompt(k3, [], Options(thinking=False)).ids[-3:] == [163587, 12092, 163589]
    assert 163584 not in ids  # no [BOS]


def test_no_control_spelling_of_the_vocabulary_becomes_a_control_token(k3):
    text = " ".join(k3.control)
    messages = [
        {"role": "system", "content": text},
        {"role": "user", "content": text, "name": text},
        {
            "role": "assistant",
            "reasoning_content": text,
            "content": text,
            "tool_calls": [{"id": "1", "function": {"name": text, "arguments": {text: text, "o": {text: [text]}}}}],
        },
        {"role": "tool", "tool_call_id": "1", "content": text},
    ]
    prompt = xtml.prompt(k3, messages)
    assert {token for token in prompt.ids if token in k3.control.values()} == set(MARKERS.values())
    plain = [{**message, "content": "x"} for message in messages]
    count = [token for token in prompt.ids if token >= 163584]
    assert count == [token for token in xtml.prompt(k3, plain).ids if token >= 163584]
    assert k3.decode(prompt.ids).count(text) >= 6


NASTY = st.sampled_from(
    ['"', "&quot;", "<", "\n\n", "<|close|>", ' C++"', "🙂", "👩‍👩‍👧", "汉字", "\\u00e9", "{", "don't"]
)
WORDS = st.lists(NASTY | st.text(max_size=4), max_size=5).map("".join)
ARGUMENTS = st.dictionaries(WORDS, WORDS | st.integers() | st.floats(-1, 1) | st.none() | st.lists(WORDS, max_size=2))


@given(WORDS, WORDS, st.lists(st.tuples(WORDS.filter(bool), ARGUMENTS), max_size=2))
@settings(max_examples=30)
def test_k3_what_is_rendered_is_parsed_back(k3, reasoning, content, calls):
    reasoning = reasoning if reasoning.strip() else ""
    message = {
        "role": "assistant",
        "content": content,
        "reasoning": reasoning,
        "tool_calls": [{"function": {"name": name, "arguments": arguments}} for name, arguments in calls],
    }
    prompt = xtml.prompt(k3, [{"role": "user", "content": content}])
    whole = xtml.prompt(k3, [{"role": "user", "content": content}, message], generate=False)
    assert whole.ids[: len(prompt.ids)] == prompt.ids
    reply = xtml_parser(k3).parse(whole.ids[len(prompt.ids) :])
    assert (reply.reasoning, reply.content, reply.flags) == (reasoning, content, [])
    assert [(call.name, json.loads(call.arguments)) for call in reply.calls] == calls
    # A client that sends the message back gets the same tokens: the cache of the prefix holds.
    again = reply.message()
    assert xtml.prompt(k3, [{"role": "user", "content": content}, again], generate=False).ids == whole.ids


@given(WORDS, WORDS, st.lists(ARGUMENTS, max_size=2))
@settings(max_examples=20)
def test_k2_what_is_rendered_is_parsed_back(k2_, reasoning, content, calls):
    reasoning = reasoning if reasoning.strip() else ""
    message = {
        "role": "assistant",
        "content": content,
        "reasoning": reasoning,
        "tool_calls": [{"function": {"name": "f", "arguments": arguments}} for arguments in calls],
    }
    options = K2Options(tools=[TOOL], thinking=True)
    prompt = k2.prompt(k2_, [{"role": "user", "content": content}], options)
    whole = k2.prompt(k2_, [{"role": "user", "content": content}, message], options, generate=False)
    reply = k2_parser(k2_, tools=[TOOL]).parse(whole.ids[len(prompt.ids) :])
    assert (reply.reasoning, reply.content, reply.flags) == (reasoning, content, [])
    assert [(call.id, json.loads(call.arguments)) for call in reply.calls] == [
        (f"functions.f:{number}", arguments) for number, arguments in enumerate(calls)
    ]


def test_one_shot_options_leave_earlier_tokens_as_they_were(k3):
    messages = [{"role": "user", "content": "请用 JSON 格式回答"}, {"role": "assistant", "content": "你好"}]
    plain = xtml.prompt(k3, messages, generate=False).ids
    options = Options(tool_choice="none", response_format={"type": "json_object"})
    assert xtml.prompt(k3, messages, options).ids[: len(plain)] == plain
    more = [*messages, {"role": "system", "tools": [TOOL]}]
    assert xtml.prompt(k3, more, options).ids[: len(plain)] == plain


def test_k2_answers_with_the_ids_of_the_vocabulary(k2_):
    prompt = k2.prompt(k2_, [{"role": "user", "content": "hi"}])
    assert prompt.ids[0] == 163594
    assert prompt.ids[-3:] == [163588, *k2_.encode_ordinary("assistant"), 163601]
    output = [163606, *k2_.encode_ordinary("a"), 163607, *k2_.encode_ordinary("b"), 163586]
    reply = k2_parser(k2_).parse(output)
    assert (reply.reasoning, reply.content, reply.finish) == ("a", "b", "stop")
