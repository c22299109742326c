"""The three stacks of matrices of routed experts, their rounded copies, and where their gradients go."""

from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor
from torch.autograd.function import once_differentiable


class Stacks(NamedTuple):
    """One tensor for each stack of weights, in its shape."""

    gate: Float[Tensor, "E F L"]
    up: Float[Tensor, "E F L"]
    down: Float[Tensor, "E L F"]


def routed(weights: Stacks, rounded: Stacks | None, sums: Stacks | None) -> Stacks:
    """Return what to multiply with: rounded copies whose gradients go to the weights, or into sums instead.

    Args:
        weights: What is trained.
        rounded: Copies made earlier, in the format of the products.
        sums: Where gradients are added; the weights then receive none.
    """
    if sums is not None:
        weights = Stacks(*(_Added.apply(*pair) for pair in zip(weights, sums, strict=True)))
    if rounded is not None:
        weights = Stacks(*(_Rounded.apply(*pair) for pair in zip(weights, rounded, strict=True)))
    return weights


class _Rounded(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: Tensor, rounded: Tensor) -> Tensor:
        ctx.dtype = weight.dtype
        return rounded.view_as(rounded)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor, None]:
        return grads[0].to(ctx.dtype), None


class _Added(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: Tensor, total: Tensor) -> Tensor:
        ctx.total = total
        return weight.view_as(weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Any) -> tuple[None, None]:
        ctx.total.add_(grads[0])
        return None, None
