"""Routed experts on a GPU from Hopper on: five kinds of products over tiles of rows, each with what follows it.

Forward: rows of tokens, one product whose end is the activation, one that leads back, a sum by token. Backward: rows of
gradients, one product whose end is the activation's gradient and that of the shares, two products of gradients and
weights, and an outer product for each stack of weights, written or added in the format of the gradient. What the
down-projection returned is not kept: see `grouped`.
"""

from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.autograd.function import once_differentiable
from triton.tools.tensor_descriptor import TensorDescriptor

from triax.errors import UnsupportedError
from triax.kernels.device import launch
from triax.kernels.moe import products
from triax.kernels.moe.activation import Activation
from triax.kernels.moe.rows import Rows, arrange, spread, sum_by_token
from triax.kernels.moe.weights import Stacks

ALIGNED_BYTES = 16  # what the copy engine asks of a row


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


class Plan(NamedTuple):
    """Tiles of each product, named as in `products`, and the rows they share."""

    rows: int
    opened: Tiles
    closed: Tiles
    reopened: Tiles
    returned: Tiles
    outer: Tiles


PLAN = Plan(
    128,
    opened=Tiles(128, 64, 8, 3, 1, False),
    closed=Tiles(256, 64, 8, 3, 1, True),
    reopened=Tiles(128, 64, 8, 3, 1, False),
    returned=Tiles(256, 64, 8, 3, 1, True),
    outer=Tiles(256, 64, 8, 3, 1, True),
)


def unsupported(hidden: Tensor, expert: Tensor, gate: Tensor, activation: Activation, dtype: torch.dtype) -> str | None:
    """Say what of these inputs the kernels cannot take, if anything; `dtype` is the format of the products."""
    if hidden.is_cuda and torch.cuda.get_device_capability(hidden.device) < (9, 0):
        return "a GPU older than Hopper"
    if dtype is not torch.bfloat16 and (hidden.is_cuda or dtype is not torch.float32):
        return f"products in `{dtype}`"
    if any(side * dtype.itemsize % ALIGNED_BYTES for side in gate.shape[1:]):
        return f"matrices of {gate.shape[1]} by {gate.shape[2]}"
    if not hasattr(activation, "gate_cap"):
        return "another activation than SiTU-GLU and SwiGLU"
    if not expert.numel():
        return "no tokens"
    return None


def experts(
    hidden: Float[Tensor, "T L"],
    expert: Int[Tensor, "T k"],
    share: Float[Tensor, "T k"],
    gate: Float[Tensor, "E F L"],
    up: Float[Tensor, "E F L"],
    down: Float[Tensor, "E L F"],
    activation: Activation,
    dtype: torch.dtype,
    rounded: Stacks | None = None,
    sums: Stacks | None = None,
    plan: Plan = PLAN,
) -> Float[Tensor, "T L"]:
    """Compute `grouped.experts` with the GPU kernels or not at all.

    Args:
        hidden: What the experts read.
        expert: The experts of each token, each at most once.
        share: How much each of them counts.
        gate: Matrix of every expert that decides what passes.
        up: Matrix of every expert that makes what may pass.
        down: Matrix of every expert that leads back.
        activation: How gate and up are joined.
        dtype: Format of the products and of the result.
        rounded: The weights rounded to that format already.
        sums: Where gradients of weights are added instead of being returned.
        plan: How the products are cut.

    Raises:
        UnsupportedError: The kernels have no form for these dtypes, sizes or this GPU.
    """
    if reason := unsupported(hidden, expert, gate, activation, dtype):
        raise UnsupportedError(f"kernels.moe.fused has no form for {reason}; use `kernels.moe.experts`")
    return _Experts.apply(
        hidden, share, gate, up, down, expert, *(rounded or (None,) * 3), sums, activation, dtype, plan
    )


class _Experts(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        share: Tensor,
        gate: Tensor,
        up: Tensor,
        down: Tensor,
        expert: Tensor,
        gate_rounded: Tensor | None,
        up_rounded: Tensor | None,
        down_rounded: Tensor | None,
        sums: Stacks | None,
        activation: Any,
        dtype: torch.dtype,
        plan: Plan,
    ) -> Tensor:
        caps = activation.gate_cap, activation.up_cap
        rows = arrange(expert, share, gate.shape[0], plan.rows)
        keeps = any(ctx.needs_input_grad)
        copies = gate_rounded, up_rounded, down_rounded
        weights = [w if r is None else r for w, r in zip((gate, up, down), copies, strict=True)]
        product = _Products(rows, Stacks(*(_whole(weight, dtype) for weight in weights)), caps, plan)
        both, inner = product.open(spread(hidden, rows, dtype), keeps)
        output = sum_by_token(product.close(inner), rows, dtype)
        if keeps:
            ctx.save_for_backward(hidden, *weights, both, *rows[:-1])
            ctx.caps, ctx.dtype, ctx.plan, ctx.sums = caps, dtype, plan, sums
            ctx.dtypes = share.dtype, gate.dtype, up.dtype, down.dtype
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, ...]:
        hidden, gate, up, down, both, row, row_share, expert, first, count, used = ctx.saved_tensors
        rows = Rows(row, row_share, expert, first, count, used, ctx.plan.rows)
        needs_hidden, needs_share, needs_gate, needs_up, needs_down = ctx.needs_input_grad[:5]
        share_dtype, gate_dtype, up_dtype, down_dtype = ctx.dtypes
        into_gate, into_up, into_down = ctx.sums or (None, None, None)
        product = _Products(rows, Stacks(*(_whole(w, ctx.dtype) for w in (gate, up, down))), ctx.caps, ctx.plan)
        above = spread(grads[0], rows, ctx.dtype)
        to_both, weighted, share_parts = product.reopen(above, both)
        to_hidden = to_share = to_gate = to_up = to_down = None
        if needs_share:
            parts = share_parts.index_select(1, rows.row.flatten()).sum(0)
            to_share = parts.view(rows.row.shape).to(share_dtype)
        if needs_down:
            to_down = product.multiply_outer(above[None], 0, weighted, down_dtype, into_down)
        del above, weighted
        if needs_gate or needs_up:
            rows_of_hidden = spread(hidden, rows, ctx.dtype)
            if needs_gate:
                to_gate = product.multiply_outer(to_both, 0, rows_of_hidden, gate_dtype, into_gate)
            if needs_up:
                to_up = product.multiply_outer(to_both, 1, rows_of_hidden, up_dtype, into_up)
            del rows_of_hidden
        if needs_hidden:
            to_hidden = sum_by_token(product.return_to(to_both), rows, hidden.dtype)
        return to_hidden, to_share, to_gate, to_up, to_down, *(None,) * 8


class _Products:
    """The products of one call: rows of one choice with one set of weights."""

    def __init__(self, rows: Rows, weights: Stacks, caps: tuple[float | None, float | None], plan: Plan) -> None:
        self.rows, self.weights, self.caps, self.plan = rows, weights, caps, plan
        self.num_experts, self.inner_dim, self.width = weights.gate.shape
        self.options = {"device": weights.gate.device, "dtype": weights.gate.dtype}
        self.is_fast = weights.gate.is_cuda
        self.precision = "tf32" if weights.gate.is_cuda else "ieee"

    def open(self, x: Tensor, keeps: bool) -> tuple[Tensor, Tensor]:
        tiles, high, rows = self.plan.opened, self.plan.rows, self.rows
        both = torch.empty(2, len(x) if keeps else 0, self.inner_dim, **self.options)
        inner = torch.empty(len(x), self.inner_dim, **self.options)
        kept = _described(both if keeps else inner[None], 1, high, tiles.columns // 2)
        gate, up = (_described(w, 1, tiles.columns, tiles.depth) for w in self.weights[:2])
        self._launch(
            products.opened, tiles, self.inner_dim, _described(x, high, tiles.depth), gate, up, kept,
            _described(inner, high, tiles.columns // 2), rows.expert, rows.used, rows.share, self.width,
            self.inner_dim, *self.caps, high, tiles.columns, tiles.depth, keeps, self.is_fast,
        )  # fmt: skip
        return both, inner

    def close(self, inner: Tensor) -> Tensor:
        tiles, high, rows = self.plan.closed, self.plan.rows, self.rows
        result = torch.empty(len(inner), self.width, **self.options)
        self._launch(
            products.closed, tiles, self.width, _described(inner, high, tiles.depth),
            _described(self.weights.down, 1, tiles.columns, tiles.depth),
            _described(result, high, tiles.columns // 2), rows.expert, rows.used, self.width, self.inner_dim, high,
            tiles.columns, tiles.depth,
        )  # fmt: skip
        return result

    def reopen(self, above: Tensor, both: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        tiles, high, rows = self.plan.reopened, self.plan.rows, self.rows
        to_both, weighted = torch.empty_like(both), torch.empty(both.shape[1:], **self.options)
        parts = -(-self.inner_dim // tiles.columns)
        share_parts = torch.empty(parts, len(above), dtype=torch.float32, device=above.device)
        kept, to_kept = (_described(x, 1, high, tiles.columns // 2) for x in (both, to_both))
        self._launch(
            products.reopened, tiles, self.inner_dim, _described(above, high, tiles.depth),
            _described(self.weights.down, 1, tiles.depth, tiles.columns), kept, to_kept,
            _described(weighted, high, tiles.columns // 2), share_parts, rows.expert, rows.used, rows.share,
            len(above), self.width, self.inner_dim, *self.caps, high, tiles.columns, tiles.depth, self.is_fast,
        )  # fmt: skip
        return to_both, weighted, share_parts

    def return_to(self, to_both: Tensor) -> Tensor:
        tiles, high, rows = self.plan.returned, self.plan.rows, self.rows
        result = torch.empty(to_both.shape[1], self.width, **self.options)
        gate, up = (_described(w, 1, tiles.depth, tiles.columns) for w in self.weights[:2])
        self._launch(
            products.returned, tiles, self.width, _described(to_both, 1, high, tiles.depth), gate, up,
            _described(result, high, tiles.columns // 2), rows.expert, rows.used, self.width, self.inner_dim, high,
            tiles.columns, tiles.depth,
        )  # fmt: skip
        return result

    def multiply_outer(
        self, left: Tensor, part: int, right: Tensor, dtype: torch.dtype, total: Tensor | None
    ) -> Tensor | None:
        """Return each expert's left[part]^T right, or add it to a total and return nothing."""
        tiles, high, rows = self.plan.outer, self.plan.rows, self.rows
        shape = self.num_experts, left.shape[2], right.shape[1]
        result = torch.empty(shape, device=right.device, dtype=dtype) if total is None else total
        grid = shape[0] * -(-shape[1] // high) * -(-shape[2] // tiles.columns)
        launch(
            products.outer, (self._programs(tiles, grid),), _described(left, 1, tiles.depth, high),
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


def _whole(weight: Tensor, dtype: torch.dtype) -> Tensor:
    return weight.to(dtype).contiguous()
