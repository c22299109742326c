"""Decode and verify on a GPU: one launch between the projections, whatever the number of tokens a row."""

import ctypes
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from triax.errors import UnsupportedError
from triax.kernels import nvrtc
from triax.kernels.kda.slots import Projected, Records, Slots, Weights

SOURCE = Path(__file__).with_name("fused.cu")
SIZES = (32, 64, 128, 256)
LARGEST = 128 * 256  # numbers of a state that the registers of a block hold
DTYPES = {torch.bfloat16: "bf16", torch.float32: "float"}
MOST_TOKENS = 64
MOST_SHARED = 227 * 1024  # bytes of shared memory that a block of Hopper can have
THREADS = 256
ALIGNMENT = 16  # bytes that the copy engine moves at least


def unsupported(
    state: Tensor, *streams: Tensor, window: Tensor | None = None, tokens: int = 1, pending: int = 0
) -> str | None:
    """Say what of these inputs the kernel cannot take, if anything.

    Args:
        state: Memory by slot.
        streams: Projections of the tokens.
        window: Inputs of the convolution by slot.
        tokens: Number of them a row that are walked over.
        pending: Number of them a row that are written before.
    """
    channels, width = state.shape[2:]
    if not nvrtc.is_available():
        return "an installation without `cuda-bindings`"
    if state.dtype not in DTYPES or any(x.dtype not in DTYPES for x in streams) or len({x.dtype for x in streams}) > 1:
        return f"dtypes {', '.join(sorted({f'`{x.dtype}`' for x in (state, *streams)}))}"
    if window is not None and window.dtype not in DTYPES:
        return f"windows of dtype `{window.dtype}`"
    if channels not in SIZES or width not in SIZES or channels * width > LARGEST:
        return f"head sizes `{channels}` and `{width}`"
    if (most := max(tokens, pending)) > 1:
        taps, kept = (1, None) if window is None else (window.shape[1] + 1, window.dtype)
        kinds = (streams[0].dtype, state.dtype, kept)
        defines = macros(channels, width, taps, tokens, pending, *kinds, bounded=True, writes=False)
        if most > MOST_TOKENS or shared_bytes(defines) > MOST_SHARED:
            return f"{most} tokens a row with heads of `{channels}` and `{width}`"
    for name, memory in (("state", state), ("window", window)):
        if memory is not None and (memory.data_ptr() % ALIGNMENT or memory.stride(0) * memory.itemsize % ALIGNMENT):
            return f"slots of `{name}` that begin between multiples of {ALIGNMENT} bytes"
    return None


def step(inputs: Projected, weights: Weights, slots: Slots, slot: Int[Tensor, " N"]) -> Float[Tensor, "N H V"]:
    """See `decode.step`.

    Raises:
        UnsupportedError: The kernel has no form for these dtypes or head sizes.
    """
    _require(slots.state, *inputs, window=slots.window)
    read = torch.empty_like(inputs.gate, memory_format=torch.contiguous_format)
    inputs = Projected(*(part[:, None] for part in inputs))
    _walk(inputs, weights, slots.state, slots.window, slot, read, None, None, None)
    return read


def recur(
    inputs: Projected, weights: Weights, state: Float[Tensor, "S H K V"], slot: Int[Tensor, " N"]
) -> Float[Tensor, "N H V"]:
    """See `decode.recur`.

    Raises:
        UnsupportedError: The kernel has no form for these dtypes or head sizes.
    """
    _require(state, *inputs[:3])
    read = inputs.mixed.new_empty(len(slot), state.shape[1], state.shape[3])
    inputs = Projected(*(part[:, None] for part in inputs))
    _walk(inputs, weights, state, None, slot, read, None, None, None)
    return read


def verify(
    inputs: Projected,
    weights: Weights,
    slots: Slots,
    slot: Int[Tensor, " N"],
    pending: Records | None,
    accepted: Int[Tensor, " N"] | None,
) -> tuple[Float[Tensor, "N W H V"], Records]:
    """See `decode.verify`.

    Raises:
        UnsupportedError: The kernel has no form for these dtypes or head sizes.
    """
    count, before = inputs.mixed.shape[1], 0 if pending is None else pending.key.shape[1]
    _require(slots.state, *inputs, window=slots.window, tokens=count, pending=before)
    read = torch.empty_like(inputs.gate, memory_format=torch.contiguous_format)
    exact = {"device": read.device, "dtype": torch.float32}
    keys, values = inputs.decay.shape, inputs.gate.shape
    records = Records(
        inputs.mixed, torch.empty(keys, **exact), torch.empty(values, **exact), torch.empty(keys, **exact)
    )
    _walk(inputs, weights, slots.state, slots.window, slot, read, records, pending, accepted)
    return read, records


def replay(records: Records, accepted: Int[Tensor, " N"], slots: Slots, slot: Int[Tensor, " N"]) -> None:
    """See `decode.replay`.

    Raises:
        UnsupportedError: The kernel has no form for these dtypes or head sizes.
    """
    _require(slots.state, records.mixed, window=slots.window, tokens=0, pending=records.key.shape[1])
    _walk(None, None, slots.state, slots.window, slot, None, None, records, accepted)


@lru_cache(maxsize=256)  # every call asks whether it fits
def shared_bytes(defines: tuple[tuple[str, str | int], ...]) -> int:
    """Return the bytes of shared memory that a block needs: the source's arrays, in its order."""
    named: dict[str, Any] = dict(defines)
    channels, width, tokens, mixes = (named[name] for name in ("K", "V", "TOKENS", "MIXES"))
    size = {name: 2 if named[name] == "bf16" else 4 for name in "XEW"}
    most, mixed, groups = max(tokens, named["PENDING"]), 2 * channels + width, THREADS * 4 // width
    stage = channels * width * size["E"] + tokens * (mixed + channels + mixes * width) * size["X"]
    stage += mixes * (named["TAPS"] - 1) * mixed * size["W"]
    vectors = most * (3 * channels + width) + mixes * tokens * width + width + 2 * groups * width + width
    return stage + 4 * (vectors + 2 * (-(-most // 4) * 4)) + 16


def macros(
    channels: int,
    width: int,
    taps: int,
    tokens: int,
    pending: int,
    stream: torch.dtype,
    state: torch.dtype,
    window: torch.dtype | None,
    *,
    bounded: bool,
    writes: bool,
) -> tuple[tuple[str, str | int], ...]:
    """Return what the source is compiled with."""
    return (
        ("K", channels),
        ("V", width),
        ("TAPS", taps),
        ("THREADS", THREADS),
        ("TOKENS", tokens),
        ("PENDING", pending),
        ("MIXES", int(window is not None)),
        ("BOUNDED", int(bounded)),
        ("WRITES", int(writes)),
        ("X", DTYPES[stream]),
        ("E", DTYPES[state]),
        ("W", DTYPES[window or stream]),
        ("BLOCKS", 2 if channels * width <= 128 * 128 else 1),
    )


def arguments(
    inputs: Projected | None,
    weights: Weights | None,
    state: Tensor,
    window: Tensor | None,
    slot: Tensor,
    read: Tensor | None,
    records: Records | None,
    pending: Records | None,
    accepted: Tensor | None,
) -> tuple[list[Tensor | None], list[int], list[float]]:
    """Return the kernel's arguments in order: tensors, strides, and two numbers."""
    strides = [0] * 11
    streams: list[Tensor | None] = [None] * 4
    if inputs is not None:
        mixed, decay, beta, gate = inputs
        mixed, decay, gate = (_copyable(x) for x in (mixed, decay, gate))
        streams = [mixed, decay, beta, gate]
        strides = [*mixed.stride()[:2], *decay.stride()[:3], *beta.stride(), *gate.stride()[:3]]
    layer = [None] * 4 if weights is None else [x.detach().float().contiguous() for x in weights[:4]]
    kept = [None] * 3 if records is None else list(records[1:])
    if pending is not None and pending.mixed.stride(-1) != 1:
        pending = pending._replace(mixed=pending.mixed.contiguous())
    old = [None] * 4 if pending is None else [pending.mixed, *(part.contiguous() for part in pending[1:])]
    counts = [None if x is None else x.int() for x in (slot, accepted)]
    tensors = [*streams, *layer, state, window, counts[0], read, *kept, *old, counts[1]]
    of_old = (0, 0) if pending is None else pending.mixed.stride()[:2]
    of_slots = (_packed(state, "state"), 0 if window is None else _packed(window, "window"))
    lowest = None if weights is None else weights.lowest_log_decay
    return (
        tensors,
        [*strides, *of_old, *of_slots],
        [0.0 if weights is None else weights.norm_eps, 0.0 if lowest is None else lowest],
    )


def _walk(
    inputs: Projected | None,
    weights: Weights | None,
    state: Tensor,
    window: Tensor | None,
    slot: Tensor,
    read: Tensor | None,
    records: Records | None,
    pending: Records | None,
    accepted: Tensor | None,
) -> None:
    if not len(slot):
        return
    tensors, strides, numbers = arguments(inputs, weights, state, window, slot, read, records, pending, accepted)
    heads, channels, width = state.shape[1:]
    tokens = 0 if inputs is None else inputs.mixed.shape[1]
    before = 0 if pending is None else pending.key.shape[1]
    streams = inputs or pending
    assert streams is not None
    taps = 1 if window is None else window.shape[1] + 1
    function, shared = _function(
        macros(
            channels, width, taps, tokens, before, streams.mixed.dtype, state.dtype,
            None if window is None else window.dtype,
            bounded=weights is not None and weights.lowest_log_decay is not None,
            writes=records is None and inputs is not None,
        ),
        state.device.index,
    )  # fmt: skip
    items = len(slot) * heads
    values = (
        *(ctypes.c_longlong(stride) for stride in strides),
        ctypes.c_int(heads),
        ctypes.c_int(items),
        *(ctypes.c_float(number) for number in numbers),
    )
    with torch.cuda.device(state.device):
        blocks = min(items, resident(state.device, shared))
        nvrtc.launch(function, (blocks,), THREADS, shared, (*tensors, *values))


@lru_cache(maxsize=256)
def _function(defines: tuple[tuple[str, str | int], ...], device: int) -> tuple[Any, int]:
    shared = shared_bytes(defines)
    return nvrtc.load((SOURCE,), "walk", defines, shared, device), shared


def resident(device: torch.device, shared: int) -> int:
    """Return how many blocks with this much shared memory run at once."""
    facts = torch.cuda.get_device_properties(device)
    own = shared + 1024  # which the driver keeps for itself
    return facts.multi_processor_count * max(1, min(2, facts.shared_memory_per_multiprocessor // own))


def _copyable(x: Tensor) -> Tensor:
    """Return the tensor with rows where the copy engine can read them."""
    steps = (x.data_ptr(), *(stride * x.itemsize for stride in x.stride()[:-1]))
    if x.stride(-1) == 1 and not any(step % ALIGNMENT for step in steps):
        return x
    packed = x.contiguous()  # which is the tensor itself where it is packed already, wherever it begins
    return packed if packed.data_ptr() % ALIGNMENT == 0 else packed.clone()


def _require(state: Tensor, *streams: Tensor, window: Tensor | None = None, tokens: int = 1, pending: int = 0) -> None:
    reason = unsupported(state, *streams, window=window, tokens=tokens, pending=pending)
    if reason is not None:
        raise UnsupportedError(
            f"kernels.kda.fused: no kernel for {reason}; head sizes are {SIZES} with at most {LARGEST} numbers a "
            f"state, dtypes bf16 and fp32, tokens a row at most {MOST_TOKENS}, of large heads fewer; the functions "
            "of `triax.kernels.kda.decode` fall back by themselves"
        )


def _packed(memory: Tensor, name: str) -> int:
    """Return the stride of slots; what lies inside a slot must be packed, since it is written in place."""
    if memory.numel() and not memory[0].is_contiguous():
        raise UnsupportedError(
            f"kernels.kda.fused: a slot of `{name}` must lie in one piece; found strides `{memory.stride()}`; "
            "only the slots themselves may be apart"
        )
    return memory.stride(0)
