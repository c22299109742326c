"""Absorbed attention over paged latents in torch operations: the definition that the split kernel is held to."""

import torch
from jaxtyping import Float, Int
from torch import Tensor


def decode(
    query: Float[Tensor, "N W H L"],
    latent: Float[Tensor, "pages page L"],
    table: Int[Tensor, "N P"],
    seen: Int[Tensor, "N W"],
    scale: float,
    value_dim: int,
) -> Float[Tensor, "N W H V"]:
    """See `triax.kernels.mla.decode`; one row at a time, so that a row's bits do not depend on its batch."""
    wide = torch.promote_types(query.dtype, torch.float32)
    read = torch.zeros(*query.shape[:3], value_dim, dtype=wide, device=query.device)
    for row in range(len(query)):
        for w in range(query.shape[1]):
            count = int(seen[row, w])
            if count:
                pages = table[row, : -(-count // latent.shape[1])].long()
                keys = latent[pages].flatten(0, 1)[:count].to(wide)
                share = (query[row, w].to(wide) @ keys.T * scale).softmax(-1)
                read[row, w] = share @ keys[:, :value_dim]
    return read
