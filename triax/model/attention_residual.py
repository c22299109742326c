"""What layers hand on: the plain residual sum, or sources that each place mixes for itself."""

import torch
from jaxtyping import Float
from torch import Tensor, nn

from triax.kernels.attention_residual import mix
from triax.model.norm import RMSNorm


class AttentionMix(nn.Module):
    """One place that reads the stream by attention over depth.

    hidden = Σ_j softmax_j(query · RMSNorm(source_j)) source_j

    The query starts at zero, so a fresh network takes the plain mean.

    Source: Attention Residuals (arXiv 2603.15031) section 3; K3 report (arXiv 2607.24653) section 2.2.
    """

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.norm = nn.Parameter(torch.ones(width))
        self.query = nn.Parameter(torch.zeros(width))
        self.record = False
        self.mean_weight: Tensor | None = None

    def forward(self, sources: list[Float[Tensor, "T D"]]) -> Float[Tensor, "T D"]:
        """Mix the sources, oldest first; with `record` on, leave their mean weights in `mean_weight`."""
        mixed, weight = mix(sources, self.norm, self.query, self.eps)
        if self.record and len(weight):
            self.mean_weight = weight.detach().mean(0)
        return mixed


class Stream:
    """The outputs that later layers still read: frozen sources, and the sum that is being written.

    Without mixes there are no frozen sources, and the sum is the ordinary residual stream. The block form freezes the
    sum at the start of each block of layers, the full form before each write.
    """

    def __init__(self, embedded: Float[Tensor, "T D"]) -> None:
        self.frozen: list[Tensor] = []
        self.current: Tensor | None = embedded
        self._added: Tensor | None = None  # written, not yet in the sum: the norm that follows may add it

    def read(self, place: AttentionMix | None) -> Float[Tensor, "T D"]:
        """Return what a place reads: its mix of all sources, or the sum while there is nothing else."""
        self._settle()
        current = [] if self.current is None else [self.current]
        if place is None or not self.frozen:
            return current[0]
        return place(self.frozen + current)

    def normed(self, place: AttentionMix | None, norm: RMSNorm) -> Float[Tensor, "T D"]:
        """Return the norm of what a place reads."""
        if self._added is None or self.current is None or (place is not None and self.frozen):
            return norm(self.read(place))
        self.current, result = norm.of_sum(self.current, self._added)
        self._added = None
        return result

    def freeze(self) -> None:
        """Close the sum: from now on it is a source of its own, and the next write starts a new one."""
        self._settle()
        if self.current is not None:
            self.frozen.append(self.current)
            self.current = None

    def write(self, output: Float[Tensor, "T D"]) -> None:
        """Add a sublayer's output to the sum."""
        self._settle()
        if self.current is None:
            self.current = output
        elif torch.is_grad_enabled():
            self.current = self.current + output
        else:
            self._added = output

    def _settle(self) -> None:
        if self.current is not None and self._added is not None:
            self.current, self._added = self.current + self._added, None
