"""The router's choice: which kernel makes it, and what is counted on the way."""

from importlib.util import find_spec
from typing import NamedTuple

from jaxtyping import Float, Int
from torch import Tensor

from triax.kernels.dispatch import mode


class Places(NamedTuple):
    """Where the tokens of one pass are counted, in whole numbers, which add up the same in any order."""

    margins: Int[Tensor, "E bins"]
    """Tokens by expert and by the bias with which it would just have won them; no bins where nobody loses."""
    low: Float[Tensor, ""]
    """Where the first bin begins."""
    width: Float[Tensor, ""]
    """How wide a bin is."""
    score_unit: float
    """What sums of scores are whole multiples of: a power of two, at least 2^-21."""


class Tallied(NamedTuple):
    """What was counted beside the margins."""

    load: Int[Tensor, " E"]
    """Tokens that each expert received."""
    score: Int[Tensor, ""]
    """Sum of all scores, each rounded to whole units."""


def choose(
    logit: Float[Tensor, "T E"],
    bias: Float[Tensor, " E"],
    top_k: int,
    scale: float,
    *,
    renormalize: bool,
    places: Places | None = None,
) -> tuple[Int[Tensor, "T k"], Float[Tensor, "T k"], Tallied | None] | None:
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
    from triax.kernels.moe import best

    if best.unsupported(logit) is not None:
        return None
    return best.choose(logit, bias, top_k, scale, renormalize=renormalize, places=places)
