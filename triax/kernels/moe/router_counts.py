"""What is counted while a router chooses, for the balance of experts."""

from typing import NamedTuple

from jaxtyping import Float, Int
from torch import Tensor


class MarginBins(NamedTuple):
    """Where the tokens of one pass are counted, in whole numbers, which add up the same in any order."""

    margins: Int[Tensor, "E bins"]
    """Tokens by expert and by the bias with which it would just have won them; no bins where nobody loses."""
    low: Float[Tensor, ""]
    """Where the first bin begins."""
    width: Float[Tensor, ""]
    """How wide a bin is."""
    score_unit: float
    """What sums of scores are whole multiples of: a power of two, at least 2^-21."""


class RouterCounts(NamedTuple):
    """What was counted beside the margins."""

    load: Int[Tensor, " E"]
    """Tokens that each expert received."""
    score: Int[Tensor, ""]
    """Sum of all scores, each rounded to whole units."""
