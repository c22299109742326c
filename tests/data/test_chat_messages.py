"""What a conversation may hold: messages, tool declarations and the options of a request."""

import json

import pytest

from triax.data.chat import Image, Options, check_tools, k2, read_messages, request_options, spell, xtml
from triax.errors import DataError


def tool(name="f", **parameters):
    return {"type": "function", "function": {"name": name, "parameters": parameters or {"type": "object"}}}


@pytest.mark.parametrize(
    ("tools", "words"),
    [
        ("get", r"tools: must be a list"),
        ({"name": "f"}, r"tools: must be a list"),
        (["f"], r"tools\[0\]: must be a function; found `'f'`"),
        ([{"type": "builtin_function", "function": {"name": "f"}}], r"tools\[0\]: must be a function"),
        ([{"type": "function"}], r"tools\[0\].function: must be an object; found `None`"),
        ([tool("")], r"tools\[0\].function.name: not allowed; found `''`"),
        ([tool("a b")], r"tools\[0\].function.name: not allowed; found `'a b'`"),
        ([tool("a\n")], r"function.name: not allowed"),
        ([tool('a"b')], r"function.name: not allowed"),
        ([tool("<|open|>")], r"function.name: not allowed"),
        ([tool("x" * 65)], r"function.name: not allowed"),
        ([tool("naïve")], r"function.name: not allowed"),
        ([{"function": {"name": 3}}], r"function.name: not allowed; found `3`"),
        ([tool("a"), tool("b"), tool("a")], r"tools\[2\].function.name: declared twice; found `a` also in tools\[0\]"),
        ([{"function": {"name": "f", "description": 3}}], r"function.description: must be text; found `3`"),
        (
            [{"function": {"name": "f", "parameters": "x"}}],
            r"function.parameters: must be the JSON schema of an object",
        ),
        ([tool(type="array", items={})], r"function.parameters: must be the JSON schema of an object"),
        ([tool(type="string")], r"found `{'type': 'string'}`"),
        ([tool(type="object", properties=["a"])], r"parameters.properties: must be an object"),
        ([tool(type="object", required="a")], r"parameters.required: must be a list of names"),
        ([tool(type="object", default=float("nan"))], r"tools: cannot be written as JSON"),
    ],
)
def test_a_bad_tool_declaration_is_refused_in_words(tools, words):
    with pytest.raises(DataError, match=words):
        check_tools(tools)
    with pytest.raises(DataError, match=words):
        request_options({"tools": tools})


def test_good_tools_pass_and_keep_their_order():
    tools = [tool("b.c-d_1"), {"function": {"name": "a"}}]
    assert check_tools(tools) == tuple(tools)
    assert check_tools(None) == ()


def test_bad_tools_on_a_system_message_name_the_message():
    with pytest.raises(DataError, match=r"messages\[1\].tools\[0\].function.name"):
        read_messages([{"role": "user", "content": "x"}, {"role": "system", "tools": [tool("a b")]}])


@pytest.mark.parametrize(
    ("message", "words"),
    [
        ("x", r"messages\[0\]: must be an object"),
        ({"content": "x"}, r"messages\[0\].role: not a role; found `None`"),
        ({"role": "critic", "content": "x"}, r"messages\[0\].role: not a role; found `'critic'`"),
        ({"role": ["user"]}, r"messages\[0\].role: not a role"),
        ({"role": "user", "content": 3}, r"messages\[0\].content: must be text, null or a list"),
        ({"role": "user", "content": [{"type": "audio"}]}, r"content\[0\].type: not a part .* found `'audio'`"),
        ({"role": "user", "content": ["x"]}, r"content\[0\].type: not a part"),
        ({"role": "user", "content": [{"type": "image_url"}]}, r"content\[0\]: an image of unknown size"),
        ({"role": "user", "content": "a\ud800"}, r"messages\[0\].content: not valid Unicode; .* at character 1"),
        ({"role": "assistant", "reasoning_content": 3}, r"reasoning_content: must be text"),
        ({"role": "assistant", "tool_calls": [{"id": "a"}]}, r"tool_calls\[0\]: a call without a name"),
        ({"role": "assistant", "tool_calls": "x"}, r"tool_calls: must be a list"),
        (
            {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "[1]"}}]},
            r"function.arguments: must be a JSON object",
        ),
        (
            {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": {"a": float("inf")}}}]},
            r"function.arguments: cannot be written as JSON",
        ),
        (
            {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": {1: 2}}}]},
            r"names must be text; found `1`",
        ),
    ],
)
def test_a_message_that_cannot_be_rendered_is_refused_in_words(message, words):
    with pytest.raises(DataError, match=words):
        read_messages([message])


def test_an_image_without_a_place_is_refused():
    with pytest.raises(DataError, match="images: more are given"):
        read_messages([{"role": "user", "content": "x"}], [Image(1, 1, 1)])


def test_the_developer_is_the_system():
    one = xtml.segments([{"role": "developer", "content": "x"}])
    assert one == xtml.segments([{"role": "system", "content": "x"}])


@pytest.mark.parametrize("effort", ["medium", "minimal", "xhigh", "huge"])
def test_an_effort_that_k3_does_not_know_is_refused_with_the_nearest(effort):
    nearest = {"medium": "use high", "minimal": "use low", "xhigh": "use max"}.get(effort, "use low, high or max")
    with pytest.raises(DataError, match=f"reasoning_effort: not supported; found `{effort}`; {nearest}"):
        request_options({"reasoning_effort": effort})
    with pytest.raises(DataError, match=f"thinking.effort: .*{nearest}"):
        request_options({"thinking": {"effort": effort}})


@pytest.mark.parametrize(
    ("request_", "keep"),
    [
        ({}, "last"),
        ({"preserve_thinking": True}, "all"),
        ({"preserve_thinking": False}, "last"),
        ({"thinking": {"keep": "all"}, "preserve_thinking": False}, "all"),
        ({"thinking": {"keep": "last"}, "preserve_thinking": True}, "last"),
    ],
)
def test_f07_k2_shows_as_much_earlier_reasoning_as_a_request_asks_for(request_, keep):
    assert request_options(request_, keeps=("last", "all")).keep == keep
    with pytest.raises(DataError, match=r"thinking\.keep: not known; found `'none'`; use last or all"):
        request_options({"thinking": {"keep": "none"}}, keeps=("last", "all"))


@pytest.mark.parametrize(
    ("request_", "thinking", "effort"),
    [
        ({}, True, "max"),
        ({"reasoning_effort": "low"}, True, "low"),
        ({"reasoning_effort": "none"}, False, None),
        ({"enable_thinking": False}, False, None),
        ({"enable_thinking": True, "reasoning_effort": "none"}, True, "max"),
        ({"thinking": {"type": "disabled"}, "reasoning_effort": "high"}, False, None),
        ({"thinking": {"type": "enabled", "keep": "all", "effort": "low"}, "reasoning_effort": "high"}, True, "low"),
        ({"thinking": False}, False, None),
        ({"thinking": None, "tool_choice": None}, True, "max"),
        ({"thinking_effort": "low", "reasoning_effort": "high"}, True, "low"),
        ({"thinking": {"effort": "high"}, "thinking_effort": "low"}, True, "high"),
        ({"thinking": True, "preserve_thinking": True, "thinking_effort": "low"}, True, "low"),
        ({"thinking": {"type": "disabled", "keep": "none"}, "preserve_thinking": False}, False, None),
    ],
)
def test_a_request_says_whether_and_how_much_to_think(request_, thinking, effort):
    options = request_options(request_)
    assert (options.thinking, options.effort) == (thinking, effort)


@pytest.mark.parametrize(
    ("request_", "words"),
    [
        ({"thinking": {"keep": "last"}}, "thinking.keep: K3 keeps all"),
        ({"preserve_thinking": False}, "preserve_thinking: K3 keeps all earlier reasoning; found `False`"),
        ({"thinking_effort": "medium"}, "thinking_effort: not supported; found `medium`; use high"),
        ({"thinking": {"type": "sometimes"}}, "thinking.type: not a mode"),
        ({"thinking": {"budget": 3}}, r"thinking: must be an object of type, keep and effort; found `\['budget'\]`"),
        ({"thinking": "yes"}, "thinking: must be an object"),
        ({"tool_choice": {"type": "function", "function": {"name": "f"}}}, "tool_choice: K3 has no such choice"),
        ({"tool_choice": "any"}, "tool_choice: K3 has no such choice"),
        ({"response_format": "json_object"}, "response_format.type: not a format"),
        ({"response_format": {"type": "xml"}}, "response_format.type: not a format; found `'xml'`"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema: no schema"),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": "x"}}}, "json_schema: no schema"),
    ],
)
def test_a_request_that_k3_does_not_know_is_refused_in_words(request_, words):
    with pytest.raises(DataError, match=words):
        request_options(request_)


def test_a_call_is_required_only_where_there_are_tools():
    with pytest.raises(DataError, match="tool_choice: there is nothing to call"):
        xtml.segments([{"role": "user", "content": "x"}], Options(tool_choice="required"))
    later = [{"role": "system", "tools": [tool()]}]
    assert "tool_choice=required" in spell(xtml.segments(later, Options(tool_choice="required")))


def test_content_beside_tools_is_refused_rather_than_dropped():
    with pytest.raises(DataError, match=r"messages\[0\]: a system message with tools shows no content"):
        xtml.segments([{"role": "system", "content": "x", "tools": [tool()]}])


@pytest.mark.parametrize("format_", [xtml, k2])
def test_a_result_without_a_call_is_refused(format_):
    with pytest.raises(DataError, match=r"messages\[1\]: a tool result that answers no call; .*`x`"):
        format_.segments([{"role": "user", "content": "a"}, {"role": "tool", "tool_call_id": "x", "content": "b"}])


def test_a_tokenizer_of_the_other_family_is_refused(k2_tokenizer, k3_tokenizer):
    with pytest.raises(DataError, match=r"it has no control token `<\|open\|>`"):
        xtml.prompt(k2_tokenizer, [{"role": "user", "content": "x"}])
    with pytest.raises(DataError, match=r"it has no control token `<\|im_system\|>`"):
        k2.prompt(k3_tokenizer, [{"role": "user", "content": "x"}])


@pytest.mark.parametrize(
    "arguments",
    ["{", "{'a': 1}", '{"a": NaN}', '{"a": ' + "9" * 5000 + "}", "[" * 100_000, '{"a": "\\ud83d"}', "call me"],
)
def test_arguments_that_are_no_json_are_kept_as_they_are(arguments):
    call = {"function": {"name": "f", "arguments": arguments}}
    (message,) = read_messages([{"role": "assistant", "tool_calls": [call]}])
    assert message.calls[0].arguments == arguments
    assert message.calls[0].json == arguments


@pytest.mark.parametrize("arguments", [None, "", "  \n", {}, "{}"])
def test_no_arguments_are_an_empty_object(arguments):
    call = {"function": {"name": "f", "arguments": arguments}}
    (message,) = read_messages([{"role": "assistant", "tool_calls": [call]}])
    assert message.calls[0].arguments == {}
    assert json.loads(message.calls[0].json) == {}
