"""The released tokenizer of Kimi: a rank file read by tiktoken, and control tokens that no user's text can spell."""

import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from hashlib import sha256
from pathlib import Path

import tiktoken
import tokenizers
from tokenizers import models, pre_tokenizers, trainers

from triax.data.control import (
    CONFIG_FILE,
    NUM_CONTROL,
    Family,
    block_names,
    check_numbers,
    config_file,
    control_tokens,
    parse_config,
)
from triax.data.ranks import ranks_of_merges, read_ranks, split_pattern, write_ranks
from triax.data.tokenizer import BORDER, MIN_COUNT, PROBE, StreamDecoder, Tokenizer
from triax.errors import DataError

RANK_FILE = "tiktoken.model"
RELEASED_RANKS = 163_584
RELEASED_SHA256 = "b6c497a7469b33ced9c38afb1ad6e47f03f5e5dc05f15930799210ec050c5103"

# The published split of K2, Kimi Linear and K3: Han apart from other letters, words with their contractions.
PIECES = "|".join(
    (
        r"[\p{Han}]+",
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+"
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*"
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    )
)
# Part of the published definition: longer text is encoded in parts, so a cut decides tokens.
CHUNK, RUN = 400_000, 25_000
ENDS = (BORDER, "[EOS]", "[EOT]", "<|end_of_msg|>", "<|im_end|>")
SLOTS = ("<|media_pad|>",)
LONGEST_SPACE = 400_000  # the expression engine gives up on about a million
SPACE, WORD = re.compile(r"\s"), re.compile(r"\S")


class KimiTokenizer:
    """Text to tokens and back, byte for byte; the two files it was made from decide everything.

    Source: the published tokenizer files of Kimi K2 and K3.
    """

    def __init__(self, rank_file: bytes, config: bytes, where: str = "tokenizer") -> None:
        """Read the contents of a rank file and of the `tokenizer_config.json` that belongs to it.

        Raises:
            DataError: A file is damaged, or they are not of one tokenizer.
        """
        self._files = {RANK_FILE: rank_file, CONFIG_FILE: config}
        ranks = read_ranks(rank_file, f"{where}/{RANK_FILE}")
        tree = parse_config(config, f"{where}/{CONFIG_FILE}")
        found = sha256(rank_file).hexdigest()
        expected = RELEASED_SHA256 if len(ranks) == RELEASED_RANKS else tree["triax"].get("ranks_sha256", found)
        if found != expected:
            raise DataError(
                f"{where}/{RANK_FILE}: not the vocabulary that it should be; found {len(ranks)} ranks of sha256 "
                f"`{found}` instead of `{expected}`; copy the file again"
            )
        self.is_released: bool = found == RELEASED_SHA256
        """Whether this is the vocabulary of K2, Kimi Linear and K3."""
        self.control: Mapping[str, int] = control_tokens(tree, ranks, where)
        """Number of each control token, the reserved ones included."""
        if self.is_released:
            check_numbers(self.control, RELEASED_RANKS, where)
        added = tree["added_tokens_decoder"].values()
        special = {entry["content"] for entry in added if entry.get("special", True)}
        self.special: frozenset[int] = frozenset(self.control[name] for name in special)
        """Control tokens that are dropped from text on request."""
        named = tree["triax"].get("border", BORDER)  # of a run of triax; released models read text as it is
        border = self.control.get(named)
        self.opening: tuple[int, ...] = () if border is None else (border,)
        """Tokens before a text that a model is to continue."""
        self.start: int = self.control["[BOS]"] if border is None else border
        """Token from which a model writes without a prompt."""
        self.ends: frozenset[int] = frozenset(self.control[name] for name in (*ENDS, named) if name in self.control)
        """Tokens after which nothing more of a text comes."""
        self.unsaid: frozenset[int] = frozenset(self.control[name] for name in SLOTS if name in self.control)
        """Tokens that a model must never write: they stand for pictures."""
        self.pattern: str = tree["triax"].get("split_pattern", PIECES)
        """Expression that cuts text into the pieces that no token crosses."""
        try:
            self._encoding = tiktoken.Encoding(
                where, pat_str=self.pattern, mergeable_ranks=ranks, special_tokens=dict(self.control)
            )
        except ValueError as problem:
            raise DataError(
                f"{where}/{CONFIG_FILE}: triax.split_pattern cannot be used; {problem}; save the tokenizer again"
            ) from None
        self.vocab_size: int = max(max(ranks.values()), max(self.control.values(), default=0)) + 1
        """One past the largest token."""
        self._bytes = [b""] * self.vocab_size
        for token, rank in ranks.items():
            self._bytes[rank] = token
        for name, number in self.control.items():
            self._bytes[number] = name.encode()

    @classmethod
    def load(cls, path: Path, vocab_size: int | None = None, family: Family = "k3") -> "KimiTokenizer":
        """Read a checkpoint's folder, or a rank file with or without its `tokenizer_config.json` beside it.

        Args:
            path: Folder or rank file.
            vocab_size: Rows of the model's embedding; rows past the tokenizer's end are padding.
            family: Whose control tokens to take where there is no `tokenizer_config.json`; then the rank file must be
                the released one, because nothing else would tell a cut-off file from a small vocabulary.

        Raises:
            DataError: A file is absent, damaged or of another model.
        """
        rank_path = path / RANK_FILE if path.is_dir() else path
        try:
            rank_file = rank_path.read_bytes()
        except OSError as problem:
            converted = rank_path.with_name("tokenizer.json").is_file()
            hint = "; a converted `tokenizer.json` numbers control tokens otherwise and is not read" * converted
            raise DataError(
                f"{path}: no vocabulary can be read; {problem}{hint}; copy `{RANK_FILE}` from the release"
            ) from None
        try:
            config = rank_path.with_name(CONFIG_FILE).read_bytes()
        except FileNotFoundError:
            if (found := sha256(rank_file).hexdigest()) != RELEASED_SHA256:
                raise DataError(
                    f"{rank_path}: not the released vocabulary, and no `{CONFIG_FILE}` says what else; found sha256 "
                    f"`{found}` instead of `{RELEASED_SHA256}`; copy both files again"
                ) from None
            config = config_file(block_names(RELEASED_RANKS, family))
        tokenizer = cls(rank_file, config, str(rank_path.parent))
        if vocab_size is not None and tokenizer.vocab_size > vocab_size:
            raise DataError(
                f"{path}: has more tokens than the model; found `{tokenizer.vocab_size}` where vocab_size is "
                f"`{vocab_size}`; use the tokenizer that the model was trained with"
            )
        return tokenizer

    @classmethod
    def train(cls, texts: Iterable[str], num_ranks: int, family: Family = "k3") -> "KimiTokenizer":
        """Learn a small vocabulary with the published split and the control tokens of a family after it.

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
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        trainer = trainers.BpeTrainer(
            vocab_size=num_ranks, min_frequency=MIN_COUNT, initial_alphabet=alphabet, show_progress=False
        )
        inner.train_from_iterator(texts, trainer)
        ranks = ranks_of_merges(json.loads(inner.to_str()))
        if len(ranks) != num_ranks:
            raise DataError(
                f"num_ranks `{num_ranks}` is not what the training text supports; found `{len(ranks)}` tokens; "
                "set it to that or give more text"
            )
        rank_file = write_ranks(ranks)
        ours = {"ranks_sha256": sha256(rank_file).hexdigest()}
        return cls(rank_file, config_file(block_names(num_ranks, family), ours))

    @classmethod
    def of(cls, tokenizer: Tokenizer, family: Family | None = None) -> "KimiTokenizer":
        """Return one that gives every text the same tokens as a tokenizer trained by triax.

        Numbers stay as they are; the border is a control token. The split is not the published one: it is stated in
        `tokenizer_config.json` as `triax.split_pattern`, and other programs must use it too.

        Args:
            tokenizer: The one to copy.
            family: Whose control tokens to append; none by default, so that the vocabulary keeps its size.

        Raises:
            DataError: Ranks cannot say what its merges say.
        """
        tree, first = tokenizer.tree(), tokenizer.vocab_size
        added = {token["id"]: token["content"] for token in tree["added_tokens"]}
        names = added | (block_names(first, family) if family else {})
        rank_file = write_ranks(ranks_of_merges(tree))
        ours = {
            "ranks_sha256": sha256(rank_file).hexdigest(),
            "split_pattern": split_pattern(tree),
            "first_control": first,
            "num_control": NUM_CONTROL if family else 0,
        } | ({"border": tokenizer.border_name} if tokenizer.border_name != BORDER else {})
        copy = cls(rank_file, config_file(names, ours))
        if copy.encode_ordinary(PROBE) != tokenizer.encode(PROBE):
            raise DataError(
                "tokenizer: tiktoken splits text differently; found other tokens for a text of many scripts; "
                "use a tokenizer trained by triax"
            )
        return copy

    def with_border(self, name: str) -> "KimiTokenizer":
        """Return the same tokenizer with a control token before each document, stated in its config as `triax.border`.

        Raises:
            DataError: There is no such control token.
        """
        if name not in self.control:
            some = ", ".join(f"`{known}`" for known in self.control if "reserved" not in known)
            raise DataError(f"data.tokenizer.border `{name}`: no control token of this tokenizer; choose one of {some}")
        tree = json.loads(self._files[CONFIG_FILE])
        tree.setdefault("triax", {})["border"] = name
        config = json.dumps(tree, indent=2, ensure_ascii=False).encode()
        return KimiTokenizer(self._files[RANK_FILE], config)

    def save(self, folder: Path) -> None:
        """Write both files, byte for byte as they were read; the rank file, by which a folder is known, last."""
        folder.mkdir(parents=True, exist_ok=True)
        for name, content in reversed(self._files.items()):
            draft = folder / f".{name}.draft"
            draft.write_bytes(content)
            os.replace(draft, folder / name)

    @property
    def identity(self) -> str:
        """Hash of everything that decides which tokens a text becomes and back."""
        parts = [sha256(self._files[RANK_FILE]).hexdigest(), dict(self.control), sorted(self.special), self.pattern]
        return sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()

    def encode_ordinary(self, text: str) -> list[int]:
        """Return the tokens of any text; text that spells a control token is text.

        Raises:
            DataError: The text holds half a surrogate pair, which no bytes stand for.
        """
        tokens: list[int] = []
        for part in self.pieces(text):
            tokens += self._encoding.encode_ordinary(part)
        return tokens

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the tokens of each text, on all cores; text that spells a control token is text."""
        with ThreadPoolExecutor() as pool:  # tiktoken lets other threads run meanwhile
            return list(pool.map(self.encode_ordinary, texts))

    def encode(self, text: str, *, allow_control: bool = False) -> list[int]:
        """Return the tokens of a text.

        Args:
            text: What to encode.
            allow_control: Read spellings of control tokens as those tokens; for text that no user had a hand in.

        Raises:
            DataError: The text holds half a surrogate pair, which no bytes stand for.
        """
        if not allow_control:
            return self.encode_ordinary(text)
        tokens: list[int] = []
        for part in self.pieces(text):
            tokens += self._encoding.encode(part, allowed_special="all", disallowed_special=())
        return tokens

    def decode_bytes(self, tokens: Iterable[int], *, skip_special: bool = False) -> bytes:
        """Return exactly the bytes of tokens; a control token stands for its name.

        Args:
            tokens: What to decode.
            skip_special: Leave out the control tokens that are special; marks of structure are not.

        Raises:
            DataError: A token is not in the vocabulary.
        """
        tokens = list(tokens)
        for token in (min(tokens, default=0), max(tokens, default=0)):
            self.token_bytes(token)  # refuses what is outside
        skip = self.special if skip_special else ()
        return b"".join([self._bytes[token] for token in tokens if token not in skip])

    def decode(self, tokens: Iterable[int], *, skip_special: bool = False) -> str:
        """Return tokens as text; bytes that are not UTF-8, such as half a character, become U+FFFD."""
        return self.decode_bytes(tokens, skip_special=skip_special).decode("utf-8", "replace")

    def token_bytes(self, token: int) -> bytes:
        """Return the bytes of one token."""
        if not 0 <= token < self.vocab_size:
            raise DataError(
                f"token `{token}` is not in the vocabulary; found `{self.vocab_size}` tokens; "
                "use the tokenizer that the model was trained with"
            )
        return self._bytes[token]

    def stream(self, *, skip_special: bool = False) -> StreamDecoder:
        """Return a decoder for tokens that arrive one by one; its pieces joined equal `decode` of all of them."""
        return StreamDecoder(self, self.special if skip_special else ())

    def pieces(self, text: str) -> Iterator[str]:
        """Yield what is encoded by itself: pieces of 400,000 characters, cut within runs of more than 25,000."""
        try:
            text.isascii() or text.encode()  # the fast one first
        except UnicodeEncodeError as problem:
            raise DataError(
                f"text: not valid Unicode; found a lone surrogate `{text[problem.start]!a}` at character "
                f"{problem.start}; repair or remove it"
            ) from None
        if self.pattern != PIECES:  # ours is cut nowhere
            for start, end in _long_runs(text, LONGEST_SPACE):
                if text[start].isspace():
                    raise DataError(
                        f"text: too long a run of blanks; found `{end - start}` at character {start}; "
                        f"keep at most {LONGEST_SPACE}"
                    )
            yield text
            return
        for begin in range(0, len(text), CHUNK):
            chunk = text[begin : begin + CHUNK]
            last = 0
            for start, end in _long_runs(chunk, RUN):
                for cut in range(start + RUN, end, RUN):
                    yield chunk[last:cut]
                    last = cut
            yield chunk[last:]


def _long_runs(text: str, limit: int) -> Iterator[tuple[int, int]]:
    """Yield start and end of each run of more than `limit` blanks or of as many others.

    Such a run covers a multiple of `limit`, so only the characters there are looked at, and their neighbours.
    """
    end = 0
    for probe in range(0, len(text) if len(text) > limit else 0, limit):
        if probe < end:
            continue
        other = WORD if text[probe].isspace() else SPACE
        before, after = other.search(text[end:probe][::-1]), other.search(text, probe)
        start, end = probe - before.start() if before else end, after.start() if after else len(text)
        if end - start > limit:
            yield start, end
