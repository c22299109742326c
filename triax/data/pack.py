"""Documents to rows: a border before each, laid end to end, cut every `seq_len` tokens.

A row is a pure function of (seed, source, number of the row), so nothing but a count has to be saved to resume.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from hashlib import sha256
from itertools import accumulate
from typing import Protocol, runtime_checkable

import numpy as np
import torch
from jaxtyping import Int, Int64, UInt
from torch import Tensor

from triax.data.source import Document
from triax.errors import DataError

ENCODED_AT_ONCE = 1_000_000  # characters; bounds the memory of an encoding call


@runtime_checkable
class Encoder(Protocol):
    """What turns documents into tokens; its attributes are described where `Tokenizer` sets them."""

    vocab_size: int
    opening: tuple[int, ...]

    def pieces(self, text: str) -> Iterator[str]:
        """Cut a text into pieces to encode one by one."""
        ...

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the tokens of each text."""
        ...


@dataclass(frozen=True)
class Batch:
    """Rows laid end to end: a flat stream with what follows each token."""

    tokens: Int[Tensor, " T"]
    targets: Int[Tensor, " T"]
    """The next token; after the last token of a document, the border."""
    lengths: tuple[int, ...]
    """Tokens of each sequence: one begins at every border and at every row."""


@dataclass(frozen=True)
class TokenStream:
    """Documents as tokens, each behind its border, in one array."""

    tokens: UInt[np.ndarray, " T"]
    """uint16 or uint32, whichever holds the vocabulary."""
    starts: Int64[np.ndarray, " _"]
    """First token of each document (its border), and one past the last of all; int64."""
    document_bytes: Int64[np.ndarray, " N"]
    """UTF-8 bytes of each document; int64."""
    border: int
    """Token that begins a document."""

    @property
    def num_documents(self) -> int:
        """Documents in the stream."""
        return len(self.document_bytes)

    @property
    def num_tokens(self) -> int:
        """Tokens in the stream, borders included."""
        return len(self.tokens)

    @property
    def num_bytes(self) -> int:
        """UTF-8 bytes of all documents; borders have none."""
        return int(self.document_bytes.sum())

    @cached_property
    def digest(self) -> str:
        """Hash of the tokens and of where documents begin."""
        return sha256(self.tokens.tobytes() + self.starts.tobytes() + str(self.border).encode()).hexdigest()

    def within(self, num_bytes: int) -> "TokenStream":
        """Return the documents that fit into this many bytes, taken in order; at least the shortest."""
        if not self.num_documents:
            return self
        chosen, left = [], num_bytes
        for number, size in enumerate(self.document_bytes.tolist()):
            if size <= left:
                chosen.append(number)
                left -= size
        chosen = chosen or [int(self.document_bytes.argmin())]
        pieces = [self.tokens[self.starts[n] : self.starts[n + 1]] for n in chosen]
        return TokenStream(
            tokens=np.concatenate(pieces),
            starts=_starts([len(piece) for piece in pieces]),
            document_bytes=self.document_bytes[chosen],
            border=self.border,
        )


def encode(
    documents: Sequence[Document], tokenizer: Encoder, progress: Callable[[int, int], None] | None = None
) -> TokenStream:
    """Turn documents into one stream, in their order, on all cores.

    Args:
        documents: What to encode.
        tokenizer: What it opens a text with, the border, precedes each document.
        progress: Called with the characters done and the characters in all.

    Raises:
        DataError: The tokenizer has no border.
    """
    if len(tokenizer.opening) != 1:
        raise DataError("tokenizer: no token begins a document; set data.tokenizer.border")
    (border,) = tokenizer.opening
    dtype = np.uint16 if tokenizer.vocab_size <= 1 << 16 else np.uint32
    total, done = sum(len(document.text) for document in documents), 0
    pieces: list[np.ndarray] = []
    lengths = np.ones(len(documents), np.int64)  # the border
    for batch in _batches(documents, tokenizer):
        encoded = tokenizer.encode_batch([text for _, text, _ in batch])
        for (number, text, is_first), tokens in zip(batch, encoded, strict=True):
            pieces.append(np.array([border, *tokens] if is_first else tokens, dtype))
            lengths[number] += len(tokens)
            done += len(text)
        if progress:
            progress(done, total)
    return TokenStream(
        tokens=np.concatenate([np.zeros(0, dtype), *pieces]),
        starts=_starts(lengths.tolist()),
        document_bytes=np.array([len(document.text.encode()) for document in documents], np.int64),
        border=border,
    )


def _batches(documents: Sequence[Document], tokenizer: Encoder) -> Iterator[list[tuple[int, str, bool]]]:
    """Yield pieces, each with its document's number and whether it begins it; a bounded amount of text at once."""
    batch, size = [], 0
    for number, document in enumerate(documents):
        is_first = True
        for piece in tokenizer.pieces(document.text) if document.text else [""]:
            if batch and size + len(piece) > ENCODED_AT_ONCE:
                yield batch
                batch, size = [], 0
            batch.append((number, piece, is_first))
            size, is_first = size + len(piece), False
    if batch:
        yield batch


class Rows:
    """One stream without end: epoch after epoch laid end to end, cut into rows.

    Each epoch orders the documents anew; the rows that begin in an epoch come in an order of their own, so that a
    long document does not fill many rows in a row. Nothing is dropped: a row may run on into the next epoch.
    """

    def __init__(self, stream: TokenStream, seq_len: int, seed: Sequence[int], name: str = "data") -> None:
        """Cut a stream into rows of `seq_len` tokens.

        Raises:
            DataError: The stream is shorter than a row.
        """
        if stream.num_tokens < seq_len:
            raise DataError(
                f"{name}: data.seq_len `{seq_len}` is more than the training text has; "
                f"found `{stream.num_tokens}` tokens in `{stream.num_documents}` documents; "
                "give more text or a smaller data.seq_len"
            )
        self._stream, self._seq_len, self._seed = stream, seq_len, list(seed)
        self._epochs: dict[int, tuple[np.ndarray, np.ndarray, np.ndarray]] = {}

    def epoch_of(self, number: int) -> int:
        """Return the epoch in which the row of this number is served."""
        return number * self._seq_len // self._stream.num_tokens

    def __getitem__(self, number: int) -> UInt[np.ndarray, " _"]:
        """Return row `number` (0, 1, …, without end): its tokens and the one that follows, `seq_len` + 1 in all."""
        epoch = self.epoch_of(number)
        rows = self._epoch(epoch)[2]
        first = self._first_row(epoch)
        at = (first + int(rows[number - first])) * self._seq_len - epoch * self._stream.num_tokens
        pieces, wanted = [], self._seq_len + 1
        while wanted:
            order, starts, _ = self._epoch(epoch)
            place = int(np.searchsorted(starts, at, side="right")) - 1
            while wanted and place < len(order):
                begin = int(self._stream.starts[order[place]]) + at - int(starts[place])
                piece = self._stream.tokens[begin : min(begin + wanted, int(self._stream.starts[order[place] + 1]))]
                pieces.append(piece)
                wanted, at, place = wanted - len(piece), at + len(piece), place + 1
            epoch, at = epoch + 1, 0
        return np.concatenate(pieces)

    def _first_row(self, epoch: int) -> int:
        return -(-epoch * self._stream.num_tokens // self._seq_len)

    def _epoch(self, epoch: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return the order of the documents, where each begins, and the order of the rows of an epoch."""
        if epoch not in self._epochs:
            self._epochs = {known: self._epochs[known] for known in self._epochs if known == epoch - 1}
            order = shuffle(self._stream.num_documents, [*self._seed, epoch, 0])
            starts = _starts(np.diff(self._stream.starts)[order].tolist())
            rows = shuffle(self._first_row(epoch + 1) - self._first_row(epoch), [*self._seed, epoch, 1])
            self._epochs[epoch] = (order, starts, rows)
        return self._epochs[epoch]


def shuffle(count: int, seed: Sequence[int]) -> Int64[np.ndarray, " N"]:
    """Return 0 … count - 1 in an order that depends on the seed only, on every machine and version of numpy."""
    return np.argsort(np.random.Philox(np.random.SeedSequence(seed)).random_raw(count), kind="stable")


def batch_of(rows: Sequence[UInt[np.ndarray, " _"]], border: int) -> Batch:
    """Lay rows, each with the token that follows it, end to end."""
    lengths: list[int] = []
    for row in rows:
        begins = np.union1d([0], np.flatnonzero(row[:-1] == border))
        lengths += np.diff([*begins, len(row) - 1]).tolist()
    return Batch(
        tokens=torch.from_numpy(np.concatenate([row[:-1] for row in rows]).astype(np.int64)),
        targets=torch.from_numpy(np.concatenate([row[1:] for row in rows]).astype(np.int64)),
        lengths=tuple(lengths),
    )


def held_out_batches(stream: TokenStream, seq_len: int, micro_tokens: int) -> Iterator[Batch]:
    """Cut a stream for evaluation: every token once, in order; the last row and the last batch may be shorter.

    The summed nats of all targets over `stream.num_bytes` (and ln 2) are bits per byte; the price of each document's
    end is in the sum.
    """
    followed = np.append(stream.tokens, stream.tokens.dtype.type(stream.border))
    cuts = list(range(0, stream.num_tokens, seq_len))
    rows = [followed[cut : min(cut + seq_len, stream.num_tokens) + 1] for cut in cuts]
    in_batch = max(1, micro_tokens // seq_len)
    for first in range(0, len(rows), in_batch):
        yield batch_of(rows[first : first + in_batch], stream.border)


def _starts(lengths: Sequence[int]) -> np.ndarray:
    return np.array([*accumulate(lengths, initial=0)], np.int64)
