"""Every parameter that the official client knows is taken, is absent where it is null, or is named as unsupported."""

from typing import get_type_hints

import pytest
from openai.types.chat import completion_create_params
from openai.types.responses import response_create_params

ENDPOINTS = {
    "chat": (
        "/v1/chat/completions",
        completion_create_params.CompletionCreateParamsBase,
        {"messages": [{"role": "user", "content": "hi"}]},
    ),
    "responses": ("/v1/responses", response_create_params.ResponseCreateParamsBase, {"input": "hi"}),
}
UNSUPPORTED = {
    "audio": {"voice": "ash", "format": "wav"},
    "function_call": "auto",
    "functions": [],
    "prediction": {"type": "content", "content": "x"},
    "prompt_cache_retention": "24h",
    "web_search_options": {},
}


@pytest.mark.parametrize("endpoint", ENDPOINTS)
def test_f20_null_says_as_much_as_nothing(server, endpoint):
    path, known, needed = ENDPOINTS[endpoint]
    names = set(get_type_hints(known)) - {"model", *needed} | {"stream"}
    assert len(names) > 20
    own = {"ignore_eos", "priority", "cache_salt", "return_token_ids"}
    response = server.post(path, {"model": "m"} | needed | dict.fromkeys(names | own))
    assert response.status_code == 200, response.text


def test_f20_null_is_no_value_of_what_is_needed(server):
    for fields, param in (({"messages": None}, "messages"), ({"messages": [{"role": None}]}, "messages[0].role")):
        response = server.post("/v1/chat/completions", {"model": "m"} | fields)
        assert (response.status_code, response.json()["error"]["param"]) == (400, param)


def test_f20_an_unknown_name_stays_unknown_though_it_is_null(server):
    body = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "tempratur": None}
    response = server.post("/v1/chat/completions", body)
    assert (response.status_code, response.json()["error"]["code"]) == (400, "unknown_parameter")


@pytest.mark.parametrize("name", UNSUPPORTED)
def test_f20_what_the_api_knows_and_this_server_does_not_is_named_so(server, name):
    body = {"model": "m", "messages": [{"role": "user", "content": "hi"}], name: UNSUPPORTED[name]}
    error = server.post("/v1/chat/completions", body).json()["error"]
    assert (error["param"], error["code"]) == (name, "unsupported_parameter")
    assert "not supported" in error["message"]


def test_f20_max_tool_calls_is_named_as_unsupported(server):
    error = server.post("/v1/responses", {"model": "m", "input": "hi", "max_tool_calls": 2}).json()["error"]
    assert (error["param"], error["code"]) == ("max_tool_calls", "unsupported_parameter")


def test_f20_the_modality_text_is_taken_and_no_other(server):
    body = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
    assert server.post("/v1/chat/completions", body | {"modalities": ["text"]}).status_code == 200
    error = server.post("/v1/chat/completions", body | {"modalities": ["text", "audio"]}).json()["error"]
    assert error["param"] == "modalities[1]"
