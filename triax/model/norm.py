"""Root-mean-square normalisation of the last axis."""

import torch
from jaxtyping import Float
from torch import Tensor, nn

from triax.kernels.rms_norm import of_sum, rms_norm
from triax.model.precision import KeepsFp32, at_least_fp32


def normalize(x: Float[Tensor, "*rows D"], eps: float, gain: float = 1.0) -> Float[Tensor, "*rows D"]:
    """Scale each row to root mean square `gain`; statistics in fp32, result in the input's format or autocast's."""
    dtype = product_dtype(x)
    return rms_norm(x, None, eps, gain, dtype)


def product_dtype(x: Tensor) -> torch.dtype:
    """Return the format in which a matrix product would take `x`: its own, or autocast's for fp32."""
    if x.dtype is torch.float32 and torch.is_autocast_enabled(x.device.type):
        return torch.get_autocast_dtype(x.device.type)
    return x.dtype


class RMSNorm(nn.Module):
    """`weight * (x / sqrt(mean(x^2) + eps))`: statistics in fp32, cast back, then the weight."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Float[Tensor, "*rows D"]) -> Float[Tensor, "*rows D"]:
        """Normalise each row."""
        return rms_norm(x, self.weight, self.eps, dtype=product_dtype(x))

    def of_sum(
        self, x: Float[Tensor, "*rows D"], added: Float[Tensor, "*rows D"]
    ) -> tuple[Float[Tensor, "*rows D"], Float[Tensor, "*rows D"]]:
        """Return a sum and its norm, without autocast."""
        return of_sum(x, added, self.weight, self.eps)


class Fp32Norm(KeepsFp32, RMSNorm):
    """An RMSNorm whose weight and output stay fp32."""

    fp32 = ("weight",)

    def forward(self, x: Float[Tensor, "*rows D"]) -> Float[Tensor, "*rows D"]:
        """Normalise each row, in fp32 throughout."""
        return rms_norm(at_least_fp32(x), self.weight, self.eps)
