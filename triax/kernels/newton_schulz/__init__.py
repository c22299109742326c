"""Orthogonalisation of gradients for Muon."""

import torch
from jaxtyping import Float
from torch import Tensor

from triax.kernels.dispatch import mode
from triax.kernels.newton_schulz import batched, reference

__all__ = ["orthogonalize", "product_dtype"]


def orthogonalize(
    matrices: Float[Tensor, "B R C"], steps: int = 5, dtype: torch.dtype | None = None
) -> Float[Tensor, "B R C"]:
    """Orthogonalise each matrix of a stack by itself.

    Args:
        matrices: Equal shapes, tall or wide; no matrix influences another.
        steps: Newton-Schulz iterations.
        dtype: Format of the products; none is bf16 on a GPU, and the input's own on a CPU, where bf16 products
            are slower than fp32 ones.

    Returns:
        Matrices in the format of the given ones.
    """
    if mode() == "reference":
        return torch.stack([reference.orthogonalize(matrix, steps) for matrix in matrices])
    return batched.orthogonalize(matrices, steps, dtype or product_dtype(matrices))


def product_dtype(matrices: Float[Tensor, "*shape"]) -> torch.dtype:
    """Return the format in which these are multiplied where none is asked for."""
    return torch.bfloat16 if matrices.is_cuda and matrices.dtype != torch.float64 else matrices.dtype
