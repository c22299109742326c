"""Absorbed attention over paged latents on a GPU: pages are split, and the parts joined by their sums."""

from typing import no_type_check

import torch
import triton
import triton.language as tl
from jaxtyping import Float, Int
from torch import Tensor

from triax.errors import UnsupportedError
from triax.kernels import device

WIDEST = 1024
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
MOST_PARTS = 64
MOST_QUERIES = 65535  # programs along the third axis of a grid
LOG2_E = 1.4426950408889634
NOTHING = tl.constexpr(-1e30)
"""The largest logit of no latents: finite, so that differences are numbers."""


@triton.jit
@no_type_check
def attend(
    query, latent, table, seen, part, summary, scale, qn, qw, qh, pages, tn, sn, W, H, S,
    L: tl.constexpr, V: tl.constexpr, BV: tl.constexpr, BR: tl.constexpr, BH: tl.constexpr, PAGE: tl.constexpr,
    EXACT: tl.constexpr,
):  # fmt: skip
    """Average one part of a row's latents for BH heads; `summary` keeps the largest logit (base 2) and the sum."""
    split = tl.program_id(0)
    group = tl.program_id(1)
    row = tl.program_id(2).to(tl.int64)
    n = row // W
    w = row % W
    count = tl.load(seen + n * sn + w)
    tiles = (count + PAGE - 1) // PAGE
    each = (tiles + S - 1) // S
    first = split * each
    last = tl.minimum(first + each, tiles)
    head = group * BH + tl.arange(0, BH)
    on = (head < H)[:, None]
    c = tl.arange(0, BV)[None, :]
    r = tl.arange(0, BR)[None, :]
    place = tl.arange(0, PAGE)
    E: tl.constexpr = latent.dtype.element_ty
    PRECISION: tl.constexpr = "ieee" if EXACT else "tf32"
    at = query + n * qn + w * qw + head[:, None].to(tl.int64) * qh
    q = tl.load(at + c, mask=on & (c < V), other=0.0).to(E)
    if L > V:
        q_rest = tl.load(at + V + r, mask=on & (r < L - V), other=0.0).to(E)
    largest = tl.full((BH,), NOTHING, tl.float32)
    mass = tl.zeros((BH,), tl.float32)
    mean = tl.zeros((BH, BV), tl.float32)
    for tile in range(first, last):
        page = latent + tl.load(table + n * tn + tile).to(tl.int64) * pages
        inside = (tile * PAGE + place < count)[:, None]
        keys = tl.load(page + place[:, None] * L + c, mask=inside & (c < V), other=0.0)
        logit = tl.dot(q, tl.trans(keys), input_precision=PRECISION)
        if L > V:
            rest = tl.load(page + place[:, None] * L + V + r, mask=inside & (r < L - V), other=0.0)
            logit = tl.dot(q_rest, tl.trans(rest), logit, input_precision=PRECISION)
        logit = tl.where((tile * PAGE + place < count)[None, :], logit * scale, float("-inf"))
        top = tl.maximum(largest, tl.max(logit, axis=1))
        faded = tl.exp2(largest - top)
        share = tl.exp2(logit - top[:, None])
        mass = mass * faded + tl.sum(share, axis=1)
        mean = tl.dot(share.to(E), keys, mean * faded[:, None], input_precision=PRECISION)
        largest = top
    slot = (row * S + split) * H + head
    mean = mean / tl.where(mass > 0, mass, 1.0)[:, None]
    tl.store(part + slot[:, None] * V + c, mean, mask=on & (c < V))
    tl.store(summary + slot * 2, largest, mask=head < H)
    tl.store(summary + slot * 2 + 1, mass, mask=head < H)


@triton.jit
@no_type_check
def join(part, summary, read, H, S, V: tl.constexpr, BV: tl.constexpr, BS: tl.constexpr):
    """Weigh the parts of one query and head by their sums; without any latent the result is zero."""
    program = tl.program_id(0).to(tl.int64)
    row = program // H
    h = program % H
    s = tl.arange(0, BS)
    v = tl.program_id(1) * BV + tl.arange(0, BV)
    slot = (row * S + s) * H + h
    largest = tl.load(summary + slot * 2, mask=s < S, other=NOTHING)
    mass = tl.load(summary + slot * 2 + 1, mask=s < S, other=0.0)
    top = tl.max(largest, axis=0)
    weight = tl.where(mass > 0, mass * tl.exp2(largest - top), 0.0)
    total = tl.sum(weight, axis=0)
    weight = weight / tl.where(total > 0, total, 1.0)
    each = tl.load(part + slot[:, None] * V + v[None, :], mask=(s < S)[:, None] & (v < V)[None, :], other=0.0)
    tl.store(read + program * V + v, tl.sum(each * weight[:, None], axis=0), mask=v < V)


def unsupported(query: Tensor, latent: Tensor, value_dim: int) -> str | None:
    """Say what of these inputs the kernel cannot take, if anything."""
    if query.dtype not in DTYPES or latent.dtype not in DTYPES:
        return f"dtypes `{query.dtype}` and `{latent.dtype}`"
    if latent.shape[2] > WIDEST:
        return f"latents of `{latent.shape[2]}` numbers"
    if latent.shape[1] < 16 or latent.shape[1] & (latent.shape[1] - 1):
        return f"pages of `{latent.shape[1]}` tokens"
    if query.shape[0] * query.shape[1] > MOST_QUERIES:
        return f"`{query.shape[0] * query.shape[1]}` queries at once"
    return None


def splits(rows: int, pages: int, processors: int) -> int:
    """Return in how many parts to cut each row's pages, so that the last wave of programs is nearly full.

    Args:
        rows: Programs that a single part makes.
        pages: Most pages of a row.
        processors: Programs that run at once.
    """
    most = max(1, min(pages, MOST_PARTS, 4 * processors // max(rows, 1)))
    # A part costs its queries' load besides its pages: about a page and a half.
    return min(range(1, most + 1), key=lambda s: -(-rows * s // processors) * (pages / s + 1.5))


def decode(
    query: Float[Tensor, "N W H L"],
    latent: Float[Tensor, "pages page L"],
    table: Int[Tensor, "N P"],
    seen: Int[Tensor, "N W"],
    scale: float,
    value_dim: int,
) -> Float[Tensor, "N W H V"]:
    """See `triax.kernels.mla.decode`; products in the format of the latents.

    Raises:
        UnsupportedError: The kernel has no form for these dtypes, this width, this size of a page or so many queries.
    """
    reason = unsupported(query, latent, value_dim)
    if reason is not None:
        raise UnsupportedError(
            f"kernels.mla.split: no kernel for {reason}; dtypes are bf16, fp16 and fp32, latents at most {WIDEST} "
            f"wide, pages a power of two from 16, queries at most {MOST_QUERIES}; `triax.kernels.mla.decode` falls "
            "back by itself"
        )
    count, queries, heads, width = query.shape
    group = 16 if heads <= 16 else 32 if heads <= 32 else 64
    groups = -(-heads // group)
    parts = splits(count * queries * groups, table.shape[1], processors(query.device))
    query, table, seen = (_last_contiguous(x) for x in (query, table, seen))
    latent = latent if latent[:1].is_contiguous() else latent.contiguous()
    part, summary = workspace(query, parts, value_dim)
    rest = max(16, triton.next_power_of_2(max(width - value_dim, 1)))
    exact = latent.dtype is torch.float32
    device.launch(
        attend, (parts, groups, count * queries),
        query, latent, table, seen, part, summary, scale * LOG2_E, *query.stride()[:3], latent.stride(0),
        table.stride(0), seen.stride(0), queries, heads, parts,
        L=width, V=value_dim, BV=triton.next_power_of_2(value_dim), BR=rest, BH=group, PAGE=latent.shape[1],
        EXACT=exact, num_warps=4 if value_dim <= 128 else 8, num_stages=1 if exact else 2,
    )  # fmt: skip
    return joined(part, summary)


def processors(where: torch.device) -> int:
    """Return how many programs of this size run at once: one a multiprocessor."""
    return torch.cuda.get_device_properties(where).multi_processor_count if where.type == "cuda" else 4


def workspace(
    query: Tensor, parts: int, value_dim: int
) -> tuple[Float[Tensor, "N W S H V"], Float[Tensor, "R S H two"]]:
    """Return room for the averages of all parts, and for the largest logit and the sum of each."""
    rows, heads = query.shape[0] * query.shape[1], query.shape[2]
    part = torch.empty(rows, parts, heads, value_dim, device=query.device, dtype=torch.float32)
    return part.unflatten(0, query.shape[:2]), part.new_empty(rows, parts, heads, 2)


def joined(part: Float[Tensor, "N W S H V"], summary: Float[Tensor, "R S H two"]) -> Float[Tensor, "N W H V"]:
    """Weigh the parts by their sums."""
    count, queries, parts, heads, value_dim = part.shape
    read, block = part.new_empty(count, queries, heads, value_dim), 128
    device.launch(
        join, (count * queries * heads, -(-value_dim // block)), part, summary, read, heads, parts,
        V=value_dim, BV=block, BS=triton.next_power_of_2(parts), num_warps=4,
    )  # fmt: skip
    return read


def _last_contiguous(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()
