"""Root-mean-square normalisation of the last axis."""

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from triax.model.precision import KeepsFp32, at_least_fp32


class _Normalize(torch.autograd.Function):
    """`gain x / sqrt(mean(x^2) + eps)`; keeps the input and one scalar a row for the backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, eps: float, gain: float, dtype: torch.dtype) -> Tensor:
        wide = at_least_fp32(x)
        scale = wide.square().mean(-1, keepdim=True).add_(eps).rsqrt_()
        ctx.save_for_backward(x, scale)
        ctx.gain = gain
        return (wide * (scale * gain)).to(dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        x, scale = ctx.saved_tensors
        grad, wide = grad.to(scale.dtype), at_least_fp32(x)
        along = (grad * wide).mean(-1, keepdim=True).mul_(scale).mul_(scale)
        return torch.addcmul(grad, wide, along, value=-1).mul_(scale * ctx.gain).to(x.dtype), None, None, None


def normalize(x: Float[Tensor, "*rows D"], eps: float, gain: float = 1.0) -> Float[Tensor, "*rows D"]:
    """Scale each row to root mean square `gain`; statistics in fp32, result in the input's format or autocast's."""
    dtype = x.dtype
    if dtype is torch.float32 and torch.is_autocast_enabled(x.device.type):
        dtype = torch.get_autocast_dtype(x.device.type)
    return _Normalize.apply(x, eps, gain, dtype)


class RMSNorm(nn.Module):
    """`weight * (x / sqrt(mean(x^2) + eps))`: statistics in fp32, cast back, then the weight."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Float[Tensor, "*rows D"]) -> Float[Tensor, "*rows D"]:
        """Normalise each row."""
        unit = normalize(x, self.eps)
        return unit * self.weight.to(unit.dtype)


class Fp32Norm(KeepsFp32, RMSNorm):
    """An RMSNorm whose weight and output stay fp32."""

    fp32 = ("weight",)

    def forward(self, x: Float[Tensor, "*rows D"]) -> Float[Tensor, "*rows D"]:
        """Normalise each row, in fp32 throughout."""
        wide = at_least_fp32(x)
        return _Normalize.apply(wide, self.eps, 1.0, wide.dtype) * self.weight
