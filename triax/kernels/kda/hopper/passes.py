"""The forward and the backward pass of the flash form on Hopper, from its CUDA C++ kernels."""

from typing import Any

import torch
from torch import Tensor

from triax.kernels.kda.hopper import launch
from triax.kernels.kda.hopper.compile import available
from triax.kernels.kda.hopper.launch import CHANNELS, MULTIPROCESSORS, Gradients, Raw
from triax.kernels.kda.hopper.segments import CHUNK, segments


def takes(query: Tensor, key: Tensor, value: Tensor) -> bool:
    """Say whether these kernels take such inputs: bf16, heads of 128, on Hopper."""
    streams = (query, key, value)
    return all(x.dtype == torch.bfloat16 and x.shape[-1] == CHANNELS for x in streams) and available(query.device)


def forward(
    query: Tensor, key: Tensor, value: Tensor, log_decay: Tensor, beta: Tensor, state: Tensor | None, table: Any,
    keep: bool, anchored: Any, raw: Raw | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Return what was read, the last states, those wanted, and for the backward pass all chunks' states and writes.

    `anchored` are the anchors of `flash`.
    """
    sequences, heads, chunks = len(table.runs) - 1, value.shape[1], len(table.first)
    log_decay, beta = _gate(log_decay), _gate(beta)
    state = None if state is None else state.float().contiguous()
    read = value.new_empty(value.shape)
    cut = segments(table.starts, table.states_at, heads, MULTIPROCESSORS, value.device)
    ends = value.new_empty(
        table.num_slots if cut is None else cut.num_slots, heads, CHANNELS, CHANNELS, dtype=torch.float32
    )
    states = value.new_empty(chunks if keep else 0, heads, CHANNELS, CHANNELS)
    written = value.new_empty(chunks if keep else 0, heads, CHUNK, CHANNELS)
    records = launch.prepare(query, key, log_decay, beta, table, anchored, raw)
    kept = (states, written) if keep else (None, None)
    if cut is None:
        launch.scan(value, state, table, records, ends, read, *kept)
    else:
        before = launch.segment_states(value, state, cut, records)
        launch.scan(value, before, cut, records, ends, read, *kept)
    final = ends[:sequences].clone() if len(ends) > sequences else ends
    return read, final, table.interior_of(ends), states, written


def backward(
    query: Tensor, key: Tensor, value: Tensor, log_decay: Tensor, beta: Tensor, states: Tensor, written: Tensor,
    d_read: Tensor, d_ends: Tensor, table: Any, anchored: Any, raw: Raw | None = None,
) -> tuple[Gradients, Tensor]:  # fmt: skip
    """Prepare the chunks again, walk back with the state's gradient, then everything else at once."""
    log_decay, beta, d_read = _gate(log_decay), _gate(beta), d_read.to(torch.bfloat16)
    scales = None if raw is None else d_ends.new_empty(len(table.first) * value.shape[1], CHUNK, 2)
    d_states, d_errors = torch.empty_like(states), torch.empty_like(written)
    d_state = torch.empty_like(d_ends[: len(table.runs) - 1])
    records = launch.prepare(query, key, log_decay, beta, table, anchored, raw, scales)
    launch.scan_back(d_read, d_ends, table, records, d_states, d_errors, d_state)
    del records
    inputs = (query, key, value, log_decay, beta, d_read)
    return launch.gradients(*inputs, table, states, written, d_states, d_errors, anchored, raw, scales), d_state


def _gate(x: Tensor) -> Tensor:
    return x if x.dtype == torch.bfloat16 else x.float()
