"""MXFP4: four bits a weight and one power of two for 32 of them, `mxfp4-pack-quantized` in a released checkpoint.

Four bits are a sign and one of 0, 0.5, 1, 1.5, 2, 3, 4, 6. The scale is 2^(floor(log2 amax) - 2), so the largest of a
block lands in [4, 8) and what is above 6 becomes 6. Whoever quantises what came out of this module gets the same bytes.
Codes of a release may follow another rule: keep their pair, and nothing changes.

Source: OCP Microscaling Formats v1.0 section 6.3; K3 report (arXiv 2607.24653) on MXFP4 weights.
"""

from typing import NamedTuple

import torch
from jaxtyping import Float, Shaped, UInt8
from torch import Tensor

from triax.errors import CheckpointError
from triax.kernels.dispatch import mode
from triax.kernels.mx import mxfp4_decode, mxfp4_encode, reference, validate
from triax.kernels.mx.reference import BIAS, E2M1, GROUP, UNIT_SCALE

__all__ = ["GROUP", "UNIT_SCALE", "Mxfp4", "check_scale", "dequantize", "is_blank", "quantize"]

NOT_A_NUMBER = 255
FIRST_TOO_LARGE = 253  # from this scale on a code can be too large for bf16 and fp32


class Mxfp4(NamedTuple):
    """The two tensors that stand for one weight."""

    packed: UInt8[Tensor, "*rows half"]
    """Two codes a byte, the first in the low four bits: `weight_packed`."""
    scale: UInt8[Tensor, "*rows blocks"]
    """Exponent of each 32 weights plus 127: `weight_scale`."""


def quantize(weight: Shaped[Tensor, "..."], *, name: str = "weight", threads: int | None = None) -> Mxfp4:
    """Round a weight to MXFP4, to nearest with ties to even; the sign of a zero is kept.

    The scale of a block whose codes are all zero is 1 (code 127): a scale tensor full of zeros is then always a fault.

    Args:
        weight: Finite numbers in bf16, fp16 or fp32, with a multiple of 32 in a row; any strides.
        name: What messages call it.
        threads: How many; none is as many as torch uses.

    Raises:
        CheckpointError: The weight cannot be held.
    """
    validate.source(weight, name, "mxfp4")
    if weight.dim() < 1 or weight.shape[-1] % GROUP:
        raise CheckpointError(
            f"{name}: a row does not split into blocks of {GROUP}; found shape {list(weight.shape)}; keep it in bf16"
        )
    weight = weight.detach()
    whole = weight.float() if weight.dtype == torch.float16 else weight
    half, blocks = ((*weight.shape[:-1], weight.shape[-1] // size) for size in (2, GROUP))
    if not weight.numel():
        return Mxfp4(*(torch.empty(shape, dtype=torch.uint8, device=weight.device) for shape in (half, blocks)))
    flat = whole.reshape(-1)
    if mode() == "reference":
        _refuse_not_finite(weight, name)
        packed, scale = reference.quantize_mxfp4(whole.reshape(-1, weight.shape[-1]).cpu())
        return Mxfp4(packed.view(half).to(weight.device), scale.view(blocks).to(weight.device))
    if weight.device.type != "cpu":
        _refuse_not_finite(weight, name)
        packed, scale = mxfp4_encode.pack_anywhere(flat)
    else:
        packed, scale = (torch.empty(flat.numel() // size, dtype=torch.uint8) for size in (2, GROUP))
        if not mxfp4_encode.pack(flat, packed, scale, threads):
            raise validate.not_finite(weight, name)
    return Mxfp4(packed.view(half), scale.view(blocks))


def dequantize(
    packed: Shaped[Tensor, "..."],
    scale: Shaped[Tensor, "..."],
    dtype: torch.dtype = torch.bfloat16,
    *,
    out: Float[Tensor, "*rows C"] | None = None,
    name: str = "weight",
    threads: int | None = None,
) -> Float[Tensor, "*rows C"]:
    """Return the weights that a pair stands for, every one exact.

    Args:
        packed: Two codes a byte, the first in the low four bits; any strides.
        scale: Exponents plus 127, one for 32 weights of a row; also as `float8_e8m0fnu`.
        dtype: bf16 or fp32.
        out: Contiguous place to write to, of that type; on a CPU, where fresh memory takes longer than the work.
        name: What messages call it.
        threads: How many; none is as many as torch uses.

    Raises:
        CheckpointError: The two do not fit each other, a scale is not a number, or a weight is too large for `dtype`.
    """
    validate.target(dtype, name)
    if scale.dtype == torch.float8_e8m0fnu:
        scale = scale.view(torch.uint8)
    if packed.dtype != torch.uint8 or packed.dim() < 1 or packed.shape[-1] % (GROUP // 2):
        raise CheckpointError(
            f"{name}: packed weights are `torch.uint8` in rows of a multiple of {GROUP // 2} bytes; found "
            f"`{packed.dtype}` of {list(packed.shape)}; name a tensor that ends in weight_packed"
        )
    *rows, half = packed.shape
    validate.shape(name, "the scale", scale, (*rows, half * 2 // GROUP), torch.uint8)
    check_scale(packed, scale, name=name)
    shape = (*rows, half * 2)
    if out is not None:
        validate.shape(name, "`out`", out, shape, dtype)
        if not out.is_contiguous():
            raise CheckpointError(f"{name}: `out` has gaps; found strides {out.stride()}; give contiguous memory")
    result = torch.empty(shape, dtype=dtype, device=packed.device) if out is None else out
    if not packed.numel():
        return result
    if mode() == "reference":
        two = (tensor.cpu().reshape(-1, tensor.shape[-1]) for tensor in (packed, scale))
        return result.copy_(reference.dequantize_mxfp4(*two).view(shape))
    flat, scales = packed.reshape(-1), scale.reshape(-1)
    if packed.device.type == "cpu":
        mxfp4_decode.unpack(flat, scales, result.view(-1), threads)
    else:
        place = (scales.int() << 8)[:, None] + flat.view(-1, GROUP // 2).int()
        words = mxfp4_decode.pairs(dtype).to(packed.device).index_select(0, place.view(-1))
        result.copy_(words.view(dtype).view(shape))
    return result


def check_scale(packed: UInt8[Tensor, "*rows half"], scale: UInt8[Tensor, "*rows blocks"], *, name: str) -> None:
    """Refuse scales under which a code is not a number or too large for bf16, without dequantising.

    Raises:
        CheckpointError: It names the block.
    """
    if not scale.numel() or (largest := int(scale.max())) < FIRST_TOO_LARGE:
        return
    if largest == NOT_A_NUMBER:
        raise CheckpointError(
            f"{name}: scale code 255 is not a number; found at block {validate.first(scale == NOT_A_NUMBER)}; "
            "fetch the file again"
        )
    magnitudes = torch.tensor(E2M1, dtype=torch.float64, device=packed.device)
    for code in range(FIRST_TOO_LARGE, largest + 1):
        blocks = (scale == code).nonzero()
        pairs = packed.unflatten(-1, (-1, GROUP // 2))[tuple(blocks.T)]
        most = torch.maximum(pairs & 7, pairs >> 4 & 7).amax(-1) if blocks.numel() else blocks[:, 0]
        wrong = (magnitudes[most.long()] * 2.0 ** (code - BIAS) > torch.finfo(torch.bfloat16).max).nonzero()
        if wrong.numel():
            raise CheckpointError(
                f"{name}: a weight is too large for bf16; found scale code {code} with code {int(most[wrong[0, 0]])} "
                f"at block {blocks[wrong[0, 0]].tolist()}; fetch the file again"
            )


def is_blank(packed: UInt8[Tensor, "*rows half"], scale: UInt8[Tensor, "*rows blocks"]) -> bool:
    """Return whether all scales are zero under codes that are not: scales that were lost on the way."""
    return not bool(scale.any()) and bool((packed & 0x77).any())


def _refuse_not_finite(weight: Float[Tensor, "*rows C"], name: str) -> None:
    if not weight.isfinite().all():
        raise validate.not_finite(weight, name)
