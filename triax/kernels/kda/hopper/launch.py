"""Start the CUDA C++ kernels of KDA over a table of runs."""

from ctypes import c_longlong
from typing import Any, NamedTuple

import torch
from torch import Tensor

from triax.kernels.kda.hopper.compile import Kernel, launch
from triax.kernels.kda.hopper.segments import Segments

CHANNELS = 128
RECORD_BYTES = 66_304
STAGE_BYTES, TILE_BYTES = 66_560, 8192
MULTIPROCESSORS = 132
"""Of an H200; only how the work is cut depends on it."""


class Raw(NamedTuple):
    """The numbers of a gate that the kernels apply themselves."""

    rates: Tensor
    """fp32 [H]; log of the gate's slope, or of the factor on a softplus."""
    biases: Tensor
    """fp32 [H, 128]; added to what the gate is computed from."""
    lowest: float
    """The gate's lower bound, -5 or higher; minus infinity is a softplus gate."""


class Gradients(NamedTuple):
    """What `gradients` returns; with a raw gate those of the raw inputs."""

    query: Tensor
    key: Tensor
    value: Tensor
    log_decay: Tensor
    beta: Tensor
    """fp32 [T, H], of the activated beta."""
    biases: Tensor | None
    """fp32 [H, 128]"""
    rates: Tensor | None
    """fp32 [H]"""


def aligned(x: Tensor) -> Tensor:
    """Return `x`, or a copy of it if the copy engine cannot read its rows: they must begin at multiples of 16 bytes."""
    unit = 16 // x.element_size()
    fits = x.stride(-1) == 1 and x.data_ptr() % 16 == 0 and all(n % unit == 0 for n in x.stride()[:-1])
    return x if fits else x.contiguous() if not x.is_contiguous() else x.clone()


def prepare(
    query: Tensor, key: Tensor, log_decay: Tensor, beta: Tensor, table: Any, anchored: Any, raw: Raw | None = None,
    scales: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Return the record of every chunk and head; `scales`, if given, gets what made raw queries and keys unit."""
    heads, chunks = beta.shape[1], len(table.first)
    records = key.new_empty(chunks * heads, RECORD_BYTES, dtype=torch.uint8)
    query, key, log_decay = aligned(query), aligned(key), aligned(log_decay)
    kinds = variant(log_decay, beta, anchored, raw)
    rates, biases, lowest = raw or (None, None, 0.0)
    shared = {32: 8, 16: 12, 8: 13}[anchored.rows] * TILE_BYTES + 8 * 512 + 512 + 256
    launch(
        Kernel("prepare", kinds, shared, 256), chunks * heads, key.device,
        query, key, log_decay, beta, rates, biases, float(lowest), table.first, table.count, records, scales,
        heads, heads // key.shape[1], *strides(query, key, log_decay, beta),
    )  # fmt: skip
    return records


def scan(
    value: Tensor, state: Tensor | None, table: Any, records: Tensor, ends: Tensor, read: Tensor,
    states: Tensor | None, written: Tensor | None,
) -> None:  # fmt: skip
    """Walk every sequence of every head; fill `read`, `ends` and, if given, what the backward pass needs.

    `table` is a run table, or segments with the states before each.
    """
    value = aligned(value)
    heads, walks = value.shape[1], (len(table.runs) - 1) * value.shape[1]
    runs = table[:5] if isinstance(table, Segments) else table[2:7]
    tiles = _tiles(walks)
    keep = states is not None
    launch(
        walk("scan", tiles, keep, maps=False), walks * 2 // tiles, value.device,
        value, state, *runs, records, read, states, written, ends, heads, *strides(value),
    )  # fmt: skip


def segment_states(value: Tensor, state: Tensor | None, cut: Segments, records: Tensor) -> Tensor:
    """Return the states before each segment, [segments, H, 128, 128] in fp32."""
    value = aligned(value)
    heads, count = value.shape[1], len(cut.runs) - 1
    maps = value.new_empty(count, heads, CHANNELS, 2 * CHANNELS, dtype=torch.float32)
    before = value.new_empty(count, heads, CHANNELS, CHANNELS, dtype=torch.float32)
    launch(
        walk("scan", 2, keep=False, maps=True), count * heads * 2, value.device,
        value, None, *cut[:4], cut.run_segment, records, None, None, None, maps, heads, *strides(value),
    )  # fmt: skip
    launch(
        Kernel("join", (), 2 * 128 * 132 * 4 + 128 * 8 * 4, 256), (len(cut.of_sequence) - 1) * heads * 16, value.device,
        maps, state, cut.of_sequence, before, heads,
    )  # fmt: skip
    return before


def scan_back(
    d_read: Tensor, d_ends: Tensor, table: Any, records: Tensor, d_states: Tensor, d_errors: Tensor, d_state: Tensor
) -> None:
    """Walk every sequence of every head backwards."""
    heads, walks = d_read.shape[1], (len(table.runs) - 1) * d_read.shape[1]
    d_read = aligned(d_read)
    tiles = _tiles(walks)
    launch(
        walk("scan_back", tiles, keep=True, maps=None), walks * 2 // tiles, d_read.device,
        d_read, d_ends, *table[2:7], records, d_states, d_errors, d_state, heads, *strides(d_read),
    )  # fmt: skip


def gradients(
    query: Tensor, key: Tensor, value: Tensor, log_decay: Tensor, beta: Tensor, d_read: Tensor, table: Any,
    states: Tensor, written: Tensor, d_states: Tensor, d_errors: Tensor, anchored: Any,
    raw: Raw | None = None, scales: Tensor | None = None,
) -> Gradients:  # fmt: skip
    """Return every gradient but the states', from what both walks kept."""
    tokens, heads = beta.shape
    group = heads // key.shape[1]
    chunks = len(table.first)
    query, key, value, log_decay, d_read = (aligned(x) for x in (query, key, value, log_decay, d_read))
    outputs = [x.new_empty(value.shape) for x in (query, key, value, log_decay)]
    of_beta = states.new_empty(2, tokens, heads, dtype=torch.float32)
    of_biases = of_rates = None
    if raw is not None:
        of_biases = states.new_empty(chunks, heads, CHANNELS, dtype=torch.float32)
        of_rates = states.new_empty(chunks, heads, 8, dtype=torch.float32)
    kinds = variant(log_decay, beta, anchored, raw)
    rates, biases, lowest = raw or (None, None, 0.0)
    launch(
        Kernel("gradients", kinds, 14 * TILE_BYTES + 1024, 128), chunks * heads * 2, key.device,
        query, key, value, log_decay, beta, rates, biases, float(lowest), scales, d_read, table.first, table.count,
        states, written, d_errors, d_states, *outputs, of_beta, of_biases, of_rates, tokens, heads, group,
        *strides(query, key, value, log_decay, beta, d_read),
    )  # fmt: skip
    d_query, d_key, d_value, d_gate = outputs
    if group > 1:
        d_query, d_key = (x.view(tokens, -1, group, CHANNELS).sum(2) for x in (d_query, d_key))
    return Gradients(
        query=d_query,
        key=d_key,
        value=d_value,
        log_decay=d_gate,
        beta=of_beta.sum(0),
        biases=None if of_biases is None else of_biases.sum(0),
        rates=None if of_rates is None else of_rates.sum((0, 2)),
    )


def variant(log_decay: Tensor, beta: Tensor, anchored: Any, raw: Raw | None) -> tuple[tuple[str, str | int], ...]:
    """Return what `prepare` and `gradients` are compiled for; `anchored` are the anchors of `flash`."""
    types = (("GATE", _type(log_decay)), ("BETAS", _type(beta)))
    return *types, ("RAW", int(raw is not None)), ("ANCHORED", anchored.rows), ("CAUSAL", int(anchored.is_causal))


def strides(*tensors: Tensor) -> tuple[c_longlong, ...]:
    """Return how far apart tokens and heads are."""
    return tuple(c_longlong(n) for x in tensors for n in x.stride()[:2])


def _tiles(walks: int) -> int:
    """Groups of 64 value columns in a block: with few walks every half of a head gets a multiprocessor."""
    return 1 if 2 * walks <= MULTIPROCESSORS else 2


def walk(name: str, tiles: int, keep: bool, maps: bool | None) -> Kernel:
    """Return the variant of a walk; `maps` is none where there is no such choice."""
    defines = (("TILES", tiles), ("KEEP", int(keep)), *((("MAPS", int(maps)),) if maps is not None else ()))
    values = 2 * 64 * (tiles * 128 + 16)
    shared = 2 * STAGE_BYTES + values + tiles * TILE_BYTES * (3 if keep else 1) + 32
    return Kernel(name, defines, shared, tiles * 128 + 128)


def _type(x: Tensor) -> str:
    return "bf16" if x.dtype == torch.bfloat16 else "float"
