import hashlib
import json
import pickle
from itertools import pairwise

import pytest
import regex
from hypothesis import example, given, settings
from hypothesis import strategies as st

from triax.data import kimi
from triax.data.control import KEPT, NAMES, block_names, config_file
from triax.data.kimi import PIECES, KimiTokenizer
from triax.data.ranks import read_ranks, write_ranks
from triax.data.tokenizer import BORDER, Tokenizer
from triax.errors import DataError

TEXTS = [
    "def read(path):\n    with open(path) as file:\n        return file.read()\n\n\n",
    "HTMLParser don't they'll I'M 1234567\n",
    "한국어 문장, 한국어 문장 — 🙂👩\u200d🚀🙂👩\u200d🚀\r\n中文字。日本語です、中文字々\u3000漢字ABC漢字\n",
    "    return the reader's    message, think response message;\t\tnaïve café Straße ĲSSELMEER\n",
] * 3
SMALL = KimiTokenizer.train(TEXTS, 420)
OURS = Tokenizer.train(TEXTS, 420)
SPELLINGS = [*NAMES["k3"].values(), *NAMES["k2"].values(), *SMALL.control, "<|reserved_token_163600|>", BORDER]
# Only characters that Unicode had assigned long ago: expression engines differ in the newest ones.
any_text = st.text(st.characters(exclude_categories=["Cs", "Cn"]), max_size=40)
tricky_text = st.lists(
    st.sampled_from(
        [*"aZzßſ'sTLld漢中々〇⺀한あカー１2٣ \t\n\r\u3000\x1c\x85!。<|>_\u0301ⅷ🙂", "'ll", "  ", "\r\n", "🙂\u200d"]
    ),
    max_size=30,
).map("".join)
hostile_text = st.lists(st.one_of(st.sampled_from(SPELLINGS), any_text), max_size=6).map("".join)


@pytest.fixture(scope="module")
def released(kimi_data):
    return KimiTokenizer.load(kimi_data / "kimi.tiktoken", vocab_size=163_840)


@pytest.fixture(scope="module", params=["small", "released"])
def either(request):
    return SMALL if request.param == "small" else request.getfixturevalue("released")


@pytest.fixture(scope="module")
def ranks(either):
    return read_ranks(either._files["tiktoken.model"], "test")


def definition(text: str, ranks: dict[bytes, int]) -> list[int]:
    """Split with another expression engine, then join the pair of lowest rank until none is a token."""
    tokens = []
    for piece in regex.findall(
        PIECES.replace(r"\s", r"\p{White_Space}").replace(r"\S", r"\P{White_Space}"), text, regex.V1
    ):
        parts = [bytes([byte]) for byte in piece.encode()]
        while True:
            pairs = [(ranks[a + b], i) for i, (a, b) in enumerate(pairwise(parts)) if a + b in ranks]
            if not pairs:
                break
            place = min(pairs)[1]
            parts[place : place + 2] = [parts[place] + parts[place + 1]]
        tokens += [ranks[part] for part in parts]
    return tokens


# Text to tokens


@given(st.one_of(any_text, tricky_text, hostile_text))
@example("A  b\tC\r\n\r\n é e\u0301 ﬁ \u00a0\u2028漢字 🙂\u200d🙂 \x00\x7f\ufeff\uffff")
def test_every_text_comes_back_byte_for_byte(either, text):
    tokens = either.encode_ordinary(text)
    assert either.decode_bytes(tokens) == text.encode()
    assert either.decode(tokens) == text


@settings(max_examples=60)
@given(st.one_of(any_text, tricky_text))
def test_tokens_are_those_of_the_written_definition(either, ranks, text):
    assert either.encode_ordinary(text) == definition(text, ranks)


# U061: Han-aware split; expected pieces follow from the published expression
@pytest.mark.parametrize(
    ("text", "pieces"),
    [
        ("A中B", "A|中|B"),
        (" 中文", " |中文"),
        ("x々y", "x|々|y"),
        ("1〇〇〇", "1〇〇|〇"),
        ("中A's don'T", "中|A's| don'T"),
        ("中文字。日本語です", "中文字|。|日本語|です"),
        ("12345678", "123|456|78"),
        ("camelCase HTMLParser", "camel|Case| HTMLParser"),
        ("ABC한국DEF", "ABC한국|DEF"),
        ("a  \n\n  b", "a|  \n\n| | b"),
    ],
)
def test_u061_han_latin_contractions_and_digits_are_split_as_published(text, pieces):
    expected = [token for piece in pieces.split("|") for token in SMALL.encode_ordinary(piece)]
    assert SMALL.encode_ordinary(text) == expected
    assert regex.findall(PIECES, text, regex.V1) == pieces.split("|")


def test_u061_known_texts_have_their_published_tokens(released):
    assert released.encode_ordinary("Hello world") == [19180, 2695]
    assert released.encode_ordinary("你好世界") == [33845, 2243]
    assert [released.encode_ordinary(word) for word in ("think", "response", "message")] == [[39964], [12092], [2778]]


def test_half_a_surrogate_pair_is_refused():
    for allow_control in (False, True):
        with pytest.raises(DataError, match=r"found a lone surrogate `'\\ud800'` at character 1"):
            SMALL.encode("a\ud800b", allow_control=allow_control)


# Control tokens


def test_u063_the_control_tokens_of_k3_keep_their_numbers(released):
    named = {name: number for name, number in released.control.items() if not name.startswith("<|reserved_token_")}
    assert named == {
        "[BOS]": 163584,
        "[EOS]": 163585,
        "<|end_of_msg|>": 163586,
        "<|open|>": 163587,
        "<|close|>": 163588,
        "<|sep|>": 163589,
        "[start_header_id]": 163590,
        "[end_header_id]": 163591,
        "[EOT]": 163593,
        "<|media_begin|>": 163602,
        "<|media_content|>": 163603,
        "<|media_end|>": 163604,
        "<|media_pad|>": 163605,
        "<osagent_mode>": 163649,
        "[UNK]": 163838,
        "[PAD]": 163839,
    }


def test_u063_the_control_tokens_of_k2_keep_their_numbers(kimi_data):
    tokenizer = KimiTokenizer.load(kimi_data / "kimi.tiktoken", family="k2")
    named = {name: number for name, number in tokenizer.control.items() if not name.startswith("<|reserved_token_")}
    assert named == {
        "[BOS]": 163584,
        "[EOS]": 163585,
        "<|im_end|>": 163586,
        "<|im_user|>": 163587,
        "<|im_assistant|>": 163588,
        "<|start_header_id|>": 163590,
        "<|end_header_id|>": 163591,
        "[EOT]": 163593,
        "<|im_system|>": 163594,
        "<|tool_calls_section_begin|>": 163595,
        "<|tool_calls_section_end|>": 163596,
        "<|tool_call_begin|>": 163597,
        "<|tool_call_argument_begin|>": 163598,
        "<|tool_call_end|>": 163599,
        "<|im_middle|>": 163601,
        "<|media_begin|>": 163602,
        "<|media_content|>": 163603,
        "<|media_end|>": 163604,
        "<|media_pad|>": 163605,
        "<think>": 163606,
        "</think>": 163607,
        "[UNK]": 163838,
        "[PAD]": 163839,
    }
    assert len(tokenizer.special) == 16


def test_the_config_made_for_k3_is_the_published_file():
    published = "5d0803c94db9cd78763499e0956c95fd5a225c14a727e5a6cf5db3f96f010a6e"
    assert hashlib.sha256(config_file(block_names(163_584, "k3"))).hexdigest() == published


def test_u061_every_number_of_the_vocabulary_decodes(either, ranks):
    assert either.vocab_size in (420 + 256, 163_840)
    assert sorted([*ranks.values(), *either.control.values()]) == list(range(either.vocab_size))
    names = [*ranks, *(name.encode() for name in either.control)]  # both are in the order of their numbers
    assert either.decode_bytes(range(either.vocab_size)) == b"".join(names)
    assert all(either.decode([number]) == name for name, number in either.control.items())


def test_u062_reserved_names_carry_the_absolute_number_and_are_one_token(either):
    first, last = either.vocab_size - 256, either.vocab_size - 1
    for number in (first + 8, first + 100, last - 2):
        assert either.encode(f"<|reserved_token_{number}|>", allow_control=True) == [number]
    assert either.encode("[BOS]x[PAD]", allow_control=True) == [first, *either.encode_ordinary("x"), last]


@given(hostile_text)
def test_u065_text_that_spells_control_tokens_stays_text(either, text):
    tokens = either.encode_ordinary(text)
    assert not set(tokens) & set(either.control.values())
    assert either.encode(text) == tokens
    assert either.decode(tokens) == text
    assert either.encode_ordinary(either.decode(tokens)) == tokens


@pytest.mark.parametrize("spelling", sorted({*NAMES["k3"].values(), *NAMES["k2"].values()}))
def test_u065_no_spelling_becomes_a_control_token_in_any_place(released, spelling):
    for text in (spelling, f"a{spelling}", f" {spelling}\n", spelling * 3, f"<{spelling}>", f"中{spelling}文"):
        assert max(released.encode_ordinary(text)) < 163_584


@given(st.lists(st.one_of(st.sampled_from(sorted(SMALL.control)), tricky_text), max_size=8))
def test_trusted_text_becomes_its_control_tokens(parts):
    tokens = SMALL.encode("".join(parts), allow_control=True)
    wanted = [number for part in parts if (number := SMALL.control.get(part)) is not None]
    assert [token for token in tokens if token >= 420] == wanted
    assert SMALL.decode(tokens) == "".join(parts)


def test_skipping_special_tokens_keeps_the_marks_of_structure():
    text = "[BOS]<|open|>think<|sep|>a<|close|>think<|sep|><|end_of_msg|><|media_pad|>[EOS][PAD]"
    tokens = SMALL.encode(text, allow_control=True)
    assert SMALL.decode(tokens) == text
    assert SMALL.decode(tokens, skip_special=True) == "<|open|>think<|sep|>a<|close|>think<|sep|>"
    assert {name for name, number in SMALL.control.items() if number in SMALL.special} == {*NAMES["k3"].values()} - KEPT
    k2 = KimiTokenizer.train(TEXTS, 300, family="k2")
    call = "<think>b</think><|tool_calls_section_begin|><|tool_call_begin|>f:0<|tool_call_argument_begin|>{}"
    tokens = k2.encode(f"<|im_assistant|>{call}<|im_end|>", allow_control=True)
    assert k2.decode(tokens, skip_special=True) == call


# Streaming


@given(st.lists(st.integers(0, 420 + 255), max_size=40), st.booleans())
def test_streamed_pieces_join_to_the_whole(tokens, skip_special):
    stream = SMALL.stream(skip_special=skip_special)
    pieces = [stream.push(token) for token in tokens]
    assert "".join(pieces) + stream.flush() == SMALL.decode(tokens, skip_special=skip_special)


@pytest.mark.parametrize("text", ["🙂", "한국어 문장", "👩\u200d🚀 go", "漢字 é", '{"city": "東京 🗼"}'])
def test_u066_a_streamed_character_waits_until_it_is_whole(either, text):
    alphabet = {either.token_bytes(token): token for token in range(256)}
    stream = either.stream()
    pieces = [stream.push(alphabet[bytes([byte])]) for byte in text.encode()]
    assert [piece for piece in pieces if piece] == list(text)
    assert stream.flush() == ""


def test_u066_an_incomplete_tail_is_replaced_only_at_the_end():
    alphabet = {SMALL.token_bytes(token): token for token in range(256)}
    stream = SMALL.stream()
    assert [stream.push(alphabet[bytes([byte])]) for byte in "a🙂".encode()[:-1]] == ["a", "", "", ""]
    assert stream.flush() == "\ufffd"


# Long text


def cut_character_by_character(text: str, chunk: int, run: int) -> list[str]:
    parts = []
    for start in range(0, len(text), chunk):
        piece = text[start : start + chunk]
        length, last = 0, 0
        for place, letter in enumerate(piece):
            length = length + 1 if place and letter.isspace() == piece[place - 1].isspace() else 1
            if length > run:
                parts.append(piece[last:place])
                length, last = 1, place
        parts.append(piece[last:])
    return parts


@settings(max_examples=100)
@given(
    st.lists(st.tuples(st.sampled_from(["a", " ", "\x1c", "漢", "\n"]), st.integers(1, 14)), max_size=12),
    st.integers(1, 30),
    st.integers(1, 8),
)
def test_long_text_is_cut_where_the_published_limits_say(runs, chunk, run):
    text = "".join(letter * count for letter, count in runs)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kimi, "CHUNK", chunk)
        patch.setattr(kimi, "RUN", run)
        tokens = SMALL.encode_ordinary(text)
    parts = cut_character_by_character(text, chunk, run)
    assert tokens == [token for part in parts for token in SMALL.encode_ordinary(part)]


@pytest.mark.parametrize(
    ("text", "cuts"),
    [
        ("abcdefg" * 4000, [25_000]),
        (" x" * 100_000 + " " * 60_001 + "y", [225_000, 250_000]),
        ("ab " * 140_000, [400_000]),
        ("读" * 25_000 + "\x1c", []),
        ("读" * 25_001, [25_000]),
    ],
)
def test_the_published_limits_are_400_000_and_25_000_characters(either, text, cuts):
    borders = [0, *cuts, len(text)]
    parts = [text[start:end] for start, end in pairwise(borders)]
    assert cut_character_by_character(text, 400_000, 25_000) == parts
    expected = [token for part in parts for token in either._encoding.encode_ordinary(part)]
    assert either.encode_ordinary(text) == expected


@pytest.mark.parametrize(
    ("unit", "times"),
    [(" ", 1_200_000), *((unit, 250_000) for unit in ("a", "=", "\n", "漢", "\u0301", "= ", "🙂", " \n"))],
)
def test_long_runs_of_one_unit_are_encoded_in_linear_time(unit, times):
    text = unit * times  # quadratic time would take hours; tiktoken alone panics on the blanks
    assert SMALL.decode(SMALL.encode_ordinary(text)) == text


# Files


@pytest.mark.parametrize("family", ["k3", "k2"])
def test_saved_files_are_those_that_were_read(tmp_path, family):
    tokenizer = KimiTokenizer.train(TEXTS, 300, family)
    tokenizer.save(tmp_path / "a")
    config = tmp_path / "a" / "tokenizer_config.json"
    config.write_bytes(config.read_bytes().replace(b'"[PAD]"', b'"\\u005bPAD]"') + b"\n\n")  # whatever a release wrote
    KimiTokenizer.load(tmp_path / "a").save(tmp_path / "b")
    assert sorted(path.name for path in (tmp_path / "b").iterdir()) == ["tiktoken.model", "tokenizer_config.json"]
    for path in (tmp_path / "a").iterdir():
        assert (tmp_path / "b" / path.name).read_bytes() == path.read_bytes()
    loaded = KimiTokenizer.load(tmp_path / "b")
    assert loaded.identity == tokenizer.identity
    assert loaded.encode(TEXTS[1] + "[PAD]", allow_control=True) == tokenizer.encode(
        TEXTS[1] + "[PAD]", allow_control=True
    )


def test_the_released_files_are_saved_as_published(released, tmp_path):
    released.save(tmp_path)
    rank_file = (tmp_path / "tiktoken.model").read_bytes()
    assert len(rank_file) == 2_795_286
    assert hashlib.sha256(rank_file).hexdigest() == "b6c497a7469b33ced9c38afb1ad6e47f03f5e5dc05f15930799210ec050c5103"
    assert len((tmp_path / "tokenizer_config.json").read_bytes()) == 3478
    assert KimiTokenizer.load(tmp_path, vocab_size=163_840).identity == released.identity
    assert write_ranks(read_ranks(rank_file, "released")) == rank_file


def test_a_wrong_released_vocabulary_is_refused(kimi_data, tmp_path):
    lines = (kimi_data / "kimi.tiktoken").read_bytes().splitlines(keepends=True)
    path = tmp_path / "tiktoken.model"
    swapped = [
        *lines[:-2],
        *(line.split()[0] + b" %d\n" % rank for line, rank in zip(lines[:-3:-1], (163_582, 163_583), strict=True)),
    ]
    for content in (swapped, lines[:-1], lines[:1000]):
        path.write_bytes(b"".join(content))
        with pytest.raises(DataError, match=r"not the .*vocabulary.* sha256 `[0-9a-f]{64}` instead of `b6c497"):
            KimiTokenizer.load(path)
    (tmp_path / "tokenizer_config.json").write_bytes(config_file(block_names(163_584, "k3")))
    for content, message in ((swapped, "not the vocabulary that it should be"), (lines[:-1], "not of one tokenizer")):
        path.write_bytes(b"".join(content))
        with pytest.raises(DataError, match=message):
            KimiTokenizer.load(tmp_path)


def test_u063_a_renumbered_config_beside_the_released_vocabulary_is_refused(kimi_data, tmp_path):
    (tmp_path / "tiktoken.model").write_bytes((kimi_data / "kimi.tiktoken").read_bytes())
    names = dict(enumerate(NAMES["k2"].values(), 163_584))  # what a converter does: no gaps
    (tmp_path / "tokenizer_config.json").write_bytes(config_file(names))
    with pytest.raises(DataError, match=r"control tokens are renumbered; found `.*` at \d+, where the release has it"):
        KimiTokenizer.load(tmp_path)


def test_u063_a_converted_tokenizer_is_no_substitute(tmp_path):
    OURS.save(tmp_path / "tokenizer.json")
    with pytest.raises(DataError, match=r"a converted `tokenizer.json` numbers control tokens otherwise"):
        KimiTokenizer.load(tmp_path)


def test_u067_more_tokens_than_the_model_has_rows_is_an_error_at_once(tmp_path):
    KimiTokenizer.train(TEXTS, 514 - 256).save(tmp_path)
    with pytest.raises(DataError, match=r"more tokens than the model; found `514` where vocab_size is `512`"):
        KimiTokenizer.load(tmp_path, vocab_size=512)
    assert KimiTokenizer.load(tmp_path, vocab_size=514).vocab_size == 514
    assert KimiTokenizer.load(tmp_path, vocab_size=576).vocab_size == 514  # rows past the end are padding


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (lambda ranks, config: (ranks[:-6], config), "line 300 is not a token and its rank"),
        (lambda ranks, config: (ranks[: ranks.rindex(b"\n", 0, -1) + 1], config), "not the vocabulary that it should"),
        (lambda ranks, config: (ranks + b"IQ== 301\n", config), "line 301 repeats a token"),
        (lambda ranks, config: (ranks + b"enp6eno= 5\n", config), "two tokens have one rank"),
        (lambda ranks, config: (ranks + b"enp6eno= 301\n", config), "not the vocabulary that it should be"),
        (lambda ranks, config: (ranks + b"enp6eno= 301\n", config.replace(b"ranks_sha256", b"x")), "not of one tok"),
        (lambda ranks, config: (ranks + b"enp6eno= 300\n", config.replace(b"ranks_sha256", b"x")), "not of one tok"),
        (lambda ranks, config: (ranks + b"enp6eno= 99999999999\n", config), "line 301 is not a token"),
        (lambda ranks, config: (ranks[ranks.index(b"\n") + 1 :], config), "none for `1` of 256 bytes, such as `0x21`"),
        (lambda ranks, config: (b"", config), "none for `256` of 256 bytes"),
        (lambda ranks, config: (b"\x80\x02pickle", config), "line 1 is not a token and its rank"),
        (lambda ranks, config: (ranks, config[:-9]), "tokenizer_config.json: names no control tokens"),
        (lambda ranks, config: (ranks, b"{}"), "tokenizer_config.json: names no control tokens"),
        (lambda ranks, config: (ranks, config.replace(b'"300"', b'"299"')), "not of one tokenizer"),
        (lambda ranks, config: (ranks, config.replace(b'"555"', b'"556"')), "not of one tokenizer"),
        (lambda ranks, config: (ranks, config.replace(b'"300"', b'"x"')), "names no control tokens"),
        (lambda ranks, config: (ranks, config.replace(b'"300"', b'"99999999999"')), "names no control tokens"),
        (lambda ranks, config: (ranks, config.replace(b'"content": "[EOS]"', b'"content": "[BOS]"')), "one name"),
        (lambda ranks, config: (ranks, config.replace(b'"content": "[EOS]"', b'"content": ""')), "without name"),
        (
            lambda ranks, config: (ranks, json.dumps(json.loads(config) | {"triax": {"split_pattern": "("}}).encode()),
            "split_pattern cannot be used",
        ),
    ],
)
def test_damaged_files_are_named(tmp_path, fault, message):
    KimiTokenizer.train(TEXTS, 300).save(tmp_path)
    paths = tmp_path / "tiktoken.model", tmp_path / "tokenizer_config.json"
    for path, content in zip(paths, fault(*(path.read_bytes() for path in paths)), strict=True):
        path.write_bytes(content)
    with pytest.raises(DataError, match=message):
        KimiTokenizer.load(tmp_path)


def test_an_absent_file_is_named(tmp_path):
    with pytest.raises(DataError, match=r"no vocabulary can be read"):
        KimiTokenizer.load(tmp_path)


def test_a_token_outside_the_vocabulary_is_refused():
    for token in (420 + 256, -1):
        with pytest.raises(DataError, match=f"token `{token}` is not in the vocabulary; found `676` tokens"):
            SMALL.decode([token])


def test_a_damaged_copy_of_a_trained_tokenizer_is_refused(tmp_path):
    KimiTokenizer.of(OURS).save(tmp_path)
    path = tmp_path / "tiktoken.model"
    path.write_bytes(b"".join(path.read_bytes().splitlines(keepends=True)[:-1]))
    with pytest.raises(DataError, match="not the vocabulary that it should be; found 418 ranks"):
        KimiTokenizer.load(tmp_path)


def test_a_tokenizer_travels_to_another_process():
    copy = pickle.loads(pickle.dumps(SMALL))
    assert copy.encode(TEXTS[1] + "[EOS]", allow_control=True) == SMALL.encode(TEXTS[1] + "[EOS]", allow_control=True)


def test_a_vocabulary_larger_than_the_text_supports_says_how_large_it_may_be():
    with pytest.raises(DataError, match=r"found `(\d+)` tokens"):
        KimiTokenizer.train(["hello world " * 9], 4096)


# A tokenizer of ours in this form


@pytest.fixture(scope="module", params=[None, "k3"], ids=["plain", "with control tokens"])
def copy(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("copy")
    KimiTokenizer.of(OURS, request.param).save(folder)
    return KimiTokenizer.load(folder, vocab_size=420 + (256 if request.param else 0))


@settings(max_examples=200)
@given(st.one_of(any_text, tricky_text, hostile_text, st.sampled_from(TEXTS)))
@example("\n\n\n    \t\t x\r\n\r\n  \r\n}  \n;;\n\n  ;;  ")
@example(" " * 50_000 + "a" * 50_000 + "\n" * 50_000 + "中" * 30_000)
def test_a_trained_tokenizer_saved_as_ranks_encodes_every_text_equally(copy, text):
    assert copy.encode_ordinary(text) == OURS.encode(text)


@settings(max_examples=10)
@given(st.lists(st.text("ab ", min_size=1, max_size=12), min_size=1, max_size=20), st.text("ab ", max_size=60))
def test_ranks_mean_what_merges_mean_whatever_was_learned(texts, text):
    learned = 257
    while learned < 300:  # all merges that these texts support
        try:
            tokenizer = Tokenizer.train(texts, learned + 1)
        except DataError:
            break
        learned += 1
    tokenizer = Tokenizer.train(texts, learned)
    assert KimiTokenizer.of(tokenizer).encode_ordinary(text) == tokenizer.encode(text)


def test_the_split_of_a_trained_tokenizer_is_stated(copy):
    config = json.loads(copy._files["tokenizer_config.json"])
    assert config["triax"]["split_pattern"] == copy.pattern != PIECES
    assert "auto_map" not in config  # that program would split in the published way
    assert json.loads(SMALL._files["tokenizer_config.json"])["auto_map"]


def test_a_trained_tokenizer_keeps_its_border_out_of_text(copy):
    assert copy.control[BORDER] == OURS.border
    assert copy.encode(f"a{BORDER}", allow_control=True) == [*OURS.encode("a"), OURS.border]
    assert OURS.border not in copy.encode_ordinary(BORDER)
    assert copy.decode([OURS.border, *OURS.encode("a")], skip_special=True) == "a"


def test_blanks_beyond_what_the_splitter_can_hold_are_refused(copy):
    with pytest.raises(DataError, match=r"too long a run of blanks; found `400001` at character 1"):
        copy.encode_ordinary("a" + " " * 400_001 + "b")
    assert copy.encode_ordinary("a" + " " * 400_000 + "b") == OURS.encode("a" + " " * 400_000 + "b")


@pytest.mark.parametrize("fault", ["merges", "split", "dropout"])
def test_a_tokenizer_that_ranks_cannot_express_is_refused(tmp_path, fault):
    path = tmp_path / "tokenizer.json"
    OURS.save(path)
    tree = json.loads(path.read_text())
    match fault:
        case "merges":
            tree["model"]["merges"].reverse()
            tree["model"]["merges"].pop()
            message = "merges and ranks would encode text differently"
        case "split":
            tree["pre_tokenizer"] = tree["pre_tokenizer"]["pretokenizers"][1]
            message = "text is not split by one expression"
        case "dropout":
            tree["model"]["dropout"] = 1e-9
            message = "ranks cannot stand for this model"
    path.write_text(json.dumps(tree))
    with pytest.raises(DataError, match=message):
        KimiTokenizer.of(Tokenizer.load(path))
