"""What an expert asks of its activation."""

from typing import Protocol, runtime_checkable

from jaxtyping import Float
from torch import Tensor


@runtime_checkable
class Activation(Protocol):
    """A gated activation that also states its closed-form gradient, so that experts can fuse it."""

    def __call__(self, gate: Float[Tensor, "*rows F"], up: Float[Tensor, "*rows F"]) -> Float[Tensor, "*rows F"]:
        """Return the activated rows; differentiable."""
        ...

    def gradient(
        self, upstream: Float[Tensor, "*rows F"], gate: Float[Tensor, "*rows F"], up: Float[Tensor, "*rows F"]
    ) -> tuple[Float[Tensor, "*rows F"], Float[Tensor, "*rows F"], Float[Tensor, "*rows F"]]:
        """Return the value again and, for `upstream` on it, the gradients of gate and up; in fp32 at least."""
        ...
