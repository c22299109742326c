"""Which weights routed experts multiply with: rounded copies, and where gradients go."""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from triax.kernels.routed import ExpertWeights


def with_gradients(weights: ExpertWeights, rounded: ExpertWeights | None, sums: ExpertWeights | None) -> ExpertWeights:
    """Return what to multiply with: rounded copies whose gradients go to the weights, or into sums instead.

    Args:
        weights: What is trained.
        rounded: Copies made earlier, in the format of the products.
        sums: Where gradients are added; the weights then receive none.
    """
    if sums is not None:
        weights = ExpertWeights(*(_Added.apply(*pair) for pair in zip(weights, sums, strict=True)))
    if rounded is not None:
        weights = ExpertWeights(*(_Rounded.apply(*pair) for pair in zip(weights, rounded, strict=True)))
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
