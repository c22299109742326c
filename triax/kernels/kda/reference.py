"""Kimi Delta Attention, one token at a time: the definition the fast paths are held to.

Source: K3 report (arXiv 2607.24653) section 2.1.1; Kimi Linear (arXiv 2510.26692).
"""

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor


class KdaResult(NamedTuple):
    """What the tokens read, and what each sequence remembers."""

    read: Float[Tensor, "T H V"]
    """What each token read, in the dtype of the values."""
    state: Float[Tensor, "N H K V"]
    """Memory of each sequence after its last token; fp32, or fp64 if an input is."""
    interior: Float[Tensor, "P H K V"]
    """Memory after the token counts that were asked for, in the order asked."""


def state_dtype(*tensors: Tensor | None) -> torch.dtype:
    """Return the precision of the memory for these inputs: fp64 if one of them is, else fp32."""
    return torch.float64 if any(t is not None and t.dtype == torch.float64 for t in tensors) else torch.float32


def ungrouped(x: Float[Tensor, "T Q K"], heads: int) -> Float[Tensor, "T H K"]:
    """Repeat queries or keys for every value head that shares them."""
    return x if x.shape[1] == heads else x.repeat_interleave(heads // x.shape[1], 1)


def kda(
    query: Float[Tensor, "T Q K"],
    key: Float[Tensor, "T Q K"],
    value: Float[Tensor, "T H V"],
    log_decay: Float[Tensor, "T H K"],
    beta: Float[Tensor, "T H"],
    state: Float[Tensor, "N H K V"] | None,
    starts: Sequence[int],
    *,
    states_at: Sequence[int] = (),
) -> KdaResult:
    """Write each token's error into the state, then read the state with its query.

    Args:
        query: Where to read; scaled by the caller. H / Q value heads in a row share a query and a key.
        key: Where to write; unit norm.
        value: What the state should hold at `key`.
        log_decay: Natural log of what each key channel keeps, at most 0.
        beta: Share of the error to write, in (0, 1).
        state: Memory of each sequence before its first token; none is empty memory.
        starts: First token of each sequence, and the number of tokens at the end.
        states_at: Token counts into the stream after which the memory is wanted too.

    Returns:
        What each token read, the memory after each sequence, and the memories asked for.
    """
    dtype = state_dtype(query, key, value, log_decay, beta, state)
    with torch.autocast(query.device.type, enabled=False):
        q, k, v, g, b = (x.to(dtype) for x in (query, key, value, log_decay, beta))
        q, k = ungrouped(q, v.shape[1]), ungrouped(k, v.shape[1])
        num_sequences, (heads, channels), width = len(starts) - 1, q.shape[1:], v.shape[-1]
        if state is None:
            state = q.new_zeros(num_sequences, heads, channels, width)
        memories = list(state.to(dtype).unbind(0))
        reads: list[Tensor] = []
        interior: dict[int, Tensor] = {}
        for n, (first, end) in enumerate(pairwise(starts)):
            memory = memories[n]
            for t in range(first, end):
                memory = g[t, :, :, None].exp() * memory
                error = v[t] - torch.einsum("hkv,hk->hv", memory, k[t])
                memory = memory + torch.einsum("hk,hv,h->hkv", k[t], error, b[t])
                reads.append(torch.einsum("hkv,hk->hv", memory, q[t]))
                interior[t + 1] = memory
            memories[n] = memory
        return KdaResult(
            torch.stack(reads).to(value.dtype) if reads else v.to(value.dtype),
            torch.stack(memories) if memories else state.to(dtype),
            torch.stack([interior[p] for p in states_at]) if states_at else state.new_zeros(0, *state.shape[1:]),
        )
