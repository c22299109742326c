"""Gated activations: SiTU-GLU, and SwiGLU as its limit without caps."""

import os
from dataclasses import dataclass

from jaxtyping import Float
from torch import Tensor

from triax.kernels.situ_glu import lean, reference


@dataclass(frozen=True)
class SituGlu:
    """`gate_cap tanh(g / gate_cap) sigmoid(g)` times `up_cap tanh(u / up_cap)`; a cap of none leaves its branch alone.

    Computed in fp32 at least, returned in the format of the gate.
    """

    gate_cap: float | None = None
    """Largest size of the gate branch."""
    up_cap: float | None = None
    """Largest size of the up branch."""

    def __call__(self, gate: Float[Tensor, "*rows F"], up: Float[Tensor, "*rows F"]) -> Float[Tensor, "*rows F"]:
        """Let the gate decide how much of `up` passes."""
        path = reference if os.environ.get("TRIAX_KERNELS") == "reference" else lean
        return path.glu(gate, up, self.gate_cap, self.up_cap)

    def gradient(
        self, upstream: Float[Tensor, "*rows F"], gate: Float[Tensor, "*rows F"], up: Float[Tensor, "*rows F"]
    ) -> tuple[Float[Tensor, "*rows F"], Float[Tensor, "*rows F"], Float[Tensor, "*rows F"]]:
        """Return the value again and the gradients of gate and up, for kernels that fuse the activation."""
        return lean.gradient(upstream, gate, up, self.gate_cap, self.up_cap)
