"""Which documents are held out: decided by their names alone, the same on every machine and in every order."""

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

    A source of two or more documents keeps at least one on each side (those that draw least and most); a source of
    one document is wholly learned from. If no source has two documents, the tail of each is held out.

    Raises:
        DataError: Something was to be held out, but there is no more than one character a source.
    """
    if share > 0 and all(len(documents) < 2 for documents in sources):
        return _tails([document for documents in sources for document in documents], share)
    training, held_out = [], []
    for documents in sources:
        kept = documents
        if share > 0 and len(documents) > 1:
            draws = sorted(draw(document.name) for document in documents)
            bar = min(max(share, draws[1]), draws[-1])
            kept = [document for document in documents if draw(document.name) >= bar]
            held_out += [document for document in documents if draw(document.name) < bar]
        training.append(tuple(kept))
    return Split(tuple(training), tuple(held_out))


def _tails(documents: Sequence[Document], share: float) -> Split:
    """Cut lone documents in two."""
    training, held_out = [], []
    for name, text in documents:
        cut = _cut(text, share)
        training.append((Document(name, text[:cut]),))
        if text[cut:]:
            held_out.append(Document(f"{name} (tail)", text[cut:]))
    if not held_out:
        raise DataError(
            f"data.held_out_share `{share}` holds out nothing; found `{len(documents)}` documents of one character; "
            "give more text, or set data.held_out_share to 0"
        )
    return Split(tuple(training), tuple(held_out))


def _cut(text: str, share: float) -> int:
    """Return where the tail begins: at a line if there is one near, else at a word, else at any character."""
    wanted = min(max(1, round(len(text) * (1 - share))), max(1, len(text) - 1))
    for mark in "\n ":
        before = text.rfind(mark, 0, wanted) + 1
        after = text.find(mark, wanted - 1) + 1
        near = [cut for cut in (before, after) if 0 < cut < len(text) and abs(cut - wanted) <= share * len(text) / 2]
        if near:
            return min(near, key=lambda cut: abs(cut - wanted))
    return wanted
