"""MXFP4 to numbers by one look-up for two of them: the pair's byte and its scale choose among 65,536 ready pairs."""

from functools import cache

import torch
from jaxtyping import Float, Shaped, UInt8
from torch import Tensor

from triax.kernels.mx.parallel_chunks import PIECE, run_chunks
from triax.kernels.mx.reference import BIAS, E2M1, GROUP

PAIRS = GROUP // 2  # bytes that share a scale
WORD = {torch.bfloat16: torch.int32, torch.float32: torch.int64}  # what holds two numbers


@cache
def pairs(dtype: torch.dtype) -> Shaped[Tensor, "65536"]:
    """Return both numbers of each byte under each scale, at `scale * 256 + byte`, as one word."""
    codes = torch.tensor([*E2M1, *(-value for value in E2M1)], dtype=torch.float64)
    byte = torch.stack((codes.repeat(16), codes.repeat_interleave(16)), dim=1)
    scale = torch.arange(256, dtype=torch.float64).sub(BIAS).exp2()
    # Two codes of scale 253, four of 254 and all of 255 are no numbers here; they are refused before.
    return (scale[:, None, None] * byte).float().to(dtype).view(WORD[dtype]).flatten()


def unpack(
    packed: UInt8[Tensor, " half"],
    scale: UInt8[Tensor, " blocks"],
    out: Float[Tensor, " N"],
    threads: int | None,
) -> None:
    """Write all numbers of contiguous pairs."""
    ready, words = pairs(out.dtype), out.view(WORD[out.dtype])
    row = scale.int() << 8

    def part(start: int, stop: int) -> None:
        places = torch.empty(PIECE, dtype=torch.int32)
        for at in range(start // 2, stop // 2, PIECE):
            end = min(at + PIECE, stop // 2)
            place = places[: end - at]
            place.copy_(packed[at:end])
            place.view(-1, PAIRS).add_(row[at // PAIRS : end // PAIRS, None])
            torch.index_select(ready, 0, place, out=words[at:end])

    run_chunks(out.numel(), part, threads)
