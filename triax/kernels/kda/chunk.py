"""Kimi Delta Attention in chunks: plain torch, all chunks and heads of a block at once, closed-form gradients.

Both passes are operators of their own, so that a compiled model keeps them whole.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from triax.kernels.kda.block import carry, carry_back, gradients, read_block, take
from triax.kernels.kda.reference import state_dtype
from triax.kernels.kda.table import ChunkTable, chunk_table, cut


@torch.library.custom_op("triax::kda_chunk", mutates_args=())
def kda_chunk(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    log_decay: Tensor,
    beta: Tensor,
    state: Tensor | None,
    starts: Sequence[int],
    states_at: Sequence[int],
    lowest_log_decay: float,
    chunk: int,
    block_rows: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return what was read, the last states, the states wanted, and for the backward pass the states of all chunks."""
    dtype = state_dtype(query, key, value, log_decay, beta, state)
    heads, channels, width = key.shape[1], key.shape[2], value.shape[2]
    table = chunk_table(tuple(starts), tuple(states_at), heads, chunk, block_rows, query.device)
    with torch.autocast(query.device.type, enabled=False):
        streams = [_rows(x) for x in (query, key, value, log_decay, beta)]
        if state is None:
            final = torch.zeros(len(starts) - 1, heads, channels, width, dtype=dtype, device=query.device)
        else:
            final = state.to(dtype, copy=True)
        # The state before each chunk, then the last state of each sequence that has tokens.
        states = final.new_empty(table.num_chunks + len(table.ranks), heads, channels, width)
        states[: len(table.ranks)] = final.index_select(0, table.ranks)
        before = states.view(-1, channels, width)
        read = final.new_empty(table.num_chunks * heads, table.chunk, width)
        for number in range(len(table.blocks)):
            here = table.heads_of(number)
            block = read_block(streams, table, number, dtype, lowest_log_decay)
            written = carry(block, table, number, before)
            torch.bmm(block.query_since, before[here], out=read[here]).baddbmm_(block.reads, written)
        final.index_copy_(0, table.ranks, states[table.num_chunks :])
        return _stream(read, table, value), final, states[list(table.interior)], states


@torch.library.custom_op("triax::kda_chunk_backward", mutates_args=())
def kda_chunk_backward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    log_decay: Tensor,
    beta: Tensor,
    states: Tensor,
    d_read: Tensor,
    d_final: Tensor,
    d_interior: Tensor,
    starts: Sequence[int],
    states_at: Sequence[int],
    lowest_log_decay: float,
    chunk: int,
    block_rows: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Walk the blocks backwards; only the gradient of the state passes from one to the next."""
    inputs = (query, key, value, log_decay, beta)
    table = chunk_table(tuple(starts), tuple(states_at), key.shape[1], chunk, block_rows, query.device)
    dtype = states.dtype
    with torch.autocast(states.device.type, enabled=False):
        streams = [_rows(x) for x in inputs]
        d_stream = _rows(d_read)
        padded = [states.new_empty(table.num_chunks * table.num_heads, table.chunk, x.shape[1]) for x in streams]
        before = states.view(-1, *states.shape[2:])
        d_state = d_final.to(dtype, copy=True)
        d_last = d_state.index_select(0, table.ranks)
        d_borders: dict[int, Tensor] = {}
        for where, gradient in zip(table.interior, d_interior.to(dtype), strict=True):
            if where >= table.num_chunks:
                d_last[where - table.num_chunks] += gradient
            else:
                d_borders[where] = d_borders[where] + gradient if where in d_borders else gradient
        carried = d_last[:0].view(-1, *states.shape[2:])
        for number in reversed(range(len(table.blocks))):
            here = table.heads_of(number)
            block = read_block(streams, table, number, dtype, lowest_log_decay)
            d_out = take(d_stream, table, number, dtype)
            after, d_written, carried = carry_back(block, table, number, d_out, d_last, d_borders, carried)
            gradients(block, before[here], after, d_out, d_written, [x[here] for x in padded])
        d_state.index_copy_(0, table.ranks, carried.view(-1, *states.shape[1:]))
        d_query, d_key, d_value, d_decay, d_beta = (
            _stream(x, table, like) for x, like in zip(padded, inputs, strict=True)
        )
        return d_query, d_key, d_value, d_decay, d_beta, d_state


def _rows(stream: Tensor) -> Tensor:
    """View [T, H, channels] or [T, H] as one row per token and head."""
    return stream.reshape(stream.shape[0] * stream.shape[1], stream.shape[2] if stream.dim() == 3 else 1)


def _stream(padded: Tensor, table: ChunkTable, like: Tensor) -> Tensor:
    """Lay the rows of all chunks, padding left out, back into the stream."""
    return padded.view(-1, padded.shape[2]).index_select(0, table.places).view(like.shape).to(like.dtype)


@kda_chunk.register_fake
def _(query, key, value, log_decay, beta, state, starts, states_at, lowest_log_decay, chunk, block_rows):
    dtype = state_dtype(query, key, value, log_decay, beta, state)

    def memories(count: int) -> Tensor:
        return key.new_empty(count, key.shape[1], key.shape[2], value.shape[2], dtype=dtype)

    all_states = sum(len(chunks) + bool(chunks) for chunks in cut(starts, states_at, chunk))
    read = torch.empty_like(value, memory_format=torch.contiguous_format)
    return read, memories(len(starts) - 1), memories(len(states_at)), memories(all_states)


@kda_chunk_backward.register_fake
def _(query, key, value, log_decay, beta, states, d_read, d_final, *_rest):
    inputs = (query, key, value, log_decay, beta)
    return *(torch.empty_like(x, memory_format=torch.contiguous_format) for x in inputs), states.new_empty(
        d_final.shape
    )


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.save_for_backward(*inputs[:5], output[3])
    ctx.mark_non_differentiable(output[3])
    ctx.set_materialize_grads(False)  # or the states of all chunks would get a gradient of zeros as large as they are
    ctx.state_dtype = None if inputs[5] is None else inputs[5].dtype
    ctx.numbers = inputs[6:]


def _backward(
    ctx: Any, d_read: Tensor | None, d_final: Tensor | None, d_interior: Tensor | None, _: None
) -> tuple[Any, ...]:
    saved = ctx.saved_tensors  # read once: under recomputation a second look finds nothing
    value, states = saved[2], saved[5]
    starts, states_at = ctx.numbers[:2]
    if d_read is None:
        d_read = torch.zeros_like(value)
    if d_final is None:
        d_final = states.new_zeros(len(starts) - 1, *states.shape[1:])
    if d_interior is None:
        d_interior = states.new_zeros(len(states_at), *states.shape[1:])
    *of_inputs, d_state = kda_chunk_backward(*saved, d_read, d_final, d_interior, *ctx.numbers)
    return *of_inputs, None if ctx.state_dtype is None else d_state.to(ctx.state_dtype), *(None for _ in ctx.numbers)


kda_chunk.register_autograd(_backward, setup_context=_save)
