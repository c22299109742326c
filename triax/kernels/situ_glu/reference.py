"""The gated activations of experts and dense MLPs: the definition the fast path is held to.

Source: K3 report (arXiv 2607.24653) section 2.3.2 and appendix B.
"""

import torch
from jaxtyping import Float
from torch import Tensor


def glu(
    gate: Float[Tensor, "*rows F"], up: Float[Tensor, "*rows F"], gate_cap: float | None, up_cap: float | None
) -> Float[Tensor, "*rows F"]:
    """Let `gate` decide how much of `up` passes, each bent smoothly towards its cap.

    Args:
        gate: What opens the way.
        up: What passes.
        gate_cap: Largest size of the opening; none leaves it unbounded, as SwiGLU does.
        up_cap: Largest size of what passes; none leaves it unbounded.
    """
    wide = torch.float64 if gate.dtype is torch.float64 else torch.float32
    opening, passing = gate.to(wide), up.to(wide)
    openness = torch.sigmoid(opening)
    if gate_cap is not None:
        opening = gate_cap * torch.tanh(opening / gate_cap)
    if up_cap is not None:
        passing = up_cap * torch.tanh(passing / up_cap)
    return (opening * openness * passing).to(gate.dtype)
