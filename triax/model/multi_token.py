"""One more layer that predicts the token after the next (multi-token prediction, depth 1).

Source: DeepSeek-V3 (arXiv 2412.19437) section 2.2; K3 and K2 were pre-trained with one such layer.
"""

import torch
from jaxtyping import Float
from torch import Tensor, nn

from triax.model.matrix import Blocks, matrix
from triax.model.norm import RMSNorm


class MultiToken(nn.Module):
    """layer(W [RMSNorm(hidden); RMSNorm(embedding of the next token)]), with plain residual sums inside.

    `hidden` is what the decoder's last norm reads; embedding, last norm and head are the decoder's own.
    """

    def __init__(self, width: int, layer: nn.Module, norm_eps: float, init_std: float) -> None:
        super().__init__()
        self.hidden_norm = RMSNorm(width, norm_eps)
        self.embed_norm = RMSNorm(width, norm_eps)
        self.project = matrix(2 * width, width, init_std)
        self.layer = layer

    def forward(self, hidden: Float[Tensor, "T D"], next_embedded: Float[Tensor, "T D"]) -> Float[Tensor, "T D"]:
        """Return what the layer reads: both inputs normalised, side by side, projected to the stream's width."""
        return self.project(torch.cat([self.hidden_norm(hidden), self.embed_norm(next_embedded)], dim=-1))

    def matrices(self) -> Blocks:
        """Return the logical matrices for the optimiser; the layer inside states its own."""
        return {"project.weight": (self.project.out_features,)}
