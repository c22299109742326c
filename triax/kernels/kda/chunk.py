"""Kimi Delta Attention in chunks: plain torch, all chunks and heads of a block at once, closed-form gradients."""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from triax.kernels.kda.block import carry, carry_back, gradients, read_block, take
from triax.kernels.kda.reference import state_dtype
from triax.kernels.kda.table import ChunkTable


class ChunkedKda(torch.autograd.Function):
    """The chunk form; saves its inputs and the state before each chunk, and computes everything else again."""

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        log_decay: Tensor,
        beta: Tensor,
        state: Tensor | None,
        table: ChunkTable,
        lowest_log_decay: float,
        num_sequences: int,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return what each token read, the last state of each sequence, and the states the table marks."""
        dtype = state_dtype(query, key, value, log_decay, beta, state)
        heads, channels, width = key.shape[1], key.shape[2], value.shape[2]
        with torch.autocast(query.device.type, enabled=False):
            streams = [_rows(x) for x in (query, key, value, log_decay, beta)]
            if state is None:
                final = torch.zeros(num_sequences, heads, channels, width, dtype=dtype, device=query.device)
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
            interior = states[list(table.interior)]
            result = _stream(read, table, value)
        ctx.save_for_backward(query, key, value, log_decay, beta, states)
        ctx.table, ctx.lowest_log_decay = table, lowest_log_decay
        ctx.state_dtype = None if state is None else state.dtype
        return result, final, interior

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_read: Tensor, d_final: Tensor, d_interior: Tensor) -> tuple[Tensor | None, ...]:
        """Walk the blocks backwards; only the gradient of the state passes from one to the next."""
        *inputs, states = ctx.saved_tensors
        table: ChunkTable = ctx.table
        dtype = states.dtype
        with torch.autocast(states.device.type, enabled=False):
            streams = [_rows(x) for x in inputs]
            gradient_stream = _rows(d_read)
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
                block = read_block(streams, table, number, dtype, ctx.lowest_log_decay)
                d_out = take(gradient_stream, table, number, dtype)
                after, d_written, carried = carry_back(block, table, number, d_out, d_last, d_borders, carried)
                gradients(block, before[here], after, d_out, d_written, [x[here] for x in padded])
            d_state.index_copy_(0, table.ranks, carried.view(-1, *states.shape[1:]))
            of_inputs = [_stream(x, table, like) for x, like in zip(padded, inputs, strict=True)]
        return *of_inputs, None if ctx.state_dtype is None else d_state.to(ctx.state_dtype), None, None, None


def _rows(stream: Tensor) -> Tensor:
    """View [T, H, channels] or [T, H] as one row per token and head."""
    return stream.reshape(stream.shape[0] * stream.shape[1], stream.shape[2] if stream.dim() == 3 else 1)


def _stream(padded: Tensor, table: ChunkTable, like: Tensor) -> Tensor:
    """Lay the rows of all chunks, padding left out, back into the stream."""
    return padded.view(-1, padded.shape[2]).index_select(0, table.places).view(like.shape).to(like.dtype)
