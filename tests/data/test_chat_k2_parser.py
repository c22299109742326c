"""K2's answers: what its models get wrong, never a call lost or text leaked."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from triax.data.chat import CallStart, Finish, K2Options, ParseError, collect, k2, k2_parser
from triax.data.chat.k2_parser import find_by_arguments, find_name

BEGIN, END = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "parameters": {"type": "object", "properties": {"city": {}, "unit": {}}, "required": ["city"]},
    },
}
EXEC = {"type": "function", "function": {"name": "exec", "parameters": {"type": "object", "properties": {"code": {}}}}}
TOOLS = [WEATHER, EXEC]
USER = {"role": "user", "content": "hi"}


def asked(name, arguments):
    return {"function": {"name": name, "arguments": arguments}}


def written(id_, arguments):
    return f"<|tool_call_begin|>{id_}<|tool_call_argument_begin|>{arguments}<|tool_call_end|>"


def parse(tokenizer, output, reason=None, **kwargs):
    return k2_parser(tokenizer, **kwargs).parse(tokenizer.trusted(output), reason)


def made(reply):
    return [(call.id, call.name, json.loads(call.arguments)) for call in reply.calls if call.valid]


def test_a_whole_answer_is_split_into_its_fields(k2_tokenizer):
    calls = written("functions.exec:3", '{"code": "1"}') + written("functions.get_weather:4", '{"city": "北京"}')
    output = f"<think>alpha</think>beta{BEGIN}{calls}{END}<|im_end|>"
    reply = parse(k2_tokenizer, output, tools=TOOLS, num_calls=3)
    assert (reply.reasoning, reply.content, reply.finish) == ("alpha", "beta", "tool_calls")
    assert made(reply) == [
        ("functions.exec:3", "exec", {"code": "1"}),
        ("functions.get_weather:4", "get_weather", {"city": "北京"}),
    ]
    assert (reply.flags, reply.errors) == ([], [])
    assert parse(k2_tokenizer, output.removeprefix("<think>"), tools=TOOLS, num_calls=3, open_think=True) == reply
    assert parse(k2_tokenizer, output, tools=TOOLS, num_calls=3, open_think=True).reasoning == "alpha"


FORMS = [
    ("functions.exec:0", "exec"),
    ("functions.exec:12", "exec"),
    ("exec:0", "exec"),
    ("functions.exec", "exec"),
    (" functions.exec:0\n", "exec"),
    ("functionsexec5", "exec"),
    ("functions_exec_5", "exec"),
    ("functions exec:5", "exec"),
    ("exec", "exec"),
    ("exec5", "exec"),
    ("functions.Exec:0", "exec"),
    ("functions.get_weather:0", "get_weather"),
    ("functionsgetweather0", "get_weather"),
    ("functions.other:0", "other"),
    ("call00003", None),
    ("", None),
]


@pytest.mark.parametrize(("header", "name"), FORMS)
def test_names_are_recovered_from_the_ids_that_models_wrote(header, name):
    assert find_name(header, {"exec": EXEC, "get_weather": WEATHER}) == name


def test_a_name_with_digits_goes_before_one_that_is_a_part_of_it():
    tools = {"exec": EXEC, "exec5": EXEC, "functions": EXEC}
    assert find_name("functionsexec5", tools) == "exec5"
    assert find_name("functionsexec7", tools) == "exec"
    assert find_name("functions.exec5:1", tools) == "exec5"


def test_arguments_name_a_tool_only_where_one_takes_them():
    tools = {"exec": EXEC, "get_weather": WEATHER}
    assert find_by_arguments('{"city": "x"}', tools) == "get_weather"
    assert find_by_arguments('{"code": "x"}', tools) == "exec"
    assert find_by_arguments("{}", tools) == "exec"  # the city is required
    assert find_by_arguments('{"nothing": 1}', tools) is None
    assert find_by_arguments("{}", {"a": EXEC, "b": EXEC}) is None
    assert find_by_arguments("[", tools) is None


@pytest.mark.parametrize("header", [header for header, name in FORMS if name in ("exec", None)])
@pytest.mark.parametrize("num_calls", [1, 3])
def test_calls_with_such_ids_are_returned_streamed_and_whole(k2_tokenizer, header, num_calls):
    calls = written(header, '{"code": "1"}') * num_calls
    output = f"{BEGIN}{calls}{END}<|im_end|>"
    parser = k2_parser(k2_tokenizer, tools=TOOLS)
    events = [event for token in k2_tokenizer.trusted(output) for event in parser.feed(token)]
    reply = collect([*events, *parser.finish()])
    assert made(reply) == [(f"functions.exec:{n}", "exec", {"code": "1"}) for n in range(num_calls)]
    assert (reply.finish, reply.errors) == ("tool_calls", [])
    assert bool(reply.flags) == (header not in ("functions.exec:0", "functions.exec:12", " functions.exec:0\n"))


def test_a_call_of_no_known_tool_is_reported_with_its_text(k2_tokenizer):
    call = written("call00003", '{"x": 1}')
    reply = parse(k2_tokenizer, f"{BEGIN}{call}{END}<|im_end|>", tools=TOOLS)
    assert reply.errors == [ParseError("call_without_name", 'call00003{"x": 1}'), ParseError("empty")]
    assert (reply.finish, reply.calls) == ("stop", [])


ONE_BEGIN, ONE_END = "<|tool_call_section_begin|>", "<|tool_call_section_end|>"
CALL = written("functions.exec:0", '{"code": "1"}')


@pytest.mark.parametrize(
    ("output", "flags"),
    [
        (f"beta{BEGIN}{CALL}{END}<|im_end|>", []),
        (f"beta{ONE_BEGIN}{CALL}{ONE_END}<|im_end|>", ["spelled_section"]),
        (f"beta{ONE_BEGIN}\n{CALL}\n{ONE_END}\n<|im_end|>", ["spelled_section"]),
        (f"beta{ONE_BEGIN}{CALL}{END}<|im_end|>", ["spelled_section"]),
        (f"beta{BEGIN}{CALL}{ONE_END}<|im_end|>", []),
        (f"beta{CALL}<|im_end|>", ["no_section"]),
        (f"beta{CALL}{END}<|im_end|>", ["no_section"]),
        (f"beta{BEGIN}{CALL}<|im_end|>", []),
        (f"beta{BEGIN}{CALL.removesuffix('<|tool_call_end|>')}{END}<|im_end|>", ["unclosed_call"]),
        (f"beta{BEGIN}{CALL.removesuffix('<|tool_call_end|>')}<|im_end|>", ["unclosed_call"]),
        (f"beta{BEGIN}{CALL.replace('<|tool_call_argument_begin|>', '')}{END}<|im_end|>", ["no_arguments_marker"]),
    ],
)
def test_every_spelling_of_a_section_holds_calls(k2_tokenizer, output, flags):
    for prefix, reasoning in (("", ""), ("<think>alpha</think>", "alpha")):
        reply = parse(k2_tokenizer, prefix + output, tools=TOOLS)
        assert (reply.reasoning, reply.content, reply.finish) == (reasoning, "beta", "tool_calls")
        assert made(reply) == [("functions.exec:0", "exec", {"code": "1"})]
        assert (reply.flags, reply.errors) == (flags, [])


@pytest.mark.parametrize("section", [BEGIN, ONE_BEGIN, ""])
def test_a_call_inside_thinking_ends_it(k2_tokenizer, section):
    reply = parse(k2_tokenizer, f"alpha{section}{CALL}<|im_end|>", tools=TOOLS, open_think=True)
    assert (reply.reasoning, reply.content, reply.finish) == ("alpha", "", "tool_calls")
    assert made(reply) == [("functions.exec:0", "exec", {"code": "1"})]
    assert "unclosed_think" in reply.flags


@pytest.mark.parametrize(
    "text", [ONE_BEGIN, f"a {ONE_BEGIN} b", f"{ONE_BEGIN}{' ' * 80}", "<|tool_call_sec", "a < b", "<"]
)
def test_an_answer_may_quote_a_marker(k2_tokenizer, text):
    reply = parse(k2_tokenizer, text + "<|im_end|>")
    assert (reply.content, reply.finish, reply.errors) == (text, "stop", [])
    assert parse(k2_tokenizer, text, "length").content == text


def test_text_after_a_call_without_a_section_is_content(k2_tokenizer):
    reply = parse(k2_tokenizer, f"be{CALL}\nta<|im_end|>", tools=TOOLS)
    assert reply.content == "be\nta"
    assert len(made(reply)) == 1


@pytest.mark.parametrize("arguments", ["", "  "])
def test_a_call_without_arguments_has_an_empty_object(k2_tokenizer, arguments):
    reply = parse(k2_tokenizer, f"{BEGIN}{written('functions.exec:0', arguments)}{END}<|im_end|>")
    assert made(reply) == [("functions.exec:0", "exec", {})]


@pytest.mark.parametrize("arguments", ['{"a": 1', "[1]", "1", '{"a": NaN}'])
def test_broken_arguments_are_reported_and_the_call_not_made(k2_tokenizer, arguments):
    reply = parse(k2_tokenizer, f"x{BEGIN}{written('functions.exec:0', arguments)}{END}<|im_end|>")
    assert reply.errors == [ParseError("arguments", arguments)]
    assert (made(reply), reply.finish, reply.message().get("tool_calls")) == ([], "stop", None)


def test_a_call_cut_before_its_name_is_known_is_reported_whole(k2_tokenizer):
    for cut in ("call7", 'call7<|tool_call_argument_begin|>{"x"'):
        reply = parse(k2_tokenizer, f"x{BEGIN}<|tool_call_begin|>{cut}", "length", tools=TOOLS)
        assert reply.errors == [ParseError("cut_call", cut.replace("<|tool_call_argument_begin|>", ""))]
        assert (reply.calls, reply.finish) == ([], "length")


def test_an_empty_stop_is_never_silent(k2_tokenizer):
    for output in ("<|im_end|>", "\n<|im_end|>", "<think>a</think><|im_end|>", f"{BEGIN}{END}<|im_end|>"):
        reply = parse(k2_tokenizer, output)
        assert (reply.finish, reply.errors) == ("stop", [ParseError("empty")])


GAMMA = written("functions.exec:0", '{"code": "gamma"}')
FULL = f"<think>alpha</think>beta{BEGIN}{GAMMA}{END}<|im_end|>"


def test_output_cut_anywhere_is_length_and_leaks_nothing(k2_tokenizer):
    tokens = k2_tokenizer.trusted(FULL)
    for cut in range(len(tokens)):
        reply = k2_parser(k2_tokenizer).parse(tokens[:cut], "length")
        assert reply.finish == "length"
        assert "alpha".startswith(reply.reasoning)
        assert "beta".startswith(reply.content)
        for call in reply.calls:
            assert call.valid == (cut > tokens.index(k2_tokenizer.control["<|tool_call_end|>"]))
            assert call.valid or reply.errors


@pytest.mark.parametrize("size", [1, 3, 1000])
def test_text_alone_gives_the_same_message_however_it_is_cut(k2_tokenizer, size):
    for output in (FULL, f"a <| b <th{ONE_BEGIN}{CALL}<|im_end|>"):
        parser = k2_parser(k2_tokenizer)
        pieces = [output[start : start + size] for start in range(0, len(output), size)]
        events = [event for piece in pieces for event in parser.feed_text(piece)]
        assert collect([*events, *parser.finish()]) == parse(k2_tokenizer, output)


def test_every_lost_marker_loses_no_word(k2_tokenizer):
    tokens = k2_tokenizer.trusted(FULL)
    control = set(k2_tokenizer.control.values())
    for at in [number for number, token in enumerate(tokens) if token in control]:
        reply = k2_parser(k2_tokenizer, tools=TOOLS).parse(tokens[:at] + tokens[at + 1 :], "stop")
        everything = reply.reasoning + reply.content
        everything += "".join(c.arguments for c in reply.calls) + "".join(error.raw for error in reply.errors)
        assert all(word in everything for word in ("alpha", "beta", "gamma"))


@given(
    st.lists(
        st.sampled_from(
            [
                *("<think>", "</think>", BEGIN, END, "<|tool_call_begin|>", "<|tool_call_argument_begin|>"),
                *("<|tool_call_end|>", "<|im_end|>", "<|im_user|>", "<|media_pad|>", ONE_BEGIN, ONE_END, "<|tool"),
                *("word ", "{}", "functions.exec:0", " ", "call0"),
            ]
        ),
        max_size=20,
    ),
    st.sampled_from([None, "stop", "length"]),
)
@settings(max_examples=100)
def test_whatever_is_written_is_read_without_loss(k2_tokenizer, pieces, reason):
    output = "".join(pieces)
    parser = k2_parser(k2_tokenizer, tools=TOOLS)
    events = [event for token in k2_tokenizer.trusted(output) for event in parser.feed(token)]
    events += parser.finish(reason)
    assert isinstance(events[-1], Finish)
    reply = collect(events)
    assert len([event for event in events if isinstance(event, CallStart)]) == len(reply.calls)
    for call in reply.calls:
        assert not call.valid or isinstance(json.loads(call.arguments), dict)
    told = [reply.reasoning, reply.content, *(call.arguments for call in reply.calls)]
    told += [error.raw for error in reply.errors] + [event.detail for event in events if hasattr(event, "detail")]
    assert "".join(told).count("word") >= output.count("word")
    if reply.finish == "stop" and not reply.content.strip():
        assert reply.errors


WORDS = st.lists(st.sampled_from(['"', "<|im_end|>", "🙂", "\n", "\\u00e9", "{", "&"]) | st.text(max_size=3)).map(
    "".join
)


@given(WORDS, WORDS, st.lists(st.dictionaries(WORDS, WORDS | st.integers() | st.none() | st.floats(0, 1), max_size=2)))
@settings(max_examples=40)
def test_what_is_rendered_is_parsed_back(k2_tokenizer, reasoning, content, calls):
    reasoning = reasoning if reasoning.strip() else ""
    message = {
        "role": "assistant",
        "content": content,
        "reasoning_content": reasoning,
        "tool_calls": [asked(f"tool-{n}.x", arguments) for n, arguments in enumerate(calls)],
    }
    options = K2Options(thinking=True, open_think=True)
    prompt = k2.prompt(k2_tokenizer, [USER], options)
    whole = k2.prompt(k2_tokenizer, [USER, message], options, generate=False)
    reply = k2_parser(k2_tokenizer, open_think=True).parse(whole.ids[len(prompt.ids) :])
    assert (reply.reasoning, reply.content) == (reasoning, content)
    assert made(reply) == [(f"functions.tool-{n}.x:{n}", f"tool-{n}.x", arguments) for n, arguments in enumerate(calls)]
    assert reply.flags == []
