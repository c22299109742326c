"""Routed experts for few tokens on a GPU: every weight that is needed is read once, whichever tokens need it.

Pairs of token and expert are sorted by expert. A program takes one expert and a part of its rows or columns, and leads
all of the expert's tokens through it; programs that stand in the middle of an expert's run have nothing to do.
"""

from functools import lru_cache
from typing import Any, no_type_check

import torch
import triton
import triton.language as tl
from jaxtyping import Float, Int
from torch import Tensor

from triax.errors import UnsupportedError
from triax.kernels.device import launch, tanh
from triax.kernels.moe.activation import Activation

MOST_PAIRS = 2048  # beyond, products grouped by expert are quicker
ROWS = 16  # tokens of an expert at a time: the least that tensor cores take
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


@triton.jit
@no_type_check
def _sort(expert, pair, sorted_expert, P, PP: tl.constexpr, BLOCK: tl.constexpr):
    """Place each pair behind all pairs of smaller experts and earlier ones of its own."""
    own = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mine = tl.load(expert + own, mask=own < P, other=2147483647).to(tl.int32)
    place = tl.zeros((BLOCK,), tl.int32)
    for first in range(0, PP, 64):
        other = first + tl.arange(0, 64)
        theirs = tl.load(expert + other, mask=other < P, other=2147483647).to(tl.int32)
        is_before = (theirs[None, :] < mine[:, None]) | (
            (theirs[None, :] == mine[:, None]) & (other[None, :] < own[:, None])
        )
        place += tl.sum(is_before.to(tl.int32), 1)
    tl.store(pair + place, own, mask=own < P)
    tl.store(sorted_expert + place, mine, mask=own < P)


@triton.jit
@no_type_check
def _open(hidden, pair, sorted_expert, gate, up, inner, P, gate_cap, up_cap, L: tl.constexpr, F: tl.constexpr,
          K: tl.constexpr, RUN: tl.constexpr, ROWS: tl.constexpr, BF: tl.constexpr, BL: tl.constexpr,
          HAS_GATE_CAP: tl.constexpr, HAS_UP_CAP: tl.constexpr):  # fmt: skip
    """Write activation(x gate^T, x up^T) of each pair, in sorted order."""
    head = tl.program_id(0)
    expert = tl.load(sorted_expert + head)
    before = tl.load(sorted_expert + head - 1, mask=head > 0, other=-1)
    if before != expert:
        place = head + tl.arange(0, RUN)
        run = tl.load(sorted_expert + place, mask=place < P, other=-1) == expert
        count = tl.sum(run.to(tl.int32), 0)
        feature = tl.program_id(1) * BF + tl.arange(0, BF)
        base = expert.to(tl.int64) * F * L
        for first in range(0, count, ROWS):
            row = first + tl.arange(0, ROWS)
            token = tl.load(pair + head + row, mask=row < count, other=0) // K
            opening = tl.zeros((ROWS, BF), tl.float32)
            passing = tl.zeros((ROWS, BF), tl.float32)
            for column in range(0, L, BL):
                c = column + tl.arange(0, BL)
                inside = (feature[:, None] < F) & (c[None, :] < L)
                x = tl.load(
                    hidden + token[:, None].to(tl.int64) * L + c[None, :],
                    mask=(row[:, None] < count) & (c[None, :] < L), other=0.0,
                )  # fmt: skip
                offset = base + feature[:, None] * L + c[None, :]
                g = tl.load(gate + offset, mask=inside, other=0.0)
                u = tl.load(up + offset, mask=inside, other=0.0)
                opening = tl.dot(x, tl.trans(g), opening, input_precision="ieee")
                passing = tl.dot(x, tl.trans(u), passing, input_precision="ieee")
            # what the products return is rounded as everywhere else
            opening = opening.to(hidden.dtype.element_ty).to(tl.float32)
            passing = passing.to(hidden.dtype.element_ty).to(tl.float32)
            openness = 1.0 / (1.0 + tl.exp(-opening))
            if HAS_GATE_CAP:
                opening = gate_cap * tanh(opening / gate_cap, False)
            if HAS_UP_CAP:
                passing = up_cap * tanh(passing / up_cap, False)
            value = openness * opening * passing
            tl.store(
                inner + (head + row)[:, None].to(tl.int64) * F + feature[None, :],
                value.to(inner.dtype.element_ty),
                mask=(row[:, None] < count) & (feature[None, :] < F),
            )


@triton.jit
@no_type_check
def _close(inner, pair, sorted_expert, share, down, returned, P, L: tl.constexpr, F: tl.constexpr, RUN: tl.constexpr,
           ROWS: tl.constexpr, BD: tl.constexpr, BF: tl.constexpr):  # fmt: skip
    """Write share * (inner down^T) of each pair, in the order of the tokens."""
    head = tl.program_id(0)
    expert = tl.load(sorted_expert + head)
    before = tl.load(sorted_expert + head - 1, mask=head > 0, other=-1)
    if before != expert:
        place = head + tl.arange(0, RUN)
        run = tl.load(sorted_expert + place, mask=place < P, other=-1) == expert
        count = tl.sum(run.to(tl.int32), 0)
        channel = tl.program_id(1) * BD + tl.arange(0, BD)
        base = expert.to(tl.int64) * L * F
        for first in range(0, count, ROWS):
            row = first + tl.arange(0, ROWS)
            own = tl.load(pair + head + row, mask=row < count, other=0)
            total = tl.zeros((ROWS, BD), tl.float32)
            for column in range(0, F, BF):
                f = column + tl.arange(0, BF)
                x = tl.load(
                    inner + (head + row)[:, None].to(tl.int64) * F + f[None, :],
                    mask=(row[:, None] < count) & (f[None, :] < F), other=0.0,
                )  # fmt: skip
                w = tl.load(
                    down + base + channel[:, None] * F + f[None, :],
                    mask=(channel[:, None] < L) & (f[None, :] < F), other=0.0,
                )  # fmt: skip
                total = tl.dot(x, tl.trans(w), total, input_precision="ieee")
            weight = tl.load(share + own, mask=row < count, other=0.0).to(tl.float32)
            tl.store(
                returned + own[:, None].to(tl.int64) * L + channel[None, :],
                (total * weight[:, None]).to(returned.dtype.element_ty),
                mask=(row[:, None] < count) & (channel[None, :] < L),
            )


@triton.jit
@no_type_check
def _sum(returned, beside, output, L: tl.constexpr, K: tl.constexpr, BLOCK: tl.constexpr):
    """Add what a token's experts returned, in the order of its choice, and what stands beside them."""
    token = tl.program_id(0).to(tl.int64)
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    for choice in range(K):
        total += tl.load(returned + (token * K + choice) * L + channel, mask=channel < L, other=0.0)
    total = total.to(output.dtype.element_ty)
    if beside is not None:
        total += tl.load(beside + token * L + channel, mask=channel < L, other=0.0)
    tl.store(output + token * L + channel, total, mask=channel < L)


def unsupported(hidden: Tensor, expert: Tensor, gate: Tensor, activation: Activation) -> str | None:
    """Say what of these inputs the kernels cannot take, if anything."""
    if hidden.dtype not in DTYPES or gate.dtype is not hidden.dtype:
        return f"dtypes `{hidden.dtype}` and `{gate.dtype}`"
    if expert.numel() > MOST_PAIRS:
        return f"{expert.numel()} pairs"
    if not hasattr(activation, "gate_cap"):
        return "another activation than SiTU-GLU and SwiGLU"
    return None


def experts(
    hidden: Float[Tensor, "T L"],
    expert: Int[Tensor, "T k"],
    share: Float[Tensor, "T k"],
    gate: Float[Tensor, "E F L"],
    up: Float[Tensor, "E F L"],
    down: Float[Tensor, "E L F"],
    activation: Activation,
    beside: Float[Tensor, "T L"] | None = None,
) -> Float[Tensor, "T L"]:
    """Send each token through its experts, see `reference.experts`; no gradient.

    Args:
        hidden: What the experts read.
        expert: The experts of each token, each at most once.
        share: How much each of them counts.
        gate: Matrix of every expert that decides what passes; stacks of matrices with gaps between them are copied.
        up: Matrix of every expert that makes what may pass.
        down: Matrix of every expert that leads back.
        activation: How gate and up are joined.
        beside: Added to the result.

    Raises:
        UnsupportedError: The kernels cannot take these dtypes or so many tokens.
    """
    if reason := unsupported(hidden, expert, gate, activation):
        raise UnsupportedError(f"kernels.moe.streamed has no form for {reason}; use `kernels.moe.experts`")
    caps: Any = activation
    tokens, top_k = expert.shape
    pairs, (inner_dim, width) = tokens * top_k, gate.shape[1:]
    hidden, expert, share = hidden.contiguous(), expert.contiguous(), share.contiguous()
    gate, up, down = (weight.contiguous() for weight in (gate, up, down))
    beside = None if beside is None else beside.contiguous()
    if tokens == 1:  # each expert has one pair, in whatever order
        pair, sorted_expert = _count(top_k, hidden.device), expert.flatten()
    else:
        pair = torch.empty(pairs, dtype=torch.int32, device=hidden.device)
        sorted_expert = torch.empty_like(pair)
        padded = triton.next_power_of_2(max(pairs, 64))
        launch(_sort, (-(-pairs // 16),), expert, pair, sorted_expert, pairs, PP=padded, BLOCK=16, num_warps=1)
    run = triton.next_power_of_2(max(tokens, 2))
    inner = hidden.new_empty(pairs, inner_dim)
    features, columns = _tile(inner_dim, 32), _tile(width, 128)
    launch(
        _open, (pairs, -(-inner_dim // features)), hidden, pair, sorted_expert, gate, up, inner, pairs,
        caps.gate_cap or 0.0, caps.up_cap or 0.0, L=width, F=inner_dim, K=top_k, RUN=run, ROWS=ROWS, BF=features,
        BL=columns, HAS_GATE_CAP=caps.gate_cap is not None, HAS_UP_CAP=caps.up_cap is not None, num_warps=4,
        num_stages=4,
    )  # fmt: skip
    returned = torch.empty(pairs, width, dtype=torch.float32, device=hidden.device)
    channels, features = _tile(width, 64), _tile(inner_dim, 128)
    launch(
        _close, (pairs, -(-width // channels)), inner, pair, sorted_expert, share, down, returned, pairs,
        L=width, F=inner_dim, RUN=run, ROWS=ROWS, BD=channels, BF=features, num_warps=4, num_stages=4,
    )  # fmt: skip
    output = torch.empty_like(hidden)
    launch(_sum, (tokens, -(-width // 512)), returned, beside, output, L=width, K=top_k, BLOCK=512, num_warps=4)
    return output


@lru_cache(maxsize=8)
@torch.inference_mode(False)
def _count(most: int, device: torch.device) -> Tensor:
    return torch.arange(most, dtype=torch.int32, device=device)


def _tile(size: int, most: int) -> int:
    return max(16, min(most, 1 << (size - 1).bit_length()))
