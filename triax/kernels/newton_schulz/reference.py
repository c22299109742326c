"""Newton-Schulz orthogonalisation, one matrix at a time: the definition the batched form is held to.

Source: Moonlight (arXiv 2502.16982) equation 2; the coefficients and the idea are Keller Jordan's Muon.
"""

from jaxtyping import Float
from torch import Tensor

COEFFICIENTS = (3.4445, -4.7750, 2.0315)  # steepest slope at zero: five steps reach singular values of 0.5 to 1.5
EPS = 1e-7  # smallest norm that is divided by; a zero matrix stays zero


def orthogonalize(matrix: Float[Tensor, "R C"], steps: int) -> Float[Tensor, "R C"]:
    """Push all singular values of a matrix towards one and keep its singular vectors.

    x <- a x + b (x x^T) x + c (x x^T)^2 x, from x = matrix / norm

    Args:
        matrix: Any real matrix; its scale does not matter.
        steps: Iterations; five leave singular values between about 0.5 and 1.5.
    """
    a, b, c = COEFFICIENTS
    x = matrix.T if matrix.shape[0] > matrix.shape[1] else matrix
    x = x / x.norm().clamp(min=EPS)
    for _ in range(steps):
        gram = x @ x.T
        x = a * x + b * gram @ x + c * gram @ gram @ x
    return x.T if matrix.shape[0] > matrix.shape[1] else x
