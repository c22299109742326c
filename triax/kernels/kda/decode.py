"""Kimi Delta Attention for decoding: one token for each sequence, all at once."""

import torch
from jaxtyping import Float
from torch import Tensor

from triax.kernels.kda.reference import state_dtype


def decode(
    query: Float[Tensor, "N H K"],
    key: Float[Tensor, "N H K"],
    value: Float[Tensor, "N H V"],
    log_decay: Float[Tensor, "N H K"],
    beta: Float[Tensor, "N H"],
    state: Float[Tensor, "N H K V"] | None,
) -> tuple[Float[Tensor, "N H V"], Float[Tensor, "N H K V"]]:
    """Return what the one token of each sequence read, and the memory after it; arguments as in `kda`."""
    dtype = state_dtype(query, key, value, log_decay, beta, state)
    with torch.autocast(query.device.type, enabled=False):
        q, k, v, g, b = (x.to(dtype) for x in (query, key, value, log_decay, beta))
        if state is None:
            state = q.new_zeros(*q.shape, v.shape[-1])
        kept = state.to(dtype) * g.exp()[..., None]
        error = v - (k[..., None, :] @ kept)[..., 0, :]
        memory = torch.addcmul(kept, k[..., None], (b[..., None] * error)[..., None, :])
        return (q[..., None, :] @ memory)[..., 0, :].to(value.dtype), memory
