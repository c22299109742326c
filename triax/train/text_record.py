"""Hashes of the text that a run reads, file by file, so that a changed file can be named."""

import hashlib
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from triax.config import data as config
from triax.data.corpus import Corpus
from triax.data.source import Document
from triax.train.run_folder import TEXT, write_json

NAMED = 5
"""Files that a message spells out; the rest are counted."""

MOST_FILES = 50_000
"""Beyond so many files none is recorded: the loader's own hashes still tell that something changed."""

Record = dict[str, dict[str, str]]
"""For each source, and for the held-out side of all, the hash of each file's text."""


def write(run_dir: Path, corpus: Corpus, settings: config.Data) -> None:
    """Write down the hashes of what is read now."""
    write_json(run_dir / TEXT, record(corpus, settings))


def record(corpus: Corpus, settings: config.Data) -> Record:
    """Return the hash of each file's documents, in their order, for each source and for the held-out side."""
    sides = zip(corpus.names, settings.sources, corpus.training, strict=True)
    found = {name: _files(documents, _has_rows(source)) for name, source, documents in sides}
    rows = any(_has_rows(source) for source in settings.sources)
    found["held-out text"] = _files(corpus.held_out, rows)
    return found if sum(map(len, found.values())) <= MOST_FILES else {}


def changes(run_dir: Path, corpus: Corpus, settings: config.Data) -> str:
    """Say which files differ from those that a run recorded; empty if none does, or none was recorded."""
    try:
        before: Mapping[str, Mapping[str, str]] = json.loads((run_dir / TEXT).read_text())
    except (OSError, ValueError):
        return ""
    now = record(corpus, settings)
    if not before or not now:
        return ""
    told: dict[str, list[str]] = {"changed": [], "new": [], "missing": []}
    old = {file: digest for side in before.values() for file, digest in side.items()}
    new = {file: digest for side in now.values() for file, digest in side.items()}
    for file in sorted(old.keys() | new.keys()):
        if file not in old or file not in new:
            told["new" if file in new else "missing"].append(file)
        elif any(side.get(file) != now.get(name, {}).get(file) for name, side in before.items()):
            told["changed"].append(file)
    return "; ".join(f"{what}: {_named(files)}" for what, files in told.items() if files)


def _has_rows(source: config.Source) -> bool:
    """Whether a document is a row of a file, so that its name ends in a number."""
    return not isinstance(source, config.Folder | config.StandardLibrary)


def _files(documents: Iterable[Document], has_rows: bool) -> dict[str, str]:
    hashes: dict[str, Any] = {}
    for document in documents:
        file, colon, row = document.name.rpartition(":")
        name = file if has_rows and colon and row.isdigit() else document.name
        text = document.text.encode("utf-8", "surrogatepass")
        hashes.setdefault(name, hashlib.sha256()).update(b"%d:" % len(text) + text)
    return {name: digest.hexdigest()[:16] for name, digest in hashes.items()}


def _named(files: list[str]) -> str:
    more = len(files) - NAMED
    return ", ".join(f"`{file}`" for file in files[:NAMED]) + (f" and {more} more" if more > 0 else "")
