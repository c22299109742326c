"""Decoding over state slots in torch operations: the definition that the fused kernels are held to.

One token is one fixed sequence of operations on its own row, so that trying tokens and writing them later gives the
very bits of writing them at once, whatever else is in the batch.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from triax.kernels.kda.reference import state_dtype
from triax.kernels.kda.slots import UNIT_EPS, Projected, Records, Slots, Weights


class _Activated(NamedTuple):
    query: Tensor
    key: Tensor
    value: Tensor
    decay: Tensor
    beta: Tensor


def step(inputs: Projected, weights: Weights, slots: Slots, slot: Int[Tensor, " N"]) -> Float[Tensor, "N H V"]:
    """See `decode.step`."""
    dtype = state_dtype(*inputs, slots.state)
    window = _seen(slots, slot, inputs.mixed)
    mixed = torch.cat([window, inputs.mixed[:, None]], 1)
    x = _activated(inputs, _convolved(mixed, weights.conv, dtype), weights, dtype)
    read, _, state = _written(slots.state[slot].to(dtype), x)
    live = slot > 0
    _store(slots, slot, live, state, mixed[:, 1:])
    return _gated(read, inputs.gate, weights, live)


def recur(
    inputs: Projected, weights: Weights, state: Float[Tensor, "S H K V"], slot: Int[Tensor, " N"]
) -> Float[Tensor, "N H V"]:
    """See `decode.recur`."""
    dtype = state_dtype(*inputs, state)
    read, _, after = _written(state[slot].to(dtype), _activated(inputs, inputs.mixed.to(dtype), weights, dtype))
    live = slot > 0
    state[slot] = torch.where(live[:, None, None, None], after.to(state.dtype), state[slot])
    return read.masked_fill(~live[:, None, None], 0).to(inputs.mixed.dtype)


def verify(
    inputs: Projected,
    weights: Weights,
    slots: Slots,
    slot: Int[Tensor, " N"],
    pending: Records | None,
    accepted: Int[Tensor, " N"] | None,
) -> tuple[Float[Tensor, "N W H V"], Records]:
    """See `decode.verify`."""
    if pending is not None:
        assert accepted is not None
        replay(pending, accepted, slots, slot)
    dtype = state_dtype(*inputs, slots.state)
    live, count, taps = slot > 0, inputs.mixed.shape[1], weights.conv.shape[1]
    seen = torch.cat([_seen(slots, slot, inputs.mixed), inputs.mixed], 1)
    state = slots.state[slot].to(dtype)
    reads, kept = [], []
    for t in range(count):
        own = Projected(*(part[:, t] for part in inputs))
        x = _activated(own, _convolved(seen[:, t : t + taps], weights.conv, dtype), weights, dtype)
        read, update, state = _written(state, x)
        state = state.to(slots.state.dtype).to(dtype)
        reads.append(_gated(read, own.gate, weights, live))
        kept.append((x.key, update, x.decay))
    return torch.stack(reads, 1), Records(inputs.mixed, *(torch.stack(part, 1) for part in zip(*kept, strict=True)))


def replay(records: Records, accepted: Int[Tensor, " N"], slots: Slots, slot: Int[Tensor, " N"]) -> None:
    """See `decode.replay`."""
    past = slots.window.shape[1]
    state = slots.state[slot].to(records.key.dtype)
    for t in range(records.key.shape[1]):
        after = _decayed_and_added(state, records.decay[:, t], records.key[:, t], records.update[:, t])
        after = after.to(slots.state.dtype).to(after.dtype)
        state = torch.where((accepted > t)[:, None, None, None], after, state)
    seen = torch.cat([slots.window[slot].to(records.mixed.dtype), records.mixed], 1)
    place = accepted[:, None] + torch.arange(past, device=accepted.device)
    window = seen.gather(1, place[:, :, None].expand(-1, -1, seen.shape[2]))
    _store(slots, slot, (slot > 0) & (accepted > 0), state, window)


def _seen(slots: Slots, slot: Tensor, mixed: Tensor) -> Tensor:
    return slots.window[slot].to(mixed.dtype).masked_fill((slot == 0)[:, None, None], 0)


def _store(slots: Slots, slot: Tensor, live: Tensor, state: Tensor, window: Tensor) -> None:
    """Write the live rows; the others write what is there already, since a graph on a GPU knows no fewer rows."""
    own = live[:, None, None]
    slots.state[slot] = torch.where(own[..., None], state.to(slots.state.dtype), slots.state[slot])
    slots.window[slot] = torch.where(own, window.to(slots.window.dtype), slots.window[slot])


def _convolved(seen: Tensor, conv: Tensor, dtype: torch.dtype) -> Tensor:
    return F.silu((seen.to(dtype) * conv.T.to(dtype)).sum(1))


def _activated(inputs: Projected, mixed: Tensor, weights: Weights, dtype: torch.dtype) -> _Activated:
    heads, channels = inputs.decay.shape[-2:]
    query, key, value = mixed.split([heads * channels, heads * channels, mixed.shape[-1] - 2 * heads * channels], -1)
    query, key, value = (part.unflatten(-1, (heads, -1)) for part in (query, key, value))
    z = inputs.decay.to(dtype) + weights.decay_bias.to(dtype).view(heads, channels)
    rate = weights.decay_rate.to(dtype).exp()[:, None]
    if weights.lowest_log_decay is None:
        log_decay = -rate * F.softplus(z, threshold=60)
    else:
        log_decay = weights.lowest_log_decay * (rate * z).sigmoid()
    return _Activated(
        query * (query.square().sum(-1, keepdim=True) + UNIT_EPS).rsqrt() * channels**-0.5,
        key * (key.square().sum(-1, keepdim=True) + UNIT_EPS).rsqrt(),
        value,
        log_decay.exp(),
        inputs.beta.to(dtype).sigmoid(),
    )


def _written(state: Tensor, x: _Activated) -> tuple[Tensor, Tensor, Tensor]:
    """Return what the token reads, what it writes at its key, and the state after it."""
    kept = state * x.decay[..., None]
    update = x.beta[..., None] * (x.value - (kept * x.key[..., None]).sum(-2))
    after = _decayed_and_added(state, x.decay, x.key, update)
    return (after * x.query[..., None]).sum(-2), update, after


def _decayed_and_added(state: Tensor, decay: Tensor, key: Tensor, update: Tensor) -> Tensor:
    return torch.addcmul(state * decay[..., None], key[..., None], update[..., None, :])


def _gated(read: Tensor, gate: Tensor, weights: Weights, live: Tensor) -> Tensor:
    unit = read * (read.square().mean(-1, keepdim=True) + weights.norm_eps).rsqrt()
    gated = unit * weights.norm.to(read.dtype) * gate.to(read.dtype).sigmoid()
    return gated.masked_fill(~live[:, None, None], 0).to(gate.dtype)
