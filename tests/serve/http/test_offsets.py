"""Where the tokens of `/v1/completions` begin in its text, also where characters are made of several tokens."""

import pytest


@pytest.mark.parametrize("echo", [False, True])
@pytest.mark.parametrize("per_step", [1, 3, 50])
def test_offsets_point_into_the_text_past_characters_of_several_tokens(server, echo, per_step):
    name = server.script(f"wide{per_step}", "ab\U0001f600c\u00fcd", per_step=per_step)
    body = {"model": "m", "prompt": name, "logprobs": 0, "echo": echo, "max_tokens": 30}
    whole = server.client().completions.create(**body).choices[0]
    told = whole.logprobs
    for word, at in zip(told.tokens, told.text_offset, strict=True):
        assert word == "\ufffd" or whole.text[at:].startswith(word), (word, at)
    assert told.text_offset[-1] == len(whole.text) - 1
    pieces = [chunk.choices[0] for chunk in server.client().completions.create(**body, stream=True) if chunk.choices]
    assert [at for piece in pieces for at in piece.logprobs.text_offset] == told.text_offset
