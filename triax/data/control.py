"""Control tokens of the Kimi tokenizers: their names and numbers, and the `tokenizer_config.json` that states them."""

import json
from collections.abc import Mapping
from typing import Any, Literal

from triax.errors import DataError

Family = Literal["k3", "k2"]

CONFIG_FILE = "tokenizer_config.json"
NUM_CONTROL = 256
MAX_TOKENS = 10_000_000  # more is a damaged file
# Splits text in the published way: a tokenizer with another split must not name it.
AUTO_CLASS = "tokenization_kimi.TikTokenTokenizer"

# Place in the block that follows the ranks -> name. All others are `<|reserved_token_{id}|>` of the absolute number.
_SHARED = {
    0: "[BOS]",
    1: "[EOS]",
    9: "[EOT]",
    18: "<|media_begin|>",
    19: "<|media_content|>",
    20: "<|media_end|>",
    21: "<|media_pad|>",
    254: "[UNK]",
    255: "[PAD]",
}
NAMES: dict[Family, dict[int, str]] = {
    "k3": _SHARED
    | {
        2: "<|end_of_msg|>",
        3: "<|open|>",
        4: "<|close|>",
        5: "<|sep|>",
        6: "[start_header_id]",
        7: "[end_header_id]",
        65: "<osagent_mode>",
    },
    "k2": _SHARED
    | {
        2: "<|im_end|>",
        3: "<|im_user|>",
        4: "<|im_assistant|>",
        6: "<|start_header_id|>",
        7: "<|end_header_id|>",
        10: "<|im_system|>",
        11: "<|tool_calls_section_begin|>",
        12: "<|tool_calls_section_end|>",
        13: "<|tool_call_begin|>",
        14: "<|tool_call_argument_begin|>",
        15: "<|tool_call_end|>",
        17: "<|im_middle|>",
        22: "<think>",
        23: "</think>",
    },
}
# Not special: they stay when special tokens are left out, because a reader of the text needs its structure.
KEPT = frozenset({"<|open|>", "<|close|>", "<|sep|>", *(NAMES["k2"][place] for place in (11, 12, 13, 14, 15, 22, 23))})


def block_names(first: int, family: Family) -> dict[int, str]:
    """Return the named tokens of a block that begins at `first`."""
    return {first + place: name for place, name in sorted(NAMES[family].items())}


def config_file(names: Mapping[int, str], ours: Mapping[str, Any] | None = None) -> bytes:
    """Return a `tokenizer_config.json` in the published form; for the released K3 it is the published file.

    Args:
        names: Number and name of each control token that has one.
        ours: What the published form cannot say, under the key `triax`: `ranks_sha256`, `split_pattern`,
            `first_control`, `num_control`.
    """
    ours = ours or {}
    flags = {"lstrip": False, "normalized": False, "rstrip": False, "single_word": False}
    roles = {"bos_token": "[BOS]", "eos_token": "[EOS]", "pad_token": "[PAD]", "unk_token": "[UNK]"}
    roles = {role: name for role, name in roles.items() if name in names.values()}
    tree = {
        "added_tokens_decoder": {
            str(number): {"content": name, **flags, "special": name not in KEPT} for number, name in names.items()
        },
        "additional_special_tokens": [name for name in names.values() if name not in {*KEPT, *roles.values()}],
        "clean_up_tokenization_spaces": False,
        "extra_special_tokens": {},
        "model_max_length": 1000000000000000019884624838656,  # the published way to say: no limit
        "tokenizer_class": "TikTokenTokenizer",
        **roles,
    }
    tree = dict(sorted(tree.items()))
    if "split_pattern" not in ours:
        tree["auto_map"] = {"AutoTokenizer": [AUTO_CLASS, None]}
    if ours:
        tree["triax"] = dict(ours)
    return json.dumps(tree, indent=2, ensure_ascii=False).encode()


def parse_config(data: bytes, where: str) -> dict[str, Any]:
    """Read a `tokenizer_config.json` as far as it decides tokens.

    Raises:
        DataError: It is damaged or names no control tokens.
    """
    try:
        config = json.loads(data)
        names = {int(number): entry["content"] for number, entry in config["added_tokens_decoder"].items()}
        ours = config.setdefault("triax", {})
        numbers = [ours.get("first_control", 0), ours.get("num_control", 0), *names]
        if not all(isinstance(number, int) and 0 <= number < MAX_TOKENS for number in numbers):
            raise ValueError("a number that no token has")
        if not all(isinstance(name, str) and name for name in names.values()):
            raise ValueError("a token without name")
        ours.get("split_pattern", "").encode(), ours.get("ranks_sha256", "").encode(), ours.get("border", "").encode()
    except (ValueError, KeyError, TypeError, AttributeError) as problem:
        raise DataError(f"{where}: names no control tokens; {problem!r}; copy the file again") from None
    return config


def control_tokens(config: Mapping[str, Any], ranks: Mapping[bytes, int], where: str) -> dict[str, int]:
    """Return name and number of each control token: the block after the ranks, named where the config names it.

    Raises:
        DataError: Ranks and config are not of one tokenizer.
    """
    ours, taken = config["triax"], set(ranks.values())
    block = range(first := ours.get("first_control", len(ranks)), first + ours.get("num_control", NUM_CONTROL))
    names = {number: f"<|reserved_token_{number}|>" for number in block}
    names |= {int(number): entry["content"] for number, entry in config["added_tokens_decoder"].items()}
    is_placed = "first_control" in ours  # else the block follows ranks without a gap, and nothing is outside of it
    stray = [number for number in sorted(names) if number in taken or not (is_placed or number in block)]
    if stray or not (is_placed or max(taken) < len(ranks)):
        raise DataError(
            f"{where}: ranks and control tokens are not of one tokenizer; found control token "
            f"{(stray or [block.start])[0]} beside {len(ranks)} ranks up to {max(taken)}; copy the rank file and "
            f"`{CONFIG_FILE}` again"
        )
    control = {name: number for number, name in sorted(names.items())}
    if len(control) < len(names):
        raise DataError(
            f"{where}/{CONFIG_FILE}: two control tokens have one name; found {len(control)} names for "
            f"{len(names)} tokens; copy the file again"
        )
    return control


def check_numbers(control: Mapping[str, int], first: int, where: str) -> None:
    """Refuse a config that a conversion has renumbered: each known name has one place in the release.

    Raises:
        DataError: A known name is elsewhere.
    """
    for names in NAMES.values():
        for place, name in names.items():
            if control.get(name, first + place) != first + place:
                raise DataError(
                    f"{where}/{CONFIG_FILE}: control tokens are renumbered; found `{name}` at {control[name]}, where "
                    f"the release has it at {first + place}; copy the file from the release"
                )
