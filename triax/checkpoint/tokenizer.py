"""The tokenizer's files beside exported weights, in the form that other programs read."""

import json
from pathlib import Path

from triax.data.kimi import RANK_FILE, KimiTokenizer
from triax.data.tokenizer import BORDER, Tokenizer
from triax.errors import CheckpointError

TOKENIZER = "tokenizer.json"


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

    A trained one becomes `tokenizer.json` and a `tokenizer_config.json` that names its border as beginning and end; one
    of Kimi's stays the two files that it is.
    """
    if isinstance(tokenizer, KimiTokenizer):
        tokenizer.save(folder)
        return
    tokenizer.save(folder / TOKENIZER)
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": BORDER,
        "eos_token": BORDER,
        "clean_up_tokenization_spaces": False,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def special_ids(tokenizer: Tokenizer | KimiTokenizer | None) -> dict[str, int] | None:
    """Return the numbers that a config names; none without a tokenizer."""
    if tokenizer is None:
        return None
    if isinstance(tokenizer, Tokenizer):
        return {"bos_token_id": tokenizer.border, "eos_token_id": tokenizer.border}
    end = "<|end_of_msg|>" if "<|end_of_msg|>" in tokenizer.control else "<|im_end|>"
    control = tokenizer.control
    return {"bos_token_id": control["[BOS]"], "eos_token_id": control[end], "pad_token_id": control["[PAD]"]}
