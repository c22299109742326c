"""Where sequences begin and end in a flat stream of tokens."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import accumulate

import torch
from jaxtyping import Bool, Int, Shaped
from torch import Tensor

from triax.errors import ConfigError
from triax.model.device import on_device


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
        here = _positions(self, str(device))
        if offsets is None or not any(offsets):
            return here
        return here + on_device(offsets, torch.device(device))[self.sequence(device)]

    def sequence(self, device: torch.device | str = "cpu") -> Int[Tensor, " T"]:
        """Number of the sequence that each token belongs to."""
        return _sequence(self, str(device))


@lru_cache(maxsize=8)  # every layer of a forward asks for the same ones
@torch.inference_mode(False)  # what is kept here may be needed in training later
def _positions(layout: Layout, device: str) -> Tensor:
    spans = [torch.arange(n, device=device) for n in layout.lengths]
    return torch.cat(spans) if spans else torch.zeros(0, dtype=torch.long, device=device)


@lru_cache(maxsize=8)
@torch.inference_mode(False)
def _sequence(layout: Layout, device: str) -> Tensor:
    lengths = on_device(layout.lengths, torch.device(device))
    return torch.arange(len(layout.lengths), device=device).repeat_interleave(lengths, output_size=layout.num_tokens)


def pack(
    tokens: Shaped[Tensor, "B T"], mask: Bool[Tensor, "rows columns"], past: int = 0
) -> tuple[Shaped[Tensor, " N"], Layout, Int[Tensor, " N"]]:
    """Turn a padded batch into a stream: pads never reach a layer, whichever side they are on.

    Args:
        tokens: One sequence a row.
        mask: Where a token is real; the real tokens of a row must be neighbours.
        past: Columns of the mask that stand for tokens of earlier calls, as a mask over a whole conversation has them;
            they are left out.

    Returns:
        The real tokens row after row, their layout, and each one's place in the flattened batch (for `unpack`).

    Raises:
        ConfigError: The mask has another shape, or a row has a pad between two real tokens.
    """
    rows, columns = tokens.shape
    if tuple(mask.shape) != (rows, past + columns):
        raise ConfigError(
            f"model.layout.pack: a mask of shape {list(mask.shape)} does not fit tokens of shape {[rows, columns]} "
            f"after {past} earlier ones; pass one of shape {[rows, past + columns]}, or `past`"
        )
    mask = mask[:, past:]
    gaps = (mask[:, 1:] & ~mask[:, :-1]).sum(-1) + mask[:, 0] if mask.shape[1] else mask.sum(-1)
    if (gaps > 1).any():
        row = int((gaps > 1).nonzero()[0])
        raise ConfigError(
            f"model.layout.pack: pads must stand before or after a row's tokens; found {int(gaps[row])} pieces "
            f"in row {row}; close the gaps or pass the pieces as rows"
        )
    index = mask.flatten().nonzero().squeeze(-1)
    return tokens.flatten()[index], Layout.of(mask.sum(-1).tolist()), index


def unpack(
    values: Shaped[Tensor, "N ..."], index: Int[Tensor, " N"], shape: tuple[int, int], fill: float | int = 0
) -> Shaped[Tensor, "B T ..."]:
    """Put values of packed tokens back in their batch, with `fill` at the pads."""
    batch = values.new_full((shape[0] * shape[1], *values.shape[1:]), fill)
    return batch.index_copy(0, index, values).unflatten(0, shape)
