"""Causal attention within packed sequences, one sequence at a time: the definition that the fast paths are held to."""

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor


def attend(
    query: Float[Tensor, "T H K"],
    key: Float[Tensor, "S H K"],
    value: Float[Tensor, "S H V"],
    query_starts: Sequence[int],
    key_starts: Sequence[int],
    scale: float,
) -> tuple[Float[Tensor, "T H V"], Float[Tensor, " H"]]:
    """Average the values that a token may see by softmax of `scale query · key`.

    Args:
        query: Sequences laid end to end; the queries of a sequence are its last tokens.
        key: Keys of the same sequences, earlier tokens included.
        value: Their values.
        query_starts: First query of each sequence, and one past the last of all.
        key_starts: First key of each sequence, and one past the last of all.
        scale: Factor on the logits.

    Returns:
        What each token read, in fp32 or wider, and the largest logit of each head (-inf without tokens; no gradient).
    """
    wide = torch.promote_types(query.dtype, torch.float32)
    reads = [value[:0].to(wide)]
    largest = torch.full((query.shape[1],), -torch.inf, dtype=wide, device=query.device)
    for row in range(len(query_starts) - 1):
        own = slice(query_starts[row], query_starts[row + 1])
        seen = slice(key_starts[row], key_starts[row + 1])
        length, past = own.stop - own.start, (seen.stop - seen.start) - (own.stop - own.start)
        logit = torch.einsum("thk,shk->hts", query[own].to(wide), key[seen].to(wide)) * scale
        future = torch.ones(length, past + length, dtype=torch.bool, device=query.device).triu(past + 1)
        logit = logit.masked_fill(future, -torch.inf)
        reads.append(torch.einsum("hts,shv->thv", logit.softmax(-1), value[seen].to(wide)))
        if length:
            largest = torch.maximum(largest, logit.detach().amax((1, 2)))
    return torch.cat(reads), largest
