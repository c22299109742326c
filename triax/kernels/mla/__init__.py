"""Causal attention of packed sequences with different widths of keys and values."""

import warnings
from collections.abc import Sequence
from importlib.util import find_spec

import torch
from jaxtyping import Float, Int
from torch import Tensor

from triax.kernels.dispatch import mode
from triax.kernels.mla import blocked, paged, ragged, reference, sdpa


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
    """Average the values that a token may see by softmax of `scale query · key`; see `reference.attend`.

    The largest logit of each head is computed for its own sake only on GPUs, and there only `with_largest`.
    """
    inputs = (query, key, value, query_starts, key_starts, scale)
    if mode() == "reference":
        return reference.attend(*inputs)
    if query.is_cuda and query.dtype is not torch.float64:
        if not with_largest and not torch.is_grad_enabled() and ragged.unsupported(query, key, value) is None:
            return ragged.attend(*inputs), query.new_full((query.shape[1],), -torch.inf, dtype=torch.float32)
        return sdpa.attend(*inputs, with_largest=with_largest)
    return blocked.attend(*inputs)


def decode(
    query: Float[Tensor, "N W H L"],
    latent: Float[Tensor, "pages page L"],
    table: Int[Tensor, "N P"],
    seen: Int[Tensor, "N W"],
    scale: float,
    value_dim: int,
) -> Float[Tensor, "N W H V"]:
    """Average cached latents by softmax of `scale query · latent`, all heads over the same pages; no gradients.

    Args:
        query: Absorbed queries, that is, already led through the key half of the up-projection, with the part for the
            head-shared key behind it: one token a row to decode, several to verify drafts.
        latent: Pages of 64 tokens: normalised latent, then the shared key. The new tokens' own are in them already.
        table: Pages of each row's sequence, in order. Entries past a row's tokens are not read.
        seen: How many of its sequence's first tokens each query sees, its own included; 0 gives zeros (padding).
        scale: Factor on the logits.
        value_dim: Width of the latent, whose channels are averaged: the first ones of L.

    Returns:
        The averages, in fp32 or wider.

    Source: DeepSeek-V2 (arXiv 2405.04434) section 2.1.
    """
    inputs = (query, latent, table, seen, scale, value_dim)
    if not query.is_cuda or mode() == "reference":
        return paged.decode(*inputs)
    if find_spec("triton") is None:
        reason = "an installation without Triton"
    else:
        from triax.kernels.mla import hopper, split

        if hopper.unsupported(query, latent, value_dim) is None:
            return hopper.decode(*inputs)
        reason = split.unsupported(query, latent, value_dim)
        if reason is None:
            return split.decode(*inputs)
    warnings.warn(f"kernels.mla: no GPU kernel for {reason}; torch operations run instead", stacklevel=2)
    return paged.decode(*inputs)
