"""Routed experts with MXFP4 weights for many tokens on a GPU: weights become numbers inside the products' kernels.

Pairs of token and expert are sorted by expert and cut into tiles; a program multiplies a tile by a part of its expert's
rows. The two codes of a byte belong to neighbouring inner places, so that the low codes of a row meet the even columns
of the tokens and the high ones the odd: tokens are parted into these before, and no code moves.
"""

from typing import Any, NamedTuple, no_type_check

import torch
import triton
import triton.language as tl
from jaxtyping import Float, Int
from torch import Tensor

from triax.errors import UnsupportedError
from triax.kernels.device import glu, launch
from triax.kernels.mx.mxfp4 import Mxfp4
from triax.kernels.mx.mxfp8 import rounded as rounded_to_mxfp8

DTYPES = (torch.bfloat16, torch.float32)
SHIFT = tl.constexpr(
    16
)  # bf16 weights are made 2^16 times too small, so that scales up to 2^17 have room; larger become infinite
MOST_PAIRS = 1 << 17  # worked on at once: what experts return is kept in fp32 until it is added up


class TiledLaunch(NamedTuple):
    """How the kernels are cut."""

    rows: int
    """Pairs of a tile."""
    features: int
    """Rows of a matrix that a program of the opening products takes."""
    channels: int
    """Rows of a matrix that a program of the closing products takes."""
    blocks: int
    """Scales of a row at a time."""
    warps: int
    stages: int


LARGE = TiledLaunch(128, 64, 128, 4, 8, 3)
SMALL = TiledLaunch(16, 16, 16, 1, 4, 1)  # what the interpreter takes in reasonable time


@triton.jit
@no_type_check
def _numbers(byte, scale, FAST: tl.constexpr):
    """Return the numbers of low and of high codes [N, blocks x 16]; bytes [N, blocks, 16], scales [N, blocks, 1]."""
    N: tl.constexpr = byte.shape[0]
    WIDE: tl.constexpr = byte.shape[1] * 16
    if FAST:
        factor = (
            ((tl.minimum(scale.to(tl.int32), 129 + SHIFT) + (126 - SHIFT)) << 7)
            .to(tl.int16)
            .to(tl.bfloat16, bitcast=True)
        )
        factor = tl.broadcast_to(factor, byte.shape)
        # four bytes: two to the lower ends of the halves of a word, then sign and three bits of a code to where they
        # are in a bf16 number 2^126 times too small
        low, high = tl.inline_asm_elementwise(
            """
            {
            .reg .b32 a, b;
            prmt.b32 a, $4, 0, 0x4140;
            prmt.b32 b, $4, 0, 0x4342;
            and.b32 $0, a, 0x000f000f;
            and.b32 $1, b, 0x000f000f;
            and.b32 $2, a, 0x00f000f0;
            and.b32 $3, b, 0x00f000f0;
            mul.lo.u32 $0, $0, 0x1040;
            mul.lo.u32 $1, $1, 0x1040;
            mul.lo.u32 $2, $2, 0x104;
            mul.lo.u32 $3, $3, 0x104;
            and.b32 $0, $0, 0x81c081c0;
            and.b32 $1, $1, 0x81c081c0;
            and.b32 $2, $2, 0x81c081c0;
            and.b32 $3, $3, 0x81c081c0;
            mul.rn.bf16x2 $0, $0, $5;
            mul.rn.bf16x2 $1, $1, $6;
            mul.rn.bf16x2 $2, $2, $5;
            mul.rn.bf16x2 $3, $3, $6;
            }
            """,
            "=&r,=&r,=&r,=&r,r,r,r", [byte, factor], dtype=(tl.bfloat16, tl.bfloat16), is_pure=True, pack=4,
        )  # fmt: skip
    else:
        factor = tl.exp2(scale.to(tl.float32) - 127.0)
        low, high = _number(byte & 15) * factor, _number(byte >> 4) * factor
    return tl.reshape(low, (N, WIDE)), tl.reshape(high, (N, WIDE))


@triton.jit
@no_type_check
def _number(code):
    size = (code & 7).to(tl.float32)
    number = tl.where(size < 4.0, size * 0.5, tl.where(size < 6.0, size - 2.0, 2.0 * size - 8.0))
    return tl.where(code >= 8, -number, number)


@triton.jit
@no_type_check
def _open(parted, pair, tile, gate, gate_scale, up, up_scale, inner, L: tl.constexpr, F: tl.constexpr,
          K: tl.constexpr, ROWS: tl.constexpr, BF: tl.constexpr, BLOCKS: tl.constexpr, GATE_CAP: tl.constexpr,
          UP_CAP: tl.constexpr, FAST: tl.constexpr):  # fmt: skip
    """Write activation(x gate^T, x up^T) of a tile's pairs; `parted` has even columns before odd ones."""
    item = tl.program_id(1)
    expert, first, count = tl.load(tile + item * 3), tl.load(tile + item * 3 + 1), tl.load(tile + item * 3 + 2)
    if count > 0:
        row, feature = tl.arange(0, ROWS), tl.program_id(0) * BF + tl.arange(0, BF)
        own = tl.load(pair + first + row, mask=row < count, other=0)
        base = (own // K).to(tl.int64) * L
        weight_row = expert.to(tl.int64) * F + feature
        block, byte = tl.arange(0, BLOCKS), tl.arange(0, 16)
        opening = tl.zeros((ROWS, BF), tl.float32)
        passing = tl.zeros((ROWS, BF), tl.float32)
        for at in range(0, L // 32, BLOCKS):
            column = at * 16 + tl.arange(0, BLOCKS * 16)
            inside = (row[:, None] < count) & (column[None, :] < L // 2)
            even = tl.load(parted + base[:, None] + column[None, :], mask=inside, other=0.0)
            odd = tl.load(parted + base[:, None] + (L // 2) + column[None, :], mask=inside, other=0.0)
            scale_at = weight_row[:, None] * (L // 32) + at + block[None, :]
            code_at = scale_at[:, :, None] * 16 + byte[None, None, :]
            known = (feature[:, None] < F) & (at + block[None, :] < L // 32)
            scale = tl.load(gate_scale + scale_at, mask=known, other=127)[:, :, None]
            low, high = _numbers(tl.load(gate + code_at, mask=known[:, :, None], other=0), scale, FAST)
            opening = tl.dot(even, tl.trans(low), opening, input_precision="ieee")
            opening = tl.dot(odd, tl.trans(high), opening, input_precision="ieee")
            scale = tl.load(up_scale + scale_at, mask=known, other=127)[:, :, None]
            low, high = _numbers(tl.load(up + code_at, mask=known[:, :, None], other=0), scale, FAST)
            passing = tl.dot(even, tl.trans(low), passing, input_precision="ieee")
            passing = tl.dot(odd, tl.trans(high), passing, input_precision="ieee")
        if FAST:
            opening *= 65536.0
            passing *= 65536.0
        value = glu(opening, passing, GATE_CAP, UP_CAP, FAST)
        to = inner + own[:, None].to(tl.int64) * F + feature[None, :]
        tl.store(to, value.to(inner.dtype.element_ty), mask=(row[:, None] < count) & (feature[None, :] < F))


@triton.jit
@no_type_check
def _close(parted, pair, tile, share, down, down_scale, returned, L: tl.constexpr, F: tl.constexpr,
           ROWS: tl.constexpr, BD: tl.constexpr, BLOCKS: tl.constexpr, FAST: tl.constexpr):  # fmt: skip
    """Write share * (inner down^T) of a tile's pairs, in the order of the tokens."""
    item = tl.program_id(1)
    expert, first, count = tl.load(tile + item * 3), tl.load(tile + item * 3 + 1), tl.load(tile + item * 3 + 2)
    if count > 0:
        row, channel = tl.arange(0, ROWS), tl.program_id(0) * BD + tl.arange(0, BD)
        own = tl.load(pair + first + row, mask=row < count, other=0).to(tl.int64)
        weight_row = expert.to(tl.int64) * L + channel
        block, byte = tl.arange(0, BLOCKS), tl.arange(0, 16)
        total = tl.zeros((ROWS, BD), tl.float32)
        for at in range(0, F // 32, BLOCKS):
            column = at * 16 + tl.arange(0, BLOCKS * 16)
            inside = (row[:, None] < count) & (column[None, :] < F // 2)
            even = tl.load(parted + own[:, None] * F + column[None, :], mask=inside, other=0.0)
            odd = tl.load(parted + own[:, None] * F + (F // 2) + column[None, :], mask=inside, other=0.0)
            scale_at = weight_row[:, None] * (F // 32) + at + block[None, :]
            code_at = scale_at[:, :, None] * 16 + byte[None, None, :]
            known = (channel[:, None] < L) & (at + block[None, :] < F // 32)
            scale = tl.load(down_scale + scale_at, mask=known, other=127)[:, :, None]
            low, high = _numbers(tl.load(down + code_at, mask=known[:, :, None], other=0), scale, FAST)
            total = tl.dot(even, tl.trans(low), total, input_precision="ieee")
            total = tl.dot(odd, tl.trans(high), total, input_precision="ieee")
        weight = tl.load(share + own, mask=row < count, other=0.0).to(tl.float32)
        if FAST:
            weight *= 65536.0
        to = returned + own[:, None] * L + channel[None, :]
        tl.store(to, total * weight[:, None], mask=(row[:, None] < count) & (channel[None, :] < L))


def unsupported(hidden: Tensor, gate: Mxfp4, up: Mxfp4, down: Mxfp4, activation: Any) -> str | None:
    """Say what of these inputs the kernels cannot take, if anything."""
    if hidden.dtype not in DTYPES:
        return f"dtype `{hidden.dtype}`"
    if not hasattr(activation, "gate_cap"):
        return "another activation than SiTU-GLU and SwiGLU"
    if not all(part.is_contiguous() for weight in (gate, up, down) for part in weight):
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
    """See `triax.kernels.mx.experts.experts`; no gradient.

    Raises:
        UnsupportedError: The kernels have no form for these inputs.
    """
    if reason := unsupported(hidden, gate, up, down, activation):
        raise UnsupportedError(
            f"kernels.mx.experts.tiled: no kernel for {reason}; it takes bf16 and fp32 tokens and packed weights; "
            "`triax.kernels.mx.experts` takes another form by itself"
        )
    output = torch.empty_like(hidden, memory_format=torch.contiguous_format)
    each = max(1, MOST_PAIRS // expert.shape[1])
    form = LARGE if hidden.is_cuda and hidden.dtype is torch.bfloat16 else SMALL
    for first in range(0, len(hidden), each):
        part = slice(first, first + each)
        _some(hidden[part], expert[part], share[part], gate, up, down, activation, output[part], form, rounded)
    return output


def _some(
    hidden: Tensor,
    expert: Tensor,
    share: Tensor,
    gate: Mxfp4,
    up: Mxfp4,
    down: Mxfp4,
    activation: Any,
    output: Tensor,
    form: TiledLaunch,
    rounded: bool,
) -> None:
    top_k, (number, inner_dim, _), width = expert.shape[1], gate.packed.shape, hidden.shape[1]
    pair, tile = tiles(expert, number, form.rows)
    prepare = rounded_to_mxfp8 if rounded else _as_it_is
    is_fast = hidden.is_cuda and hidden.dtype is torch.bfloat16
    sizes: dict[str, Any] = {"L": width, "F": inner_dim, "ROWS": form.rows, "BLOCKS": form.blocks, "FAST": is_fast}
    how: dict[str, Any] = {"num_warps": form.warps, "num_stages": form.stages}
    inner = hidden.new_empty(expert.numel(), inner_dim)
    launch(
        _open, (-(-inner_dim // form.features), len(tile)), _parted(prepare(hidden)), pair, tile, *gate, *up, inner,
        K=top_k, BF=form.features, GATE_CAP=activation.gate_cap, UP_CAP=activation.up_cap, **sizes, **how,
    )  # fmt: skip
    returned = torch.empty(expert.numel(), width, dtype=torch.float32, device=hidden.device)
    launch(
        _close, (-(-width // form.channels), len(tile)), _parted(prepare(inner)), pair, tile, share.contiguous(), *down,
        returned, BD=form.channels, **sizes, **how,
    )  # fmt: skip
    output.copy_(returned.unflatten(0, expert.shape).sum(1))


def tiles(expert: Int[Tensor, "T k"], num_experts: int, rows: int) -> tuple[Int[Tensor, " P"], Int[Tensor, "tiles 3"]]:
    """Sort pairs by expert; return them, and expert, first place and count of every tile, some of them empty.

    Args:
        expert: The experts of each token.
        num_experts: How many there are.
        rows: Pairs of a tile at most.
    """
    chosen, pair = expert.flatten().sort(stable=True)
    each = torch.arange(num_experts, device=pair.device, dtype=chosen.dtype)
    end = torch.searchsorted(chosen, each, right=True)
    count = end.diff(prepend=end.new_zeros(1))
    tile_end = ((count + rows - 1) // rows).cumsum(0)
    at = torch.arange(len(pair) // rows + min(num_experts, len(pair)), device=pair.device)
    owner = torch.searchsorted(tile_end, at, right=True).clamp_(max=num_experts - 1)
    inside = (at - tile_end[owner]) * rows + (count[owner] + rows - 1) // rows * rows
    first = end[owner] - count[owner] + inside
    return pair, torch.stack((owner, first, (end[owner] - first).clamp_(0, rows)), 1).int()


def _parted(rows: Tensor) -> Tensor:
    """Return each row with its even columns before its odd ones."""
    return rows.unflatten(1, (-1, 2)).transpose(1, 2).contiguous()


def _as_it_is(rows: Tensor) -> Tensor:
    return rows
