"""Everything a run reads, from settings to streams of tokens."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path

from triax.config import data as config
from triax.data.kimi import RANK_FILE, KimiTokenizer
from triax.data.mixture import Part
from triax.data.pack import Encoder, TokenStream, encode
from triax.data.source import Document, read
from triax.data.split import Split, draw, split
from triax.data.tokenizer import Tokenizer


@dataclass(frozen=True)
class Corpus:
    """The documents of every source, split."""

    names: tuple[str, ...]
    """What each source is called in logs and errors."""
    weights: tuple[float, ...]
    """Share of each source, relative to the others."""
    training: tuple[tuple[Document, ...], ...]
    """Documents to learn from, source by source."""
    held_out: tuple[Document, ...]
    """Documents to be measured on."""
    num_empty: int
    """Files or rows without text, left out."""
    notes: tuple[str, ...] = ()
    """What a person should know of the text, one line each."""

    @classmethod
    def read(cls, settings: config.Data) -> "Corpus":
        """Read and split every source.

        Raises:
            DataError: A source cannot be read, or nothing can be held out.
        """
        found = [read(source) for source in settings.sources]
        sides = split([source.documents for source in found], settings.held_out_share)
        names = tuple(f"data.sources.{n} ({source.kind})" for n, source in enumerate(settings.sources))
        notes = [f"{name}: {note}" for name, source in zip(names, found, strict=True) for note in source.notes]
        return cls(
            names=names,
            weights=tuple(source.weight for source in settings.sources),
            training=sides.training,
            held_out=sides.held_out,
            num_empty=sum(source.num_empty for source in found),
            notes=(*notes, *_copies(sides)),
        )

    def tokenizer(self, settings: config.Tokenizer) -> Tokenizer | KimiTokenizer:
        """Learn a tokenizer from the training side, or load the one that the settings name.

        Raises:
            DataError: The text supports no such vocabulary, or the file cannot be used.
        """
        if settings.path is not None:
            return read_tokenizer(settings.path.expanduser(), settings.border)
        documents = (document for source in self.training for document in source)
        return Tokenizer.train(within(documents, settings.train_bytes), settings.vocab_size)

    def encode(
        self, tokenizer: Encoder, progress: Callable[[int, int], None] | None = None
    ) -> tuple[tuple[Part, ...], TokenStream]:
        """Return the parts of the training mixture, and the held-out stream.

        Args:
            tokenizer: Encodes all of them.
            progress: Called with the characters done and the characters in all.
        """
        sides = (*self.training, self.held_out)
        sizes = [sum(len(document.text) for document in side) for side in sides]
        streams = []
        for n, side in enumerate(sides):
            done = sum(sizes[:n])
            step = (lambda here, _, done=done: progress(done + here, sum(sizes))) if progress else None
            streams.append(encode(side, tokenizer, step))
        parts = zip(self.names, streams, self.weights, strict=False)
        return tuple(Part(name, stream, weight) for name, stream, weight in parts), streams[-1]


def _copies(sides: Split) -> list[str]:
    """Tell of held-out documents whose text is learned from too."""
    wanted = {_digest(document) for document in sides.held_out}
    learned = wanted & {_digest(document) for source in sides.training for document in source}
    copies = sum(_digest(document) in learned for document in sides.held_out)
    if not copies:
        return []
    return [
        f"held-out text: {copies} of {len(sides.held_out)} documents stand in the training text too, word for word: "
        "what is measured on them is memory; remove the copies"
    ]


def _digest(document: Document) -> bytes:
    return blake2b(document.text.encode(), digest_size=16).digest()


def read_tokenizer(path: Path, border: str = "") -> Tokenizer | KimiTokenizer:
    """Read a tokenizer to train with: a `tokenizer.json`, one of Kimi's rank files, or the folder of either.

    Args:
        path: File or folder.
        border: Token that begins every document; if empty, the tokenizer's own, `<|border|>`, or Kimi's `[BOS]`.

    Raises:
        DataError: It cannot be used, or has no such token.
    """
    if path.suffix == ".json" or (path.is_dir() and not (path / RANK_FILE).exists()):
        return Tokenizer.load(path / "tokenizer.json" if path.is_dir() else path, border)
    kimi = KimiTokenizer.load(path)
    return kimi if kimi.opening and not border else kimi.with_border(border or "[BOS]")


def within(documents: Iterable[Document], num_bytes: int) -> Iterator[str]:
    """Yield texts up to a number of bytes, in an order drawn by name, the last one cut."""
    left = num_bytes
    for document in sorted(documents, key=lambda document: (draw(document.name), document.name)):
        text = document.text
        size = len(text.encode())
        if size > left:
            text = text.encode()[:left].decode("utf-8", "ignore")
        if text:
            yield text
        left -= size
        if left <= 0:
            return
