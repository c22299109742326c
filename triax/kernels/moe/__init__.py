"""Routed experts: each token goes through a few of many small gated MLPs."""

import os

from jaxtyping import Float, Int
from torch import Tensor

from triax.kernels.moe import grouped, reference
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
    """Send each token through its experts and add what they return by their shares; see `reference.experts`."""
    path = reference if os.environ.get("TRIAX_KERNELS") == "reference" else grouped
    return path.experts(hidden, expert, share, gate, up, down, activation)
