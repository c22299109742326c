"""What a model remembers of each sequence between calls."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from triax.config.model import Kda, Mla, Model
from triax.errors import ConfigError
from triax.model.layout import Layout


@dataclass
class KdaCache:
    """Memory of one KDA layer: of fixed size, however long the sequences are."""

    state: Float[Tensor, "N H K V"]
    """What each head holds, key channel by value channel; fp32 or wider."""
    window: Float[Tensor, "N past C"]
    """Inputs of the short convolutions (query, key, value) before the next token."""

    @classmethod
    def empty(cls, settings: Kda, num_sequences: int, device: torch.device | str, dtype: torch.dtype) -> "KdaCache":
        """Return the memory of sequences that have no tokens yet."""
        heads, dim = settings.num_heads, settings.head_dim
        wide = torch.promote_types(dtype, torch.float32)
        return cls(
            torch.zeros(num_sequences, heads, dim, dim, device=device, dtype=wide),
            torch.zeros(num_sequences, settings.conv_kernel - 1, 3 * heads * dim, device=device, dtype=dtype),
        )

    def select(self, rows: list[int]) -> "KdaCache":
        """Return a copy of these sequences, in this order."""
        return KdaCache(self.state[rows], self.window[rows])

    def reset(self, row: int) -> None:
        """Forget a sequence."""
        # new tensors, since a selection or an earlier result may still read the old ones
        self.state, self.window = self.state.clone(), self.window.clone()
        self.state[row] = 0
        self.window[row] = 0


@dataclass
class MlaCache:
    """Memory of one MLA layer: a latent and the head-shared key part of every token."""

    latent: Float[Tensor, "N capacity L"]
    """Normalised latent, then the shared key part (rotated where the model rotates); rows grow by doubling."""
    lengths: list[int]
    """Tokens that each sequence has."""

    @classmethod
    def empty(cls, settings: Mla, num_sequences: int, device: torch.device | str, dtype: torch.dtype) -> "MlaCache":
        """Return the memory of sequences that have no tokens yet."""
        width = settings.kv_latent_dim + settings.rope_dim
        return cls(torch.zeros(num_sequences, 0, width, device=device, dtype=dtype), [0] * num_sequences)

    def append(self, latent: Float[Tensor, "T L"], layout: Layout) -> None:
        """Write each sequence's new tokens after those it has."""
        needed = max((old + new for old, new in zip(self.lengths, layout.lengths, strict=True)), default=0)
        if needed > self.latent.shape[1]:
            self.latent = _grown(self.latent, max(needed, 2 * self.latent.shape[1], 16))
        places = layout.positions(self.lengths, latent.device)
        self.latent[layout.sequence(latent.device), places] = latent.detach().to(self.latent.dtype)
        self.lengths = [old + new for old, new in zip(self.lengths, layout.lengths, strict=True)]

    def flat(self) -> Float[Tensor, "S L"]:
        """Return all latents of all sequences, laid end to end."""
        layout = Layout.of(self.lengths)
        return self.latent[layout.sequence(self.latent.device), layout.positions(device=self.latent.device)]

    def select(self, rows: list[int]) -> "MlaCache":
        """Return a copy of these sequences, in this order."""
        return MlaCache(self.latent[rows], [self.lengths[row] for row in rows])

    def reset(self, row: int) -> None:
        """Forget a sequence."""
        self.lengths = [0 if i == row else n for i, n in enumerate(self.lengths)]


class Cache:
    """Memory of a whole decoder: one row a sequence, one entry a layer.

    A call with this cache continues each row by the layout's sequence of the same number and updates the cache in
    place, whether a sequence brings no token, one or many. Nothing is ever reset by a token count: a new request means
    `reset` or a new cache.
    """

    def __init__(self, layers: list[KdaCache | MlaCache], lengths: list[int]) -> None:
        self.layers = layers
        self.lengths = lengths

    @classmethod
    def empty(
        cls,
        settings: Model,
        num_sequences: int,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
    ) -> "Cache":
        """Return the memory of sequences that have no tokens yet.

        Args:
            settings: Shape of the decoder.
            num_sequences: Rows.
            device: Where the model runs.
            dtype: Format of latents and convolution windows; KDA states are fp32 or wider.
        """
        layers: list[KdaCache | MlaCache] = []
        for layer in range(settings.num_layers):
            if settings.is_mla(layer):
                assert settings.mla is not None
                layers.append(MlaCache.empty(settings.mla, num_sequences, device, dtype))
            else:
                assert settings.kda is not None
                layers.append(KdaCache.empty(settings.kda, num_sequences, device, dtype))
        return cls(layers, [0] * num_sequences)

    def __len__(self) -> int:
        return len(self.lengths)

    def check(self, layout: Layout) -> None:
        """Refuse a layout with another number of sequences.

        Raises:
            ConfigError: They differ.
        """
        if len(layout.lengths) != len(self):
            raise ConfigError(
                f"model.cache: the layout must name one sequence a row; found {len(layout.lengths)} sequences for "
                f"{len(self)} rows; give rows without new tokens the length 0"
            )

    def advance(self, layout: Layout) -> None:
        """Count the tokens of a finished call."""
        self.lengths = [old + new for old, new in zip(self.lengths, layout.lengths, strict=True)]

    def select(self, rows: Sequence[int]) -> "Cache":
        """Return a copy of these rows, in this order; a row may be named twice (to fork it) or not at all."""
        chosen = list(rows)
        return Cache([layer.select(chosen) for layer in self.layers], [self.lengths[row] for row in chosen])

    @staticmethod
    def cat(caches: Sequence["Cache"]) -> "Cache":
        """Return one cache with the rows of all, in order."""
        layers: list[KdaCache | MlaCache] = []
        for parts in zip(*(cache.layers for cache in caches), strict=True):
            kda = [part for part in parts if isinstance(part, KdaCache)]
            mla = [part for part in parts if isinstance(part, MlaCache)]
            if kda:
                layers.append(KdaCache(torch.cat([p.state for p in kda]), torch.cat([p.window for p in kda])))
            else:
                capacity = max(p.latent.shape[1] for p in mla)
                latent = torch.cat([_grown(p.latent, capacity) for p in mla])
                layers.append(MlaCache(latent, [n for p in mla for n in p.lengths]))
        return Cache(layers, [n for cache in caches for n in cache.lengths])

    def reset(self, row: int) -> None:
        """Forget a row: its next token is the first of a new sequence."""
        for layer in self.layers:
            layer.reset(row)
        self.lengths = [0 if i == row else n for i, n in enumerate(self.lengths)]


def _grown(latent: Tensor, capacity: int) -> Tensor:
    more = latent.new_zeros(latent.shape[0], capacity - latent.shape[1], latent.shape[2])
    return torch.cat([latent, more], dim=1)
