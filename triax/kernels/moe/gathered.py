"""Routed experts for many tokens on a GPU when nothing is learnt: products grouped by expert, one pass after each.

Nothing between the products is kept or widened in memory: the activation reads what the first two return and writes the
input of the third, and the sum reads each token's rows where the third left them.
"""

from typing import Any, no_type_check

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from jaxtyping import Float, Int
from torch import Tensor

from triax.errors import UnsupportedError
from triax.kernels.device import glu, launch
from triax.kernels.moe.activation import Activation
from triax.kernels.moe.grouped import ALIGNED_BYTES, sort_by_expert

DTYPES = (torch.bfloat16, torch.float16, torch.float32)


@triton.jit
@no_type_check
def _between(opening, passing, share, pair, inner, F: tl.constexpr, BLOCK: tl.constexpr, GATE_CAP: tl.constexpr,
             UP_CAP: tl.constexpr):  # fmt: skip
    """Write share * activation(opening, passing) of each row."""
    row = tl.program_id(0).to(tl.int64)
    weight = tl.load(share + tl.load(pair + row)).to(tl.float32)
    for first in tl.static_range(0, F, BLOCK):
        column = first + tl.arange(0, BLOCK)
        gate = tl.load(opening + row * F + column, mask=column < F, other=0.0).to(tl.float32)
        up = tl.load(passing + row * F + column, mask=column < F, other=0.0).to(tl.float32)
        tl.store(inner + row * F + column, glu(gate, up, GATE_CAP, UP_CAP) * weight, mask=column < F)


@triton.jit
@no_type_check
def _behind(returned, rows, beside, output, L: tl.constexpr, K: tl.constexpr, BLOCK: tl.constexpr):
    """Add each token's rows in the order of its choice, and what stands beside them."""
    token = tl.program_id(0).to(tl.int64)
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    for choice in tl.static_range(K):
        row = tl.load(rows + token * K + choice)
        total += tl.load(returned + row * L + channel, mask=channel < L, other=0.0).to(tl.float32)
    total = total.to(output.dtype.element_ty)
    if beside is not None:
        total += tl.load(beside + token * L + channel, mask=channel < L, other=0.0)
    tl.store(output + token * L + channel, total, mask=channel < L)


def unsupported(hidden: Tensor, gate: Tensor, activation: Activation) -> str | None:
    """Say what of these inputs the kernels cannot take, if anything."""
    if hidden.dtype not in DTYPES or gate.dtype is not hidden.dtype:
        return f"dtypes `{hidden.dtype}` and `{gate.dtype}`"
    if any(side * gate.itemsize % ALIGNED_BYTES for side in gate.shape[1:]):
        return f"matrices of {gate.shape[1]} by {gate.shape[2]}"
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
        gate: Matrix of every expert that decides what passes.
        up: Matrix of every expert that makes what may pass.
        down: Matrix of every expert that leads back.
        activation: How gate and up are joined.
        beside: Added to the result.

    Raises:
        UnsupportedError: The kernels cannot take these dtypes, sizes or this activation.
    """
    if reason := unsupported(hidden, gate, activation):
        raise UnsupportedError(f"kernels.moe.gathered has no form for {reason}; use `kernels.moe.experts`")
    caps: Any = activation
    tokens, top_k = expert.shape
    inner_dim, width = gate.shape[1:]
    order = sort_by_expert(expert, len(gate))
    rows = hidden.index_select(0, order.token)
    opening = F.grouped_mm(rows, gate.transpose(1, 2), offs=order.ends)
    passing = F.grouped_mm(rows, up.transpose(1, 2), offs=order.ends)
    inner = torch.empty_like(opening)
    block = min(1024, 1 << (inner_dim - 1).bit_length())
    launch(
        _between, (len(rows),), opening, passing, share.contiguous(), order.pair, inner, F=inner_dim, BLOCK=block,
        GATE_CAP=caps.gate_cap, UP_CAP=caps.up_cap, num_warps=max(1, min(8, block // 256)),
    )  # fmt: skip
    returned = F.grouped_mm(inner, down.transpose(1, 2), offs=order.ends)
    output, beside = rows.new_empty(tokens, width), None if beside is None else beside.contiguous()
    block = min(1024, 1 << (width - 1).bit_length())
    launch(
        _behind, (tokens, -(-width // block)), returned, order.row, beside, output, L=width, K=top_k, BLOCK=block,
        num_warps=max(1, min(8, block // 256)),
    )  # fmt: skip
    return output
