"""The tokenizer's files beside exported weights, in the form that other programs read."""

import json
from pathlib import Path
from typing import Any

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

    A trained one becomes a `tokenizer.json` that puts the border before each text, as training does, and a
    `tokenizer_config.json` that names it as beginning and end; one of Kimi's stays the two files that it is.
    """
    if isinstance(tokenizer, KimiTokenizer):
        tokenizer.save(folder)
        return
    tree = tokenizer.tree()
    tree["post_processor"] = _opening(tokenizer.border, tree.get("post_processor"))
    (folder / TOKENIZER).write_text(json.dumps(tree, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": BORDER,
        "eos_token": BORDER,
        "clean_up_tokenization_spaces": False,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def _opening(border: int, existing: dict[str, Any] | None) -> dict[str, Any]:
    """Return the last step of a `tokenizer.json`: the border, then the text, and each further text behind its own."""
    single = [{"SpecialToken": {"id": BORDER, "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}]
    pair = [*single, {"SpecialToken": {"id": BORDER, "type_id": 1}}, {"Sequence": {"id": "B", "type_id": 1}}]
    special = {BORDER: {"id": BORDER, "ids": [border], "tokens": [BORDER]}}
    template = {"type": "TemplateProcessing", "single": single, "pair": pair, "special_tokens": special}
    if existing is None or existing["type"] == "TemplateProcessing":
        return template
    return {"type": "Sequence", "processors": [existing, template]}


def special_ids(tokenizer: Tokenizer | KimiTokenizer | None) -> dict[str, int] | None:
    """Return the numbers that a config names; none without a tokenizer."""
    if tokenizer is None:
        return None
    if isinstance(tokenizer, Tokenizer):
        return {"bos_token_id": tokenizer.border, "eos_token_id": tokenizer.border}
    end = "<|end_of_msg|>" if "<|end_of_msg|>" in tokenizer.control else "<|im_end|>"
    control = tokenizer.control
    return {"bos_token_id": control["[BOS]"], "eos_token_id": control[end], "pad_token_id": control["[PAD]"]}
