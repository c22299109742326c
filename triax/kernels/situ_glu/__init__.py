"""Gated activations: SiTU-GLU, and SwiGLU as its limit without caps."""

import warnings
from dataclasses import dataclass
from importlib.util import find_spec

from jaxtyping import Float
from torch import Tensor

from triax.kernels.dispatch import mode
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
        if mode() == "reference":
            return reference.glu(gate, up, self.gate_cap, self.up_cap)
        if gate.is_cuda:
            reason = "an installation without Triton"
            if find_spec("triton") is not None:
                from triax.kernels.situ_glu import fused

                reason = fused.unsupported(gate, up)
                if reason is None:
                    return fused.glu(gate, up, self.gate_cap, self.up_cap)
            warnings.warn(f"kernels.situ_glu: no GPU kernel for {reason}; torch's operations run", stacklevel=2)
        return lean.glu(gate, up, self.gate_cap, self.up_cap)

    def gradient(
        self, upstream: Float[Tensor, "*rows F"], gate: Float[Tensor, "*rows F"], up: Float[Tensor, "*rows F"]
    ) -> tuple[Float[Tensor, "*rows F"], Float[Tensor, "*rows F"], Float[Tensor, "*rows F"]]:
        """Return the value again and the gradients of gate and up, for kernels that fuse the activation."""
        return lean.gradient(upstream, gate, up, self.gate_cap, self.up_cap)
