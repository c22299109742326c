"""The vision tower: patches of pictures and short clips become vectors that have seen their whole item."""

import math
from itertools import groupby
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional as F

from triax.config.vision import Vision
from triax.errors import ConfigError
from triax.kernels.linear import linear
from triax.model.matrix import Linear, draw_normal
from triax.model.norm import RMSNorm
from triax.model.precision import at_least_fp32
from triax.model.rotary import rotate

Grid = tuple[int, int, int]
"""Frames, rows and columns of patches of one item."""


class Media(NamedTuple):
    """Pictures and clips laid end to end: frame by frame, row by row."""

    patches: Float[Tensor, "N 3 P P"]
    """Pixels of each patch, normalised."""
    grids: tuple[Grid, ...]
    """Shape of each item, in order; a picture has one frame."""


class VisionTower(nn.Module):
    """A transformer over patches; an item is a picture or a clip, and no patch sees another item.

    hidden = patch + position(row, column) + clock(frame)     (the clock only where there are several frames)
    hidden += output(attention(norm(hidden)))                  all patches of an item, both ways
    hidden += down(gelu(up(norm(hidden))))

    Queries and keys turn by column and row, pair by pair in alternation. At the end the frames are averaged, and each
    square of `merge` x `merge` patches is handed on together, so that tokens do not depend on the number of frames.

    Source: K3 report (arXiv 2607.24653) section 2.4; the released checkpoints of Kimi-K3 and Kimi-K2.5.
    """

    def __init__(self, settings: Vision, init_std: float) -> None:
        super().__init__()
        self.settings = settings
        self.patch = PatchProduct(settings, init_std)
        self.position = nn.Parameter(torch.zeros(settings.table_rows, settings.table_columns, settings.width))
        draw_normal(self.position, init_std)
        self.layers = nn.ModuleList(VisionLayer(settings, init_std) for _ in range(settings.num_layers))
        self.output_norm = norm_of(settings)

    def forward(self, media: Media, taps: dict[Any, Tensor] | None = None) -> Float[Tensor, "S M D"]:
        """Return the patches of each future token, `merge` x `merge` of them in row-major order.

        Args:
            media: Any number of items, none included: an empty stream leaves every weight a zero gradient.
            taps: Filled, if given, with the stream after the embedding (`vision.embed`), after each layer (`vision.0`,
                …), after the last norm (`vision.norm`), and with the result (`vision.merged`).

        Raises:
            ConfigError: The grids do not describe the patches, or are not whole tokens.
        """
        _check(media, self.settings)
        hidden = self.patch(media.patches)
        hidden = hidden + self._where(media.grids).to(hidden.dtype)
        turns = self._turns(media.grids, hidden.device)
        _tap(taps, "vision.embed", hidden)
        for number, layer in enumerate(self.layers):
            hidden = layer(hidden, turns, media.grids)
            _tap(taps, f"vision.{number}", hidden)
        hidden = self.output_norm(hidden)
        _tap(taps, "vision.norm", hidden)
        merged = self._merge(hidden, media.grids)
        _tap(taps, "vision.merged", merged)
        return merged

    def _where(self, grids: tuple[Grid, ...]) -> Float[Tensor, "N D"]:
        """Return what each patch adds for its place: the resized table, and in clips the frame's clock."""
        table = at_least_fp32(self.position)
        resized: dict[tuple[int, int], Tensor] = {}
        parts = [table.flatten(0, 1)[:0]]
        for frames, rows, columns in grids:
            place = resized.get((rows, columns))
            if place is None:
                place = resized[rows, columns] = self._resize(table, rows, columns)
            if frames > 1:
                parts.append((place + self._clock(frames, table)[:, None]).flatten(0, 1))
            else:
                parts.append(place)
        return torch.cat(parts)

    def _resize(self, table: Float[Tensor, "R C D"], rows: int, columns: int) -> Float[Tensor, "places D"]:
        if table.shape[:2] != (rows, columns):
            image = table.permute(2, 0, 1)[None]
            image = F.interpolate(image, size=(rows, columns), mode=self.settings.resize, align_corners=False)
            table = image[0].permute(1, 2, 0)
        return table.flatten(0, 1)

    def _clock(self, frames: int, like: Tensor) -> Float[Tensor, "frames D"]:
        """Return the fixed vector of each frame: sines, then cosines, of ever slower turns."""
        half = self.settings.width // 2
        speed = self.settings.rope_theta ** (-torch.arange(half, device=like.device, dtype=torch.float64) / half)
        angle = torch.arange(frames, device=like.device, dtype=torch.float64)[:, None] * speed
        return torch.cat([angle.sin(), angle.cos()], dim=-1).to(like.dtype)

    def _turns(
        self, grids: tuple[Grid, ...], device: torch.device
    ) -> tuple[Float[Tensor, "N p"], Float[Tensor, "N p"]]:
        """Return cosine and sine of each patch's angles, the same in every frame."""
        quarter = self.settings.head_dim // 4
        speed = self.settings.rope_theta ** (-torch.arange(quarter, device=device, dtype=torch.float64) / quarter)
        parts = [speed.new_zeros(0, 2 * quarter)]
        for frames, rows, columns in grids:
            row, column = torch.meshgrid(
                torch.arange(rows, device=device), torch.arange(columns, device=device), indexing="ij"
            )
            place = torch.stack([column.flatten(), row.flatten()], dim=-1)
            angle = (speed[:, None] * place[:, None, :]).flatten(1)
            parts.append(angle.repeat(frames, 1))
        angle = torch.cat(parts)
        return angle.cos(), angle.sin()

    def _merge(self, hidden: Float[Tensor, "N D"], grids: tuple[Grid, ...]) -> Float[Tensor, "S M D"]:
        side = self.settings.merge
        merged = [hidden[:0].unflatten(0, (0, side * side))]
        for item, (frames, rows, columns) in zip(hidden.split([math.prod(g) for g in grids]), grids, strict=True):
            squares = item.unflatten(0, (frames, rows // side, side, columns // side, side))
            pooled = squares[0] if frames == 1 else at_least_fp32(squares).mean(0).to(item.dtype)
            merged.append(pooled.transpose(1, 2).flatten(2, 3).flatten(0, 1))
        return torch.cat(merged)


class PatchProduct(nn.Module):
    """One product for a whole patch: a convolution whose stride is its size."""

    def __init__(self, settings: Vision, init_std: float) -> None:
        super().__init__()
        side = settings.patch
        self.weight = nn.Parameter(torch.zeros(settings.width, 3, side, side))
        self.bias = nn.Parameter(torch.zeros(settings.width)) if settings.bias else None
        draw_normal(self.weight, init_std)

    def forward(self, patches: Float[Tensor, "N 3 P P"]) -> Float[Tensor, "N D"]:
        """Project each patch."""
        return linear(patches.flatten(1).to(self.weight.dtype), self.weight.flatten(1), self.bias)


class VisionLayer(nn.Module):
    """One attention over the patches of an item, one MLP."""

    def __init__(self, settings: Vision, init_std: float) -> None:
        super().__init__()
        self.attention_norm = norm_of(settings)
        self.attention = VisionAttention(settings, init_std)
        self.mlp_norm = norm_of(settings)
        self.mlp = VisionMlp(settings, init_std)

    def forward(
        self, hidden: Float[Tensor, "N D"], turns: tuple[Tensor, Tensor], grids: tuple[Grid, ...]
    ) -> Float[Tensor, "N D"]:
        """Add what the layer makes of the stream."""
        hidden = hidden + self.attention(self.attention_norm(hidden), turns, grids)
        return hidden + self.mlp(self.mlp_norm(hidden))


class VisionAttention(nn.Module):
    """Softmax attention in both directions inside each item; all frames of a clip see each other."""

    def __init__(self, settings: Vision, init_std: float) -> None:
        super().__init__()
        inner = settings.num_heads * settings.head_dim
        self.shape = (3, settings.num_heads, settings.head_dim)
        self.query_key_value = product(settings.width, 3 * inner, settings.bias, init_std)
        self.output = product(inner, settings.width, settings.bias, init_std)

    def forward(
        self, hidden: Float[Tensor, "N D"], turns: tuple[Tensor, Tensor], grids: tuple[Grid, ...]
    ) -> Float[Tensor, "N D"]:
        """Let each patch read its item."""
        query, key, value = self.query_key_value(hidden).unflatten(-1, self.shape).unbind(1)
        query, key = rotate(query, *turns), rotate(key, *turns)
        read = [value[:0]]
        start = 0
        for length, items in groupby(math.prod(grid) for grid in grids):
            count = sum(1 for _ in items)
            stop = start + count * length
            q, k, v = (part[start:stop].unflatten(0, (count, length)).transpose(1, 2) for part in (query, key, value))
            read.append(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(0, 1))
            start = stop
        return self.output(torch.cat(read).flatten(1))


class VisionMlp(nn.Module):
    """`down(gelu(up(x)))` with the tanh form of GELU."""

    def __init__(self, settings: Vision, init_std: float) -> None:
        super().__init__()
        self.up = product(settings.width, settings.mlp_dim, settings.bias, init_std)
        self.down = product(settings.mlp_dim, settings.width, settings.bias, init_std)

    def forward(self, hidden: Float[Tensor, "N D"]) -> Float[Tensor, "N D"]:
        """Transform each patch by itself."""
        return self.down(F.gelu(self.up(hidden), approximate="tanh"))


def norm_of(settings: Vision) -> RMSNorm | nn.LayerNorm:
    """Return a norm of the tower's stream."""
    kind = RMSNorm if settings.norm == "rms" else nn.LayerNorm
    return kind(settings.width, settings.norm_eps)


def product(width_in: int, width_out: int, bias: bool, init_std: float) -> Linear:
    """Return a product whose weight is drawn from N(0, init_std^2) and whose bias, if any, is zero."""
    made = Linear(width_in, width_out, bias=bias)
    draw_normal(made.weight, init_std)
    if bias and not made.bias.is_meta:
        nn.init.zeros_(made.bias)
    return made


def _tap(taps: dict[Any, Tensor] | None, name: str, value: Tensor) -> None:
    if taps is not None:
        taps[name] = value


def _check(media: Media, settings: Vision) -> None:
    expected = sum(math.prod(grid) for grid in media.grids)
    side, merge = settings.patch, settings.merge
    if tuple(media.patches.shape) != (expected, 3, side, side):
        raise ConfigError(
            f"model.vision: {len(media.grids)} grids need {expected} patches of [3, {side}, {side}]; found "
            f"`{list(media.patches.shape)}`; pass the patches of all items, in the order of the grids"
        )
    for number, (frames, rows, columns) in enumerate(media.grids):
        if min(frames, rows, columns) < 1 or rows % merge or columns % merge or frames > settings.max_frames:
            raise ConfigError(
                f"model.vision: an item has 1 to {settings.max_frames} frames and rows and columns in multiples of "
                f"{merge}; found `{(frames, rows, columns)}` for item {number}; cut videos into clips and pad pictures"
            )
