"""Routed experts with MXFP4 weights for few tokens on Hopper: each weight that is needed comes once from memory."""

import ctypes
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from triax.errors import UnsupportedError
from triax.kernels import nvrtc
from triax.kernels.mx.mxfp4 import Mxfp4

STREAM, PLAN = (Path(__file__).with_name(name) for name in ("streamed.cu", "plan.cu"))
MOST_EXPERTS = 4096
ROOM = 226 * 1024  # bytes of shared memory a processor's blocks may have
WIDTHS, HEIGHTS = 128, (16, 32)  # what widths and heights of the matrices split into
RINGS = (4, 3, 2, 1)


class Form(NamedTuple):
    """How the kernel is cut."""

    columns: int
    """Tokens of a work item."""
    warps: int
    blocks: int
    """Blocks a processor holds at once."""

    def shared(self, width: int) -> int:
        """Return the bytes of shared memory that a block needs: tokens of this width, and their numbers."""
        return self.columns * (2 * width + 4)


FORMS = (Form(8, 16, 1), Form(16, 16, 1), Form(32, 12, 1))
MOST_ROWS = 24  # pairs an expert on average; beyond, products of many rows at a time are quicker


def unsupported(hidden: Tensor, expert: Tensor, gate: Mxfp4, up: Mxfp4, down: Mxfp4, activation: Any) -> str | None:
    """Say what of these inputs the kernel cannot take, if anything."""
    if not hidden.is_cuda or not nvrtc.is_available() or torch.cuda.get_device_capability(hidden.device)[0] < 9:
        return "this device or installation"
    if hidden.dtype is not torch.bfloat16:
        return f"dtype `{hidden.dtype}`"
    if not hasattr(activation, "gate_cap"):
        return "another activation than SiTU-GLU and SwiGLU"
    experts, inner, _ = gate.packed.shape
    width = hidden.shape[1]
    if width % WIDTHS or inner % WIDTHS or _form(0, experts, width, inner) is None:
        return f"widths `{width}` and `{inner}`"
    if experts > MOST_EXPERTS or expert.numel() > MOST_ROWS * experts:
        return f"{expert.numel()} pairs over {experts} experts"
    if not all(part.is_contiguous() and part.data_ptr() % 16 == 0 for weight in (gate, up, down) for part in weight):
        return "weights with gaps between them"
    return None


def experts(
    hidden: Float[Tensor, "T L"],
    expert: Int[Tensor, "T k"],
    share: Float[Tensor, "T k"],
    gate: Mxfp4,
    up: Mxfp4,
    down: Mxfp4,
    activation: Any,
    *,
    rounded: bool,
) -> Float[Tensor, "T L"]:
    """See `triax.kernels.mx.experts.experts`, and with `rounded` `experts_of_rounded`; no gradient.

    Raises:
        UnsupportedError: The kernel has no form for these dtypes, widths or so many tokens.
    """
    if reason := unsupported(hidden, expert, gate, up, down, activation):
        raise UnsupportedError(
            f"kernels.mx.streamed: no kernel for {reason}; it takes bf16 tokens, multiples of {WIDTHS} as widths, few "
            f"tokens an expert, on Hopper; `triax.kernels.mx.experts` takes another form by itself"
        )
    tokens, top_k = expert.shape
    number, inner, _ = gate.packed.shape
    width, pairs = hidden.shape[1], tokens * top_k
    output = torch.empty_like(hidden, memory_format=torch.contiguous_format)
    if not pairs:
        return output.zero_()
    form = _form(pairs, number, width, inner)
    assert form is not None
    hidden, share, expert = hidden.contiguous(), share.float().contiguous(), expert.long().contiguous()
    kept = {"dtype": torch.int32, "device": hidden.device}
    order, items = torch.empty(pairs, **kept), torch.empty(min(number, pairs) + pairs // form.columns, 4, **kept)
    count = torch.empty(1, **kept)
    opened = hidden.new_empty(pairs, inner)
    returned = torch.empty(pairs, width, dtype=torch.float32, device=hidden.device)
    index = hidden.device.index
    blocks = (_processors(index) * form.blocks,)
    with torch.cuda.device(hidden.device):
        planned = [expert, ctypes.c_int(pairs), order, items, count]
        nvrtc.launch(_plan(number, form.columns, width, index), (1,), 1024, 0, planned)
        caps = [ctypes.c_float(cap or 0.0) for cap in (activation.gate_cap, activation.up_cap)]
        caps += [ctypes.c_float(1 / (cap or 1.0)) for cap in (activation.gate_cap, activation.up_cap)]
        has_caps = activation.gate_cap is not None, activation.up_cap is not None
        planned = [order, items, count, share]
        shared = form.shared(width)
        function = _stream(macros(form, width, inner, True, *has_caps, rounded), shared, index)
        values = [hidden, ctypes.c_int(top_k), gate.packed, up.packed, gate.scale, up.scale, *planned, opened, *caps]
        nvrtc.launch(function, blocks, form.warps * 32, shared, values)
        shared = form.shared(inner)
        function = _stream(macros(form, inner, width, False, False, False, rounded), shared, index)
        values = [opened, ctypes.c_int(1), down.packed, None, down.scale, None, *planned, returned, *caps]
        nvrtc.launch(function, blocks, form.warps * 32, shared, values)
        added = [returned, ctypes.c_int(top_k), output]
        nvrtc.launch(_add(number, form.columns, width, index), (tokens, -(-width // 1024)), 256, 0, added)
    return output


def macros(
    form: Form, width: int, rows: int, opens: bool, has_gate_cap: bool, has_up_cap: bool, rounded: bool
) -> tuple[tuple[str, int], ...]:
    """Return what the source is compiled with."""
    chunks = width // WIDTHS
    return (
        ("K", width), ("ROWS", rows), ("COLUMNS", form.columns),
        ("RING", next(ring for ring in RINGS if chunks % ring == 0)),
        ("OPENS", int(opens)), ("HAS_GATE_CAP", int(has_gate_cap)), ("HAS_UP_CAP", int(has_up_cap)),
        ("ROUNDED", int(rounded)), ("WARPS", form.warps), ("BLOCKS", form.blocks),
    )  # fmt: skip


def _form(pairs: int, experts: int, width: int, inner: int) -> Form | None:
    """Return the form for so many pairs, of those that find room."""
    found = [form for form in FORMS if form.blocks * form.shared(max(width, inner)) <= ROOM]
    each = pairs / max(1, min(experts, pairs))
    enough = [form for form in found if form.columns >= 3 * each]
    return (enough or found[-1:] or [None])[0]


@lru_cache(maxsize=64)
def _processors(device: int) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


def _stream(defines: tuple[tuple[str, int], ...], shared: int, device: int) -> Any:
    return nvrtc.load((STREAM,), "stream", defines, shared, device)


def _plan(experts: int, columns: int, width: int, device: int) -> Any:
    return nvrtc.load((PLAN,), "plan", _plan_macros(experts, columns, width), 0, device)


def _add(experts: int, columns: int, width: int, device: int) -> Any:
    return nvrtc.load((PLAN,), "add", _plan_macros(experts, columns, width), 0, device)


def _plan_macros(experts: int, columns: int, width: int) -> tuple[tuple[str, int], ...]:
    return ("EXPERTS", experts), ("MOST", columns), ("THREADS", 1024), ("CHANNELS", width)
