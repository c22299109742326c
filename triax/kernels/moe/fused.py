"""Routed experts on a GPU from Hopper on: five kinds of products over tiles of rows, each with what follows it.

Forward: rows of tokens, one product whose end is the activation, one that leads back, a sum by token. Backward: rows of
gradients, one product whose end is the activation's gradient and that of the shares, two products of gradients and
weights, and an outer product for each stack of weights, written or added in the format of the gradient. What the
down-projection returned is not kept: see `grouped`.
"""

from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.autograd.function import once_differentiable

from triax.errors import UnsupportedError
from triax.kernels.moe import hopper
from triax.kernels.moe.activation import Activation
from triax.kernels.moe.rows import ExpertRows, arrange, collect, spread, sum_by_token
from triax.kernels.moe.tiles import PLAN, TiledProducts, TilePlan
from triax.kernels.routed import ExpertWeights

ALIGNED_BYTES = 16  # what the copy engine asks of a row


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
    rounded: ExpertWeights | None = None,
    sums: ExpertWeights | None = None,
    plan: TilePlan | None = None,
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
        plan: How the products are cut; without one, CUDA C++ runs where it can, which is cut in one way.

    Raises:
        UnsupportedError: The kernels have no form for these dtypes, sizes or this GPU.
    """
    if reason := unsupported(hidden, expert, gate, activation, dtype):
        raise UnsupportedError(f"kernels.moe.fused has no form for {reason}; use `kernels.moe.experts`")
    if plan is None and not hopper.is_available(hidden.device):
        plan = PLAN
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
        sums: ExpertWeights | None,
        activation: Any,
        dtype: torch.dtype,
        plan: TilePlan | None,
    ) -> Tensor:
        ctx.caps, ctx.dtype, ctx.plan = (activation.gate_cap, activation.up_cap), dtype, plan
        ctx.tile = hopper.ROWS if plan is None else plan.rows
        rows = arrange(expert, share, gate.shape[0], ctx.tile)
        keeps = any(ctx.needs_input_grad)
        copies = gate_rounded, up_rounded, down_rounded
        weights = [w if r is None else r for w, r in zip((gate, up, down), copies, strict=True)]
        product = _products(rows, ExpertWeights(*weights), ctx)
        both, inner = product.gate_up_proj(spread(hidden, rows, dtype), keeps)
        output = sum_by_token(product.down_proj(inner), rows, dtype)
        if keeps:
            ctx.save_for_backward(hidden, *weights, both, *rows[:-1])
            ctx.sums, ctx.dtypes = sums, (share.dtype, gate.dtype, up.dtype, down.dtype)
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, ...]:
        hidden, gate, up, down, both, row, row_share, expert, first, count, used = ctx.saved_tensors
        rows = ExpertRows(row, row_share, expert, first, count, used, ctx.tile)
        needs_hidden, needs_share, needs_gate, needs_up, needs_down = ctx.needs_input_grad[:5]
        share_dtype, gate_dtype, up_dtype, down_dtype = ctx.dtypes
        into_gate, into_up, into_down = ctx.sums or (None, None, None)
        product = _products(rows, ExpertWeights(gate, up, down), ctx)
        above = spread(grads[0], rows, ctx.dtype)
        to_both, weighted, share_parts = product.down_proj_backward(above, both)
        to_hidden = to_share = to_gate = to_up = to_down = None
        if needs_share:
            to_share = collect(share_parts, rows, share_dtype)
        if needs_down:
            to_down = product.weight_gradient(above[None], 0, weighted, down_dtype, into_down)
        del above, weighted
        if needs_gate or needs_up:
            rows_of_hidden = spread(hidden, rows, ctx.dtype)
            if needs_gate:
                to_gate = product.weight_gradient(to_both, 0, rows_of_hidden, gate_dtype, into_gate)
            if needs_up:
                to_up = product.weight_gradient(to_both, 1, rows_of_hidden, up_dtype, into_up)
            del rows_of_hidden
        if needs_hidden:
            to_hidden = sum_by_token(product.gate_up_proj_backward(to_both), rows, hidden.dtype)
        return to_hidden, to_share, to_gate, to_up, to_down, *(None,) * 8


def _products(rows: ExpertRows, weights: ExpertWeights, ctx: Any) -> TiledProducts | hopper.HopperProducts:
    """Return the products in the form that rows were laid out for."""
    weights = ExpertWeights(*(weight.to(ctx.dtype).contiguous() for weight in weights))
    if ctx.plan is None:
        return hopper.HopperProducts(rows, weights, ctx.caps)
    return TiledProducts(rows, weights, ctx.caps, ctx.plan)
