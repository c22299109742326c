"""Kimi Delta Attention: a memory per head that is corrected, not summed, and in which every channel forgets alone."""

import math
import warnings
from collections.abc import Sequence
from importlib.util import find_spec
from itertools import pairwise
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from triax.errors import UnsupportedError
from triax.kernels.dispatch import mode
from triax.kernels.kda import reference
from triax.kernels.kda.chunk import kda_chunk
from triax.kernels.kda.decode import decode
from triax.kernels.kda.raw import kda_from_raw
from triax.kernels.kda.reference import KdaResult

__all__ = ["KdaResult", "SegmentMap", "kda", "kda_from_raw", "segment_map"]


class SegmentMap(NamedTuple):
    """What a sequence does to any memory it starts from: `keep @ state + add`.

    Two sequences after each other are `keep = second.keep @ first.keep`, `add = second.keep @ first.add + second.add`.
    """

    keep: Float[Tensor, "N H K K"]
    """What remains of the memory before."""
    add: Float[Tensor, "N H K V"]
    """Memory after a start from nothing."""


def kda(
    query: Float[Tensor, "T Q K"],
    key: Float[Tensor, "T Q K"],
    value: Float[Tensor, "T H V"],
    log_decay: Float[Tensor, "T H K"],
    beta: Float[Tensor, "T H"],
    state: Float[Tensor, "N H K V"] | None,
    starts: Sequence[int],
    *,
    lowest_log_decay: float = -math.inf,
    states_at: Sequence[int] = (),
    chunk: int | None = None,
) -> KdaResult:
    """Write each token's error into the memory of its sequence, then read that memory with the token's query.

    memory_t = decay_t * memory_{t-1} + beta_t * key_t (value_t - (decay_t * memory_{t-1})^T key_t)^T
    read_t = memory_t^T query_t

    Gradients reach every tensor given. The memory is kept in fp32, or fp64 if an input is fp64, also under autocast.
    On a GPU kernels do the work, with bf16 products where query, key and value are bf16; those hold a gate without a
    bound of -5 at -10, so that up to 4.5e-5 of a channel stays where less should. They take 32, 64, 128 or 256 key and
    as many value channels, not necessarily alike, in bf16 and fp32; for all else the chunk form runs, with one warning.
    By default their bounded gates, and the unbounded ones of bf16 products, let what comes after a token within its
    chunk move the last bits of what it read and of gradients; after `torch.use_deterministic_algorithms(True)` nothing
    after a token moves a bit of either, as on a CPU.
    With `TRIAX_KERNELS=reference` in the environment the definition runs token by token.

    Args:
        query: Where to read; scaled by the caller. H / Q value heads in a row share a query and a key.
        key: Where to write; unit norm.
        value: What the memory should hold at `key`.
        log_decay: Natural log of what each key channel keeps, at most 0 and at least `lowest_log_decay`.
        beta: Share of the error to write, in (0, 1).
        state: Memory of each sequence before its first token; none is empty memory.
        starts: First token of each sequence, in order, and the number of tokens at the end.
        lowest_log_decay: Bound that the caller's gate guarantees; from -5 upwards the products in a chunk are dense.
        states_at: Numbers of tokens, counted from the stream's start, after which the memory of the sequence of the
            last of them is wanted too.
        chunk: Tokens worked on at once, a power of two from 16; left out, what is quickest here. Changes nothing else.

    Returns:
        What each token read, the memory after each sequence, and the memories asked for.

    Raises:
        UnsupportedError: The tensors disagree on tokens, heads or channels.
        ValueError: `starts`, `states_at`, `lowest_log_decay` or `chunk` is impossible.

    Source: K3 report (arXiv 2607.24653) section 2.1.1; Kimi Linear (arXiv 2510.26692).
    """
    starts, states_at = tuple(starts), tuple(states_at)
    _check_shapes(query, key, value, log_decay, beta, state, starts)
    check_numbers(starts, states_at, lowest_log_decay, chunk)
    if mode() == "reference":
        return reference.kda(query, key, value, log_decay, beta, state, starts, states_at=states_at)
    if not query.is_cuda:
        query, key = reference.ungrouped(query, value.shape[1]), reference.ungrouped(key, value.shape[1])
    if len(query) and starts == tuple(range(len(starts))):
        query, key = reference.ungrouped(query, value.shape[1]), reference.ungrouped(key, value.shape[1])
        read, memory = decode(query, key, value, log_decay, beta, state)
        return KdaResult(read, memory, memory[[p - 1 for p in states_at]])
    if query.is_cuda and chunk is None:
        if find_spec("triton") is None:
            reason = "an installation without Triton"
        else:
            from triax.kernels.kda import flash

            reason = flash.unsupported(query, key, value)
            if reason is None:
                inputs = (query, key, value, log_decay, beta, state, starts)
                return flash.kda(*inputs, lowest_log_decay=lowest_log_decay, states_at=states_at)
        query, key = reference.ungrouped(query, value.shape[1]), reference.ungrouped(key, value.shape[1])
        warnings.warn(f"kernels.kda: no GPU kernel for {reason}; the chunk form runs instead", stacklevel=2)
    widest = max(key.shape[2], value.shape[2], 1)
    on_cpu = query.device.type == "cpu"
    if chunk is None:
        # Measured: longer chunks multiply more inside a chunk, shorter ones move more states, [K, V] each.
        chunk = 64 if not on_cpu else 16 if widest <= 64 else 32
    # On a CPU about 1 MiB a tensor, so that a block of chunks stays in its cache.
    rows = 2 ** (18 if on_cpu else 24) // widest
    read, memory, interior, _ = kda_chunk(
        query, key, value, log_decay, beta, state, starts, states_at, float(lowest_log_decay), chunk, rows
    )
    return KdaResult(read, memory, interior)


def segment_map(
    key: Float[Tensor, "T Q K"],
    value: Float[Tensor, "T H V"],
    log_decay: Float[Tensor, "T H K"],
    beta: Float[Tensor, "T H"],
    starts: Sequence[int],
    *,
    lowest_log_decay: float = -math.inf,
) -> SegmentMap:
    """Return each sequence's effect on the memory before it, so that pieces of a sequence can be worked on apart.

    The memory is linear in its start and in the values: identity columns beside an empty start become `keep`.

    Source: K3 report (arXiv 2607.24653) section 5.1.2.
    """
    num_sequences, channels, (heads, width) = len(starts) - 1, key.shape[2], value.shape[1:]
    dtype = reference.state_dtype(key, value, log_decay, beta)
    identity = torch.eye(channels, dtype=dtype, device=key.device).expand(num_sequences, heads, -1, -1)
    nothing, query = value.new_zeros(len(value), heads, channels), torch.zeros_like(key)
    if key.is_cuda:
        # The kernels are made for the heads' own sizes, not for both matrices beside each other.
        gates = (log_decay, beta)
        keep = kda(query, key, nothing, *gates, identity, starts, lowest_log_decay=lowest_log_decay).state
        return SegmentMap(keep, kda(query, key, value, *gates, None, starts, lowest_log_decay=lowest_log_decay).state)
    start = torch.cat((identity.new_zeros(num_sequences, heads, channels, width), identity), 3)
    values = torch.cat((value, nothing), 2)
    result = kda(query, key, values, log_decay, beta, start, starts, lowest_log_decay=lowest_log_decay)
    return SegmentMap(result.state[..., width:], result.state[..., :width])


def _check_shapes(
    query: Tensor, key: Tensor, value: Tensor, log_decay: Tensor, beta: Tensor, state: Tensor | None, starts: tuple
) -> None:
    tokens, shared, channels = key.shape
    heads, width = value.shape[1:]
    if not shared or heads % shared:
        raise UnsupportedError(
            f"kernels.kda: `value` does not fit `key`; found {heads} heads of values and {shared} of keys; give a "
            "multiple of the keys' heads"
        )
    expected = {
        "query": (query, (tokens, shared, channels)),
        "value": (value, (tokens, heads, width)),
        "log_decay": (log_decay, (tokens, heads, channels)),
        "beta": (beta, (tokens, heads)),
        "state": (state, (len(starts) - 1, heads, channels, width)),
    }
    for name, (tensor, shape) in expected.items():
        if tensor is not None and tensor.shape != shape:
            raise UnsupportedError(
                f"kernels.kda: `{name}` does not fit `key`; found shape `{tuple(tensor.shape)}` beside a key of shape "
                f"`{tuple(key.shape)}`, {heads} heads of values and {len(starts) - 1} sequences; give it shape "
                f"`{shape}`"
            )
    if starts[-1:] != (tokens,):
        raise UnsupportedError(
            f"kernels.kda: `starts` does not cover the stream; found `{starts[-1:]}` as its end and {tokens} tokens; "
            "end it with the number of tokens"
        )


def check_numbers(
    starts: tuple[int, ...], states_at: tuple[int, ...], lowest_log_decay: float, chunk: int | None
) -> None:
    """Raise ValueError where borders, wanted states, bound or chunk make no sense."""
    if starts[0] != 0 or any(end < first for first, end in pairwise(starts)):
        raise ValueError(f"kernels.kda: `starts` is not a list of borders; found `{starts}`; count up from 0")
    if not all(1 <= p <= starts[-1] for p in states_at):
        raise ValueError(
            f"kernels.kda: `states_at` lies outside the stream; found `{states_at}`; ask for 1 to {starts[-1]} tokens"
        )
    if not lowest_log_decay < 0:
        raise ValueError(
            f"kernels.kda: `lowest_log_decay` is no bound; found `{lowest_log_decay}`; give a negative number"
        )
    if chunk is not None and (chunk < 16 or chunk & (chunk - 1)):
        raise ValueError(f"kernels.kda: `chunk` is not possible; found `{chunk}`; give a power of two from 16")
