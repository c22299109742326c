"""`triax bench serve` in front of what is no server of this API, or none for this client: words, never a traceback."""

from pathlib import Path

import pytest

from triax.errors import ConfigError
from triax.serve.bench import Bench, Load, check_files


@pytest.mark.parametrize(
    ("status", "text", "told"),
    [
        (200, "[1]", "not a server of this API"),
        (200, "<html>", "not a server of this API"),
        (200, '{"data": []}', "not a server of this API"),
        (200, '{"data": [{"id": "x", "vocab_size": "many"}]}', "not a server of this API"),
        (500, "oh", "status 500"),
        (401, '{"error": {"message": "authorization: a key is needed"}}', "a key is needed; give --key"),
    ],
)
def test_what_is_no_server_for_this_client_is_told(odd, status, text, told):
    odd.card = status, text
    with pytest.raises(ConfigError, match=told):
        Bench(odd.url, Load()).run()


@pytest.mark.parametrize("stream", ["", "data: [DONE]\n\n", 'data: {"choices": []}\n\n', "data: {oh\n\n"])
def test_an_answer_without_a_token_is_an_error_and_no_quick_success(odd, stream):
    odd.answer = 200, stream
    tree = Bench(odd.url, Load(requests=2, prompt_tokens=3)).run()
    assert sum(tree["errors"].values()) == 2
    assert tree["request_s"]["p50"] == 0.0


def test_files_that_could_not_be_written_are_refused_before_anything_is_measured(tmp_path):
    check_files(tmp_path / "r.json", tmp_path / "r.png")
    check_files(Path("r.json"), Path("r.svg"))
    with pytest.raises(ConfigError, match="make it first"):
        check_files(tmp_path / "none" / "r.json", None)
    with pytest.raises(ConfigError, match="not a kind of picture"):
        check_files(None, tmp_path / "r.unknown")
