"""Routed experts, one expert at a time: the definition the fast path is held to.

Source: K3 report (arXiv 2607.24653) section 2.3, equation 11.
"""

import torch
from jaxtyping import Float, Int
from torch import Tensor

from triax.kernels.moe.activation import Activation


def experts(
    hidden: Float[Tensor, "T L"],
    expert: Int[Tensor, "T k"],
    share: Float[Tensor, "T k"],
    gate: Float[Tensor, "E F L"],
    up: Float[Tensor, "E F L"],
    down: Float[Tensor, "E L F"],
    activation: Activation,
) -> Float[Tensor, "T L"]:
    """Send each token through its experts and add what they return by their shares.

    Args:
        hidden: What the experts read.
        expert: The experts of each token, each at most once.
        share: How much each of them counts.
        gate: Matrix of every expert that decides what passes.
        up: Matrix of every expert that makes what may pass.
        down: Matrix of every expert that leads back.
        activation: How gate and up are joined.
    """
    output = torch.zeros(hidden.shape, dtype=torch.promote_types(share.dtype, hidden.dtype), device=hidden.device)
    for one in range(gate.shape[0]):
        token, slot = (expert == one).nonzero(as_tuple=True)
        rows = hidden[token]
        inner = activation(rows @ gate[one].T, rows @ up[one].T)
        output = output.index_add(0, token, (inner @ down[one].T * share[token, slot, None]).to(output.dtype))
    return output.to(hidden.dtype)
