"""The activation that settings name, as the function the layers call."""

from functools import lru_cache

from jaxtyping import Float
from torch import Tensor

from triax.config.model import Activation, Situ
from triax.kernels.situ_glu import SituGlu


@lru_cache
def activation_of(settings: Activation) -> SituGlu:
    """Return the gated activation of these settings; SwiGLU is SiTU-GLU without caps."""
    return SituGlu(settings.gate_cap, settings.up_cap) if isinstance(settings, Situ) else SituGlu()


def glu(
    gate: Float[Tensor, "*rows F"], up: Float[Tensor, "*rows F"], activation: Activation
) -> Float[Tensor, "*rows F"]:
    """Let `gate` decide how much of `up` passes.

    SiTU-GLU: `gate_cap tanh(gate / gate_cap) sigmoid(gate) * up_cap tanh(up / up_cap)`, at most the product of the
    caps in size. SwiGLU: `gate sigmoid(gate) * up`. Computed in fp32 (fp64 for fp64), returned in the gate's format.

    Source: K3 report (arXiv 2607.24653) section 2.3.2 and appendix B.
    """
    return activation_of(activation)(gate, up)
