"""What the serving forms of Kimi Delta Attention take and give: projections, weights, and memory kept in slots."""

from typing import NamedTuple

from jaxtyping import Float
from torch import Tensor

UNIT_EPS = 1e-6
"""Added to the sum of squares of a query or key before the root."""


class Projected(NamedTuple):
    """What the projections of a layer return for its tokens, nothing activated yet; any strides but the last's."""

    mixed: Float[Tensor, "*rows C"]
    """Query, key and value channels before the short convolution: C = H K + H K + H V."""
    decay: Float[Tensor, "*rows H K"]
    """Before the bias of the decay gate."""
    beta: Float[Tensor, "*rows H"]
    """Before the sigmoid."""
    gate: Float[Tensor, "*rows H V"]
    """Output gate before the sigmoid."""


class Weights(NamedTuple):
    """Parameters of a layer that work on single channels; in fp32, as the model keeps them."""

    conv: Float[Tensor, "C taps"]
    """One kernel a channel, in the order of `Projected.mixed`; the last tap meets the current token."""
    decay_rate: Float[Tensor, " H"]
    """Log of the factor on (bounded gate) or before (softplus gate) each head's decay."""
    decay_bias: Float[Tensor, " HK"]
    norm: Float[Tensor, " V"]
    """Weight of the RMSNorm on what was read."""
    norm_eps: float
    lowest_log_decay: float | None
    """Bound of the gate `lowest sigmoid(exp(rate) z)`, negative; none is the gate `-exp(rate) softplus(z)`."""


class Slots(NamedTuple):
    """Memory of many sequences, one slot each. Slot 0 belongs to padding rows: it is neither read nor written."""

    state: Float[Tensor, "S H K V"]
    """fp32 (fp64 for fp64 models), or bf16 to halve its bytes: then it is rounded after every token."""
    window: Float[Tensor, "S past C"]
    """The `taps - 1` inputs of the convolution before the next token, oldest first."""


class Records(NamedTuple):
    """What is kept of tokens that were tried but not yet written to a state: enough to write any first few of them."""

    mixed: Float[Tensor, "N W C"]
    """Their inputs of the convolution."""
    key: Float[Tensor, "N W H K"]
    """Where each writes."""
    update: Float[Tensor, "N W H V"]
    """What each writes there: beta times its error."""
    decay: Float[Tensor, "N W H K"]
    """What each keeps of every channel, in (0, 1]."""
