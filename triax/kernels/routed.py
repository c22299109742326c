"""What the products of routed experts take, plain or quantised: who goes where, and the weights of all experts."""

from typing import Any, NamedTuple

from jaxtyping import Float, Int
from torch import Tensor


class Routing(NamedTuple):
    """Which experts each token goes through, and how much each of them counts."""

    expert: Int[Tensor, "T k"]
    """Each at most once a token."""
    share: Float[Tensor, "T k"]
    """Weights of the sum."""


class ExpertWeights(NamedTuple):
    """The three matrices of every expert, stacked over the experts: tensors, or tensors in a quantised format."""

    gate: Any
    """[E, F, L]; decides what passes."""
    up: Any
    """[E, F, L]; makes what may pass."""
    down: Any
    """[E, L, F]; leads back."""
