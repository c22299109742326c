"""The products of `products.py` as they are launched: how each is cut, and what it reads and writes."""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from triax.kernels.device import launch
from triax.kernels.moe import products
from triax.kernels.moe.rows import ExpertRows
from triax.kernels.routed import ExpertWeights


class Tiles(NamedTuple):
    """How one product is cut."""

    columns: int
    """Columns of a tile of the result."""
    depth: int
    """What is summed at a time."""
    warps: int
    stages: int
    """Pieces of depth on their way."""
    programs: int
    """Programs a multiprocessor; 0 gives every tile its own."""
    flatten: bool
    """Fetch the next tile's operands while a result is written."""


class TilePlan(NamedTuple):
    """Tiles of each product, named as in `products`, and the rows they share: a multiple of the last one's depth."""

    rows: int
    gate_up_proj: Tiles
    down_proj: Tiles
    down_proj_backward: Tiles
    gate_up_proj_backward: Tiles
    weight_gradient: Tiles


PLAN = TilePlan(
    128,
    gate_up_proj=Tiles(128, 64, 8, 4, 0, False),
    down_proj=Tiles(128, 64, 4, 3, 2, True),
    down_proj_backward=Tiles(128, 64, 8, 4, 1, True),
    gate_up_proj_backward=Tiles(256, 64, 8, 3, 1, False),
    weight_gradient=Tiles(256, 64, 8, 3, 0, False),
)


class TiledProducts:
    """The products of one call: rows of one choice with one set of weights."""

    def __init__(
        self, rows: ExpertRows, weights: ExpertWeights, caps: tuple[float | None, float | None], plan: TilePlan
    ) -> None:
        self.rows, self.weights, self.caps, self.plan = rows, weights, caps, plan
        self.num_experts, self.inner_dim, self.width = weights.gate.shape
        self.options = {"device": weights.gate.device, "dtype": weights.gate.dtype}
        self.is_fast = weights.gate.is_cuda
        self.precision = "tf32" if weights.gate.is_cuda else "ieee"

    def gate_up_proj(self, x: Tensor, keeps: bool) -> tuple[Tensor, Tensor]:
        """Return the activation's two arguments, if kept, and its value times the shares."""
        tiles, high, rows = self.plan.gate_up_proj, self.plan.rows, self.rows
        both = torch.empty(2, len(x) if keeps else 0, self.inner_dim, **self.options)
        inner = torch.empty(len(x), self.inner_dim, **self.options)
        kept = _described(both if keeps else inner[None], 1, high, tiles.columns // 2)
        gate, up = (_described(w, 1, tiles.columns, tiles.depth) for w in self.weights[:2])
        self._launch(
            products.gate_up_proj, tiles, self.inner_dim, _described(x, high, tiles.depth), gate, up, kept,
            _described(inner, high, tiles.columns // 2), rows.expert, rows.used, rows.share, self.width,
            self.inner_dim, *self.caps, high, tiles.columns, tiles.depth, keeps, self.is_fast,
        )  # fmt: skip
        return both, inner

    def down_proj(self, inner: Tensor) -> Tensor:
        """Return what the experts return of each row."""
        tiles, high, rows = self.plan.down_proj, self.plan.rows, self.rows
        result = torch.empty(len(inner), self.width, **self.options)
        self._launch(
            products.down_proj, tiles, self.width, _described(inner, high, tiles.depth),
            _described(self.weights.down, 1, tiles.columns, tiles.depth),
            _described(result, high, tiles.columns // 2), rows.expert, rows.used, self.width, self.inner_dim, high,
            tiles.columns, tiles.depth,
        )  # fmt: skip
        return result

    def down_proj_backward(self, above: Tensor, both: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return gradients of both arguments, shares times values, and parts of the gradients of the shares."""
        tiles, high, rows = self.plan.down_proj_backward, self.plan.rows, self.rows
        to_both, weighted = torch.empty_like(both), torch.empty(both.shape[1:], **self.options)
        parts = -(-self.inner_dim // tiles.columns)
        share_parts = torch.empty(parts, len(above), dtype=torch.float32, device=above.device)
        kept, to_kept = (_described(x, 1, high, tiles.columns // 2) for x in (both, to_both))
        self._launch(
            products.down_proj_backward, tiles, self.inner_dim, _described(above, high, tiles.depth),
            _described(self.weights.down, 1, tiles.depth, tiles.columns), kept, to_kept,
            _described(weighted, high, tiles.columns // 2), share_parts, rows.expert, rows.used, rows.share,
            len(above), self.width, self.inner_dim, *self.caps, high, tiles.columns, tiles.depth, self.is_fast,
        )  # fmt: skip
        return to_both, weighted, share_parts

    def gate_up_proj_backward(self, to_both: Tensor) -> Tensor:
        """Return the gradients of each row."""
        tiles, high, rows = self.plan.gate_up_proj_backward, self.plan.rows, self.rows
        result = torch.empty(to_both.shape[1], self.width, **self.options)
        gate, up = (_described(w, 1, tiles.depth, tiles.columns) for w in self.weights[:2])
        self._launch(
            products.gate_up_proj_backward, tiles, self.width, _described(to_both, 1, high, tiles.depth), gate, up,
            _described(result, high, tiles.columns // 2), rows.expert, rows.used, self.width, self.inner_dim, high,
            tiles.columns, tiles.depth,
        )  # fmt: skip
        return result

    def weight_gradient(
        self, left: Tensor, part: int, right: Tensor, dtype: torch.dtype, total: Tensor | None
    ) -> Tensor | None:
        """Return each expert's left[part]^T right, or add it to a total and return nothing."""
        tiles, high, rows = self.plan.weight_gradient, self.plan.rows, self.rows
        shape = self.num_experts, left.shape[2], right.shape[1]
        result = torch.empty(shape, device=right.device, dtype=dtype) if total is None else total
        grid = shape[0] * -(-shape[1] // high) * -(-shape[2] // tiles.columns)
        launch(
            products.weight_gradient, (self._programs(tiles, grid),), _described(left, 1, tiles.depth, high),
            _described(right, tiles.depth, tiles.columns), _described(result, 1, high, tiles.columns // 2),
            rows.first, rows.count, *shape, part, high, tiles.columns, tiles.depth, total is not None, tiles.flatten,
            self.precision, num_warps=tiles.warps, num_stages=tiles.stages,
        )  # fmt: skip
        return result if total is None else None

    def _launch(self, kernel: Any, tiles: Tiles, columns: int, *arguments: Any) -> None:
        grid = self._programs(tiles, len(self.rows.expert) * -(-columns // tiles.columns))
        options = {"num_warps": tiles.warps, "num_stages": tiles.stages}
        launch(kernel, (grid,), *arguments, tiles.flatten, self.precision, **options)

    def _programs(self, tiles: Tiles, most: int) -> int:
        if not tiles.programs:
            return most
        on_gpu = self.weights.gate.is_cuda
        processors = torch.cuda.get_device_properties(self.weights.gate.device).multi_processor_count if on_gpu else 2
        return min(most, tiles.programs * processors)


def _described(tensor: Tensor, *block: int) -> TensorDescriptor:
    return TensorDescriptor.from_tensor(tensor, list(block))
