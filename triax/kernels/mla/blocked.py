"""Attention in blocks of queries over the flat stream.

Each block reads only the keys between the first token of its first sequence and its own last token, so packing costs
no mask of the whole stream and no loop over sequences.
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

BLOCK = 128  # queries at a time


def attend(
    query: Float[Tensor, "T H K"],
    key: Float[Tensor, "S H K"],
    value: Float[Tensor, "S H V"],
    query_starts: Sequence[int],
    key_starts: Sequence[int],
    scale: float,
) -> tuple[Float[Tensor, "T H V"], Float[Tensor, " H"]]:
    """Attend within each sequence, in fp32 throughout; see `reference.attend`."""
    wide = torch.promote_types(query.dtype, torch.float32)
    with torch.autocast(query.device.type, enabled=False):
        return _Attend.apply(
            query.to(wide),
            key.to(wide),
            value.to(wide),
            _plan(tuple(query_starts), tuple(key_starts), str(query.device)),
            scale,
        )


class _Plan(NamedTuple):
    blocks: list[tuple[slice, slice]]
    """Queries of each block, and the keys that any of them sees."""
    partial: dict[int, list[slice]]
    """For the first query of each block, the keys among them that not all of its queries see: at most two ranges."""
    first: Tensor
    """First key that each query sees."""
    last: Tensor
    """Last key that each query sees."""


@lru_cache(maxsize=4)  # every layer of a forward asks for the same one
@torch.inference_mode(False)  # what is kept here may be needed in training later
def _plan(query_starts: tuple[int, ...], key_starts: tuple[int, ...], device: str) -> _Plan:
    length = query_starts[-1]
    counts = torch.tensor(query_starts).diff()
    ahead = torch.tensor(key_starts[1:]) - torch.tensor(query_starts[1:])  # a key's place minus its query's
    first = torch.tensor(key_starts[:-1]).repeat_interleave(counts)
    last = torch.arange(length) + ahead.repeat_interleave(counts)
    blocks = [slice(start, min(start + BLOCK, length)) for start in range(0, length, BLOCK)]
    spans, partial = [], {}
    for rows in blocks:
        begin, end = int(first[rows.start]), int(last[rows.stop - 1]) + 1
        low = int(first[rows.stop - 1])  # from here to the last key of the first query, all queries see all keys
        high = max(low, int(last[rows.start]) + 1)
        spans.append((rows, slice(begin, end)))
        partial[rows.start] = [some for some in (slice(begin, low), slice(high, end)) if some.start < some.stop]
    return _Plan(spans, partial, first.to(device)[:, None], last.to(device)[:, None])


class _Attend(torch.autograd.Function):
    """Keeps inputs, result and one scalar a query and head; recomputes the logits of a block in the backward."""

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, plan: _Plan, scale: float
    ) -> tuple[Tensor, Tensor]:
        query, key, value = (x.transpose(0, 1).contiguous() for x in (query * scale, key, value))
        read = value.new_zeros(*query.shape[:2], value.shape[2])
        log_sum = query.new_zeros(query.shape[:2])
        largest = query.new_full((len(query),), -torch.inf)
        for rows, keys in plan.blocks:
            logit = _logits(query, key, plan, rows, keys)
            top = logit.amax(-1, keepdim=True)
            largest = torch.maximum(largest, top.amax((1, 2)))
            share = logit.sub_(top).exp_()
            total = share.sum(-1, keepdim=True)
            read[:, rows] = (share @ value[:, keys]).div_(total)
            log_sum[:, rows] = total.log_().add_(top).squeeze(-1)
        ctx.save_for_backward(query, key, value, read, log_sum)
        ctx.plan, ctx.scale = plan, scale
        ctx.mark_non_differentiable(largest)
        return read.transpose(0, 1), largest

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, read, log_sum = ctx.saved_tensors
        d_query, d_key, d_value = torch.zeros_like(query), torch.zeros_like(key), torch.zeros_like(value)
        with torch.autocast(grad.device.type, enabled=False):
            grad = grad.transpose(0, 1).contiguous()
            mean = (grad * read).sum(-1, keepdim=True)
            for rows, keys in ctx.plan.blocks:
                share = _logits(query, key, ctx.plan, rows, keys).sub_(log_sum[:, rows, None]).exp_()
                d_value[:, keys] += share.transpose(1, 2) @ grad[:, rows]
                d_logit = (grad[:, rows] @ value[:, keys].transpose(1, 2)).sub_(mean[:, rows]).mul_(share)
                d_query[:, rows] = d_logit @ key[:, keys]
                d_key[:, keys] += d_logit.transpose(1, 2) @ query[:, rows]
        d_query *= ctx.scale
        return d_query.transpose(0, 1), d_key.transpose(0, 1), d_value.transpose(0, 1), None, None


def _logits(query: Tensor, key: Tensor, plan: _Plan, rows: slice, keys: slice) -> Tensor:
    logit = query[:, rows] @ key[:, keys].transpose(1, 2)
    first, last = plan.first[rows], plan.last[rows]
    for some in plan.partial[rows.start]:
        place = torch.arange(some.start, some.stop, device=logit.device)
        part = logit[:, :, some.start - keys.start : some.stop - keys.start]
        part.masked_fill_((place < first) | (place > last), -torch.inf)
    return logit
