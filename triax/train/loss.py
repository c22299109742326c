"""Cross-entropy of the next token, chunk by chunk, so that the logits of all tokens never exist at once."""

from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from triax.kernels.cross_entropy import nats
from triax.kernels.linear import operand

IGNORED = -100
"""Target of a token that is not trained on."""

CHUNK_LOGITS = 2**22
"""Logits held at once on a CPU; large enough for full-speed matrix products, small beside the weights of a model."""

GPU_FACTOR = 32
"""How many times more a GPU holds: its products need more rows to fill it."""


def cross_entropy(
    hidden: Float[Tensor, "T D"], weight: Float[Tensor, "V D"], targets: Int[Tensor, " T"]
) -> Float[Tensor, ""]:
    """Return the nats that the targets cost, summed over the tokens whose target is not -100.

    Both gradients are computed during the forward, one chunk of tokens at a time: what stays in memory is their
    size, never tokens times vocabulary. Under autocast the matrix products run in its dtype; statistics in fp32 (fp64
    for fp64 inputs). The sum, not the mean: a step divides by its own number of trained tokens, once.

    Args:
        hidden: The stream after the last norm.
        weight: The head's matrix.
        targets: Token that follows each position, or -100.
    """
    if torch.is_grad_enabled() and (hidden.requires_grad or weight.requires_grad):
        return _ChunkedLoss.apply(hidden, weight, targets)
    return _nats(hidden, weight, targets, wants_hidden=False, wants_weight=False)[0]


class _ChunkedLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
        loss, *gradients = _nats(
            hidden, weight, targets, wants_hidden=ctx.needs_input_grad[0], wants_weight=ctx.needs_input_grad[1]
        )
        ctx.save_for_backward(*gradients)
        return loss

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return *(None if saved is None else saved * grad.to(saved.dtype) for saved in ctx.saved_tensors), None


def _nats(
    hidden: Tensor, weight: Tensor, targets: Tensor, *, wants_hidden: bool, wants_weight: bool
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    device = hidden.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else hidden.dtype
    wide = torch.promote_types(hidden.dtype, torch.float32)
    if hidden.dtype == torch.float64:
        dtype = wide  # autocast leaves fp64 alone
    with torch.autocast(device, enabled=False):
        narrow_weight = operand(weight, dtype)
        loss = hidden.new_zeros((), dtype=wide)
        hidden_grad = torch.empty_like(hidden) if wants_hidden else None
        weight_grad = torch.zeros_like(weight, dtype=wide) if wants_weight else None
        size = max(1, CHUNK_LOGITS * (1 if device == "cpu" else GPU_FACTOR) // weight.shape[0])
        for start in range(0, hidden.shape[0], size):
            part = slice(start, start + size)
            narrow = operand(hidden[part], dtype)
            wants_slope = wants_hidden or wants_weight
            cost, slope = nats(narrow @ narrow_weight.T, targets[part], IGNORED, wants_slope=wants_slope)
            loss += cost.sum()
            if slope is None:
                continue
            slope = operand(slope, dtype)
            if hidden_grad is not None:
                hidden_grad[part] = slope @ narrow_weight
            if weight_grad is not None:
                weight_grad += slope.T @ narrow
    return loss, hidden_grad, None if weight_grad is None else weight_grad.to(weight.dtype)
