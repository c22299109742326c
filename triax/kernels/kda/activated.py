"""What a layer gives its recurrence, in one pass on a GPU: unit query and key, log decay and beta; no gradient."""

from typing import NamedTuple, no_type_check

import torch
import triton
import triton.language as tl
from jaxtyping import Float
from torch import Tensor

from triax.errors import UnsupportedError
from triax.kernels.device import launch
from triax.kernels.kda.slots import UNIT_EPS, Projected, Weights

TOKENS = 32  # of a program: with channels 128 wide, 4096 numbers of each stream
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


class Activated(NamedTuple):
    """Arguments of `kda` in its order; the value is the caller's own."""

    query: Float[Tensor, "T H K"]
    key: Float[Tensor, "T H K"]
    value: Float[Tensor, "T H V"]
    log_decay: Float[Tensor, "T H K"]
    beta: Float[Tensor, "T H"]


@triton.jit
@no_type_check
def _activate(
    mixed, raw, share, rate, bias, query, key, log_decay, beta, T, xt, rt, rh, bt, bh, eps, lowest,
    H: tl.constexpr, K: tl.constexpr, BT: tl.constexpr, BK: tl.constexpr, BOUNDED: tl.constexpr,
):  # fmt: skip
    """Write the four streams of BT tokens and one head."""
    h = tl.program_id(1)
    token = tl.program_id(0).to(tl.int64) * BT + tl.arange(0, BT)
    channel = tl.arange(0, BK)[None, :]
    t = token[:, None]
    inside = (t < T) & (channel < K)
    own = (t * H + h) * K + channel
    q = tl.load(mixed + t * xt + h * K + channel, mask=inside, other=0.0).to(tl.float32)
    unit = tl.rsqrt(tl.sum(q * q, 1) + eps) * tl.rsqrt(K + 0.0)
    tl.store(query + own, q * unit[:, None], mask=inside)
    k = tl.load(mixed + t * xt + (H + h) * K + channel, mask=inside, other=0.0).to(tl.float32)
    unit = tl.rsqrt(tl.sum(k * k, 1) + eps)
    tl.store(key + own, k * unit[:, None], mask=inside)
    z = tl.load(raw + t * rt + h * rh + channel, mask=inside, other=0.0).to(tl.float32)
    z += tl.load(bias + h * K + channel, mask=channel < K, other=0.0)
    slope = tl.exp(tl.load(rate + h))
    if BOUNDED:
        decay = lowest * tl.sigmoid(slope * z)
    else:
        e = tl.exp(-tl.abs(z))
        rest = tl.where(e < 0.01, e * (1.0 - e * (0.5 - e * (1.0 / 3.0))), tl.log(1.0 + e))
        decay = -slope * (tl.maximum(z, 0.0) + rest)
    tl.store(log_decay + own, decay, mask=inside)
    b = tl.load(share + token * bt + h * bh, mask=token < T, other=0.0).to(tl.float32)
    tl.store(beta + token * H + h, tl.sigmoid(b), mask=token < T)


def unsupported(inputs: Projected) -> str | None:
    """Say what of these inputs the kernel cannot take, if anything."""
    if any(part.dtype not in DTYPES for part in inputs[:3]):
        return f"dtypes {', '.join(sorted({f'`{part.dtype}`' for part in inputs[:3]}))}"
    if inputs.decay.shape[-1] > 1024:
        return f"heads of `{inputs.decay.shape[-1]}` channels"
    return None


def activate(inputs: Projected, weights: Weights) -> Activated:
    """Return what `kda` takes; the query comes scaled by K^-1/2, log decay and beta in fp32.

    Args:
        inputs: What the projections returned; `mixed` after convolution and SiLU. The output gate is not read.
        weights: The layer's own; convolution and norm are not read.

    Raises:
        UnsupportedError: The kernel has no form for these dtypes or this head size.
    """
    if reason := unsupported(inputs):
        raise UnsupportedError(f"kernels.kda.activated: no kernel for {reason}; use bf16, fp16 or fp32 and small heads")
    tokens, heads, channels = inputs.decay.shape
    mixed, decay, beta = (part if part.stride(-1) == 1 else part.contiguous() for part in inputs[:3])
    query, key = (mixed.new_empty(tokens, heads, channels) for _ in range(2))
    log_decay = mixed.new_empty(tokens, heads, channels, dtype=torch.float32)
    share = mixed.new_empty(tokens, heads, dtype=torch.float32)
    lowest = weights.lowest_log_decay
    launch(
        _activate, (-(-tokens // TOKENS), heads),
        mixed, decay, beta, weights.decay_rate, weights.decay_bias, query, key, log_decay, share, tokens,
        mixed.stride(0), *decay.stride()[:2], *beta.stride(), UNIT_EPS, 0.0 if lowest is None else lowest,
        H=heads, K=channels, BT=TOKENS, BK=triton.next_power_of_2(channels), BOUNDED=lowest is not None, num_warps=8,
    )  # fmt: skip
    value = mixed[:, 2 * heads * channels :].unflatten(-1, (heads, -1))
    return Activated(query, key, value, log_decay, share)
