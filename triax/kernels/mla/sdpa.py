"""Attention through torch's own fused kernels, one call a sequence; the largest logits come from a second pass."""

from collections.abc import Sequence
from functools import lru_cache
from importlib.util import find_spec

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.attention.bias import causal_lower_right
from torch.nn.functional import scaled_dot_product_attention

BLOCK = 512  # queries at a time in the pass for the largest logit


def attend(
    query: Float[Tensor, "T H K"],
    key: Float[Tensor, "S H K"],
    value: Float[Tensor, "S H V"],
    query_starts: Sequence[int],
    key_starts: Sequence[int],
    scale: float,
    *,
    with_largest: bool,
) -> tuple[Float[Tensor, "T H V"], Float[Tensor, " H"]]:
    """Attend within each sequence; see `reference.attend`. Without `with_largest` that statistic is -inf."""
    reads = [value[:0].float()]
    at_once = with_largest and has_kernel(query)
    if at_once:
        from triax.kernels.mla.largest import largest as largest_of

        with torch.no_grad():
            largest = largest_of(query, key, query_starts, key_starts, scale)
    else:
        largest = torch.full((query.shape[1],), -torch.inf, device=query.device)
    for row in range(len(query_starts) - 1):
        own = slice(query_starts[row], query_starts[row + 1])
        seen = slice(key_starts[row], key_starts[row + 1])
        if own.start == own.stop:
            continue
        q, k, v = (x.transpose(0, 1)[None] for x in (query[own], key[seen], value[seen]))
        if q.shape[2] == k.shape[2]:
            read = scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale)
        else:
            past_too = causal_lower_right(q.shape[2], k.shape[2])
            read = scaled_dot_product_attention(q, k, v, attn_mask=past_too, scale=scale)
        reads.append(read[0].transpose(0, 1).float())
        if with_largest and not at_once:
            largest = torch.maximum(largest, _largest(q[0], k[0], scale))
    return torch.cat(reads), largest


def has_kernel(query: Float[Tensor, "T H K"]) -> bool:
    """Return whether a kernel finds the largest logits of all sequences at once."""
    return query.is_cuda and query.dtype in (torch.bfloat16, torch.float16, torch.float32) and _has_triton()


@lru_cache
def _has_triton() -> bool:
    return find_spec("triton") is not None


@torch.no_grad()
def _largest(query: Tensor, key: Tensor, scale: float) -> Tensor:
    past = key.shape[1] - query.shape[1]
    largest = torch.full((len(query),), -torch.inf, device=query.device)
    for start in range(0, query.shape[1], BLOCK):
        part = query[:, start : start + BLOCK]
        end = past + start + part.shape[1]
        keys = key[:, :end].transpose(1, 2)
        logit = torch.bmm(part, keys) if part.dtype is torch.float32 else torch.bmm(part, keys, out_dtype=torch.float32)
        future = torch.ones(logit.shape[1:], dtype=torch.bool, device=logit.device).triu(past + start + 1)
        largest = torch.maximum(largest, logit.masked_fill_(future, -torch.inf).amax((1, 2)) * scale)
    return largest
