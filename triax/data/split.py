"""Which documents are held out: decided by their names alone, so every machine and order agrees."""

from collections.abc import Sequence
from hashlib import sha256
from typing import NamedTuple

from triax.data.source import Document
from triax.errors import DataError


class Split(NamedTuple):
    """The two sides; no document is on both."""

    training: tuple[tuple[Document, ...], ...]
    """Documents to learn from, source by source; none of them is empty."""
    held_out: tuple[Document, ...]
    """Documents to be measured on, all sources together."""


def draw(name: str) -> float:
    """Return a number in [0, 1) that depends on this name only."""
    return int.from_bytes(sha256(name.encode("utf-8", "surrogatepass")).digest()[:6], "big") / 2**48


def split(sources: Sequence[Sequence[Document]], share: float) -> Split:
    """Hold out the documents whose name draws less than a share.

    A source of two or more documents keeps at least one on each side (those that draw least and most);
    a source of one document is wholly learned from.

    Raises:
        DataError: Something was to be held out, but no source has two documents.
    """
    training, held_out = [], []
    for documents in sources:
        kept = documents
        if share > 0 and len(documents) > 1:
            draws = sorted(draw(document.name) for document in documents)
            bar = min(max(share, draws[1]), draws[-1])
            kept = [document for document in documents if draw(document.name) >= bar]
            held_out += [document for document in documents if draw(document.name) < bar]
        training.append(tuple(kept))
    if share > 0 and not held_out:
        raise DataError(
            f"data.held_out_share `{share}` holds out nothing; found `{sum(map(len, sources))}` documents in "
            f"`{len(sources)}` sources; give a source with several documents, or set data.held_out_share to 0"
        )
    return Split(tuple(training), tuple(held_out))
