import pytest
from hypothesis import given
from hypothesis import strategies as st

from triax.data.tokenizer import Tokenizer
from triax.serve.text import Text


@pytest.fixture(scope="module")
def tokenizer():
    return Tokenizer.train(["stop this top stop"] * 4, 262)


def read(tokenizer, tokens, stop=()):
    text = Text(tokenizer, stop)
    pieces = []
    for token in tokens:
        pieces.append(text.push(token))
        if text.has_stopped:
            break
    return [*pieces, text.flush()]


@given(tokens=st.lists(st.integers(0, 256), max_size=20))
def test_any_tokens_read_one_by_one_give_their_text(tokenizer, tokens):
    assert "".join(read(tokenizer, tokens)) == tokenizer.decode(tokens)


@pytest.mark.parametrize("text", ["🙂", "안녕", "👩‍👩‍👧", "a🙂", "é e\u0301"])
def test_no_piece_holds_half_a_character(tokenizer, text):
    pieces = read(tokenizer, tokenizer.encode(text))
    assert "".join(pieces) == text
    assert not any("\ufffd" in piece for piece in pieces)


def test_an_incomplete_end_is_marked_once(tokenizer):
    assert "".join(read(tokenizer, [*tokenizer.encode("ok"), *tokenizer.encode("🙂")[:3]])) == "ok\ufffd"


@given(text=st.text("stop🙂", max_size=12), stop=st.lists(st.text("stop🙂", min_size=1, max_size=3), max_size=3))
def test_text_ends_before_the_stop_string_that_is_complete_first(tokenizer, text, stop):
    ends = [(text.find(s) + len(s), text.find(s)) for s in stop if s in text]
    expected = text[: min(ends)[1]] if ends else text
    assert "".join(read(tokenizer, tokenizer.encode(text), stop)) == expected


def test_text_that_cannot_become_a_stop_string_does_not_wait(tokenizer):
    tokens = [tokenizer.encode(letter)[0] for letter in "asstx"]
    assert read(tokenizer, tokens, ["stop"]) == ["a", "", "s", "", "stx", ""]
