"""Root-mean-square normalisation: the definition that the fast paths are held to.

Source: RMSNorm (arXiv 1910.07467); the order of rounding and weight is that of the released models.
"""

import torch
from jaxtyping import Float
from torch import Tensor


def rms_norm(
    x: Float[Tensor, "*rows D"], weight: Float[Tensor, " D"] | None, eps: float, gain: float, dtype: torch.dtype
) -> Float[Tensor, "*rows D"]:
    """Scale each row to root mean square `gain`, round, then multiply by the weight.

    Args:
        x: Rows; their statistics are taken in fp32 at least.
        weight: One factor a column, rounded to the result's format too; none leaves the unit rows.
        eps: Added to the mean square.
        gain: Root mean square of the rows before the weight.
        dtype: Format of the result.
    """
    wide = x if x.dtype is torch.float64 else x.float()
    unit = (wide * ((wide.square().mean(-1, keepdim=True) + eps).rsqrt() * gain)).to(dtype)
    return unit if weight is None else unit * weight.to(dtype)


def gated(
    x: Float[Tensor, "*rows D"],
    gate: Float[Tensor, "*rows D"],
    weight: Float[Tensor, " D"],
    eps: float,
    dtype: torch.dtype,
) -> Float[Tensor, "*rows D"]:
    """Normalise each row and multiply by the weight and by the sigmoid of the gate, in fp32 at least, then round."""
    wide = x if x.dtype is torch.float64 else x.float()
    unit = wide * (wide.square().mean(-1, keepdim=True) + eps).rsqrt()
    return (unit * weight.to(wide.dtype) * gate.to(wide.dtype).sigmoid()).to(dtype)
