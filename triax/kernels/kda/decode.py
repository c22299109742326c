"""Kimi Delta Attention for decoding: one token for each sequence, all at once, and drafts tried before they count."""

import warnings
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from triax.errors import UnsupportedError
from triax.kernels.dispatch import mode
from triax.kernels.kda import stepping
from triax.kernels.kda.reference import state_dtype
from triax.kernels.kda.slots import Projected, Records, Slots, Weights

__all__ = ["Projected", "Records", "Slots", "Weights", "decode", "recur", "replay", "step", "verify"]


def decode(
    query: Float[Tensor, "N H K"],
    key: Float[Tensor, "N H K"],
    value: Float[Tensor, "N H V"],
    log_decay: Float[Tensor, "N H K"],
    beta: Float[Tensor, "N H"],
    state: Float[Tensor, "N H K V"] | None,
) -> tuple[Float[Tensor, "N H V"], Float[Tensor, "N H K V"]]:
    """Return what the one token of each sequence read, and the memory after it; arguments as in `kda`."""
    dtype = state_dtype(query, key, value, log_decay, beta, state)
    with torch.autocast(query.device.type, enabled=False):
        q, k, v, g, b = (x.to(dtype) for x in (query, key, value, log_decay, beta))
        if state is None:
            state = q.new_zeros(*q.shape, v.shape[-1])
        kept = state.to(dtype) * g.exp()[..., None]
        error = v - (k[..., None, :] @ kept)[..., 0, :]
        memory = torch.addcmul(kept, k[..., None], (b[..., None] * error)[..., None, :])
        return (q[..., None, :] @ memory)[..., 0, :].to(value.dtype), memory


def step(inputs: Projected, weights: Weights, slots: Slots, slot: Int[Tensor, " N"]) -> Float[Tensor, "N H V"]:
    """Take one token of each row through a whole layer between its projections, and advance the row's slot in place.

    Convolution and SiLU, unit query and key, decay gate, recurrence, RMSNorm and output gate: on a GPU one launch, for
    keys and values of 32, 64, 128 and 256. A state of 256 by 256 outgrows the registers of a block: for it, as for
    other sizes, torch operations run, with one warning. Everything is computed in fp32 (fp64 where an input is),
    whatever the inputs' format. No gradients.

    Args:
        inputs: One token a row.
        weights: The layer's own.
        slots: Memory; the rows' slots are updated in place.
        slot: Slot of each row, all different; 0 marks a padding row, which returns zeros and touches nothing.

    Returns:
        What the output projection reads, in the format of `inputs.gate`.

    Raises:
        UnsupportedError: The tensors disagree on rows, heads or channels.

    Source: K3 report (arXiv 2607.24653) section 5.4.2.
    """
    _check("step", inputs, weights, slots, slot, 1)
    return _form(slots.state, *inputs, window=slots.window).step(inputs, weights, slots, slot)


def recur(
    inputs: Projected, weights: Weights, state: Float[Tensor, "S H K V"], slot: Int[Tensor, " N"]
) -> Float[Tensor, "N H V"]:
    """Do the middle of `step` alone: unit query and key, gates and recurrence, on inputs that are convolved already.

    Args:
        inputs: One token a row; `mixed` after convolution and SiLU. The output gate is not read.
        weights: The layer's own; convolution and norm are not read.
        state: Memory by slot, updated in place.
        slot: Slot of each row, all different; 0 marks a padding row, which returns zeros and touches nothing.

    Returns:
        What each token read, in the format of `inputs.mixed`.
    """
    return _form(state, *inputs[:3]).recur(inputs, weights, state, slot)


def verify(
    inputs: Projected,
    weights: Weights,
    slots: Slots,
    slot: Int[Tensor, " N"],
    *,
    pending: Records | None = None,
    accepted: Int[Tensor, " N"] | None = None,
) -> tuple[Float[Tensor, "N W H V"], Records]:
    """Try W tokens of each row as `step` would one after the other, without writing any of them to the slot.

    The outputs are, bit for bit, those of W calls of `step`. Each state is read once. Rows with fewer tokens than W
    are padded at the end with anything: a token never reads a later one. Where W tokens outgrow a block's shared memory
    (from 41 with heads of 128, bf16 inputs and an fp32 state), torch operations run, with one warning.

    Args:
        inputs: W tokens a row, the newest accepted one and the drafts behind it.
        weights: The layer's own.
        slots: Memory; written only for `pending`.
        slot: Slot of each row, all different; 0 marks a padding row, whose outputs are zero.
        pending: Records of an earlier `verify` of the same rows that nobody has replayed: as `replay(pending,
            accepted, slots, slot)` before this call, in the same launch.
        accepted: How many of the first tokens of `pending` count, a row.

    Returns:
        What the output projection reads, and what `replay` needs to commit any first few of these tokens.

    Source: K3 report (arXiv 2607.24653) section 5.4.2; ReplaySSM.
    """
    _check("verify", inputs, weights, slots, slot, 2)
    if (pending is None) != (accepted is None):
        raise ValueError("kernels.kda.verify: `pending` and `accepted` belong together; found one; give both or none")
    count, before = inputs.mixed.shape[1], 0 if pending is None else pending.key.shape[1]
    form = _form(slots.state, *inputs, window=slots.window, tokens=count, pending=before)
    return form.verify(inputs, weights, slots, slot, pending, accepted)


def replay(records: Records, accepted: Int[Tensor, " N"], slots: Slots, slot: Int[Tensor, " N"]) -> None:
    """Write the first few tokens that a `verify` tried: state and window become those of that many calls of `step`.

    Args:
        records: What `verify` returned for these rows; it may be indexed by row.
        accepted: How many tokens of each row count, 0 to W.
        slots: Memory; the rows' slots are updated in place.
        slot: Slot of each row, all different; 0 marks a padding row.
    """
    form = _form(slots.state, records.mixed, window=slots.window, tokens=0, pending=records.key.shape[1])
    form.replay(records, accepted, slots, slot)


def _form(state: Tensor, *streams: Tensor, window: Tensor | None = None, tokens: int = 1, pending: int = 0) -> Any:
    """Choose the kernel on a GPU, the definition elsewhere and where `TRIAX_KERNELS=reference` asks for it."""
    if not state.is_cuda or mode() == "reference":
        return stepping
    from triax.kernels.kda import fused

    reason = fused.unsupported(state, *streams, window=window, tokens=tokens, pending=pending)
    if reason is None:
        return fused
    warnings.warn(f"kernels.kda.decode: no GPU kernel for {reason}; torch operations run instead", stacklevel=3)
    return stepping


def _check(name: str, inputs: Projected, weights: Weights, slots: Slots, slot: Tensor, rows: int) -> None:
    heads, channels, width = slots.state.shape[1:]
    mixed, taps = (2 * channels + width) * heads, weights.conv.shape[1]
    lead = inputs.mixed.shape[:rows]
    expected = {
        "inputs.mixed": (inputs.mixed, (*lead, mixed)),
        "inputs.decay": (inputs.decay, (*lead, heads, channels)),
        "inputs.beta": (inputs.beta, (*lead, heads)),
        "inputs.gate": (inputs.gate, (*lead, heads, width)),
        "weights.conv": (weights.conv, (mixed, taps)),
        "weights.decay_rate": (weights.decay_rate, (heads,)),
        "weights.decay_bias": (weights.decay_bias, (heads * channels,)),
        "weights.norm": (weights.norm, (width,)),
        "slots.window": (slots.window, (len(slots.state), taps - 1, mixed)),
        "slot": (slot, lead[:1]),
    }
    for field, (tensor, shape) in expected.items():
        if tensor.shape != shape:
            raise UnsupportedError(
                f"kernels.kda.{name}: `{field}` does not fit the state; found shape `{tuple(tensor.shape)}` beside a "
                f"state of shape `{tuple(slots.state.shape)}`; give it shape `{shape}`"
            )
