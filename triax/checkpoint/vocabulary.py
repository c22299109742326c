"""The tokenizer beside released weights must not know more tokens than the embedding has rows."""

import json
from pathlib import Path

from triax.errors import CheckpointError


def check_vocabulary(folder: Path, vocab_size: int) -> None:
    """Compare the largest token id of the folder's tokenizer with the rows of the embedding.

    Fewer tokens than rows are fine: the rest is padding. A folder without a tokenizer passes.

    Raises:
        CheckpointError: A token has no row, or the tokenizer cannot be read.
    """
    path, needed = _rows_needed(folder)
    if needed > vocab_size:
        raise CheckpointError(
            f"{path}: has more tokens than the model; found {needed:,} where `vocab_size` is {vocab_size:,}; "
            "use the tokenizer that the weights were trained with"
        )


def _rows_needed(folder: Path) -> tuple[Path, int]:
    path = folder / "tokenizer.json"
    try:
        if path.is_file():
            tokenizer = json.loads(path.read_text(encoding="utf-8-sig"))
            ids = [*tokenizer["model"]["vocab"].values(), *(token["id"] for token in tokenizer["added_tokens"])]
            return path, max(ids, default=-1) + 1
        path = folder / "tiktoken.model"
        if path.is_file():
            ranks = [int(line.split()[1]) for line in path.read_bytes().splitlines() if line]
            ids = [*ranks, *_added(folder)]
            return path, max(ids, default=-1) + 1
    except (OSError, ValueError, KeyError, TypeError, AttributeError, IndexError) as problem:
        raise CheckpointError(f"{path}: is not a tokenizer; {problem!r}; copy it again") from None
    return folder, 0


def _added(folder: Path) -> list[int]:
    path = folder / "tokenizer_config.json"
    if not path.is_file():
        return []
    return [int(number) for number in json.loads(path.read_text(encoding="utf-8-sig")).get("added_tokens_decoder", {})]
