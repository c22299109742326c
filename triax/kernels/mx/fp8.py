"""FP8 with a scale for each block of 128 x 128: `weight` in E4M3 and `weight_scale_inv` in a released checkpoint.

A weight is its code times the scale of its block. The scale is amax / 448, so the largest of a block becomes the
largest code; where a block is zero it is 1. Codes of a release may follow another rule: keep their pair.

Source: DeepSeek-V3 (arXiv 2412.19437) section 3.3.
"""

import math
from functools import cache
from typing import NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Float, Shaped
from torch import Tensor

from triax.errors import CheckpointError
from triax.kernels.dispatch import mode
from triax.kernels.mx import reference, validate
from triax.kernels.mx.parallel_chunks import run_chunks
from triax.kernels.mx.reference import BLOCK, E4M3

__all__ = ["BLOCK", "Fp8", "dequantize", "quantize"]

LARGEST = E4M3[-1]
SMALLEST_SCALE = torch.finfo(torch.float32).tiny


class Fp8(NamedTuple):
    """The two tensors that stand for one weight."""

    weight: Float[Tensor, "R C"]
    """E4M3 codes: `weight`."""
    scale: Float[Tensor, "r c"]
    """What the codes of a block are multiplied by, f32: `weight_scale_inv`."""


def quantize(weight: Shaped[Tensor, "..."], *, name: str = "weight", threads: int | None = None) -> Fp8:
    """Round a weight to E4M3 under block scales, to nearest with ties to even.

    Args:
        weight: Matrix of finite numbers in bf16, fp16 or fp32; any strides; blocks at its edges may be cut off.
        name: What messages call it.
        threads: How many; none is as many as torch uses.

    Raises:
        CheckpointError: The weight cannot be held.
    """
    validate.source(weight, name, "fp8")
    _refuse_no_matrix(weight, name)
    weight = weight.detach()
    if mode() == "reference" and weight.numel():
        if not weight.isfinite().all():
            raise validate.not_finite(weight, name)
        code, scale = reference.quantize_fp8(weight.cpu())
        return Fp8(code.view(torch.float8_e4m3fn).to(weight.device), scale.to(weight.device))
    rows, columns = weight.shape
    scale = torch.ones(_blocks(weight), device=weight.device)
    code = torch.empty(rows, columns, dtype=torch.float8_e4m3fn, device=weight.device)

    def part(start: int, stop: int) -> None:
        for row in range(start // columns, stop // columns, BLOCK):
            strip = F.pad(weight[row : row + BLOCK].float(), (0, -columns % BLOCK)).unflatten(1, (-1, BLOCK))
            largest = strip.abs().amax((0, 2))
            stored = (largest / LARGEST).clamp_(min=SMALLEST_SCALE).masked_fill_(largest == 0, 1.0)
            # A scale that was rounded down may leave the largest quotient a little above the largest code.
            rounded = (strip / stored[:, None]).clamp_(-LARGEST, LARGEST).to(torch.float8_e4m3fn)
            code[row : row + BLOCK].copy_(rounded.flatten(1)[:, :columns])
            scale[row // BLOCK] = stored

    run_chunks(weight.numel(), part, threads, BLOCK * max(columns, 1))
    if not scale.isfinite().all():
        raise validate.not_finite(weight, name)
    return Fp8(code, scale)


def dequantize(
    weight: Shaped[Tensor, "..."],
    scale: Shaped[Tensor, "..."],
    dtype: torch.dtype = torch.bfloat16,
    *,
    name: str = "weight",
    threads: int | None = None,
) -> Float[Tensor, "R C"]:
    """Return code times scale, rounded once where `dtype` is bf16.

    Args:
        weight: Matrix of `float8_e4m3fn`.
        scale: f32, one number for each block of 128 x 128, those cut off at the edges included.
        dtype: bf16 or fp32.
        name: What messages call it.
        threads: How many; none is as many as torch uses.

    Raises:
        CheckpointError: The two do not fit each other, or a code, a scale or a product is not a finite number.
    """
    validate.target(dtype, name)
    _refuse_no_matrix(weight, name)
    validate.shape(name, "the weight", weight, tuple(weight.shape), torch.float8_e4m3fn)
    validate.shape(name, "the scale", scale, _blocks(weight), torch.float32)
    validate.scale(name, scale, lambda: _used(weight))
    code = weight.view(torch.uint8)
    out = torch.empty(weight.shape, dtype=dtype, device=weight.device)
    if mode() == "reference" and weight.numel():
        out.copy_(reference.dequantize_fp8(code.cpu(), scale.cpu()).view(weight.shape).float())
        _refuse_product(out, name)
        return out
    columns, values = weight.shape[1], _values(weight.device)

    def part(start: int, stop: int) -> None:
        for row in range(start // columns, stop // columns, BLOCK):
            strip = code[row : row + BLOCK]
            number = values.index_select(0, strip.reshape(-1).int()).view(strip.shape)
            number.mul_(scale[row // BLOCK].repeat_interleave(BLOCK)[:columns])
            target = out[row : row + BLOCK].copy_(number)
            ends = torch.stack(number.aminmax())  # not a number if one of them is not
            if not ends.to(dtype).isfinite().all():
                _refuse_product(target, name, row)

    run_chunks(weight.numel(), part, threads, BLOCK * max(columns, 1))
    return out


@cache
def _values(device: torch.device) -> Float[Tensor, "256"]:
    """Return the number of each code; a look-up is several times faster than torch's conversion on a CPU."""
    half = torch.tensor([*E4M3, math.nan])
    return torch.cat((half, -half)).to(device)


def _blocks(weight: Shaped[Tensor, "R C"]) -> tuple[int, ...]:
    return tuple(math.ceil(size / BLOCK) for size in weight.shape)


def _used(weight: Float[Tensor, "R C"]) -> Shaped[Tensor, "r c"]:
    """Return which blocks have a code that is not zero."""
    cells = ((weight.view(torch.uint8) & 127) != 0).nonzero() // BLOCK
    used = torch.zeros(_blocks(weight), dtype=torch.bool, device=weight.device)
    used[cells[:, 0], cells[:, 1]] = True
    return used


def _refuse_no_matrix(weight: Shaped[Tensor, "..."], name: str) -> None:
    if weight.dim() != 2:
        raise CheckpointError(
            f"{name}: fp8 blocks are parts of a matrix; found shape {list(weight.shape)}; take one matrix at a time"
        )


def _refuse_product(number: Float[Tensor, "R C"], name: str, row: int = 0) -> None:
    wrong = ~number.isfinite()
    if wrong.any():
        first, column = wrong.nonzero()[0].tolist()
        raise CheckpointError(
            f"{name}: a weight is not finite; found `{number[first, column].item()}` at [{row + first}, {column}] as "
            "code times scale; fetch the file again"
        )
