"""Byte-level BPE: any text to tokens and back, byte for byte, and one border that no text can spell."""

import codecs
import json
import re
from collections.abc import Container, Iterable, Iterator, Sequence
from functools import cached_property
from hashlib import sha256
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import tokenizers
from tokenizers import decoders, models, pre_tokenizers, processors, trainers

from triax.errors import DataError

BORDER = "<|border|>"
LONE_SURROGATE = re.compile("[\ud800-\udfff]")
LONGEST_PIECE = 100_000  # characters encoded by themselves: the library takes some 200 bytes of memory for each
MIN_COUNT = 2  # a pair seen once is no pattern

# Text is cut into pieces that no token crosses. Code is mostly short lines, so a line's end is one piece together with
# the punctuation before it and the indentation after it. `++` never gives back: long runs stay linear in time.
PIECES = "|".join(
    (
        r" ?[^\s\p{L}\p{N}]*+[ \t]*+[\r\n]++[ \t]*",  # the end of a line and the indent of the next
        r"[^\r\n\p{L}\p{N}]?\p{L}+",  # a word with the space, dot or bracket before it
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+",
        r"[ \t]+(?=[ \t])",  # a run of blanks leaves the last one to the word
        r"\s+",
    )
)

# Round trip on loading: what a normaliser, a prefix space or a vocabulary without all bytes would alter.
PROBE = "A  b\tC\r\n\r\n é e\u0301 \ufb01 \u00a0\u2028漢字 🙂\u200d🙂 \x00\x7f" + BORDER + "<|x|>12345 end "


class Tokenizer:
    """A vocabulary of byte sequences; save and load keep every id."""

    def __init__(self, inner: tokenizers.Tokenizer, where: str = "tokenizer", border: str = "") -> None:
        """Take over a trained tokenizer of the `tokenizers` library.

        Args:
            inner: The tokenizer.
            where: What errors call it.
            border: Token that begins every document; if empty, the one that the tokenizer itself puts before a text,
                else `<|border|>`.

        Raises:
            DataError: It has no border, or does not give every text back byte for byte.
        """
        self._inner = inner
        inner.encode_special_tokens = True  # text that spells a special token is text
        inner.no_padding()
        inner.no_truncation()
        self.border_name: str = border or _put_before_text(inner) or BORDER
        """How the border is written; text that spells it stays text."""
        special = {token.content: number for number, token in inner.get_added_tokens_decoder().items() if token.special}
        if self.border_name not in special:
            found = ", ".join(f"`{name}`" for name in special)
            remedy = f"set data.tokenizer.border to one of {found}" if found else "add one, or train one with triax"
            raise DataError(f"{where}: no special token `{self.border_name}` to begin each document with; {remedy}")
        border_id = special[self.border_name]
        inner.post_processor = processors.TemplateProcessing(
            single=f"{self.border_name} $A",
            pair=f"{self.border_name} $A {self.border_name}:1 $B:1",
            special_tokens=[(self.border_name, border_id)],
        )  # so that other programs, too, begin a text as it was learned
        self.border: int = border_id
        """Token that begins every document."""
        self.opening: tuple[int, ...] = (border_id,)
        """Tokens before a text that a model is to continue."""
        self.start: int = border_id
        """Token from which a model writes without a prompt."""
        self.ends: frozenset[int] = frozenset({border_id})
        """Tokens after which nothing more of a text comes."""
        self.unsaid: frozenset[int] = frozenset()
        """Tokens that a model must never write."""
        self.vocab_size: int = max(inner.get_vocab().values()) + 1
        """One past the largest token."""
        self._bytes = _bytes_of_tokens(inner, self.vocab_size, self.border_name)
        probe = PROBE + self.border_name
        ids = self.encode(probe)
        altering = [token for token in inner.get_added_tokens_decoder().values() if not token.special]
        if altering or border_id in ids or self.decode_bytes(ids) != probe.encode():
            raise DataError(
                f"{where}: text does not come back byte for byte; found another kind of tokenizer than byte-level BPE; "
                "train one with triax or remove its normaliser, prefix space and added tokens that are not special"
            )

    @classmethod
    def train(cls, texts: Iterable[str], vocab_size: int) -> "Tokenizer":
        """Learn the most useful merges of these texts; the same texts give the same tokenizer in any order.

        Args:
            texts: What to learn from.
            vocab_size: Tokens in all, the 256 bytes and the border included.

        Raises:
            DataError: The texts have fewer repeated pairs than the vocabulary has room for.
        """
        inner = tokenizers.Tokenizer(models.BPE())
        inner.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Split(tokenizers.Regex(PIECES), "isolated"),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        )
        inner.decoder = decoders.ByteLevel()
        trainer = trainers.BpeTrainer(
            vocab_size=vocab_size,
            min_frequency=MIN_COUNT,
            special_tokens=[BORDER],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        )
        inner.train_from_iterator((piece for text in texts for piece in _pieces(text)), trainer)
        learned = inner.get_vocab_size()
        if learned < vocab_size:
            raise DataError(
                f"data.tokenizer.vocab_size `{vocab_size}` is more than the training text supports; "
                f"found patterns for `{learned}` tokens; set data.tokenizer.vocab_size to at most {learned} "
                "or give more text"
            )
        return cls(inner)

    @classmethod
    def load(cls, path: Path, border: str = "") -> "Tokenizer":
        """Read a `tokenizer.json`.

        Args:
            path: The file.
            border: Token that begins every document, as the constructor takes it.

        Raises:
            DataError: There is none, it is damaged, or it is not a byte-level BPE with a border.
        """
        try:
            text = path.read_text(encoding="utf-8-sig")
        except (OSError, UnicodeDecodeError) as problem:
            raise DataError(f"{path}: no tokenizer can be read; {problem}; correct data.tokenizer.path") from None
        try:
            inner = tokenizers.Tokenizer.from_str(text)
        except Exception as problem:  # the library raises plain Exception
            raise DataError(f"{path}: not a tokenizer.json; {problem}; replace it or train a new one") from None
        return cls(inner, str(path), border)

    def save(self, path: Path) -> None:
        """Write a `tokenizer.json`, readable by the `tokenizers` library."""
        path.write_text(self._inner.to_str(pretty=True), encoding="utf-8")

    def tree(self) -> dict[str, Any]:
        """Return what `save` writes, as parsed JSON."""
        return json.loads(self._inner.to_str())

    @cached_property
    def identity(self) -> str:
        """Hash of everything that decides which tokens a text becomes; equal after save and load."""
        tree = self.tree()
        parts = [tree["model"]["vocab"], tree["model"]["merges"], tree["pre_tokenizer"], tree["added_tokens"]]
        return sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()

    def encode(self, text: str) -> list[int]:
        """Return the tokens of a text, without a border; a text that spells the border is plain text.

        Raises:
            DataError: The text holds half a surrogate pair, which no bytes stand for.
        """
        return self.encode_batch([text])[0]

    def pieces(self, text: str) -> Iterator[str]:
        """Cut a long text into pieces to encode one by one, so that memory stays bounded.

        Cuts are made before a line that is not indented. No token of a tokenizer trained by triax crosses such a place,
        so the tokens of the pieces are those of the whole. Only where 100,000 characters have no such line, or with
        another tokenizer whose tokens cross it, does a cut decide tokens.
        """
        return _pieces(text)

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the tokens of each text, on all cores (`RAYON_NUM_THREADS` limits them).

        Raises:
            DataError: A text holds half a surrogate pair, which no bytes stand for.
        """
        try:
            return [encoding.ids for encoding in self._inner.encode_batch_fast(list(texts), add_special_tokens=False)]
        except TypeError:  # what the library says about a lone surrogate
            for number, text in enumerate(texts):
                if half := LONE_SURROGATE.search(text):
                    raise DataError(
                        f"text {number}: not valid Unicode; found a lone surrogate `{half[0]!a}` at character "
                        f"{half.start()}; repair or remove it"
                    ) from None
            raise

    def decode_bytes(self, tokens: Iterable[int]) -> bytes:
        """Return exactly the bytes that tokens stand for; a border stands for none.

        Raises:
            DataError: A token is not in the vocabulary.
        """
        tokens = list(tokens)
        for token in (min(tokens, default=0), max(tokens, default=0)):
            self.token_bytes(token)  # refuses what is outside
        return b"".join([self._bytes[token] for token in tokens])

    def decode(self, tokens: Iterable[int]) -> str:
        """Return tokens as text; bytes that are not UTF-8, such as half a character, become U+FFFD."""
        return self.decode_bytes(tokens).decode("utf-8", "replace")

    def token_bytes(self, token: int) -> bytes:
        """Return the bytes of one token; a border has none."""
        if not 0 <= token < self.vocab_size:
            raise DataError(
                f"token `{token}` is not in the vocabulary; found `{self.vocab_size}` tokens; "
                "use the tokenizer that the model was trained with"
            )
        return self._bytes[token]


@runtime_checkable
class Vocabulary(Protocol):
    """Whatever knows the bytes of each token."""

    def token_bytes(self, token: int) -> bytes:
        """Return the bytes of one token."""
        ...


class Language(Vocabulary, Protocol):
    """What continuing a text takes of a tokenizer; its attributes are described where `Tokenizer` sets them."""

    vocab_size: int
    opening: tuple[int, ...]
    start: int
    ends: frozenset[int]
    unsaid: frozenset[int]

    def encode(self, text: str) -> list[int]:
        """Return the tokens of any text; text that spells a control token is text."""
        ...


class StreamDecoder:
    """Text of tokens that arrive one by one; the pieces joined equal `decode` of all of them.

    The bytes of an incomplete character wait for the rest of it; only bytes that can never become text are replaced.
    """

    def __init__(self, tokenizer: Vocabulary, skip: Container[int] = ()) -> None:
        """Start before the first token; tokens to skip stand for nothing."""
        self._tokenizer = tokenizer
        self._skip = skip
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token: int) -> str:
        """Return the text that this token completes; empty while a character is incomplete."""
        if token in self._skip:
            return ""
        return self._decoder.decode(self._tokenizer.token_bytes(token))

    def flush(self) -> str:
        """Return what is left at the end, an incomplete character as U+FFFD, and start anew."""
        rest = self._decoder.decode(b"", final=True)
        self._decoder.reset()
        return rest


def byte_of_letter() -> dict[str, int]:
    """Return the byte that each letter of a byte-level vocabulary stands for.

    Bytes that print as Latin-1 stand for themselves; the others were given the letters from U+0100 on, in order.
    Source: the published GPT-2 vocabulary, which every byte-level BPE follows.
    """
    shown = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(256) if byte not in set(shown)]
    return {chr(byte): byte for byte in shown} | {chr(0x100 + n): byte for n, byte in enumerate(hidden)}


def _put_before_text(inner: tokenizers.Tokenizer) -> str:
    """Return the one special token that a tokenizer puts before every text; empty if it puts none or several."""
    encoding = inner.encode("a")
    return encoding.tokens[0] if encoding.special_tokens_mask == [1, *[0] * (len(encoding.tokens) - 1)] else ""


def _pieces(text: str) -> Iterator[str]:
    begin = 0
    while len(text) - begin > LONGEST_PIECE:
        cut = text.rfind("\n", begin, begin + LONGEST_PIECE)
        while cut >= 0 and text[cut + 1].isspace():  # the end of a line and the next indentation are one token
            cut = text.rfind("\n", begin, cut)
        if cut < 0:
            cut = max(text.rfind(" ", begin + 1, begin + LONGEST_PIECE), begin + LONGEST_PIECE // 2) - 1
        yield text[begin : cut + 1]
        begin = cut + 1
    yield text[begin:]


def _bytes_of_tokens(inner: tokenizers.Tokenizer, vocab_size: int, border: str) -> list[bytes]:
    """Return what each token stands for; added tokens are literal text, the border and unused numbers are nothing."""
    byte_of = byte_of_letter()
    table = [b""] * vocab_size
    for word, token in inner.get_vocab(with_added_tokens=False).items():
        if all(letter in byte_of for letter in word):
            table[token] = bytes(byte_of[letter] for letter in word)
    for token, added in inner.get_added_tokens_decoder().items():
        table[token] = b"" if added.content == border else added.content.encode()
    return table
