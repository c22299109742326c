"""The mix with memory for one [T, D] result: sources are read in place, never stacked and never copied as a whole."""

from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from triax.kernels.attention_residual import reference

BLOCK_VALUES = 2**20  # numbers of one source that are widened at a time: the temporary stays in cache


def mix(
    sources: Sequence[Float[Tensor, "T D"]], norm: Float[Tensor, " D"], query: Float[Tensor, " D"], eps: float
) -> tuple[Float[Tensor, "T D"], Float[Tensor, "T J"]]:
    """Average the sources as `reference.mix` does; the weights carry no gradient."""
    if not torch.is_grad_enabled() and len(sources) * sources[0].numel() <= BLOCK_VALUES:
        return reference.mix(sources, norm, query, eps)  # a few tokens: one stacked pass costs fewer calls
    probe = _wide(norm) * _wide(query)
    return _Mix.apply(probe, eps, *sources)


class _Mix(torch.autograd.Function):
    """Keeps references to the sources, and three scalars a token and source."""

    @staticmethod
    def forward(ctx: Any, probe: Tensor, eps: float, *sources: Tensor) -> tuple[Tensor, Tensor]:
        length, width = sources[0].shape
        wide = torch.promote_types(probe.dtype, sources[0].dtype)
        vector = probe.to(wide)
        score = torch.zeros(length, len(sources), dtype=wide, device=probe.device)
        scale, weight = torch.zeros_like(score), torch.zeros_like(score)
        mixed = torch.zeros(length, width, dtype=sources[-1].dtype, device=probe.device)
        for rows in _blocks(length, width):
            for j, source in enumerate(sources):
                part = source[rows].to(wide)
                scale[rows, j] = part.square().mean(-1).add_(eps).rsqrt_()
                score[rows, j] = (part * vector).sum(-1)
            score[rows] *= scale[rows]
            weight[rows] = score[rows].softmax(-1)
            total = sources[0][rows].to(wide) * weight[rows, :1]
            for j, source in enumerate(sources[1:], start=1):
                total.addcmul_(source[rows].to(wide), weight[rows, j : j + 1])
            mixed[rows] = total
        ctx.save_for_backward(probe, score, scale, weight, *sources)
        ctx.mark_non_differentiable(weight)
        return mixed, weight

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        probe, score, scale, weight, *sources = ctx.saved_tensors
        wide, (length, width) = score.dtype, grad.shape
        vector = probe.to(wide)
        d_probe = torch.zeros_like(vector)
        d_sources = [
            torch.zeros_like(source) if want else None
            for source, want in zip(sources, ctx.needs_input_grad[2:], strict=True)
        ]
        for rows in _blocks(length, width):
            out = grad[rows].to(wide)
            d_weight = torch.stack([(out * source[rows].to(wide)).sum(-1) for source in sources], dim=-1)
            d_score = weight[rows] * (d_weight - (weight[rows] * d_weight).sum(-1, keepdim=True))
            toward = d_score * scale[rows]
            along = toward * score[rows] * scale[rows] / -width
            for j, (source, d_source) in enumerate(zip(sources, d_sources, strict=True)):
                part, column = source[rows].to(wide), slice(j, j + 1)
                d_probe += (part * toward[:, column]).sum(0)
                if d_source is not None:
                    total = out * weight[rows, column]
                    d_source[rows] = total.addcmul_(toward[:, column], vector).addcmul_(part, along[:, column])
        return d_probe.to(probe.dtype), None, *d_sources


def _blocks(length: int, width: int) -> list[slice]:
    step = max(1, BLOCK_VALUES // width)
    return [slice(first, min(first + step, length)) for first in range(0, length, step)]


def _wide(tensor: Tensor) -> Tensor:
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))
