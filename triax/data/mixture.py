"""Several sources in one stream of batches, by weight, resumable after any batch."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from triax.data.pack import Batch, Rows, TokenStream, batch_of
from triax.errors import CheckpointError, ConfigError, DataError


@dataclass(frozen=True)
class Part:
    """One source of a mixture."""

    name: str
    stream: TokenStream
    weight: float = 1.0
    """Share of the rows, relative to the other parts."""


class PackedLoader(Iterator[Batch]):
    """Batches without end; each row comes from a source drawn by weight.

    The draw depends on the seed and the number of the row only, so the counts of rows are the whole position: the
    batches after a resume equal those of the run that was not interrupted, wherever it stopped.
    """

    def __init__(self, parts: Sequence[Part], seq_len: int, micro_tokens: int, seed: int = 0) -> None:
        """Start at the first row.

        Args:
            parts: What to mix.
            seq_len: Tokens in a row.
            micro_tokens: Tokens in a batch, a multiple of `seq_len`.
            seed: Decides every order and every draw.

        Raises:
            ConfigError: `micro_tokens` is not a multiple of `seq_len`.
            DataError: A part is shorter than a row, or the parts do not share one border.
        """
        if micro_tokens % seq_len or micro_tokens < seq_len:
            raise ConfigError(
                f"train.micro_tokens `{micro_tokens}` is not a multiple of data.seq_len `{seq_len}`; "
                f"choose {max(1, micro_tokens // seq_len) * seq_len}"
            )
        borders = sorted({part.stream.border for part in parts})
        if len(borders) != 1:
            raise DataError(
                f"data.sources: one tokenizer encodes all of them; found borders `{borders}` in `{len(parts)}` parts; "
                "encode every source with the same tokenizer"
            )
        self._parts, self._seq_len, self._seed, self._border = tuple(parts), seq_len, seed, borders[0]
        self._rows_per_batch = micro_tokens // seq_len
        self._rows = [Rows(part.stream, seq_len, [seed, 0, n], part.name) for n, part in enumerate(parts)]
        self._served = [0] * len(parts)
        self._bars = np.cumsum([part.weight for part in parts]) / sum(part.weight for part in parts)

    def __next__(self) -> Batch:
        """Return the next `micro_tokens` tokens."""
        rows = []
        for _ in range(self._rows_per_batch):
            part = self._draw(sum(self._served))
            rows.append(self._rows[part][self._served[part]])
            self._served[part] += 1
        return batch_of(rows, self._border)

    @property
    def epochs(self) -> dict[str, float]:
        """Times that each source has been read so far."""
        return {
            part.name: served * self._seq_len / part.stream.num_tokens
            for part, served in zip(self._parts, self._served, strict=True)
        }

    def state_dict(self) -> dict[str, Any]:
        """Return the position and what it is a position in; plain values, fit for JSON."""
        return {
            "seed": self._seed,
            "seq_len": self._seq_len,
            "sources": [part.name for part in self._parts],
            "weights": [part.weight for part in self._parts],
            "digests": [part.stream.digest for part in self._parts],
            "rows": list(self._served),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a position; the size of a batch may differ from the one before.

        Raises:
            CheckpointError: It is a position in other text, another mixture, another order or other rows.
        """
        here = self.state_dict()
        if missing := [name for name in here if name not in state]:
            raise CheckpointError(
                f"data position: incomplete; found no `{', '.join(missing)}`; resume from another checkpoint"
            )
        for name, value in here.items():
            if name != "rows" and state[name] != value:
                raise CheckpointError(
                    f"data position: `{name}` is not what the run began with; found `{value}`, saved was "
                    f"`{state[name]}`; resume with the same data and settings, or start a new run"
                )
        self._served = [int(count) for count in state["rows"]]

    def _draw(self, number: int) -> int:
        if len(self._parts) == 1:
            return 0
        raw = np.random.Philox(np.random.SeedSequence([self._seed, 1, number])).random_raw()
        return int(np.searchsorted(self._bars[:-1], (raw >> 11) / 2**53, side="right"))
