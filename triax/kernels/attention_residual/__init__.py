"""Attention Residuals: each place in the network averages what earlier places wrote."""

import os
from collections.abc import Sequence

from jaxtyping import Float
from torch import Tensor

from triax.kernels.attention_residual import lean, reference


def mix(
    sources: Sequence[Float[Tensor, "T D"]], norm: Float[Tensor, " D"], query: Float[Tensor, " D"], eps: float
) -> tuple[Float[Tensor, "T D"], Float[Tensor, "T J"]]:
    """Average the sources by `softmax_j(query · RMSNorm(source_j))`; see `reference.mix`."""
    path = reference if os.environ.get("TRIAX_KERNELS") == "reference" else lean
    return path.mix(sources, norm, query, eps)
