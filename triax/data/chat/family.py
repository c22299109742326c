"""Which chat format a tokenizer speaks."""

from typing import Literal

from triax.data.chat.k2 import MIDDLE
from triax.data.chat.xtml import OPEN

Format = Literal["k3", "k2", "text"]
"""K3's, K2's, or none: a base model that continues text."""


def chat_format(tokenizer: object) -> Format:
    """Return the format whose control tokens a tokenizer has."""
    control = getattr(tokenizer, "control", {})
    return "k3" if OPEN in control else "k2" if MIDDLE in control else "text"
