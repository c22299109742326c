"""The router's choice: which kernel makes it, and what is counted on the way."""

from importlib.util import find_spec

from jaxtyping import Float, Int
from torch import Tensor

from triax.kernels.dispatch import mode
from triax.kernels.moe.router_counts import MarginBins, RouterCounts


def choose(
    logit: Float[Tensor, "T E"],
    bias: Float[Tensor, " E"],
    top_k: int,
    scale: float,
    *,
    renormalize: bool,
    places: MarginBins | None = None,
) -> tuple[Int[Tensor, "T k"], Float[Tensor, "T k"], RouterCounts | None] | None:
    """Return each token's experts, best first, their shares and what was counted, where one kernel does all that.

    Args:
        logit: Scores before the sigmoid, in fp32; the shares' gradient reaches them.
        bias: Added to the scores for the choice alone.
        top_k: Experts a token.
        scale: Factor on the shares.
        renormalize: Let the shares sum to one before that factor.
        places: Where to count; none counts nothing. The margin of a token and an expert is the best loser's biased
            score minus the expert's plain one.
    """
    if not logit.is_cuda or mode() != "fast" or find_spec("triton") is None:
        return None
    from triax.kernels.moe import router_fused

    if router_fused.unsupported(logit) is not None:
        return None
    return router_fused.choose(logit, bias, top_k, scale, renormalize=renormalize, places=places)
