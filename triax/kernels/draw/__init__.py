"""From logits to tokens: each row greedy or drawn in its own way, with the logarithm of the token's probability."""

from importlib.util import find_spec

from jaxtyping import Bool, Float
from torch import Tensor

from triax.kernels.dispatch import mode
from triax.kernels.draw import reference
from triax.kernels.draw.reference import Drawn, Ways

__all__ = ["Drawn", "Ways", "draw"]


def draw(logits: Float[Tensor, "B V"], barred: Bool[Tensor, " V"] | None, ways: Ways) -> Drawn:
    """Choose one token a row, of equal logits the smaller token; see `reference.draw`. Nothing waits for the device."""
    if logits.is_cuda and mode() != "reference" and find_spec("triton") is not None:
        from triax.kernels.draw import bisected

        if bisected.unsupported(logits) is None:
            return bisected.draw(logits, barred, ways)
    return reference.draw(logits, barred, ways)
