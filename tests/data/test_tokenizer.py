import json

import pytest
import tokenizers
from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers

from triax.data.tokenizer import BORDER, StreamDecoder, Tokenizer
from triax.errors import DataError

TEXTS = [
    "def read(path):\n    with open(path) as file:\n        return file.read()\n\n\n" * 3,
    "class Reader:\n    def read(self):\n        return self.path.read()\n" * 3,
    "한국어 문장, 한국어 문장 — 🙂👩\u200d🚀🙂👩\u200d🚀\r\n" * 2,
]
TOKENIZER = Tokenizer.train(TEXTS, 300)
any_text = st.text(st.characters(exclude_categories=["Cs"]), max_size=60)
any_tokens = st.lists(st.integers(0, 299), max_size=40)


@given(any_text)
def test_every_text_comes_back_byte_for_byte(text):
    tokens = TOKENIZER.encode(text)
    assert TOKENIZER.decode_bytes(tokens) == text.encode()
    assert TOKENIZER.decode(tokens) == text


@pytest.mark.parametrize(
    "text", [*TEXTS, "", " ", "\ufeff\r\n\r\r\n\t x ", "\x00\x7f\u0085\ufffd\uffff", "e\u0301\ufb01"]
)
def test_awkward_texts_come_back_byte_for_byte(text):
    assert TOKENIZER.decode_bytes(TOKENIZER.encode(text)) == text.encode()


def test_all_256_bytes_have_a_token_of_their_own():
    assert {TOKENIZER.token_bytes(token) for token in range(300)} >= {bytes([byte]) for byte in range(256)}


def test_merges_shorten_text_like_the_one_they_were_learned_from():
    assert len(TOKENIZER.encode(TEXTS[0])) < len(TEXTS[0].encode()) / 2


@given(any_text, any_text)
def test_no_text_gives_the_border(before, after):
    tokens = TOKENIZER.encode(before + BORDER + after)
    assert TOKENIZER.border not in tokens
    assert TOKENIZER.decode(tokens) == before + BORDER + after


def test_text_that_spells_the_border_teaches_no_border():
    tokenizer = Tokenizer.train(["x" + BORDER + "y"] * 9, 262)
    assert tokenizer.border not in tokenizer.encode(BORDER)


def test_a_border_has_no_text():
    assert TOKENIZER.decode([TOKENIZER.border, *TOKENIZER.encode("a"), TOKENIZER.border]) == "a"


def test_a_batch_is_encoded_like_its_texts():
    assert TOKENIZER.encode_batch(TEXTS) == [TOKENIZER.encode(text) for text in TEXTS]


def test_runs_of_one_character_are_encoded_in_linear_time():
    for letter in ("=", " ", "\n", "a", "\u0301", "= "):
        text = letter * 100_000
        assert TOKENIZER.decode(TOKENIZER.encode(text)) == text


def test_half_a_surrogate_pair_is_refused():
    with pytest.raises(
        DataError, match=r"text 0: not valid Unicode; found a lone surrogate `'\\ud800'` at character 1"
    ):
        TOKENIZER.encode("a\ud800b")


def test_a_token_outside_the_vocabulary_is_refused():
    for token in (300, -1):
        with pytest.raises(DataError, match=f"token `{token}` is not in the vocabulary; found `300` tokens"):
            TOKENIZER.decode([token])


@given(any_tokens)
def test_streamed_pieces_join_to_the_whole(tokens):
    stream = StreamDecoder(TOKENIZER)
    pieces = [stream.push(token) for token in tokens]
    assert "".join(pieces) + stream.flush() == TOKENIZER.decode(tokens)
    assert stream.flush() == ""


@pytest.mark.parametrize("text", ["🙂", "한국어 문장", "👩\u200d🚀 go", "é 🙂 é"])
def test_a_streamed_character_waits_until_it_is_whole(text):
    alphabet = {TOKENIZER.token_bytes(token): token for token in range(300)}
    single_bytes = [alphabet[bytes([byte])] for byte in text.encode()]
    stream = StreamDecoder(TOKENIZER)
    pieces = [stream.push(token) for token in single_bytes]
    assert [piece for piece in pieces if piece] == list(text)
    assert stream.flush() == ""


def test_an_incomplete_tail_is_replaced_only_at_the_end():
    alphabet = {TOKENIZER.token_bytes(token): token for token in range(300)}
    stream = StreamDecoder(TOKENIZER)
    assert [stream.push(alphabet[bytes([byte])]) for byte in "a🙂".encode()[:-1]] == ["a", "", "", ""]
    assert stream.flush() == "\ufffd"
    assert stream.push(alphabet[b"b"]) == "b"


def test_the_order_of_the_texts_changes_nothing():
    assert Tokenizer.train(reversed(TEXTS), 300).identity == TOKENIZER.identity


def test_other_texts_give_another_identity():
    assert Tokenizer.train(TEXTS[:2], 300).identity != TOKENIZER.identity


def test_a_saved_tokenizer_keeps_every_token(tmp_path):
    TOKENIZER.save(tmp_path / "tokenizer.json")
    loaded = Tokenizer.load(tmp_path / "tokenizer.json")
    assert loaded.identity == TOKENIZER.identity
    assert (loaded.border, loaded.vocab_size) == (TOKENIZER.border, 300)
    assert loaded.encode(TEXTS[2] + BORDER) == TOKENIZER.encode(TEXTS[2] + BORDER)


def test_a_vocabulary_larger_than_the_text_supports_says_how_large_it_may_be():
    with pytest.raises(DataError, match=r"found patterns for `(\d+)` tokens") as caught:
        Tokenizer.train(["hello world " * 9], 4096)
    supported = int(str(caught.value).split("at most ")[1].split()[0])
    assert Tokenizer.train(["hello world " * 9], supported).vocab_size == supported


def test_a_missing_or_damaged_file_is_named(tmp_path):
    path = tmp_path / "tokenizer.json"
    with pytest.raises(DataError, match=r"tokenizer.json: no tokenizer can be read"):
        Tokenizer.load(path)
    TOKENIZER.save(path)
    path.write_text(path.read_text()[:-50])
    with pytest.raises(DataError, match=r"tokenizer.json: not a tokenizer.json"):
        Tokenizer.load(path)
    path.write_bytes(b"\xff")
    with pytest.raises(DataError, match=r"tokenizer.json: no tokenizer can be read"):
        Tokenizer.load(path)


def test_a_tokenizer_without_a_border_is_refused(tmp_path):
    inner = tokenizers.Tokenizer(models.BPE({"a": 0}, []))
    inner.save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(DataError, match=r"no special token `<\|border\|>` to begin each document with; add one"):
        Tokenizer.load(tmp_path / "tokenizer.json")


@pytest.mark.parametrize("fault", ["normaliser", "prefix space", "added token"])
def test_a_tokenizer_that_alters_text_is_refused(tmp_path, fault):
    TOKENIZER.save(tmp_path / "tokenizer.json")
    inner = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    match fault:
        case "normaliser":
            inner.normalizer = normalizers.NFC()
        case "prefix space":
            inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
        case "added token":
            inner.add_tokens([tokenizers.AddedToken("<|x|>", lstrip=True, rstrip=True)])
    inner.save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(DataError, match=r"text does not come back byte for byte"):
        Tokenizer.load(tmp_path / "tokenizer.json")


def test_added_tokens_of_other_tokenizers_are_kept_as_their_text(tmp_path):
    TOKENIZER.save(tmp_path / "tokenizer.json")
    inner = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    inner.add_special_tokens(["<|é|>"])
    inner.save(str(tmp_path / "tokenizer.json"))
    loaded = Tokenizer.load(tmp_path / "tokenizer.json")
    assert loaded.vocab_size == 301
    assert loaded.decode([300]) == "<|é|>"
    assert 300 not in loaded.encode("<|é|>")


@pytest.fixture
def foreign(tmp_path):
    """A tokenizer of one's own, as the `tokenizers` library trains it for GPT-2's split."""
    inner = tokenizers.Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<|pad|>", "<|endoftext|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    inner.train_from_iterator(TEXTS, trainer)
    inner.save(str(tmp_path / "tokenizer.json"))
    return inner, tmp_path / "tokenizer.json"


def test_f58_a_tokenizer_of_ones_own_has_the_border_that_the_setting_names(foreign):
    inner, path = foreign
    with pytest.raises(DataError, match=r"set data.tokenizer.border to one of `<\|pad\|>`, `<\|endoftext\|>`"):
        Tokenizer.load(path)
    with pytest.raises(DataError, match=r"no special token `the`"):
        Tokenizer.load(path, "the")
    loaded = Tokenizer.load(path, "<|endoftext|>")
    assert (loaded.border, loaded.opening, loaded.start, loaded.ends) == (1, (1,), 1, frozenset({1}))
    assert loaded.encode(TEXTS[0]) == inner.encode(TEXTS[0], add_special_tokens=False).ids
    spelled = "a<|endoftext|>b<|pad|>"
    assert loaded.decode(loaded.encode(spelled)) == spelled
    assert 1 not in loaded.encode(spelled)
    assert loaded.decode_bytes([1, *loaded.encode("x")]) == b"x"


def test_f58_the_border_is_kept_in_the_file_where_other_programs_find_it_too(foreign, tmp_path):
    path = foreign[1]
    Tokenizer.load(path, "<|endoftext|>").save(tmp_path / "saved.json")
    assert Tokenizer.load(tmp_path / "saved.json").border_name == "<|endoftext|>"
    assert tokenizers.Tokenizer.from_file(str(tmp_path / "saved.json")).encode("a").tokens[0] == "<|endoftext|>"
    assert tokenizers.Tokenizer.from_str(json.dumps(TOKENIZER.tree())).encode("a").tokens[0] == BORDER


def test_f58_a_token_after_the_text_is_not_taken_for_the_border(foreign):
    inner, path = foreign
    for template in ("$A <|endoftext|>", "<|pad|> $A <|endoftext|>"):
        inner.post_processor = processors.TemplateProcessing(
            single=template, special_tokens=[("<|pad|>", 0), ("<|endoftext|>", 1)]
        )
        inner.save(str(path))
        with pytest.raises(DataError, match=r"no special token `<\|border\|>`"):
            Tokenizer.load(path)


LINES = st.lists(
    st.sampled_from(["\n", "\n\n", "\r\n", " ", "    ", "\t", "x", "ab", "def f(x):", ").", "é", "\x1c", "1234"])
)


@given(LINES.map("".join), st.integers(3, 12))
@example("x" * 40, 7)
@example("\n" * 40, 7)
@example(" " * 40, 7)
def test_f60_pieces_of_a_long_text_are_short_and_join_to_it(text, longest):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("triax.data.tokenizer.LONGEST_PIECE", longest)
        pieces = list(TOKENIZER.pieces(text))
    assert "".join(pieces) == text
    assert all(0 < len(piece) <= longest for piece in pieces) or pieces == [""]


@given(st.lists(LINES.map(lambda parts: "".join(["w", *parts])[:40]), min_size=1).map("\n".join))
def test_f60_the_tokens_of_the_pieces_are_those_of_the_whole(text):
    """Every 60 characters have a line that is not indented here, as code and prose have in 100,000."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("triax.data.tokenizer.LONGEST_PIECE", 60)
        pieces = list(TOKENIZER.pieces(text))
    assert [token for tokens in TOKENIZER.encode_batch(pieces) for token in tokens] == TOKENIZER.encode(text)
