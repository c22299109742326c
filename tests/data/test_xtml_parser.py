"""K3's answers: nothing lost, nothing leaked, the same streamed and whole."""

import json
import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from triax.data.chat import (
    Arguments,
    CallEnd,
    CallStart,
    Content,
    Finish,
    ParseError,
    Promoted,
    Reasoning,
    collect,
    xtml,
    xtml_parser,
)

END = "<|close|>message<|sep|><|end_of_msg|>"
THINK_END = "<|close|>think<|sep|>"
ANSWER = "<|open|>response<|sep|>beta<|close|>response<|sep|>"


def argument(key, kind, text):
    return f'<|open|>argument key="{key}" type="{kind}"<|sep|>{text}<|close|>argument<|sep|>'


def call(*arguments, tool="f", index=1):
    return f'<|open|>call tool="{tool}" index="{index}"<|sep|>{"".join(arguments)}<|close|>call<|sep|>'


def tools(*calls):
    return f"<|open|>tools<|sep|>{''.join(calls)}<|close|>tools<|sep|>"


FULL = f"alpha{THINK_END}{ANSWER}{tools(call(argument('k', 'string', 'gamma'), argument('n', 'number', '7')))}{END}"


def parse(tokenizer, output, reason=None, **kwargs):
    return xtml_parser(tokenizer, **kwargs).parse(tokenizer.trusted(output), reason)


def stream(tokenizer, output, **kwargs):
    parser = xtml_parser(tokenizer, **kwargs)
    events = [event for token in tokenizer.trusted(output) for event in parser.feed(token)]
    return [*events, *parser.finish()]


def as_text(tokenizer, output, size, reason=None, **kwargs):
    """The reply when only text is known, in pieces of a size."""
    parser = xtml_parser(tokenizer, **kwargs)
    pieces = [output[start : start + size] for start in range(0, len(output), size)]
    return collect([*(event for piece in pieces for event in parser.feed_text(piece)), *parser.finish(reason)])


def made(reply):
    return [(call.name, json.loads(call.arguments)) for call in reply.calls if call.valid]


def test_a_whole_answer_is_split_into_its_fields(k3_tokenizer):
    reply = parse(k3_tokenizer, FULL)
    assert (reply.reasoning, reply.content, reply.finish) == ("alpha", "beta", "tool_calls")
    assert made(reply) == [("f", {"k": "gamma", "n": 7})]
    assert (reply.flags, reply.errors) == ([], [])
    assert reply.message() == {
        "role": "assistant",
        "content": "beta",
        "reasoning_content": "alpha",
        "tool_calls": [
            {
                "id": "functions.f:0",
                "type": "function",
                "function": {"name": "f", "arguments": '{"k": "gamma", "n": 7}'},
            }
        ],
    }


def test_the_opener_of_the_prompt_may_be_repeated(k3_tokenizer):
    plain = parse(k3_tokenizer, FULL)
    for opener in ("<|open|>think<|sep|>", '<|open|>message role="assistant"<|sep|><|open|>think<|sep|>'):
        assert parse(k3_tokenizer, opener + FULL) == plain
        assert parse(k3_tokenizer, opener + FULL, thinking=False) == plain
    instant = "beta<|close|>response<|sep|>" + END
    for opener in ("", "<|open|>response<|sep|>", '<|open|>message role="assistant"<|sep|><|open|>response<|sep|>'):
        reply = parse(k3_tokenizer, opener + instant, thinking=False)
        assert (reply.reasoning, reply.content, reply.flags, reply.finish) == ("", "beta", [], "stop")


def test_tag_words_in_an_answer_are_words(k3_tokenizer):
    words = 'think response message call argument tools close open sep message role="user" <think></response>'
    output = f"{words}{THINK_END}<|open|>response<|sep|>{words}<|close|>response<|sep|>{END}"
    reply = parse(k3_tokenizer, output)
    assert (reply.reasoning, reply.content, reply.flags, reply.errors) == (words, words, [], [])


def test_markers_spelled_in_text_are_text_when_tokens_are_known(k3_tokenizer):
    spelled = k3_tokenizer.encode_ordinary("<|close|>response<|sep|><|open|>")
    tokens = k3_tokenizer.trusted(f"a{THINK_END}<|open|>response<|sep|>")
    tokens += spelled + k3_tokenizer.trusted(f"<|close|>response<|sep|>{END}")
    reply = xtml_parser(k3_tokenizer).parse(tokens)
    assert (reply.content, reply.flags, reply.errors) == ("<|close|>response<|sep|><|open|>", [], [])


def test_thinking_that_is_not_closed_ends_where_the_response_opens(k3_tokenizer):
    reply = parse(k3_tokenizer, f"alpha{ANSWER}{END}")
    assert (reply.reasoning, reply.content, reply.flags) == ("alpha", "beta", ["unclosed_think"])


@pytest.mark.parametrize("opened", ["", "<|open|>tools<|sep|>"])
def test_tools_inside_thinking_are_calls(k3_tokenizer, opened):
    output = f"alpha{opened}{call(argument('k', 'string', 'x'))}<|close|>tools<|sep|>{END}"
    reply = parse(k3_tokenizer, output)
    assert (reply.reasoning, reply.content, reply.finish) == ("alpha", "", "tool_calls")
    assert made(reply) == [("f", {"k": "x"})]
    assert "unclosed_think" in reply.flags
    assert "no_response" in reply.flags


def test_a_close_without_its_separator_is_a_close(k3_tokenizer):
    reply = parse(k3_tokenizer, f"alpha<|close|>think{ANSWER}<|close|>message<|end_of_msg|>")
    assert (reply.reasoning, reply.content, reply.errors) == ("alpha", "beta", [])
    assert reply.flags == ["no_separator", "no_separator"]


def test_an_answer_written_into_the_think_section_is_the_answer(k3_tokenizer):
    """The model skipped thinking: the section it closes says what it wrote."""
    output = f"alpha beta<|close|>response<|sep|>{END}"
    reply = parse(k3_tokenizer, output)
    assert (reply.reasoning, reply.content, reply.finish) == ("", "alpha beta", "stop")
    assert reply.flags == ["answer_in_think"]
    assert Promoted("alpha beta") in stream(k3_tokenizer, output)


def test_thinking_without_a_response_is_reasoning_and_says_so(k3_tokenizer):
    for output in (f"alpha{THINK_END}{END}", f"alpha{END}", "alpha<|end_of_msg|>"):
        reply = parse(k3_tokenizer, output)
        assert (reply.reasoning, reply.content, reply.finish) == ("alpha", "", "stop")
        assert "no_response" in reply.flags
        assert reply.errors == [ParseError("empty")]


def test_a_missing_response_opener_is_flagged_and_the_answer_kept(k3_tokenizer):
    reply = parse(k3_tokenizer, f"alpha{THINK_END}\n beta{END}")
    assert (reply.reasoning, reply.content) == ("alpha", "\n beta")
    assert reply.flags == ["no_response_opener", "unclosed_response"]
    blank = parse(k3_tokenizer, f"alpha{THINK_END}\n {ANSWER}\n{END}")
    assert (blank.content, blank.flags) == ("beta", [])


def test_two_think_sections_stay_apart_from_the_answer(k3_tokenizer):
    more = "<|open|>think<|sep|>delta<|close|>think<|sep|>"
    for output in (f"alpha{THINK_END}{more}{ANSWER}{END}", f"alpha{THINK_END}{ANSWER}{more}{END}"):
        reply = parse(k3_tokenizer, output)
        assert (reply.reasoning, reply.content, reply.flags) == ("alphadelta", "beta", ["second_think"])


def test_an_empty_stop_is_never_silent(k3_tokenizer):
    for output in ("<|end_of_msg|>", "[EOS]", END, f"{THINK_END}<|open|>response<|sep|><|close|>response<|sep|>{END}"):
        reply = parse(k3_tokenizer, output)
        assert (reply.finish, reply.content, reply.errors[-1]) == ("stop", "", ParseError("empty"))
    assert parse(k3_tokenizer, "", "stop").errors == [ParseError("empty")]


def test_output_cut_anywhere_is_length_and_leaks_nothing(k3_tokenizer):
    tokens = k3_tokenizer.trusted(FULL)
    for cut in range(len(tokens)):
        reply = xtml_parser(k3_tokenizer).parse(tokens[:cut], "length")
        assert reply.finish == "length"
        assert "alpha".startswith(reply.reasoning)
        assert "beta".startswith(reply.content)
        assert reply.reasoning == "alpha" or not reply.content
        for one in reply.calls:
            assert '{"k": "gamma", "n": 7}'.startswith(one.arguments)
            assert one.valid == (one.arguments == '{"k": "gamma", "n": 7}')
            assert one.valid or any(error.kind == "cut_call" for error in reply.errors)


def test_the_engine_may_keep_the_stop_token_to_itself(k3_tokenizer):
    whole = parse(k3_tokenizer, FULL)
    assert parse(k3_tokenizer, FULL.removesuffix("<|end_of_msg|>"), "stop") == whole
    assert parse(k3_tokenizer, FULL.removesuffix("<|end_of_msg|>")).finish == "length"
    assert parse(k3_tokenizer, FULL, "length") == whole


@pytest.mark.parametrize("size", [1, 2, 3, 7, 1000])
def test_text_alone_gives_the_same_message_however_it_is_cut(k3_tokenizer, size):
    for output in (
        FULL,
        f"α🙂<|close|>think<|open|>response<|sep|>a < b <| c |> <|o{END}",
        f"alpha<|close|>x<|sep|>{END}",
    ):
        assert as_text(k3_tokenizer, output, size) == parse(k3_tokenizer, output)


def test_every_lost_marker_loses_no_word_and_makes_no_other_call(k3_tokenizer):
    tokens = k3_tokenizer.trusted(FULL)
    control = set(k3_tokenizer.control.values())
    whole = parse(k3_tokenizer, FULL)
    for at in [number for number, token in enumerate(tokens) if token in control]:
        where = k3_tokenizer.show(tokens[at : at + 9])
        reply = xtml_parser(k3_tokenizer).parse(tokens[:at] + tokens[at + 1 :], "stop")
        fields = reply.reasoning + reply.content + "".join(one.arguments for one in reply.calls)
        everything = fields + "".join(error.raw for error in reply.errors)
        assert all(word in everything for word in ("alpha", "beta", "gamma")), where
        assert "<|" not in fields, where
        assert "beta" not in reply.reasoning, where
        assert "alpha" not in reply.content, where
        assert made(reply) in ([], made(whole)), where
        assert made(reply) or reply.errors, where
        if where.startswith("<|sep|>"):
            assert (reply.reasoning, reply.content, made(reply)) == ("alpha", "beta", made(whole)), where
            assert reply.flags == ["no_separator"], where


CONTROL = ["<|open|>", "<|close|>", "<|sep|>", "<|end_of_msg|>"]
PIECES = st.lists(
    st.sampled_from(
        [
            *CONTROL,
            "<|media_pad|>",
            *(
                f"<|{side}|>{tag}<|sep|>"
                for side in ("open", "close")
                for tag in ("think", "response", "tools", "call")
            ),
            *(
                f"<|{side}|>{tag}<|sep|>"
                for side in ("open", "close")
                for tag in ("message", "argument", "json", "foo")
            ),
            '<|open|>call tool="f" index="1"<|sep|>',
            '<|open|>argument key="k" type="string"<|sep|>',
            '<|open|>argument key="m" type="number"<|sep|>',
            '<|open|>argument key="o" type="object"<|sep|>',
            "word ",
            "{}",
            "1",
            " ",
            '"',
            "🙂"[:1],
        ]
    ),
    max_size=25,
)


@given(PIECES, st.sampled_from([None, "stop", "length"]), st.booleans())
@settings(max_examples=150)
def test_whatever_is_written_is_read_without_loss(k3_tokenizer, pieces, reason, thinking):
    """Any order of tags and words: calls balance, valid calls are JSON, every word is somewhere, no marker leaks."""
    output = "".join(pieces)
    parser = xtml_parser(k3_tokenizer, thinking=thinking)
    events = [event for token in k3_tokenizer.trusted(output) for event in parser.feed(token)]
    events += parser.finish(reason)
    assert parser.finish(reason) == ()
    assert isinstance(events[-1], Finish)
    assert sum(isinstance(event, Finish) for event in events) == 1
    started = [event.index for event in events if isinstance(event, CallStart)]
    assert started == [event.index for event in events if isinstance(event, CallEnd)] == list(range(len(started)))
    reply = collect(events)
    for one in reply.calls:
        assert not one.valid or isinstance(json.loads(one.arguments), dict)
    told = [event.text for event in events if isinstance(event, Reasoning | Content | Arguments)]
    told += [error.raw for error in reply.errors] + [event.detail for event in events if hasattr(event, "detail")]
    assert "".join(told).count("word") >= output.count("word")
    assert "<|" not in reply.reasoning + reply.content + "".join(one.arguments for one in reply.calls)
    if reply.finish == "stop" and not reply.content.strip():
        assert reply.errors
    if "media" not in output:
        assert as_text(k3_tokenizer, output, 5, reason, thinking=thinking) == reply
    assert (reply.finish == "tool_calls") == (any(one.valid for one in reply.calls) and reply.finish != "length")


@pytest.mark.parametrize(
    ("body", "arguments"),
    [
        ("", {}),
        (argument("a", "string", ""), {"a": ""}),
        (argument("a", "number", "1.50"), {"a": 1.5}),
        (argument("a", "null", "null") + argument("b", "boolean", "true"), {"a": None, "b": True}),
        (argument("a", "object", '{"x": [1, "ü"]}'), {"a": {"x": [1, "ü"]}}),
        (argument("a", "array", "[]"), {"a": []}),
        (argument("a&quot;&amp;quot;", "string", '&quot;"\\\n\x00'), {'a"&quot;': '&quot;"\\\n\x00'}),
    ],
)
def test_arguments_come_back_as_they_were_typed(k3_tokenizer, body, arguments):
    reply = parse(k3_tokenizer, f"a{THINK_END}{ANSWER}{tools(call(body))}{END}")
    assert made(reply) == [("f", arguments)]
    assert (reply.flags, reply.errors) == ([], [])


@pytest.mark.parametrize(
    ("body", "flags", "errors", "arguments"),
    [
        (argument("a", "number", "many"), ["other_type"], [], {"a": "many"}),
        (argument("a", "boolean", "1"), ["other_type"], [], {"a": 1}),
        (argument("a", "number", "true"), ["other_type"], [], {"a": True}),
        (argument("a", "date", "now"), ["unknown_type"], [], {"a": "now"}),
        (argument("a", "object", "[1]"), ["other_type"], [], {"a": [1]}),
        (argument("a", "object", "{1}"), [], ["arguments"], None),
        (argument("a", "object", '{}, "b": {}'), [], ["arguments"], None),
        (argument("a", "number", '1, "b": 2'), ["other_type"], [], {"a": '1, "b": 2'}),
        (argument("a", "array", ""), [], ["arguments"], None),
        (argument("a", "number", "NaN"), ["other_type"], [], {"a": "NaN"}),
        (argument("a", "string", "1") * 2, [], ["duplicate_argument"], None),
        ('<|open|>json type="object"<|sep|>{"a": 1}<|close|>json<|sep|>', ["raw_arguments"], [], {"a": 1}),
        ('<|open|>json type="object"<|sep|>[1]<|close|>json<|sep|>', ["raw_arguments"], ["arguments"], None),
        (
            argument("a", "string", "1") + '<|open|>json type="object"<|sep|>{}<|close|>json<|sep|>',
            [],
            ["stray_text"],
            None,
        ),
        ('<|open|>argument type="string"<|sep|>x<|close|>argument<|sep|>', [], ["stray_text"], None),
        ("chatter" + argument("a", "string", "1"), [], ["stray_text"], None),
        (argument("a", "string", "1argument<|sep|>"), [], ["stray_control"], None),
        ('<|open|>argument key="a" type="string"<|sep|>x', ["unclosed_argument"], [], {"a": "x"}),
    ],
)
def test_malformed_arguments_are_mended_or_reported(k3_tokenizer, body, flags, errors, arguments):
    reply = parse(k3_tokenizer, f"a{THINK_END}{ANSWER}{tools(call(body))}{END}")
    assert reply.flags == flags
    assert [error.kind for error in reply.errors] == errors
    assert made(reply) == ([] if arguments is None else [("f", arguments)])
    assert reply.finish == ("stop" if arguments is None else "tool_calls")


def test_a_call_without_a_name_is_reported_with_its_arguments(k3_tokenizer):
    body = f'<|open|>call index="1"<|sep|>{argument("k", "string", "gamma")}<|close|>call<|sep|>'
    reply = parse(k3_tokenizer, f"a{THINK_END}{ANSWER}{tools(body, call(index=2))}{END}")
    assert reply.errors == [ParseError("call_without_name", '{"k": "gamma"}')]
    assert made(reply) == [("f", {})]


def test_a_call_that_is_not_closed_is_a_call(k3_tokenizer):
    body = f'<|open|>call tool="f" index="1"<|sep|>{argument("k", "number", "1")}'
    for output in (f"{body}{call(tool='g', index=2)}", body):
        reply = parse(k3_tokenizer, f"a{THINK_END}{ANSWER}{tools(output)}{END}")
        assert made(reply)[0] == ("f", {"k": 1})
        assert "unclosed_call" in reply.flags


def test_what_waits_when_the_output_is_cut_is_reported(k3_tokenizer):
    start = f"a{THINK_END}{ANSWER}<|open|>tools<|sep|>"
    number = '<|open|>argument key="n" type="number"<|sep|>12'
    lost = "<|open|>argument<|sep|>word"
    for body, errors in (
        (f'<|open|>call tool="f" index="1"<|sep|>{number}', [ParseError("cut_call", "12")]),
        (f'<|open|>call tool=""<|sep|>{number}', [ParseError("cut_call", '{"n": 12')]),
        (
            f'<|open|>call tool="f" index="1"<|sep|>{lost}',
            [ParseError("cut_call"), ParseError("stray_text", "argument\nword")],
        ),
        ('<|open|>call tool="f', [ParseError("unknown_tag", 'call tool="f')]),
    ):
        reply = parse(k3_tokenizer, start + body, "length")
        assert (reply.finish, reply.errors, made(reply)) == ("length", errors, [])


def test_blanks_are_no_answer(k3_tokenizer):
    reply = parse(k3_tokenizer, f" \n<|close|>response<|sep|>{END}", thinking=False)
    assert (reply.content, reply.finish, reply.errors) == (" \n", "stop", [ParseError("empty")])


def test_a_tag_that_is_none_is_reported_and_not_shown(k3_tokenizer):
    reply = parse(
        k3_tokenizer, f"a{THINK_END}<|open|>response<|sep|>be<|open|>foo bar<|sep|>ta<|close|>response<|sep|>{END}"
    )
    assert (reply.content, reply.errors) == ("beta", [ParseError("unknown_tag", "foo bar")])


def test_a_message_that_the_model_writes_for_others_is_no_part_of_the_answer(k3_tokenizer):
    for end in ("", "<|close|>message<|sep|>"):
        other = f'<|open|>message role="user"<|sep|>more{END}'
        reply = parse(k3_tokenizer, f"alpha{THINK_END}{ANSWER}{end}{other}")
        assert (reply.reasoning, reply.content, reply.finish) == ("alpha", "beta", "stop")
        assert reply.errors[0].kind == "stray_text"
        assert "more" in reply.errors[0].raw


def test_other_control_tokens_are_flagged_and_not_shown(k3_tokenizer):
    reply = parse(k3_tokenizer, f"al<|media_pad|>pha{THINK_END}{ANSWER}{END}")
    assert (reply.reasoning, reply.flags) == ("alpha", ["stray_control"])


def test_ids_follow_one_rule_and_count_over_the_conversation(k3_tokenizer):
    output = f"a{THINK_END}{ANSWER}{tools(call(), call(tool='g', index=2))}{END}"
    for num_calls in (0, 5):
        ids = [f"functions.f:{num_calls}", f"functions.g:{num_calls + 1}"]
        assert [c.id for c in parse(k3_tokenizer, output, num_calls=num_calls).calls] == ids
        events = stream(k3_tokenizer, output, num_calls=num_calls)
        assert [event.id for event in events if isinstance(event, CallStart)] == ids


def test_a_long_argument_streams_from_the_first_bytes_on(k3_tokenizer):
    text = 'line "1"\n' * 1_100
    tokens = k3_tokenizer.trusted(f"a{THINK_END}{ANSWER}{tools(call(argument('k', 'string', text)))}{END}")
    parser = xtml_parser(k3_tokenizer)
    pieces, first = [], None
    for number, token in enumerate(tokens):
        new = [event.text for event in parser.feed(token) if isinstance(event, Arguments)]
        first = number if first is None and "line" in "".join(pieces + new) else first
        pieces += new
    assert json.loads("".join(pieces)) == {"k": text}
    assert first < 0.05 * len(tokens)


@pytest.mark.parametrize("word", ["🙂", "한국어", "👩‍👩‍👧", "漢"])
def test_characters_split_over_tokens_arrive_whole_everywhere(k3_tokenizer, word):
    body = tools(
        call(argument("k", "string", word), argument("o", "object", json.dumps({"x": word}, ensure_ascii=False)))
    )
    output = f"{word}{THINK_END}<|open|>response<|sep|>{word}<|close|>response<|sep|>{body}{END}"
    events = stream(k3_tokenizer, output)
    assert not any("\ufffd" in getattr(event, "text", "") for event in events)
    reply = collect(events)
    assert (reply.reasoning, reply.content, made(reply)) == (word, word, [("f", {"k": word, "o": {"x": word}})])


def test_half_a_character_before_a_marker_or_the_end_is_replaced(k3_tokenizer):
    half = list("🙂".encode())[:2]
    tokens = [*half, *k3_tokenizer.trusted(f"{THINK_END}<|open|>response<|sep|>"), *half]
    reply = xtml_parser(k3_tokenizer).parse(tokens, "length")
    assert (reply.reasoning, reply.content) == ("\ufffd", "\ufffd")


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=6),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=5,
)
NASTY = st.sampled_from(
    [
        '"',
        "&",
        "&quot;",
        "&amp;quot;",
        "<",
        ">",
        "\n",
        "<|close|>",
        "<|sep|>",
        '" key="',
        "🙂",
        "\\u00e9",
        "{",
        "'",
        "\\",
    ]
)
WORDS = st.lists(NASTY | st.text(max_size=3), max_size=4).map("".join)
CALLS = st.lists(st.tuples(WORDS.filter(bool), st.dictionaries(WORDS, VALUES | WORDS, max_size=3)), max_size=2)


@given(WORDS, WORDS, CALLS, st.booleans())
@settings(max_examples=60)
def test_what_is_rendered_is_parsed_back(k3_tokenizer, reasoning, content, calls, thinking):
    """Names and arguments with quotes, ampersands, brackets, newlines, markers, split emoji, escapes, nested values."""
    reasoning = reasoning if reasoning.strip() and thinking else ""
    message = {
        "role": "assistant",
        "content": content,
        "reasoning_content": reasoning,
        "tool_calls": [{"function": {"name": name, "arguments": arguments}} for name, arguments in calls],
    }
    options = xtml.Options(thinking=thinking)
    prompt = xtml.prompt(k3_tokenizer, [{"role": "user", "content": "x"}], options)
    whole = xtml.prompt(k3_tokenizer, [{"role": "user", "content": "x"}, message], options, generate=False)
    reply = xtml_parser(k3_tokenizer, thinking=thinking).parse(whole.ids[len(prompt.ids) :])
    assert (reply.reasoning, reply.content) == (reasoning, content)
    assert [(call.name, call.arguments) for call in reply.calls] == [
        (name, json.dumps(arguments, ensure_ascii=False)) for name, arguments in calls
    ]
    assert all(call.valid for call in reply.calls)
    assert reply.flags == []
    assert reply.finish == ("tool_calls" if calls else "stop")
    assert reply.errors == ([] if content or calls else [ParseError("empty")])


def test_the_section_says_where_an_answers_grammar_starts(k3_tokenizer):
    parser = xtml_parser(k3_tokenizer)
    sections = []
    for token in k3_tokenizer.trusted(FULL):
        parser.feed(token)
        if not sections or sections[-1] != parser.section:
            sections.append(parser.section)
    values = ["tools", "call", "argument", "call", "argument", "call", "tools"]
    assert sections == ["think", "message", "response", "message", *values, "message", "over"]


SECONDS = """
import time
from triax.data.chat import xtml_parser

class Bytes:
    control = {"<|open|>": 256, "<|close|>": 257, "<|sep|>": 258, "<|end_of_msg|>": 259}
    def encode_ordinary(self, text): return list(text.encode())
    def decode_bytes(self, tokens): return bytes(tokens)

def seconds(kind, value):
    opener = [256, *b"tools", 258, 256, *b'call tool="f"', 258, 256, *f'argument key="k" type="{kind}"'.encode(), 258]
    tokens = [*opener, *value, 257, *b"argument", 258]
    parser = xtml_parser(Bytes())
    start = time.process_time()
    parser.parse(tokens)
    return time.process_time() - start

for kind, unit in (("string", b"word "), ("array", b"1234,")):
    wrap = (lambda body: b"[" + body[:-1] + b"]") if kind == "array" else bytes
    short = long = 1e9
    for tries in range(1, 13):  # a busy machine disturbs some
        short = min(short, seconds(kind, wrap(unit * 1_600)))
        long = min(long, seconds(kind, wrap(unit * 12_800)))
        if tries > 2 and long / short < 3 * 8:
            break
    print(long / short)
"""


def test_parsing_is_linear_in_the_length_of_an_argument():
    """Arguments of 64,000 tokens, in a process without the checks of tests, which would hide the cost."""
    done = subprocess.run([sys.executable, "-c", SECONDS], capture_output=True, text=True, check=True)
    ratios = [float(line) for line in done.stdout.split()]
    assert len(ratios) == 2
    assert max(ratios) < 3 * 8
