"""The tokenizer's files beside exported weights, in the form that other programs read."""

import json
from pathlib import Path

from triax.data.control import CONFIG_FILE
from triax.data.kimi import RANK_FILE, KimiTokenizer
from triax.data.tokenizer import Tokenizer
from triax.errors import CheckpointError

TOKENIZER = "tokenizer.json"
TOKENIZER_FILES = (
    TOKENIZER,
    f"{TOKENIZER}.tmp",
    CONFIG_FILE,
    f".{CONFIG_FILE}.draft",
    RANK_FILE,
    f".{RANK_FILE}.draft",
)
"""Whatever `save_tokenizer` writes or, if it is killed, leaves."""


def has_tokenizer(folder: Path) -> bool:
    """Whether `load_tokenizer` finds one here."""
    return any((folder / name).is_file() for name in (RANK_FILE, TOKENIZER))


def load_tokenizer(folder: Path) -> Tokenizer | KimiTokenizer:
    """Read the tokenizer that lies beside weights: Kimi's rank file if there is one, else one trained by triax.

    Raises:
        CheckpointError: There is neither.
        DataError: The files are damaged or of something else.
    """
    if (folder / RANK_FILE).is_file():
        return KimiTokenizer.load(folder)
    if (folder / TOKENIZER).is_file():
        return Tokenizer.load(folder / TOKENIZER)
    raise CheckpointError(
        f"{folder}: has no `{RANK_FILE}` and no `{TOKENIZER}`; found none; put the one of its training beside it"
    )


def save_tokenizer(tokenizer: Tokenizer | KimiTokenizer, folder: Path) -> None:
    """Write the tokenizer into a folder of weights.

    A trained one becomes a `tokenizer.json` that puts the border before each text, as training does, and a
    `tokenizer_config.json` that names it as beginning and end; one of Kimi's stays the two files that it is.
    """
    if isinstance(tokenizer, KimiTokenizer):
        tokenizer.save(folder)
        return
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": tokenizer.border_name,
        "eos_token": tokenizer.border_name,
        "clean_up_tokenization_spaces": False,
    }
    (folder / CONFIG_FILE).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    draft = folder / f"{TOKENIZER}.tmp"
    tokenizer.save(draft)
    draft.replace(folder / TOKENIZER)


def special_ids(tokenizer: Tokenizer | KimiTokenizer | None) -> dict[str, int] | None:
    """Return the numbers that a config names; none without a tokenizer."""
    if tokenizer is None:
        return None
    if isinstance(tokenizer, Tokenizer):
        return {"bos_token_id": tokenizer.border, "eos_token_id": tokenizer.border}
    end = "<|end_of_msg|>" if "<|end_of_msg|>" in tokenizer.control else "<|im_end|>"
    control = tokenizer.control
    return {"bos_token_id": tokenizer.start, "eos_token_id": control[end], "pad_token_id": control["[PAD]"]}
