"""Root-mean-square normalisation of the last axis, with its weight, and with the output gate of KDA."""

import warnings
from importlib.util import find_spec
from types import ModuleType

import torch
from jaxtyping import Float
from torch import Tensor

from triax.kernels.dispatch import mode
from triax.kernels.rms_norm import lean, reference


def rms_norm(
    x: Float[Tensor, "*rows D"],
    weight: Float[Tensor, " D"] | None,
    eps: float,
    gain: float = 1.0,
    dtype: torch.dtype | None = None,
) -> Float[Tensor, "*rows D"]:
    """Scale each row to root mean square `gain`, round, then multiply by the weight; see `reference.rms_norm`."""
    return _path(x, weight).rms_norm(x, weight, eps, gain, dtype or x.dtype)


def gated(
    x: Float[Tensor, "*rows D"],
    gate: Float[Tensor, "*rows D"],
    weight: Float[Tensor, " D"],
    eps: float,
    dtype: torch.dtype | None = None,
) -> Float[Tensor, "*rows D"]:
    """Normalise each row, then multiply by the weight and by the sigmoid of the gate; see `reference.gated`."""
    return _path(x, weight).gated(x, gate, weight, eps, dtype or x.dtype)


def of_sum(
    x: Float[Tensor, "*rows D"], added: Float[Tensor, "*rows D"], weight: Float[Tensor, " D"], eps: float
) -> tuple[Float[Tensor, "*rows D"], Float[Tensor, "*rows D"]]:
    """Return a sum in its own format, and its `rms_norm`; on a GPU in one pass where no gradient is wanted."""
    if x.is_cuda and not torch.is_grad_enabled() and x.dtype is added.dtype:
        path = _path(x, weight)
        if path.__name__.endswith("fused"):
            return path.of_sum(x, added, weight, eps)
    total = x + added
    return total, rms_norm(total, weight, eps)


def _path(x: Tensor, weight: Tensor | None) -> ModuleType:
    if mode() == "reference":
        return reference
    if x.is_cuda:
        reason = "an installation without Triton"
        if find_spec("triton") is not None:
            from triax.kernels.rms_norm import fused

            reason = fused.unsupported(x, weight)
            if reason is None:
                return fused
        warnings.warn(f"kernels.rms_norm: no GPU kernel for {reason}; torch's operations run", stacklevel=3)
    return lean
