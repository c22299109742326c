"""Where sequences begin and end in a flat stream of tokens."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

import torch
from jaxtyping import Int
from torch import Tensor


@dataclass(frozen=True)
class Layout:
    """Sequences laid end to end, in order; every layer takes it, so no layer can forget a border.

    A sequence may have any length, 0 and 1 included. Padded batches become such a stream by leaving the pads out.
    """

    lengths: tuple[int, ...]
    """Tokens of each sequence."""

    @classmethod
    def of(cls, lengths: Sequence[int]) -> "Layout":
        """Return the layout of sequences with these lengths."""
        return cls(tuple(int(n) for n in lengths))

    @cached_property
    def starts(self) -> tuple[int, ...]:
        """First token of each sequence, and one past the last token of all (cumulative lengths)."""
        return tuple(accumulate(self.lengths, initial=0))

    @property
    def num_tokens(self) -> int:
        """Tokens of all sequences together."""
        return self.starts[-1]

    def positions(self, offsets: Sequence[int] | None = None, device: torch.device | str = "cpu") -> Int[Tensor, " T"]:
        """Position of each token in its sequence, plus that sequence's offset (tokens it had before)."""
        offsets = offsets or [0] * len(self.lengths)
        return torch.cat(
            [torch.arange(o, o + n, device=device) for n, o in zip(self.lengths, offsets, strict=True)]
            or [torch.zeros(0, dtype=torch.long, device=device)]
        )
