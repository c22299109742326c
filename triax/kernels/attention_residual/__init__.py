"""Attention Residuals: each place in the network averages what earlier places wrote."""

import warnings
from collections.abc import Sequence
from importlib.util import find_spec

from jaxtyping import Float
from torch import Tensor

from triax.kernels.attention_residual import lean, reference
from triax.kernels.dispatch import mode


def mix(
    sources: Sequence[Float[Tensor, "T D"]], norm: Float[Tensor, " D"], query: Float[Tensor, " D"], eps: float
) -> tuple[Float[Tensor, "T D"], Float[Tensor, "T J"]]:
    """Average the sources by `softmax_j(query · RMSNorm(source_j))`; see `reference.mix`."""
    if mode() != "fast":  # the other forms go by the number of tokens
        return reference.mix(sources, norm, query, eps)
    if sources[0].is_cuda:
        reason = "an installation without Triton"
        if find_spec("triton") is not None:
            from triax.kernels.attention_residual import fused

            reason = fused.unsupported(sources)
            if reason is None:
                return fused.mix(sources, norm, query, eps)
        warnings.warn(f"kernels.attention_residual: no GPU kernel for {reason}; torch's operations run", stacklevel=2)
    return lean.mix(sources, norm, query, eps)
