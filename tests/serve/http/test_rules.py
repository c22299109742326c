"""What K3's API refuses, and the error object that says so; a request that is refused leaves nothing behind."""

import base64
import io
import json
import re

import pytest
from PIL import Image

USER = {"role": "user", "content": "hi"}


def tool(name="f", **function):
    parameters = {"type": "object", "properties": {}}
    return {"type": "function", "function": {"name": name, "parameters": parameters} | function}


def system(*tools, **fields):
    return {"role": "system", "tools": list(tools)} | fields


def without(tree, *path):
    """Return a copy of a declaration that lacks one key."""
    tree = {name: dict(value) if isinstance(value, dict) else value for name, value in tree.items()}
    place = tree
    for name in path[:-1]:
        place = place[name]
    del place[path[-1]]
    return tree


def form(**wrapper):
    return {"response_format": {"type": "json_schema", "json_schema": wrapper}}


def deep(levels):
    tree = {"type": "string"}
    for _ in range(levels):
        tree = {"type": "object", "properties": {"a": tree}}
    return tree


CASES = {
    "tools in a user message": ({"messages": [USER | {"tools": [tool()]}]}, "messages[0].tools"),
    "content and tools": ({"messages": [system(tool(), content="x"), USER]}, "messages[0]"),
    "added tool without type": ({"messages": [system(without(tool(), "type")), USER]}, "messages[0].tools[0].type"),
    "added tool without function": (
        {"messages": [system({"type": "function"}), USER]},
        "messages[0].tools[0].function",
    ),
    "added tool without name": (
        {"messages": [system(without(tool(), "function", "name")), USER]},
        "messages[0].tools[0].function.name",
    ),
    "added tool without parameters": (
        {"messages": [system(without(tool(), "function", "parameters")), USER]},
        "messages[0].tools[0].function.parameters",
    ),
    "f50 name that begins with a digit": ({"tools": [tool("1bad")]}, "tools[0].function.name"),
    "name with a blank": ({"tools": [tool("a b")]}, "tools[0].function.name"),
    "name that is too long": ({"tools": [tool("a" * 65)]}, "tools[0].function.name"),
    "name with a line break": ({"tools": [tool("a\n")]}, "tools[0].function.name"),
    "names twice": ({"tools": [tool(), tool()]}, "tools[1].function.name"),
    "names twice, one added": (
        {"tools": [tool()], "messages": [system(tool()), USER]},
        "messages[0].tools[0].function.name",
    ),
    "tool without type": ({"tools": [without(tool(), "type")]}, "tools[0].type"),
    "tool of another type": ({"tools": [tool() | {"type": "web_search"}]}, "tools[0]"),
    "schema of a list": ({"tools": [tool(parameters={"type": "array"})]}, "tools[0].function.parameters"),
    "result without its call": ({"messages": [USER, {"role": "tool", "content": "x"}]}, "messages[1].tool_call_id"),
    "result of no call": (
        {"messages": [USER, {"role": "tool", "content": "x", "tool_call_id": "y"}]},
        "messages[1]",
    ),
    "a named tool": (
        {"tools": [tool()], "tool_choice": {"type": "function", "function": {"name": "f"}}},
        "tool_choice",
    ),
    "another choice": ({"tools": [tool()], "tool_choice": "any"}, "tool_choice"),
    "required without tools": ({"tool_choice": "required"}, "tool_choice"),
    "required with no tools": ({"tool_choice": "required", "tools": []}, "tool_choice"),
    "schema without name": (form(schema={"type": "object"}), "response_format.json_schema.name"),
    "schema that is a text": (form(name="x", schema="object"), "response_format.json_schema.schema"),
    "no schema": (form(name="x"), "response_format.json_schema.schema"),
    "strict that is a text": (
        form(name="x", schema={"type": "object"}, strict="yes"),
        "response_format.json_schema.strict",
    ),
    "schema of many properties": (
        form(name="x", schema={"type": "object", "properties": {f"p{n}": {} for n in range(129)}}),
        "response_format.json_schema.schema",
    ),
    "schema of many values": (form(name="x", schema={"enum": list(range(1001))}), "response_format.json_schema.schema"),
    "deep schema": (form(name="x", schema=deep(80)), "response_format.json_schema.schema"),
    "large schema of a tool": (
        {"tools": [tool(parameters={"type": "object", "properties": deep(80)})], "tool_choice": "required"},
        "tools[0].function.parameters",
    ),
    "another form": ({"response_format": {"type": "xml"}}, "response_format.type"),
    "medium effort": ({"reasoning_effort": "medium"}, "reasoning_effort"),
    "minimal effort": ({"reasoning_effort": "minimal"}, "reasoning_effort"),
    "effort xhigh": ({"thinking": {"effort": "xhigh"}}, "thinking.effort"),
    "medium effort of the template": ({"chat_template_kwargs": {"thinking_effort": "medium"}}, "thinking_effort"),
    "dropping earlier thinking": ({"chat_template_kwargs": {"preserve_thinking": False}}, "preserve_thinking"),
    "a word that preserves": (
        {"chat_template_kwargs": {"preserve_thinking": "yes"}},
        "chat_template_kwargs.preserve_thinking",
    ),
    "keeping the last thinking only": ({"thinking": {"keep": "last"}}, "thinking.keep"),
    "another mode of thinking": ({"thinking": {"type": "maybe"}}, "thinking.type"),
    "unknown field": ({"warmth": 1}, "warmth"),
    "unknown field of the template": ({"chat_template_kwargs": {"x": 1}}, "chat_template_kwargs"),
    "temperature as text": ({"temperature": "1"}, "temperature"),
    "temperature too high": ({"temperature": 2.5}, "temperature"),
    "no tokens": ({"max_tokens": 0}, "max_tokens"),
    "truth as a number": ({"stream": 1}, "stream"),
    "bias of no token": ({"logit_bias": {"x": 1}}, "logit_bias"),
    "bias of another vocabulary": ({"logit_bias": {"99999999": 1}}, "logit_bias"),
    "top logprobs alone": ({"top_logprobs": 2}, "top_logprobs"),
    "no messages": ({"messages": []}, "messages"),
    "another role": ({"messages": [{"role": "critic", "content": "x"}]}, "messages[0].role"),
    "a user without words": ({"messages": [{"role": "user"}]}, "messages[0].content"),
    "half a character": ({"messages": [{"role": "user", "content": "\ud83d"}]}, "messages[0].content"),
    "half a character as an effort": ({"reasoning_effort": "\ud83d"}, "reasoning_effort"),
    "half a character as a token": ({"logit_bias": {"\ud83d": 1}}, "logit_bias"),
    "half a character as an address": (
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "\ud83d"}}]}]},
        "messages[0].content[0].image_url",
    ),
    "half a character in what is kept": ({"metadata": {"a": "\ud83d"}}, "metadata"),
    "half a character as a form's name": (
        form(name="\ud83d", schema={"type": "object"}),
        "response_format.json_schema.name",
    ),
    "sound": (
        {"messages": [{"role": "user", "content": [{"type": "input_audio", "input_audio": {}}]}]},
        "messages[0].content[0].type",
    ),
    "a prompt that does not fit": ({"messages": [{"role": "user", "content": "x1y2" * 4000}]}, "prompt"),
}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_what_cannot_be_answered_is_refused_with_the_field_and_a_way_out(server, name, stream):
    fields, param = CASES[name]
    response = server.post("/v1/chat/completions", {"model": "m", "messages": [USER], "stream": stream} | fields)
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert error["type"] == "invalid_request_error"
    assert error["param"] == param, error
    assert error["message"].startswith(param)
    assert error["message"].count("; ") >= 2  # what is wrong; what was found; what to do


NOT_HELD = {"type": "object", "properties": {"née": {"type": "array", "maxContains": 2, "contains": True}}}
BY_PLACE = {
    "response_format.json_schema.schema": form(name="x", schema=NOT_HELD),
    "tools[1].function.parameters": {
        "tools": [tool("g"), tool(parameters=NOT_HELD)],
        "tool_choice": {"type": "function", "function": {"name": "f"}},
    },
    "tools[0].function.parameters": {"tools": [tool(parameters=NOT_HELD, strict=True)]},
    "messages[0].tools[0].function.parameters": {
        "messages": [system(tool(parameters=NOT_HELD)), USER],
        "tool_choice": "required",
    },
}


@pytest.mark.parametrize("place", BY_PLACE)
def test_f44_a_keyword_that_cannot_be_held_is_named_with_its_field(server, k2_server, place):
    servers = [server, k2_server]
    if "tool_choice" in BY_PLACE[place]:  # named tools are K2's, tools in mid-session K3's
        servers = [server] if "messages" in BY_PLACE[place] else [k2_server]
    for one in servers:
        response = one.post("/v1/chat/completions", {"model": "m", "messages": [USER]} | BY_PLACE[place])
        assert response.status_code == 400, response.text
        error = response.json()["error"]
        assert error["param"] == f"{place}.properties.née.maxContains"
        assert "`maxContains`" in error["message"]


def test_f44_what_is_not_held_to_a_schema_may_have_any(ask, server):
    ask(ask.said("x"), tools=[tool(parameters=NOT_HELD)])
    assert server.last()["structure"] is None


def test_f42_strict_tools_are_guided_where_the_model_may_choose(ask, server):
    strict = tool(strict=True)
    ask(ask.said("x"), tools=[strict, tool("g")])
    last = server.last()
    assert last["structure"][0] == "auto"
    assert json.loads(last["structure"][1]) == [strict, tool("g")]
    ask(ask.said("x"), tools=[strict], tool_choice="none")
    assert server.last()["structure"] is None


def test_the_context_has_its_own_code(server):
    messages = [{"role": "user", "content": "x1y2" * 4000}]
    error = server.post("/v1/chat/completions", {"model": "m", "messages": messages}).json()["error"]
    assert error["code"] == "context_length_exceeded"


def test_what_only_the_engine_can_refuse_is_refused_before_a_stream_begins(server):
    name = server.script("refused", "", refuse="CapacityError")
    for stream in (False, True):
        body = {"model": "m", "messages": [{"role": "user", "content": name}], "stream": stream}
        response = server.post("/v1/chat/completions", body)
        assert (response.status_code, response.json()["error"]["code"]) == (400, "context_length_exceeded")


@pytest.mark.parametrize(
    ("body", "status", "words"),
    [
        (b"", 400, "not JSON"),
        (b"{", 400, "not JSON"),
        (b'{"model": NaN}', 400, "not JSON"),
        (b'{"model": "m", "messages": ' + b"[" * 100_000, 400, "not JSON"),
        (b"\xff\xfe", 400, "not JSON"),
        (b"[]", 400, "body"),
        (b'"text"', 400, "body"),
        (b'{"messages": []}', 400, "model: is missing"),
        (b'{"model": "other", "messages": [{"role": "user", "content": "x"}]}', 404, "model: not served here"),
    ],
)
def test_broken_bodies_get_an_error_object(server, body, status, words):
    import httpx

    headers = {"content-type": "application/json"}
    response = httpx.post(f"{server.url}/v1/chat/completions", content=body, headers=headers)
    assert response.status_code == status
    assert words in response.json()["error"]["message"]


def test_a_page_of_another_origin_cannot_send_a_plain_form(server):
    import httpx

    response = httpx.post(f"{server.url}/v1/chat/completions", data={"model": "m"})
    assert response.status_code == 415
    assert "access-control-allow-origin" not in httpx.options(f"{server.url}/v1/models").headers


def test_other_paths_and_methods_get_an_error_object(server):
    assert server.get("/v1/nothing").json()["error"]["message"].startswith("path: nothing is here")
    response = server.get("/v1/chat/completions")
    assert (response.status_code, response.json()["error"]["type"]) == (405, "invalid_request_error")


def test_what_clients_send_back_is_taken(ask, server):
    first = ask(ask.said("one", "thought"))
    message = first.choices[0].message.model_dump() | {"annotations": [], "function_call": None, "audio": None}
    second = ask(ask.said("two"), messages=[{"role": "user", "content": "hi"}, message])
    assert second.choices[0].message.content == "two"
    assert "thought<|close|>think" in server.last()["words"]


def test_the_next_prompt_begins_with_this_one_and_its_answer(ask, server):
    """Nothing that was computed is computed again: prompt and answer are the beginning of the next prompt."""
    words = ask.called(("f", {"a": "x y"}), thought="deep")
    first = ask(words, tools=[ask.tool("f")], extra_body={"return_token_ids": True})
    before = first.prompt_token_ids + first.choices[0].token_ids
    message = first.choices[0].message
    call = message.tool_calls[0]
    said = server.last()["words"].split('role="user"<|sep|>')[1].split("<|close|>")[0]
    history = [
        {"role": "user", "content": said},
        message.model_dump(exclude_none=True),
        {"role": "tool", "tool_call_id": call.id, "content": "done"},
    ]
    second = ask(ask.said("two"), messages=history, tools=[ask.tool("f")], extra_body={"return_token_ids": True})
    assert second.prompt_token_ids[: len(before)] == before


def test_options_reach_the_prompt(ask, server):
    ask(ask.said("x"), reasoning_effort="low")
    assert "thinking_effort=low" in server.last()["words"]
    ask(ask.said("x"))
    assert "thinking_effort=max" in server.last()["words"]
    ask("x<|close|>response<|sep|>", extra_body={"thinking": {"type": "disabled"}})
    assert server.last()["words"].endswith("<|open|>response<|sep|>")
    ask("x", extra_body={"chat_template_kwargs": {"thinking": False}})
    assert server.last()["words"].endswith("<|open|>response<|sep|>")
    ask("x", reasoning_effort="none")
    assert server.last()["words"].endswith("<|open|>response<|sep|>")


def test_f07_the_templates_words_for_thinking_have_their_meaning(ask, server):
    words = {"thinking": True, "preserve_thinking": True, "thinking_effort": "low"}
    ask(ask.said("x"), extra_body={"chat_template_kwargs": words})
    assert "thinking_effort=low" in server.last()["words"]
    ask(ask.said("x"), reasoning_effort="high", extra_body={"chat_template_kwargs": words})
    assert "thinking_effort=high" in server.last()["words"], "the field of the body goes before the template's"
    ask("x", extra_body={"chat_template_kwargs": words | {"thinking": False, "preserve_thinking": False}})
    assert server.last()["words"].endswith("<|open|>response<|sep|>")
    assert "thinking_effort" not in server.last()["words"]
    ask("x", extra_body={"enable_thinking": False, "chat_template_kwargs": words})
    assert server.last()["words"].endswith("<|open|>response<|sep|>")


def test_added_tools_and_choices_reach_the_prompt_and_the_engine(ask, server):
    added = system(tool("g"))
    ask(ask.called(("g", {})), messages=[added], tools=[tool("f")], tool_choice="required")
    last = server.last()
    assert "New Tools Available" in last["words"]
    assert "tool_choice=required" in last["words"]
    assert last["structure"][0] == "tools"
    assert '"g"' in last["structure"][1]
    assert '"f"' in last["structure"][1]
    assert last["thinking"] == "open"


def test_a_form_begins_after_the_thinking(ask, server):
    options = form(name="x", schema={"type": "object", "properties": {"a": {"type": "integer"}}})
    ask(ask.said('{"a":1}', "t"), **options)
    thinking = server.last()
    assert thinking["structure"][0] == "json_schema"
    assert thinking["thinking"] == "open"
    ask('{"a":1}', reasoning_effort="none", **options)
    assert server.last()["thinking"] == ""


def test_a_form_stands_beside_the_calls_of_tools_that_may_be_called(ask, server):
    options = form(name="x", schema={"type": "object"}) | {"tools": [tool()]}
    ask(ask.said("{}"), **options)
    last = server.last()
    assert last["structure"][0] == "json_schema"
    assert json.loads(last["callable"]) == [tool()]
    assert "response_format=json_schema" in last["words"]
    ask(ask.said("{}"), tool_choice="none", **options)
    assert (server.last()["structure"][0], server.last()["callable"]) == ("json_schema", "")


def test_sampling_is_the_models_own_unless_asked_otherwise(ask, server):
    ask(ask.said("x"))
    assert (server.last()["temperature"], server.last()["top_p"]) == (1.0, 0.95)
    ask(ask.said("x"), temperature=0, top_p=0.5, seed=7, max_tokens=9)
    last = server.last()
    assert (last["temperature"], last["top_p"], last["seed"], last["max_tokens"]) == (0, 0.5, 7, 9)


def test_borders_stand_where_the_next_conversation_may_part(ask, server):
    messages = [{"role": "system", "content": "be"}, {"role": "user", "content": "x"}]
    messages += [{"role": "assistant", "content": "y"}]
    response = ask(ask.said("z"), messages=messages, tools=[tool()], extra_body={"return_token_ids": True})
    tokens, borders = response.prompt_token_ids, server.last()["borders"]
    parts = [server.post("/detokenize", {"tokens": tokens[:border]}).json()["text"] for border in borders]
    assert len(parts) == 3
    assert all(part.endswith("<|end_of_msg|>") for part in parts)
    assert parts[0].endswith('<|open|>message role="system"<|sep|>be<|close|>message<|sep|><|end_of_msg|>')
    assert 'role="assistant"' in parts[1].split("<|end_of_msg|>")[-2]
    assert 'role="user"' in parts[2].split("<|end_of_msg|>")[-2]


def png(width=60, height=30):
    file = io.BytesIO()
    Image.new("RGB", (width, height), "red").save(file, "PNG")
    return "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()


def picture(url):
    return {"type": "image_url", "image_url": {"url": url}}


def test_pictures_reach_the_engine_with_their_place(ask, server):
    content = [picture(png()), {"type": "text", "text": "and"}, picture(png(28, 28))]
    response = ask(ask.said("x"), messages=[{"role": "user", "content": content}])
    media = server.last()["media"]
    assert [item[2] for item in media] == [6, 1]
    assert media[1][1] > media[0][1] + 6
    assert media[0][3] == 6 * 4 * 3 * 14 * 14 * 4
    with_text = ask(ask.said("x"), messages=[{"role": "user", "content": "and"}])
    assert response.usage.prompt_tokens > with_text.usage.prompt_tokens + 7


def test_f06_pictures_follow_their_tool_results_into_the_order_of_the_calls(ask, server):
    """Results are told in the order of their calls; of equal sizes, swapped pictures would pass unseen."""
    calls = [{"id": name, "type": "function", "function": {"name": "f", "arguments": "{}"}} for name in "abc"]
    shown = {
        "a": [picture(png(30, 30))],
        "b": [picture(png(40, 40)), picture(png(56, 28))],
        "c": [picture(png(41, 41))],
    }
    digests = {}
    for order in ("abc", "cab", "bca"):
        history = [
            {"role": "user", "content": [picture(png(29, 28))]},
            {"role": "assistant", "content": "", "tool_calls": calls},
            *({"role": "tool", "tool_call_id": name, "content": shown[name]} for name in order),
        ]
        ask(ask.said("x"), messages=history, tools=[ask.tool("f")])
        told = server.last()
        digests[order] = [item[:3] for item in told["media"]]
        sizes = re.findall(r"image (\d+x\d+)", told["words"])
        assert sizes == ["29x28", "30x30", "40x40", "56x28", "41x41"]
    assert len({item[0] for item in digests["abc"]}) == 5
    assert digests["cab"] == digests["bca"] == digests["abc"]


@pytest.mark.parametrize(
    "url",
    ["http://example.com/a.png", "file:///etc/passwd", "data:image/png,xx", "data:image/png;base64,%%%", png()[:-60]],
)
def test_pictures_that_cannot_be_read_are_refused(server, url):
    messages = [{"role": "user", "content": [picture(url)]}]
    response = server.post("/v1/chat/completions", {"model": "m", "messages": messages})
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "messages[0].content[0].image_url"


def test_refused_requests_leave_nothing_behind(server):
    text = server.get("/metrics").text
    assert "triax_active_requests 0.0" in text
    assert "triax_waiting_requests 0.0" in text
