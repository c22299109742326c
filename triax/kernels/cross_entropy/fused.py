"""The same on a GPU: a row's logits are read twice, once for the sum and once where the slope replaces them."""

from typing import no_type_check

import torch
import triton
import triton.language as tl
from jaxtyping import Float, Int
from torch import Tensor

from triax.errors import UnsupportedError
from triax.kernels.device import launch

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
COLUMNS = 4096  # logits that a program holds at once


@triton.jit
@no_type_check
def _nats(logit, targets, cost, stride, ignored, V, C: tl.constexpr, SLOPES: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    target = tl.load(targets + row)
    trained = target != ignored
    logit += row * stride
    column = tl.arange(0, C)
    largest = tl.full((C,), float("-inf"), tl.float32)
    total = tl.zeros((C,), tl.float32)
    for first in range(0, V, C):
        inside = first + column < V
        value = tl.load(logit + first + column, mask=inside, other=float("-inf")).to(tl.float32)
        larger = tl.maximum(largest, value)
        # a lane that has seen nothing yet, or -inf alone, has nothing to rescale
        shift = tl.where(larger == float("-inf"), 0.0, larger)
        total = total * tl.exp(largest - shift) + tl.exp(value - shift)
        largest = larger
    top = tl.max(largest, 0)
    total = tl.sum(total * tl.exp(largest - top), 0)
    picked = tl.load(logit + tl.where(trained, target, 0)).to(tl.float32)
    tl.store(cost + row, tl.where(trained, tl.log(total) - (picked - top), 0.0))
    if SLOPES:
        scale = tl.where(trained, 1.0 / total, 0.0)
        hit = tl.where(trained, target, -1)
        tl.debug_barrier()  # the target's logit is read before it is overwritten
        for first in range(0, V, C):
            inside = first + column < V
            value = tl.load(logit + first + column, mask=inside, other=float("-inf")).to(tl.float32)
            slope = tl.exp(value - top) * scale
            slope = tl.where(first + column == hit, slope - 1.0, slope)
            slope = tl.where(trained, slope, 0.0)
            tl.store(logit + first + column, slope.to(logit.dtype.element_ty), mask=inside)


def nats(
    logit: Float[Tensor, "T V"], targets: Int[Tensor, " T"], ignored: int, *, wants_slope: bool
) -> tuple[Float[Tensor, " T"], Float[Tensor, "T V"] | None]:
    """See `cross_entropy.nats`; the slope lies in the memory of the logits.

    Raises:
        UnsupportedError: The logits have a format that the kernel does not read.
    """
    if logit.dtype not in DTYPES:
        raise UnsupportedError(
            f"kernels.cross_entropy.fused: no kernel for logits of `{logit.dtype}`; use bf16, fp16 or fp32"
        )
    if logit.stride(-1) != 1:
        logit = logit.contiguous()
    cost = torch.empty(len(logit), dtype=torch.float32, device=logit.device)
    launch(
        _nats, (len(logit),), logit, targets.contiguous(), cost, logit.stride(0), ignored, logit.shape[1],
        min(COLUMNS, triton.next_power_of_2(logit.shape[1])), wants_slope, num_warps=8,
    )  # fmt: skip
    return cost, logit if wants_slope else None
