"""Kimi Delta Attention on a GPU: all chunks prepared at once, then one walk a head with the state in registers."""

from collections.abc import Sequence
from functools import lru_cache
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from triax.errors import UnsupportedError
from triax.kernels.device import assembler
from triax.kernels.dispatch import mode
from triax.kernels.kda.direct import Pass, with_gradient
from triax.kernels.kda.flash_backward import gradients, scan_back
from triax.kernels.kda.flash_forward import prepare, scan
from triax.kernels.kda.hopper import passes
from triax.kernels.kda.reference import KdaResult, ungrouped

CHUNK = 64
LOWEST_ANCHORED = -5.0  # 16 steps from the middle of a tile of 32, e^80, are inside bf16's range
SIZES = (32, 64, 128, 256)
HALVED = 256
"""Values of this width are worked on in two halves: their columns do not know of each other."""
PIECEWISE = 256
"""States with as many key channels are multiplied in pieces, or their operands would not fit in registers."""
FEW_WALKS = 66  # half the multiprocessors of an H200


class RunTable(NamedTuple):
    """Chunks of a stream in its order, and runs of chunks: what lies between two places where a state is wanted."""

    first: Int[Tensor, " chunks"]
    """First token of each chunk."""
    count: Int[Tensor, " chunks"]
    """Tokens in each chunk."""
    runs: Int[Tensor, " N_1"]
    """First run of each sequence, and the number of runs."""
    run_first: Int[Tensor, " runs"]
    run_tokens: Int[Tensor, " runs"]
    run_chunk: Int[Tensor, " runs"]
    """First token, tokens and first chunk of each run."""
    run_slot: Int[Tensor, " runs"]
    """Where the state after each run is kept: sequence n ends in slot n, other places follow."""
    num_slots: int
    interior: tuple[int, ...]
    """Slot of each wanted state."""
    starts: tuple[int, ...]
    states_at: tuple[int, ...]
    """What the table was made of."""

    def interior_of(self, states: Float[Tensor, "slots H K V"]) -> Float[Tensor, "M H K V"]:
        """Return the wanted ones of the states after all runs; none without asking the GPU for any."""
        return states[list(self.interior)] if self.interior else states.new_empty(0, *states.shape[1:])


@lru_cache(maxsize=32)
def run_table(starts: tuple[int, ...], states_at: tuple[int, ...], device: torch.device) -> RunTable:
    """Cut a stream; the layers of a network ask for the same few tables again and again, hence the cache."""
    first: list[int] = []
    count: list[int] = []
    runs, run_first, run_tokens, run_chunk, run_slot = [0], [], [], [], []
    slots: dict[int, int] = {}
    num_slots = len(starts) - 1
    for sequence, (begin, end) in enumerate(pairwise(starts)):
        places = sorted({begin, end, *(p for p in states_at if begin < p < end)})
        for low, high in pairwise(places):
            run_first.append(low)
            run_tokens.append(high - low)
            run_chunk.append(len(first))
            slots[high] = sequence if high == end else num_slots
            num_slots += high != end
            run_slot.append(slots[high])
            first += range(low, high, CHUNK)
            count += (min(CHUNK, high - t) for t in range(low, high, CHUNK))
        runs.append(len(run_first))

    def to_device(numbers: list[int]) -> Tensor:
        tensor = torch.tensor(numbers, dtype=torch.int32)
        if device.type == "cuda":  # nobody waits for what runs there
            return tensor.pin_memory().to(device, non_blocking=True)
        return tensor.to(device)

    return RunTable(
        to_device(first),
        to_device(count),
        to_device(runs),
        to_device(run_first),
        to_device(run_tokens),
        to_device(run_chunk),
        to_device(run_slot),
        num_slots,
        tuple(slots[p] for p in states_at),
        starts,
        states_at,
    )


def unsupported(query: Tensor, key: Tensor, value: Tensor) -> str | None:
    """Say what of these inputs the kernels cannot take, if anything."""
    if torch.float64 in (query.dtype, key.dtype, value.dtype):
        return "dtype `float64`"
    if key.shape[-1] not in SIZES or value.shape[-1] not in SIZES:
        return f"head sizes `{key.shape[-1]}` and `{value.shape[-1]}`"
    return None


class Anchors(NamedTuple):
    """How the rows of a chunk share what their decays are measured from."""

    rows: int
    """Rows with a common anchor."""
    is_causal: bool
    """Whether it lies where they start, so that what comes after a row moves no bit of it; else in their middle."""


def anchors(lowest_log_decay: float, dtype: torch.dtype) -> Anchors:
    """Return as many rows as can share an anchor with their decay in range.

    That is 32 with bounded gates. Unbounded ones get 16, and a token's log decay is held at -10; those of fp32 products
    get 1, which is exact. Where the caller wants torch to be deterministic (`torch.use_deterministic_algorithms`), or
    batch-invariant results, half as many share one at their start: measured, that costs 2 to 19 % on Hopper and more in
    Triton.
    """
    if dtype == torch.float32 and lowest_log_decay < LOWEST_ANCHORED:
        return Anchors(1, True)
    is_causal = torch.are_deterministic_algorithms_enabled() or mode() == "batch_invariant"
    rows = 32 if lowest_log_decay >= LOWEST_ANCHORED else 16
    return Anchors(rows // 2 if is_causal else rows, is_causal)


def kda(
    query: Float[Tensor, "T Q K"],
    key: Float[Tensor, "T Q K"],
    value: Float[Tensor, "T H V"],
    log_decay: Float[Tensor, "T H K"],
    beta: Float[Tensor, "T H"],
    state: Float[Tensor, "N H K V"] | None,
    starts: Sequence[int],
    *,
    lowest_log_decay: float = float("-inf"),
    states_at: Sequence[int] = (),
) -> KdaResult:
    """Compute what `triax.kernels.kda.kda` describes with the GPU kernels or not at all.

    Products use bf16 operands and fp32 sums when query, key and value are bf16, or under autocast to bf16; otherwise
    fp32 operands, as three tf32 products each. With bf16 products and `lowest_log_decay` below -5 a channel keeps at
    least e^-10, 4.5e-5, of itself from token to token, whatever its gate says; gradients are those of the gate given.

    Raises:
        UnsupportedError: The kernels have no form for this dtype or head size.
    """
    reason = unsupported(query, key, value)
    if reason is not None:
        raise UnsupportedError(
            f"kernels.kda.flash: no kernel for {reason}; head sizes are {SIZES}, dtypes bf16 and fp32; "
            "call `triax.kernels.kda.kda`, which falls back to the chunk form"
        )
    if value.shape[2] == HALVED:
        states = (None, None) if state is None else state.chunk(2, 3)
        first, second = (
            kda(
                query, key, half, log_decay, beta, start, starts, lowest_log_decay=lowest_log_decay, states_at=states_at
            )
            for half, start in zip(value.chunk(2, 2), states, strict=True)
        )
        return KdaResult(*(torch.cat(halves, -1) for halves in zip(first, second, strict=True)))
    device = query.device.type
    if torch.is_autocast_enabled(device) and torch.get_autocast_dtype(device) == torch.bfloat16:
        query, key, value = (x.bfloat16() for x in (query, key, value))
    anchored = anchors(lowest_log_decay, _product_dtype(query, key, value))
    if not passes.takes(query, key, value):
        query, key = ungrouped(query, value.shape[1]), ungrouped(key, value.shape[1])
    inputs = (query, key, value, log_decay, beta, state)
    keep = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in inputs)
    read, final, interior, *_ = _forward(*inputs, list(starts), list(states_at), *anchored, keep)
    return KdaResult(read, final, interior)


def _run(kernel: Any, programs: int, *arguments: Any, num_warps: int, num_stages: int) -> None:
    if programs:
        with assembler():
            kernel[(programs,)](*arguments, num_warps=num_warps, num_stages=num_stages)


class _Launch(NamedTuple):
    """Inputs in the dtype of the products, and how to cut the work."""

    streams: tuple[Tensor, ...]
    precision: str
    value_tile: int
    state_piece: int
    scan_warps: int
    stages: int
    channel_tile: int


def _launch(
    query: Tensor, key: Tensor, value: Tensor, log_decay: Tensor, beta: Tensor, walks: int, *, wide: bool
) -> _Launch:
    dtype = _product_dtype(query, key, value)
    streams = tuple(_last_contiguous(x.to(dtype)) for x in (query, key, value))
    gates = tuple(_last_contiguous(x if x.dtype == torch.bfloat16 else x.float()) for x in (log_decay, beta))
    channels, width = key.shape[2], value.shape[2]
    exact = dtype == torch.float32
    if channels == PIECEWISE:  # compiled for sm_90, bf16 then spills no register and fp32 at most 40
        value_tile, state_piece, scan_warps = (16, 32, 4) if exact else (32, 64, 8)
    else:
        # One program for all values of a head reads its chunks once; with few walks, two fill more of the GPU.
        value_tile = 128 if width == 128 and not exact and (wide or walks > FEW_WALKS) else min(width, 64)
        state_piece, scan_warps = channels, 8 if value_tile == 128 else 4
    return _Launch(
        (*streams, *gates),
        "tf32x3" if exact else "tf32",
        value_tile,
        state_piece,
        scan_warps,
        1 if exact else 2,
        min(channels, 32),
    )


def _product_dtype(*streams: Tensor) -> torch.dtype:
    return torch.bfloat16 if all(x.dtype == torch.bfloat16 for x in streams) else torch.float32


def _last_contiguous(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


def _strides(*tensors: Tensor) -> tuple[int, ...]:
    return tuple(n for x in tensors for n in x.stride()[:2])


class _Prepared(NamedTuple):
    """What the walks need of each chunk and head."""

    keys: Tensor
    queries: Tensor
    writes: Tensor
    reads: Tensor
    inverse: Tensor
    decay: Tensor


def _prepare(launch: _Launch, table: RunTable, anchored: Anchors) -> _Prepared:
    query, key, _, log_decay, beta = launch.streams
    heads, channels = key.shape[1:]
    chunks = len(table.first)
    prepared = _Prepared(
        keys=key.new_empty(chunks, heads, CHUNK, channels),
        queries=key.new_empty(chunks, heads, CHUNK, channels),
        writes=key.new_empty(chunks, heads, CHUNK, channels),
        reads=key.new_empty(chunks, heads, CHUNK, CHUNK),
        inverse=key.new_empty(chunks, heads, CHUNK, CHUNK),
        decay=key.new_empty(chunks, heads, channels, dtype=torch.float32),
    )
    _run(
        prepare, chunks * heads,
        query, key, log_decay, beta, table.first, table.count, *prepared,
        *_strides(query, key, log_decay, beta), heads, channels, min(channels, 32), *anchored, launch.precision,
        num_warps=4, num_stages=1,
    )  # fmt: skip
    return prepared


def ends_of(table: RunTable, d_final: Tensor, d_interior: Tensor) -> Tensor:
    """Return the gradient of the state after each run, by slot."""
    ends = d_final.new_zeros(table.num_slots, *d_final.shape[1:], dtype=torch.float32)
    ends[: len(d_final)] = d_final
    for slot, gradient in zip(table.interior, d_interior, strict=True):
        ends[slot] += gradient
    return ends


def _flash(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    log_decay: Tensor,
    beta: Tensor,
    state: Tensor | None,
    starts: Sequence[int],
    states_at: Sequence[int],
    rows: int,
    is_causal: bool,
    keep: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return what was read, the last states, those wanted, and for the backward pass all chunks' states and writes."""
    table, anchored = run_table(tuple(starts), tuple(states_at), query.device), Anchors(rows, is_causal)
    if passes.takes(query, key, value):
        return passes.forward(query, key, value, log_decay, beta, state, table, keep, anchored)
    # Measured: where it also keeps states, the wide walk is the faster one with few heads too.
    launch = _launch(query, key, value, log_decay, beta, (len(starts) - 1) * key.shape[1], wide=keep)
    values, betas = launch.streams[2], launch.streams[4]
    heads, channels, width = *key.shape[1:], value.shape[2]
    sequences, chunks = len(starts) - 1, len(table.first) if keep else 0
    if state is None:
        state = key.new_zeros(sequences, heads, channels, width, dtype=torch.float32)
    state = state.float().contiguous()
    read = value.new_empty(value.shape)
    ends = state.new_empty(table.num_slots, heads, channels, width)
    states = values.new_empty(chunks, heads, width, channels)
    written = values.new_empty(chunks, heads, CHUNK, width)
    prepared = _prepare(launch, table, anchored)
    _run(
        scan, width // launch.value_tile * heads * sequences,
        values, betas, state, *table[2:7], *prepared, read, states, written, ends,
        *_strides(values, betas, read),
        heads, channels, launch.state_piece, width, launch.value_tile, launch.precision, keep,
        num_warps=launch.scan_warps, num_stages=launch.stages,
    )  # fmt: skip
    final = ends[:sequences].clone() if table.num_slots > sequences else ends
    return read, final, table.interior_of(ends), states, written


def _flash_backward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    log_decay: Tensor,
    beta: Tensor,
    states: Tensor,
    written: Tensor,
    d_read: Tensor,
    d_final: Tensor,
    d_interior: Tensor,
    starts: Sequence[int],
    states_at: Sequence[int],
    rows: int,
    is_causal: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Prepare the chunks again, walk back with the state's gradient, then everything else at once."""
    table, anchored = run_table(tuple(starts), tuple(states_at), query.device), Anchors(rows, is_causal)
    tokens, heads, channels, width = *key.shape, value.shape[2]
    sequences, chunks = len(starts) - 1, len(table.first)
    d_ends = ends_of(table, d_final, d_interior)
    if passes.takes(query, key, value):
        inputs = (query, key, value, log_decay, beta, states, written)
        of, d_state = passes.backward(*inputs, d_read, d_ends, table, anchored)
        return of.query, of.key, of.value, of.log_decay.to(log_decay.dtype), of.beta.to(beta.dtype), d_state
    launch = _launch(query, key, value, log_decay, beta, (len(starts) - 1) * key.shape[1], wide=False)
    d_read = _last_contiguous(d_read.to(states.dtype))
    d_states, d_errors = torch.empty_like(states), torch.empty_like(written)
    d_state = torch.empty_like(d_ends[:sequences])
    prepared = _prepare(launch, table, anchored)
    _run(
        scan_back, width // launch.value_tile * heads * sequences,
        d_read, d_ends, *table[2:7], *prepared, d_errors, d_states, d_state, *_strides(d_read),
        heads, channels, launch.state_piece, width, launch.value_tile, launch.precision,
        num_warps=launch.scan_warps, num_stages=launch.stages,
    )  # fmt: skip
    del prepared
    outputs = [x.new_empty(x.shape) for x in (query, key, value, log_decay)]
    pieces = channels // launch.channel_tile
    of_beta = d_ends.new_empty(pieces, tokens, heads)
    _run(
        gradients, pieces * chunks * heads,
        *launch.streams, d_read, table.first, table.count, states, written, d_errors, d_states,
        *outputs, of_beta, *_strides(*launch.streams, d_read), tokens, heads, channels, width,
        launch.channel_tile, *anchored, launch.precision, num_warps=4, num_stages=1,
    )  # fmt: skip
    d_query, d_key, d_value, d_decay = outputs
    return d_query, d_key, d_value, d_decay, of_beta.sum(0).to(beta.dtype), d_state


def kda_flash_shapes(
    key: Tensor, value: Tensor, starts: Sequence[int], states_at: Sequence[int], keep: bool, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return empty tensors of the shapes that the forward pass returns."""
    channels, (heads, width) = key.shape[2], value.shape[1:]
    places = [sorted({low, high, *(p for p in states_at if low < p < high)}) for low, high in pairwise(starts)]
    chunks = sum(-(-(b - a) // CHUNK) for p in places for a, b in pairwise(p)) if keep else 0

    def memories(count: int) -> Tensor:
        return key.new_empty(count, heads, channels, width, dtype=torch.float32)

    return (
        value.new_empty(value.shape),
        memories(len(starts) - 1),
        memories(len(states_at)),
        key.new_empty(chunks, heads, width, channels, dtype=dtype),
        key.new_empty(chunks, heads, CHUNK, width, dtype=dtype),
    )


kda_flash = torch.library.custom_op("triax::kda_flash", _flash, mutates_args=())
kda_flash_backward = torch.library.custom_op("triax::kda_flash_backward", _flash_backward, mutates_args=())


@kda_flash.register_fake
def _(query, key, value, log_decay, beta, state, starts, states_at, rows, is_causal, keep):
    return kda_flash_shapes(key, value, starts, states_at, keep, _product_dtype(query, key, value))


@kda_flash_backward.register_fake
def _(query, key, value, log_decay, beta, states, written, d_read, d_final, *_rest):
    inputs = (query, key, value, log_decay, beta)
    return *(x.new_empty(x.shape) for x in inputs), d_final.new_empty(d_final.shape, dtype=torch.float32)


_forward = with_gradient(Pass(_flash, kda_flash), Pass(_flash_backward, kda_flash_backward), num_streams=5)
