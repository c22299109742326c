"""MXFP4, MXFP8, FP8 blocks and INT4 groups, a number at a time in float64: the definition the fast paths are held to.

Sources: OCP Microscaling Formats v1.0 sections 5.3, 5.4 and 6.3 (MXFP4, MXFP8); DeepSeek-V3 (arXiv 2412.19437) section
3.3 (FP8 blocks); Kimi K2 Thinking's model card (INT4 groups).
"""

import math
from bisect import bisect_left
from collections.abc import Sequence

import torch
from jaxtyping import Float, Int, UInt8
from torch import Tensor

GROUP = 32  # consecutive input channels that share a scale, in MXFP4 and INT4
BLOCK = 128  # rows and columns that share a scale, in FP8
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
E4M3 = tuple(  # 127 magnitudes; code 127 is not a number
    math.ldexp(code % 8 + (8 if code >= 8 else 0), max(code // 8, 1) - 10) for code in range(127)
)
BIAS = 127  # of E8M0: scale code s means 2^(s - 127)
UNIT_SCALE = BIAS  # scale of a block in which every code is zero: the value 1


def nearest(value: float, magnitudes: Sequence[float]) -> int:
    """Return the code of the nearest magnitude; a tie goes to the even code, what is too large to the largest."""
    above = min(bisect_left(magnitudes, value), len(magnitudes) - 1)
    return min(max(above - 1, 0), above, key=lambda code: (abs(magnitudes[code] - value), code % 2))


def mxfp4_block(values: Sequence[float]) -> tuple[list[int], int]:
    """Return the 4-bit codes of up to 32 numbers and the code of their scale, 2^(floor(log2 amax) - 2).

    The scale code ends at 0, so the smallest blocks use small codes. The sign of a zero is kept.
    """
    largest = max(abs(value) for value in values)
    scale = max(math.frexp(largest)[1] - 1 - 2 + BIAS, 0)
    codes = [nearest(math.ldexp(abs(value), BIAS - scale), E2M1) for value in values]
    signs = [8 if math.copysign(1.0, value) < 0 else 0 for value in values]
    return [code + sign for code, sign in zip(codes, signs, strict=True)], scale if any(codes) else UNIT_SCALE


def quantize_mxfp4(weight: Float[Tensor, "R C"]) -> tuple[UInt8[Tensor, "R half"], UInt8[Tensor, "R blocks"]]:
    """Return the packed pairs, the first of a pair in the low four bits, and the scale codes."""
    packed, scales = [], []
    for row in weight.double().tolist():
        blocks = [mxfp4_block(row[start : start + GROUP]) for start in range(0, len(row), GROUP)]
        codes = [code for block, _ in blocks for code in block]
        packed.append([low | high << 4 for low, high in zip(codes[::2], codes[1::2], strict=True)])
        scales.append([scale for _, scale in blocks])
    return torch.tensor(packed, dtype=torch.uint8), torch.tensor(scales, dtype=torch.uint8)


def dequantize_mxfp4(packed: UInt8[Tensor, "R half"], scale: UInt8[Tensor, "R blocks"]) -> Float[Tensor, "R C"]:
    """Return the weights; every one of them is exact in bf16, too, unless it is too large for it."""
    rows = []
    for pairs, scales in zip(packed.tolist(), scale.tolist(), strict=True):
        codes = [code for pair in pairs for code in (pair & 15, pair >> 4)]
        values = [-E2M1[code & 7] if code & 8 else E2M1[code] for code in codes]
        rows.append([math.ldexp(value, scales[place // GROUP] - BIAS) for place, value in enumerate(values)])
    return torch.tensor(rows, dtype=torch.float64)


def round_mxfp8(rows: Float[Tensor, "*rows C"]) -> Float[Tensor, "*rows C"]:
    """Return what MXFP8 keeps of each 32 numbers: E4M3 under the scale 2^(floor(log2 amax) - 8), at least 2^-127."""
    kept = []
    for block in rows.double().reshape(-1, GROUP).tolist():
        scale = max(math.frexp(max(abs(value) for value in block))[1] - 1 - 8, -BIAS)
        codes = [nearest(math.ldexp(abs(value), -scale), E4M3) for value in block]
        kept.append([math.copysign(math.ldexp(E4M3[c], scale), v) for c, v in zip(codes, block, strict=True)])
    return torch.tensor(kept, dtype=torch.float64).view(rows.shape)


def quantize_fp8(weight: Float[Tensor, "R C"]) -> tuple[UInt8[Tensor, "R C"], Float[Tensor, "r c"]]:
    """Return E4M3 codes and the f32 scale of each 128 x 128 block, amax / 448; 1 where a block is zero.

    The quotient of weight and scale is rounded to f32 and then to E4M3, both to nearest with ties to even.
    """
    weight = weight.double()
    down, across = (math.ceil(size / BLOCK) for size in weight.shape)
    scale, code = torch.ones(down, across), torch.zeros(weight.shape, dtype=torch.uint8)
    for r in range(down):
        for c in range(across):
            place = (slice(r * BLOCK, (r + 1) * BLOCK), slice(c * BLOCK, (c + 1) * BLOCK))
            if weight[place].any():
                scale[r, c] = (weight[place].abs().max() / E4M3[-1]).float().clamp(torch.finfo(torch.float32).tiny)
            quotient = (weight[place] / scale[r, c].double()).float().double()
            codes = [
                [nearest(abs(v), E4M3) + (128 if math.copysign(1.0, v) < 0 else 0) for v in row]
                for row in quotient.tolist()
            ]
            code[place] = torch.tensor(codes, dtype=torch.uint8)
    return code, scale


def dequantize_fp8(code: UInt8[Tensor, "R C"], scale: Float[Tensor, "r c"]) -> Float[Tensor, "R C"]:
    """Return code times scale in float64, where the product is exact."""
    rows = [
        [(-1.0 if v & 128 else 1.0) * E4M3[v & 127] * float(scale[r // BLOCK, c // BLOCK]) for c, v in enumerate(row)]
        for r, row in enumerate(code.tolist())
    ]
    return torch.tensor(rows, dtype=torch.float64)


def quantize_int4(weight: Float[Tensor, "R C"]) -> tuple[Int[Tensor, "R words"], Float[Tensor, "R groups"]]:
    """Return 32-bit words of eight codes, lowest bits first, and the bf16 scale of each group of 32, amax / 7.

    A code is the number plus 8. The quotient of weight and scale is rounded to f32 and then to an integer, both to
    nearest with ties to even; the scale of a group of zeros is 1.
    """
    groups = weight.double().unflatten(1, (-1, GROUP))
    largest = groups.abs().amax(-1)
    # Through f32 once more, as the division of f32 numbers does.
    scale = (largest / 7).float().bfloat16().clamp(min=torch.finfo(torch.bfloat16).tiny)
    scale = torch.where(largest == 0, torch.ones_like(scale), scale)
    words = []
    for row, scales in zip(groups, scale.double(), strict=True):
        quotient = (row / scales[:, None]).float().flatten().tolist()
        codes = [min(max(round(value), -8), 7) + 8 for value in quotient]
        unsigned = [sum(codes[w + k] << 4 * k for k in range(8)) for w in range(0, len(codes), 8)]
        words.append([word - (1 << 32) if word >> 31 else word for word in unsigned])
    return torch.tensor(words, dtype=torch.int32), scale


def dequantize_int4(packed: Int[Tensor, "R words"], scale: Float[Tensor, "R groups"]) -> Float[Tensor, "R C"]:
    """Return (code - 8) times scale in float64, where the product is exact."""
    rows = [
        [
            ((word >> 4 * k & 15) - 8) * float(scale[r, (8 * w + k) // GROUP])
            for w, word in enumerate(row)
            for k in range(8)
        ]
        for r, row in enumerate(packed.tolist())
    ]
    return torch.tensor(rows, dtype=torch.float64)
