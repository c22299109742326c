"""Causal attention of packed sequences with different widths of keys and values."""

import os
from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from triax.kernels.mla import blocked, reference, sdpa


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
    if os.environ.get("TRIAX_KERNELS") == "reference":
        return reference.attend(*inputs)
    if query.is_cuda and query.dtype is not torch.float64:
        return sdpa.attend(*inputs, with_largest=with_largest)
    return blocked.attend(*inputs)
