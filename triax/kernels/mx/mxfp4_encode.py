"""Numbers to MXFP4 on their bits: a code is how many of seven borders the scaled magnitude has reached.

Subtracting a multiple of the exponent's unit from the bits of a number scales it by a power of two, and the bits of
positive numbers are ordered as the numbers are. So one subtraction and seven comparisons of integers round to nearest.
"""

from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Float, Int, UInt8
from torch import Tensor

from triax.kernels.mx.parallel_chunks import PIECE, run_chunks
from triax.kernels.mx.reference import BIAS, E2M1, GROUP, UNIT_SCALE

BITS = {torch.bfloat16: (torch.int16, 7), torch.float32: (torch.int32, 23)}  # as integers; bits of the mantissa
# Between code k and k + 1 lies their mean, which belongs to the even one of the two.
BORDERS = tuple(((low + high) / 2, k % 2 == 1) for k, (low, high) in enumerate(pairwise(E2M1)))
LONG = 4 * PIECE  # numbers; so many that calling the loops does not count
LOW_SCALE = 2  # up to here a number without the exponent's hidden bit can reach the first border


def exact_codes(
    magnitude: Float[Tensor, "blocks group"], scale: UInt8[Tensor, " blocks"]
) -> UInt8[Tensor, "blocks group"]:
    """Return the codes without sign by comparing in float64, on any device."""
    scaled = magnitude.double() * (BIAS - scale.double()).exp2()[:, None]
    code = torch.zeros(scaled.shape, dtype=torch.uint8, device=scaled.device)
    for border, reached in BORDERS:
        code += scaled >= border if reached else scaled > border
    return code


def lowest_bits(dtype: torch.dtype) -> list[int]:
    """Return the bits of the smallest number past each border."""
    kind, _ = BITS[dtype]
    at = torch.tensor([border for border, _ in BORDERS]).to(dtype).view(kind).tolist()
    return [bits + (not reached) for bits, (_, reached) in zip(at, BORDERS, strict=True)]


def pack(
    weight: Float[Tensor, " N"],
    packed: UInt8[Tensor, " half"],
    scale: UInt8[Tensor, " blocks"],
    threads: int | None,
) -> bool:
    """Write pairs and scales of contiguous numbers; return false where one of them is not finite.

    Numpy's loops stand here because on integers of 8 and 16 bits they take half the time of torch's.
    """
    kind, mantissa = BITS[weight.dtype]
    borders = lowest_bits(weight.dtype)
    finite: list[bool] = []

    def part(start: int, stop: int) -> None:
        space = Space.of(min(LONG, stop - start), kind)
        for at in range(start, stop, LONG):
            end = min(at + LONG, stop)
            bits, (order, code, other) = weight[at:end].view(kind), space.first(end - at)
            np.bitwise_and(bits.numpy(), torch.iinfo(kind).max, out=order)
            largest = space.largest(end - at)
            if int(largest.max()) >> mantissa == 255:
                finite.append(False)
                return
            stored = np.maximum((largest >> mantissa) - 2, 0)
            stored[largest == 0] = UNIT_SCALE
            groups = order.reshape(-1, GROUP)
            np.subtract(groups, ((stored - BIAS) << mantissa).astype(order.dtype)[:, None], out=groups)
            np.greater_equal(order, borders[0], out=code.view(np.bool_))
            for border in borders[1:]:
                np.greater_equal(order, border, out=other.view(np.bool_))
                np.add(code, other, out=code)
            if int(stored.min()) <= LOW_SCALE:
                _redo_low(weight[at:end], torch.from_numpy(code), torch.from_numpy(stored))
            np.less(bits.numpy(), 0, out=other.view(np.bool_))
            eight, eight_signs = code.view(np.int64), other.view(np.int64)
            np.bitwise_or(eight, np.left_shift(eight_signs, 3, out=eight_signs), out=eight)
            two = code.view(np.uint16)
            np.bitwise_or(two, np.right_shift(two, 4, out=other.view(np.uint16)), out=two)
            np.copyto(packed[at // 2 : end // 2].numpy(), two, casting="unsafe")
            np.copyto(scale[at // GROUP : end // GROUP].numpy(), stored, casting="unsafe")

    run_chunks(weight.numel(), part, threads)
    return not finite


class Space(NamedTuple):
    """Memory that a thread uses again for each of its pieces: fresh memory takes longer than the work on it."""

    order: Int[Tensor, " piece"]
    code: UInt8[Tensor, " piece"]
    other: UInt8[Tensor, " piece"]
    wide: Int[Tensor, " short"]
    most: Int[Tensor, " blocks"]

    @classmethod
    def of(cls, size: int, kind: torch.dtype) -> "Space":
        """Take memory for pieces of up to `size` numbers."""
        kinds = (
            (size, kind),
            (size, torch.uint8),
            (size, torch.uint8),
            (PIECE, torch.int32),
            (size // GROUP, torch.int32),
        )
        return cls(*(torch.empty(length, dtype=dtype) for length, dtype in kinds))

    def first(self, size: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return the beginning of the three long buffers."""
        return self.order[:size].numpy(), self.code[:size].numpy(), self.other[:size].numpy()

    def largest(self, size: int) -> np.ndarray:
        """Return the largest of each group in `order`; torch is fastest at it on rows of 32-bit integers."""
        for at in range(0, size, PIECE):
            end = min(at + PIECE, size)
            wide = self.wide[: end - at].copy_(self.order[at:end])
            torch.amax(wide.view(-1, GROUP), 1, out=self.most[at // GROUP : end // GROUP])
        return self.most[: size // GROUP].numpy()


def _redo_low(weight: Float[Tensor, " N"], code: UInt8[Tensor, " N"], stored: Int[Tensor, " blocks"]) -> None:
    """Write the codes of blocks so small that some of their numbers have no hidden bit; none does in a real model."""
    low = (stored <= LOW_SCALE).nonzero()[:, 0]
    exact = exact_codes(weight.view(-1, GROUP)[low].abs(), stored[low].to(torch.uint8))
    code.view(-1, GROUP)[low] = exact
    stored[low[(exact == 0).all(1)]] = UNIT_SCALE


def pack_anywhere(weight: Float[Tensor, " N"]) -> tuple[UInt8[Tensor, " half"], UInt8[Tensor, " blocks"]]:
    """Return pairs and scales of finite numbers on any device, in float64."""
    groups = weight.view(-1, GROUP)
    largest = groups.abs().amax(1).double()
    exponent = largest.frexp().exponent - 1
    scale = (exponent - 2 + BIAS).clamp(min=0).to(torch.uint8)
    code = exact_codes(groups.abs(), scale)
    scale[(code == 0).all(1)] = UNIT_SCALE
    code |= groups.signbit().to(torch.uint8) << 3
    low, high = code.view(-1, 2).unbind(1)
    return low | high << 4, scale
