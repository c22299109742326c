"""The dense gated MLP: first layers and shared experts."""

from jaxtyping import Float
from torch import Tensor

from triax.config.model import Activation
from triax.kernels.linear import linear
from triax.model.matrix import Blocks, Joins, Linear, matrix
from triax.model.situ_glu import glu


class GatedMlp(Joins):
    """down(glu(gate x, up x)), where glu is SiTU-GLU or SwiGLU.

    Source: K3 report (arXiv 2607.24653) section 2.3.
    """

    def __init__(self, width: int, inner_dim: int, activation: Activation, init_std: float) -> None:
        super().__init__()
        self.activation = activation
        self.gate = matrix(width, inner_dim, init_std)
        self.up = matrix(width, inner_dim, init_std)
        self.down = matrix(inner_dim, width, init_std)

    def forward(self, hidden: Float[Tensor, "T D"]) -> Float[Tensor, "T D"]:
        """Transform each token."""
        if (whole := self.whole()) is not None:
            gate, up = linear(hidden, whole).chunk(2, dim=-1)
        else:
            gate, up = self.gate(hidden), self.up(hidden)
        return self.down(glu(gate, up, self.activation))

    def joinable(self) -> list[Linear]:
        """Return gate and up."""
        return [self.gate, self.up]

    def matrices(self) -> Blocks:
        """Return the logical matrices for the optimiser."""
        return {f"{name}.weight": (getattr(self, name).out_features,) for name in ("gate", "up", "down")}
