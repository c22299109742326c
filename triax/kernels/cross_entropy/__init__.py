"""Cross-entropy of given logits and its slope, for a head that works on a few tokens at a time."""

from importlib.util import find_spec

from jaxtyping import Float, Int
from torch import Tensor

from triax.kernels.cross_entropy import reference
from triax.kernels.dispatch import mode


def nats(
    logit: Float[Tensor, "T V"], targets: Int[Tensor, " T"], ignored: int, *, wants_slope: bool
) -> tuple[Float[Tensor, " T"], Float[Tensor, "T V"] | None]:
    """Return what each target costs and, if wanted, the gradient of that cost: softmax minus one at the target.

    The memory of the logits is used up.

    Args:
        logit: Scores of the vocabulary.
        targets: Token that follows each position.
        ignored: Target of a token that costs nothing and has no slope.
        wants_slope: Whether the gradient is needed.

    Returns:
        Costs in fp32 (fp64 for such logits), and the slope: on a GPU in the logits' format, elsewhere as the costs.
    """
    if logit.is_cuda and mode() != "reference" and find_spec("triton") is not None:
        from triax.kernels.cross_entropy import fused

        if logit.dtype in fused.DTYPES:
            return fused.nats(logit, targets, ignored, wants_slope=wants_slope)
    return reference.nats(logit, targets, ignored, wants_slope=wants_slope)
