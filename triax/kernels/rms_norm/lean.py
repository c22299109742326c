"""The norm in torch's operations with a closed-form backward: it keeps the input and one scalar a row."""

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor


def rms_norm(
    x: Float[Tensor, "*rows D"], weight: Float[Tensor, " D"] | None, eps: float, gain: float, dtype: torch.dtype
) -> Float[Tensor, "*rows D"]:
    """See `reference.rms_norm`."""
    unit = _Normalize.apply(x, eps, gain, dtype)
    return unit if weight is None else unit * weight.to(dtype)


def gated(
    x: Float[Tensor, "*rows D"],
    gate: Float[Tensor, "*rows D"],
    weight: Float[Tensor, " D"],
    eps: float,
    dtype: torch.dtype,
) -> Float[Tensor, "*rows D"]:
    """See `reference.gated`."""
    wide = _wide(x)
    unit = _Normalize.apply(wide, eps, 1.0, wide.dtype)
    return (unit * weight.to(wide.dtype) * gate.to(wide.dtype).sigmoid()).to(dtype)


class _Normalize(torch.autograd.Function):
    """`gain x / sqrt(mean(x^2) + eps)`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, eps: float, gain: float, dtype: torch.dtype) -> Tensor:
        wide = _wide(x)
        scale = wide.square().mean(-1, keepdim=True).add_(eps).rsqrt_()
        ctx.save_for_backward(x, scale)
        ctx.gain = gain
        return (wide * (scale * gain)).to(dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        x, scale = ctx.saved_tensors
        grad, wide = grad.to(scale.dtype), _wide(x)
        along = (grad * wide).mean(-1, keepdim=True).mul_(scale).mul_(scale)
        return torch.addcmul(grad, wide, along, value=-1).mul_(scale * ctx.gain).to(x.dtype), None, None, None


def _wide(x: Tensor) -> Tensor:
    return x if x.dtype in (torch.float32, torch.float64) else x.float()
