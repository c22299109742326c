"""A vocabulary as ranked byte strings, the form that tiktoken reads: its file, and ranks that mean what merges mean."""

import binascii
from typing import Any

from triax.data.control import MAX_TOKENS
from triax.data.tokenizer import byte_of_letter
from triax.errors import DataError


def read_ranks(data: bytes, where: str) -> dict[bytes, int]:
    """Parse a rank file: one line a token, its bytes in base64, a blank and its number.

    Raises:
        DataError: A line is damaged or repeated, or a byte has no token of its own.
    """
    ranks: dict[bytes, int] = {}
    for number, line in enumerate(data.splitlines(), 1):
        try:
            word, rank = line.split(b" ")
            token = binascii.a2b_base64(word, strict_mode=True)
            if not (token and rank.isdigit() and int(rank) < MAX_TOKENS):
                raise ValueError
        except ValueError:
            raise DataError(
                f"{where}: line {number} is not a token and its rank; found `{line[:40]!r}`; copy the file again"
            ) from None
        if token in ranks:
            raise DataError(f"{where}: line {number} repeats a token; found `{line[:40]!r}`; copy the file again")
        ranks[token] = int(rank)
    if len(set(ranks.values())) < len(ranks):
        raise DataError(f"{where}: two tokens have one rank; found `{len(ranks)}` tokens; copy the file again")
    if absent := [byte for byte in range(256) if bytes([byte]) not in ranks]:
        raise DataError(
            f"{where}: not every text has tokens; found none for `{len(absent)}` of 256 bytes, such as "
            f"`{absent[0]:#04x}`; copy the file again"
        )
    return ranks


def write_ranks(ranks: dict[bytes, int]) -> bytes:
    """Return the rank file of a vocabulary, lowest rank first."""
    lines = (
        binascii.b2a_base64(token, newline=False) + b" %d\n" % rank
        for token, rank in sorted(ranks.items(), key=lambda entry: entry[1])
    )
    return b"".join(lines)


def ranks_of_merges(tree: dict[str, Any]) -> dict[bytes, int]:
    """Return the bytes of each token with its number as rank, for a byte-level BPE given as its `tokenizer.json`.

    Merges say which pairs may be joined; ranks allow every pair whose bytes are a token. Both agree on all text if each
    token's bytes alone, joined by the lower ranks only, come to the two halves of its merge: which pairs get joined
    inside a stretch of text does not depend on its surroundings, as long as nothing is joined across its ends.

    Raises:
        DataError: The merges are no such BPE; one trained by triax always is.
    """
    model = tree["model"]
    added = {token["id"] for token in tree["added_tokens"]}
    byte_of = byte_of_letter()
    options = [name for name in ("dropout", "continuing_subword_prefix", "end_of_word_suffix") if model.get(name)]
    if model["type"] != "BPE" or options:
        raise DataError(
            f"tokenizer: ranks cannot stand for this model; found `{model['type']}` with `{options}`; "
            "use a byte-level BPE without them"
        )
    bytes_of = {
        word: bytes(byte_of[letter] for letter in word)
        for word, token in model["vocab"].items()
        if token not in added and all(letter in byte_of for letter in word)
    }
    ranks = {bytes_of[word]: model["vocab"][word] for word in bytes_of}
    halves = {bytes_of[left] + bytes_of[right]: [bytes_of[left], bytes_of[right]] for left, right in model["merges"]}
    for token, rank in ranks.items():
        if len(token) > 1 and halves.get(token) != (found := _joined(token, ranks, below=rank)):
            raise DataError(
                f"tokenizer: merges and ranks would encode text differently; found token `{token!r}` merged from "
                f"`{halves.get(token)}` where ranks give `{found}`; use a BPE trained by triax"
            )
    return ranks


def split_pattern(tree: dict[str, Any]) -> str:
    """Return the expression that cuts text into the pieces that no token crosses.

    Raises:
        DataError: Text is cut in another way than by one expression.
    """
    match tree["pre_tokenizer"]:
        case {
            "type": "Sequence",
            "pretokenizers": [
                {"type": "Split", "pattern": {"Regex": str(pattern)}, "behavior": "Isolated", "invert": False},
                {"type": "ByteLevel", "add_prefix_space": False, "use_regex": False},
            ],
        }:
            return pattern
        case other:
            raise DataError(
                f"tokenizer: text is not split by one expression; found `{other}`; use a tokenizer trained by triax"
            )


def _joined(token: bytes, ranks: dict[bytes, int], below: int) -> list[bytes]:
    """Join neighbours, the lowest rank first and leftmost on ties, while their rank is low enough."""
    parts = [bytes([byte]) for byte in token]
    while True:
        found = [
            (rank, place)
            for place in range(len(parts) - 1)
            if (rank := ranks.get(parts[place] + parts[place + 1], below)) < below
        ]
        if not found:
            return parts
        place = min(found)[1]
        parts[place : place + 2] = [parts[place] + parts[place + 1]]
