"""INT4 with a bf16 scale for 32 weights: `pack-quantized` in a released checkpoint.

A weight is its integer of -8 to 7 times the scale of its group. The scale is amax / 7 rounded to bf16, and 1 where a
group is zero. Codes of a release may follow another rule: keep their pair.

Source: Kimi K2 Thinking and K2.5 model cards (INT4 weights, group 32, symmetric).
"""

from functools import cache
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor

from triax.errors import CheckpointError
from triax.kernels.dispatch import mode
from triax.kernels.mx import reference, validate
from triax.kernels.mx.parallel_chunks import pieces, run_chunks
from triax.kernels.mx.reference import GROUP

__all__ = ["GROUP", "Int4", "dequantize", "quantize"]

WORD = 8  # codes in a word of 32 bits
ZERO = 8  # what the integer 0 is stored as
LARGEST = 7
INTEGER = 1.5 * 2.0**23  # a small fp32 number plus this is rounded to an integer, which stands in the lowest bits
SMALLEST_SCALE = torch.finfo(torch.bfloat16).tiny


class Int4(NamedTuple):
    """The three tensors that stand for one weight."""

    packed: Int[Tensor, "R words"]
    """Eight codes a word, the first in the lowest bits: `weight_packed`."""
    scale: Float[Tensor, "R groups"]
    """What the integers of a group are multiplied by, bf16: `weight_scale`."""
    shape: Int[Tensor, "2"]
    """Rows and columns of the weight: `weight_shape`."""


def quantize(weight: Shaped[Tensor, "..."], *, name: str = "weight", threads: int | None = None) -> Int4:
    """Round a weight to integers under group scales, to nearest with ties to even.

    Args:
        weight: Matrix of finite numbers in bf16, fp16 or fp32, with a multiple of 32 columns; any strides.
        name: What messages call it.
        threads: How many; none is as many as torch uses.

    Raises:
        CheckpointError: The weight cannot be held.
    """
    validate.source(weight, name, "int4")
    if weight.dim() != 2 or weight.shape[1] % GROUP:
        raise CheckpointError(
            f"{name}: no matrix whose rows split into groups of {GROUP}; found shape {list(weight.shape)}; "
            "keep it in bf16"
        )
    weight = weight.detach()
    rows, columns = weight.shape
    shape = torch.tensor([rows, columns], dtype=torch.int32)
    if mode() == "reference" and weight.numel():
        if not weight.isfinite().all():
            raise validate.not_finite(weight, name)
        packed, scale = reference.quantize_int4(weight.cpu())
        return Int4(packed.to(weight.device), scale.to(weight.device), shape)
    groups = weight.reshape(-1, GROUP)
    packed = torch.empty(len(groups), GROUP // 2, dtype=torch.uint8, device=weight.device)
    largest = torch.empty(len(groups), device=weight.device)

    def measure(start: int, stop: int) -> None:
        for part in pieces(start, stop, GROUP):
            largest[part] = groups[part].float().abs().amax(1)

    run_chunks(weight.numel(), measure, threads)
    if not largest.isfinite().all():
        raise validate.not_finite(weight, name)
    scale = (largest / LARGEST).bfloat16().clamp_(min=SMALLEST_SCALE).masked_fill_(largest == 0, 1.0)

    def write(start: int, stop: int) -> None:
        for part in pieces(start, stop, GROUP):
            number = (groups[part].float() / scale[part, None].float()).add_(INTEGER + ZERO)
            two = number.view(torch.int32).to(torch.uint8).view(torch.int16)
            packed[part] = (two | two >> 4).to(torch.uint8)

    run_chunks(weight.numel(), write, threads)
    return Int4(packed.view(torch.int32).view(rows, columns // WORD), scale.view(rows, columns // GROUP), shape)


def dequantize(
    packed: Shaped[Tensor, "..."],
    scale: Shaped[Tensor, "..."],
    shape: Shaped[Tensor, "..."] | None = None,
    dtype: torch.dtype = torch.bfloat16,
    *,
    name: str = "weight",
    threads: int | None = None,
) -> Float[Tensor, "R C"]:
    """Return integer times scale, rounded once where `dtype` is bf16.

    Args:
        packed: Eight codes a word.
        scale: bf16, one number for 32 columns of a row.
        shape: `weight_shape`, held against the other two if given.
        dtype: bf16 or fp32.
        name: What messages call it.
        threads: How many; none is as many as torch uses.

    Raises:
        CheckpointError: The tensors do not fit each other, or a scale or a product is not a finite number.
    """
    validate.target(dtype, name)
    if packed.dim() != 2 or packed.dtype != torch.int32 or packed.shape[1] * WORD % GROUP:
        raise CheckpointError(
            f"{name}: packed weights are a matrix of `torch.int32` with a multiple of {GROUP // WORD} words in a row; "
            f"found `{packed.dtype}` of {list(packed.shape)}; name a tensor that ends in weight_packed"
        )
    rows, columns = packed.shape[0], packed.shape[1] * WORD
    validate.shape(name, "the scale", scale, (rows, columns // GROUP), torch.bfloat16)
    if shape is not None and shape.tolist() != [rows, columns]:
        raise CheckpointError(
            f"{name}: weight_shape says {shape.tolist()}; found packed weights of {[rows, columns]}; "
            "take all three tensors from the same checkpoint"
        )
    validate.scale(name, scale, lambda: _used(packed))
    out = torch.empty(rows, columns, dtype=dtype, device=packed.device)
    if mode() == "reference" and packed.numel():
        out.copy_(reference.dequantize_int4(packed.cpu(), scale.cpu()).float())
    else:
        pairs, scales = packed.reshape(-1, GROUP // WORD).view(torch.uint8), scale.reshape(-1).float()
        target = out.view(-1, GROUP)
        ready = _pairs(packed.device)

        def read(start: int, stop: int) -> None:
            for part in pieces(start, stop, GROUP):
                words = ready.index_select(0, pairs[part].reshape(-1).int())
                target[part] = words.view(torch.float32).view(-1, GROUP).mul_(scales[part, None])

        run_chunks(out.numel(), read, threads)
    # The largest integer is -8; a look at every weight is needed only if it may have become infinite.
    if scale.numel() and (scale.float().max() * 8).to(dtype).isinf() and not out.isfinite().all():
        raise validate.not_finite(out, name)
    return out


@cache
def _pairs(device: torch.device) -> Int[Tensor, "256"]:
    """Return both integers of each byte as fp32, in one word of 64 bits."""
    number = torch.arange(16.0) - ZERO
    both = torch.stack((number.repeat(16), number.repeat_interleave(16)), dim=1)
    return both.view(torch.int64).flatten().to(device)


def _used(packed: Int[Tensor, "R words"]) -> Bool[Tensor, "R groups"]:
    """Return which groups have an integer that is not zero."""
    nothing = 0x88888888 - (1 << 32)  # eight times ZERO
    return (packed.unflatten(1, (-1, GROUP // WORD)) != nothing).any(-1)
