"""Newton-Schulz orthogonalisation of many equal shapes at once, in two forms of the same polynomial."""

from importlib.util import find_spec

import torch
from jaxtyping import Float
from torch import Tensor

from triax.kernels.newton_schulz.reference import COEFFICIENTS, EPS

SMALLEST = 512  # rows from which half the work is worth a kernel of our own
WIDE = 1.5  # columns per row from which iterating on the Gram matrix needs fewer multiplications (five steps)


def orthogonalize(matrices: Float[Tensor, "B R C"], steps: int, dtype: torch.dtype) -> Float[Tensor, "B R C"]:
    """Orthogonalise each matrix, computing in `dtype`; wide ones by their Gram matrix where that is exact enough.

    Every product but the last is of polynomials of one symmetric matrix, hence symmetric: on a GPU a kernel computes
    one triangle of it and mirrors the other.
    """
    tall = matrices.shape[1] > matrices.shape[2]
    wide = matrices.mT if tall else matrices
    exact = torch.promote_types(wide.dtype, torch.float32)
    norm = torch.linalg.vector_norm(wide, dim=(1, 2), keepdim=True, dtype=exact)
    start = torch.empty(wide.shape, dtype=dtype, device=wide.device)  # in one piece, also where `wide` is a transpose
    torch.div(wide, norm.clamp(min=EPS), out=start)
    # In bf16 the Gram form squares rounding errors that the plain form keeps small, so half precision stays plain.
    form = _by_gram if dtype in (torch.float32, torch.float64) and wide.shape[2] >= WIDE * wide.shape[1] else _plain
    result = form(start, steps).to(matrices.dtype)
    return result.mT if tall else result


def _polynomial(gram: Float[Tensor, "B R R"]) -> Float[Tensor, "B R R"]:
    _, b, c = COEFFICIENTS
    return torch.baddbmm(gram, gram, gram, beta=b, alpha=c)


def _plain(x: Float[Tensor, "B R C"], steps: int) -> Float[Tensor, "B R C"]:
    polynomial = _mirrored if _has_kernel(x) else lambda x: _polynomial(x @ x.mT)
    for _ in range(steps):
        x = torch.baddbmm(x, polynomial(x), x, beta=COEFFICIENTS[0])
    return x


def _has_kernel(x: Float[Tensor, "B R C"]) -> bool:
    is_long = x.shape[1] >= SMALLEST and x.shape[2] % 8 == 0 and x.shape[1] % 8 == 0  # rows of 16-byte units
    return x.is_cuda and x.dtype is torch.bfloat16 and is_long and find_spec("triton") is not None


def _mirrored(x: Float[Tensor, "B R C"]) -> Float[Tensor, "B R R"]:
    from triax.kernels.newton_schulz.symmetric import product

    _, b, c = COEFFICIENTS
    gram = product(x.contiguous())
    return product(gram, c, gram, b)


def _by_gram(x: Float[Tensor, "B R C"], steps: int) -> Float[Tensor, "B R C"]:
    """Follow x x^T alone, collect the factors that multiply x, and touch the wide matrix only twice."""
    gram, factors = x @ x.mT, None
    for step in range(steps):
        factor = _polynomial(gram)
        factor.diagonal(dim1=1, dim2=2).add_(COEFFICIENTS[0])
        factors = factor if factors is None else factor @ factors
        if step < steps - 1:
            gram = factor @ gram @ factor
    return x if factors is None else factors @ x
