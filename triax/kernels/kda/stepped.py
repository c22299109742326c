"""Kimi Delta Attention in decode order: token after token, all sequences side by side.

The same arithmetic for every token wherever a sequence is cut and whatever runs beside it, so that prefill, decode,
the verification of drafts and the replay of accepted ones leave the same bits.
"""

from collections.abc import Sequence
from itertools import pairwise

import torch
from jaxtyping import Float
from torch import Tensor

from triax.kernels.kda.reference import state_dtype


def kda(
    query: Float[Tensor, "T H K"],
    key: Float[Tensor, "T H K"],
    value: Float[Tensor, "T H V"],
    kept: Float[Tensor, "T H K"],
    beta: Float[Tensor, "T H"],
    state: Float[Tensor, "N H K V"],
    starts: Sequence[int],
) -> tuple[Float[Tensor, "T H V"], Float[Tensor, "N H K V"]]:
    """Return what each token read, and the memory after each sequence; no gradient.

    Args:
        query: Where to read; scaled by the caller.
        key: Where to write; unit norm.
        value: What the memory should hold at `key`.
        kept: What each key channel keeps, the exponential of its log decay; in (0, 1].
        beta: Share of the error to write, in (0, 1).
        state: Memory of each sequence before its first token.
        starts: First token of each sequence, and one past the last of all; tokens past that read 0.
    """
    dtype = state_dtype(query, key, value, kept, beta, state)
    with torch.autocast(query.device.type, enabled=False):
        q, k, v, kept, b = (x.to(dtype) for x in (query, key, value, kept, beta))
        lengths = [end - first for first, end in pairwise(starts)]
        order = sorted(range(len(lengths)), key=lambda n: -lengths[n])  # those still going stand in front
        firsts = torch.tensor([starts[n] for n in order], device=q.device)
        memory = state[order].to(dtype)
        read = v.new_zeros(v.shape)
        depth, going = 0, len(order)
        while True:
            while going and lengths[order[going - 1]] <= depth:
                going -= 1
            if not going:
                break
            token = firsts[:going] + depth
            read[token] = step(q[token], k[token], v[token], kept[token], b[token], memory[:going])
            depth += 1
        following = memory[torch.tensor(order, device=q.device).argsort()] if order else memory
        return read.to(value.dtype), following


def step(
    query: Float[Tensor, "N H K"],
    key: Float[Tensor, "N H K"],
    value: Float[Tensor, "N H V"],
    kept: Float[Tensor, "N H K"],
    beta: Float[Tensor, "N H"],
    memory: Float[Tensor, "N H K V"],
) -> Float[Tensor, "N H V"]:
    """Write one token of each sequence into its memory, in place, and return what it then reads there.

    Args:
        query: Where to read.
        key: Where to write.
        value: What the memory should hold at `key`.
        kept: What each key channel keeps, in (0, 1].
        beta: Share of the error to write.
        memory: Changed in place.
    """
    write(key, value, kept, beta, memory)
    return (query[..., None, :] @ memory)[..., 0, :]


def write(
    key: Float[Tensor, "N H K"],
    value: Float[Tensor, "N H V"],
    kept: Float[Tensor, "N H K"],
    beta: Float[Tensor, "N H"],
    memory: Float[Tensor, "N H K V"],
) -> None:
    """Write one token of each sequence into its memory, in place; arguments as in `step`."""
    memory.mul_(kept[..., None])
    error = value - (key[..., None, :] @ memory)[..., 0, :]
    memory.add_(key[..., None] * (beta[..., None] * error)[..., None, :])
