"""From patches to tokens of the decoder: the projector, and the slots that its vectors fill."""

import math
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional as F

from triax.config.vision import Vision
from triax.errors import ConfigError
from triax.model.layout import Layout
from triax.model.matrix import Blocks
from triax.model.norm import RMSNorm
from triax.model.vision import Media, VisionTower, product


class Projector(nn.Module):
    """`output(gelu(inner(patches of a token)))`, with a norm before the products or after them.

    Source: `patchmergerv2` of the released Kimi-K3 and `patchmerger` of Kimi-K2.5.
    """

    def __init__(self, settings: Vision, width: int, init_std: float) -> None:
        super().__init__()
        wide = settings.merge**2 * settings.width
        self.is_norm_first = settings.projector == "norm_before"
        self.norm: RMSNorm | nn.LayerNorm = (
            nn.LayerNorm(settings.width, settings.projector_eps)
            if self.is_norm_first
            else RMSNorm(width, settings.projector_eps)
        )
        self.inner = product(wide, wide, settings.bias, init_std)
        self.output = product(wide, width, settings.bias, init_std)

    def forward(self, merged: Float[Tensor, "S M V"]) -> Float[Tensor, "S D"]:
        """Turn the patches of each token into one vector of the decoder's width."""
        if self.is_norm_first:
            merged = self.norm(merged)
        made = self.output(F.gelu(self.inner(merged.flatten(1))))
        return made if self.is_norm_first else self.norm(made)


class Inserts(NamedTuple):
    """Vectors of items, made before, and where in a stream they go."""

    places: Int[Tensor, " S"]
    vectors: Float[Tensor, "S D"]


class MediaEncoder(nn.Module):
    """Tower and projector. AdamW moves all of it: which rule the released towers were trained with is not published."""

    def __init__(self, settings: Vision, width: int, init_std: float) -> None:
        super().__init__()
        self.settings = settings
        self.tower = VisionTower(settings, init_std)
        self.projector = Projector(settings, width, init_std)

    def matrices(self) -> Blocks:
        """Return no matrices: AdamW's are all of them."""
        return {}

    def forward(self, media: Media, taps: dict[Any, Tensor] | None = None) -> Float[Tensor, "S D"]:
        """Return the tokens of all items, in order; `taps` as in the tower, and the result as `vision.tokens`."""
        tokens = self.projector(self.tower(media, taps))
        if taps is not None:
            taps["vision.tokens"] = tokens
        return tokens

    def fill(
        self,
        embedded: Float[Tensor, "T D"],
        tokens: Int[Tensor, " T"],
        layout: Layout,
        media: Media | None,
        taps: dict[Any, Tensor] | None = None,
    ) -> Float[Tensor, "T D"]:
        """Put the items' vectors in the place of the slots' embeddings.

        Without items the tower still runs in training, on no patch at all: every weight gets a zero gradient, and with
        several processes the ones without pictures take part in whatever the others exchange.

        Args:
            embedded: Embeddings of the tokens.
            tokens: Sequences laid end to end.
            layout: Where each begins.
            media: The items, in the order of their slots.
            taps: Filled with what the tower holds on the way.

        Raises:
            ConfigError: The slots do not lie in one run for each item, as long as the item's tokens.
        """
        slots = (tokens == self.settings.slot_token).nonzero().squeeze(-1)
        self._check(slots.tolist(), layout, media)
        if media is None or not media.grids:
            if not (torch.is_grad_enabled() and any(weight.requires_grad for weight in self.parameters())):
                return embedded
            side = self.settings.patch
            media = Media(embedded.new_zeros(0, 3, side, side), ())
        return embedded.index_copy(0, slots, self(media, taps).to(embedded.dtype))

    def _check(self, slots: list[int], layout: Layout, media: Media | None) -> None:
        grids = media.grids if media is not None else ()
        expected = [self.settings.num_tokens(rows, columns) for _, rows, columns in grids]
        found: list[int] = []
        borders = set(layout.starts)
        for before, slot in zip([-2, *slots], slots, strict=False):
            if slot == before + 1 and slot not in borders:
                found[-1] += 1
            else:
                found.append(1)
        if found != expected:
            raise ConfigError(
                f"model.vision: each picture or clip needs one run of slots (token {self.settings.slot_token}) as long "
                f"as its tokens; found {len(found)} runs of {_lengths(found)} slots for {len(expected)} items of "
                f"{_lengths(expected)} tokens; render the prompt with the sizes of the items that go with it"
            )


def _lengths(counts: list[int]) -> str:
    shown = ", ".join(str(count) for count in counts[:8])
    return f"[{shown}{', …' if len(counts) > 8 else ''}] = {math.fsum(counts):.0f}"
