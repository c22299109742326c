"""Refusals of weights that no form can hold, and the place of what is wrong with them."""

from collections.abc import Callable

import torch
from jaxtyping import Bool, Float, Shaped
from torch import Tensor

from triax.errors import CheckpointError

SOURCES = (torch.bfloat16, torch.float16, torch.float32)
TARGETS = (torch.bfloat16, torch.float32)


def first(wrong: Bool[Tensor, "..."]) -> str:
    """Return the place of the first true cell, such as `[3, 17]`."""
    return str(wrong.nonzero()[0].tolist())


def not_finite(weight: Float[Tensor, "..."], name: str) -> CheckpointError:
    """Return the error for a weight that holds NaN or infinity."""
    wrong = ~weight.isfinite()
    value = weight[wrong][0].item()
    return CheckpointError(
        f"{name}: a weight is not finite; found `{value}` at {first(wrong)}; convert from a checkpoint that is sound"
    )


def source(weight: Shaped[Tensor, "..."], name: str, form: str) -> None:
    """Refuse what is no matrix of numbers that can be rounded once."""
    if weight.dtype not in SOURCES:
        raise CheckpointError(
            f"{name}: {form} is made from bf16, fp16 or fp32; found `{weight.dtype}`; dequantise or cast the weight"
        )


def target(dtype: torch.dtype, name: str) -> None:
    """Refuse to dequantise to a type that does not hold every value."""
    if dtype not in TARGETS:
        raise CheckpointError(f"{name}: weights are dequantised to bf16 or fp32; found `{dtype}`; cast the result")


def shape(name: str, what: str, found: Shaped[Tensor, "..."], expected: tuple[int, ...], dtype: torch.dtype) -> None:
    """Refuse a tensor whose shape or type does not fit the other one of its pair."""
    if tuple(found.shape) != expected or found.dtype != dtype:
        raise CheckpointError(
            f"{name}: {what} must be `{dtype}` of {list(expected)}; found `{found.dtype}` of {list(found.shape)}; "
            "take both tensors from the same checkpoint"
        )


def scale(name: str, scale: Float[Tensor, "R C"], used: Callable[[], Bool[Tensor, "R C"]]) -> None:
    """Refuse scales that are no positive numbers; zero is a scale that got lost, where codes are `used` under it."""
    wrong = ~scale.isfinite() | (scale < 0)
    if (scale == 0).any():
        wrong |= (scale == 0) & used()
    if wrong.any():
        raise CheckpointError(
            f"{name}: a scale is no positive number; found `{scale[wrong][0].item()}` at {first(wrong)}; "
            "fetch the file again"
        )
