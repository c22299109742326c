"""A tokenizer of bytes with the control names of each family, and the real vocabulary where it is present."""

import re

import pytest

K3_NAMES = (
    "[BOS]",
    "[EOS]",
    "<|end_of_msg|>",
    "<|open|>",
    "<|close|>",
    "<|sep|>",
    "<|media_begin|>",
    "<|media_content|>",
    "<|media_end|>",
    "<|media_pad|>",
)
K2_NAMES = (
    "[BOS]",
    "[EOS]",
    "<|im_end|>",
    "<|im_user|>",
    "<|im_assistant|>",
    "<|im_system|>",
    "<|tool_calls_section_begin|>",
    "<|tool_calls_section_end|>",
    "<|tool_call_begin|>",
    "<|tool_call_argument_begin|>",
    "<|tool_call_end|>",
    "<|im_middle|>",
    "<|media_begin|>",
    "<|media_content|>",
    "<|media_end|>",
    "<|media_pad|>",
    "<think>",
    "</think>",
)


class ByteTokenizer:
    """One token a byte; control tokens from 256 on."""

    def __init__(self, names: tuple[str, ...]) -> None:
        self.control = {name: 256 + number for number, name in enumerate(names)}

    def encode_ordinary(self, text: str) -> list[int]:
        return list(text.encode())

    def decode_bytes(self, tokens) -> bytes:
        return bytes(tokens)

    def trusted(self, text: str) -> list[int]:
        """Tokens of what a model wrote, its control tokens spelled out."""
        names = "|".join(map(re.escape, sorted(self.control, key=len, reverse=True)))
        return [
            token
            for piece in re.split(f"({names})", text)
            for token in ([self.control[piece]] if piece in self.control else self.encode_ordinary(piece))
        ]

    def show(self, tokens) -> str:
        """Tokens as a reader sees them, control tokens spelled out."""
        names = {token: name.encode() for name, token in self.control.items()}
        return b"".join(names.get(token) or bytes([token]) for token in tokens).decode()


@pytest.fixture(scope="session")
def k3_tokenizer() -> ByteTokenizer:
    return ByteTokenizer(K3_NAMES)


@pytest.fixture(scope="session")
def k2_tokenizer() -> ByteTokenizer:
    return ByteTokenizer(K2_NAMES)
