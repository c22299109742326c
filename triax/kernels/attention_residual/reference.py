"""Mixing earlier outputs by attention over depth: the definition that the fast path is held to.

Source: Attention Residuals (arXiv 2603.15031) section 3; K3 report (arXiv 2607.24653) section 2.2.
"""

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor


def mix(
    sources: Sequence[Float[Tensor, "T D"]], norm: Float[Tensor, " D"], query: Float[Tensor, " D"], eps: float
) -> tuple[Float[Tensor, "T D"], Float[Tensor, "T J"]]:
    """Average the sources, each token with its own weights: softmax over j of `query · RMSNorm(source_j)`.

    Args:
        sources: Earlier outputs of the network, oldest first; they enter the average as they are.
        norm: Weight of the RMSNorm that the scores read the sources through.
        query: What this place in the network looks for; zero gives the plain mean.
        eps: Added to the mean square.

    Returns:
        The average, and the weight of each source.
    """
    stacked = torch.stack([source.to(torch.promote_types(source.dtype, torch.float32)) for source in sources])
    unit = stacked * (stacked.square().mean(-1, keepdim=True) + eps).rsqrt()
    weight = (unit * norm * query).sum(-1).softmax(dim=0)
    return (weight[..., None] * stacked).sum(0).to(sources[-1].dtype), weight.T
