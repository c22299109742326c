"""Which tensors stay fp32 whatever the model is cast to."""

from collections.abc import Callable
from typing import ClassVar

import torch
from torch import Tensor, nn

from triax.errors import TriaxError

FULL = (torch.float32, torch.float64)


class KeepsFp32(nn.Module):
    """A module some of whose own tensors never fall below fp32: rounding them compounds over a long sequence.

    Moving to another device works as ever, and so does `.double()`; a cast to a 16-bit format leaves them unrounded.
    """

    fp32: ClassVar[tuple[str, ...]] = ()
    """Names of these parameters and buffers, relative to the module."""

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
        kept = [tensor for name in self.fp32 if (tensor := getattr(self, name)) is not None]
        kept += [tensor.grad for tensor in kept if tensor.grad is not None]

        def careful(tensor: Tensor) -> Tensor:
            moved = fn(tensor)
            if moved.dtype not in FULL and any(tensor is one for one in kept):
                return tensor.to(moved.device, torch.float32)
            return moved

        return super()._apply(careful, recurse)


def check_precision(model: nn.Module) -> None:
    """Refuse a model that lost an fp32 tensor; call it after each step that prepares a model (cast, shard, load).

    Raises:
        TriaxError: A tensor that must stay fp32 is not; the message names each.
    """
    lost = [
        f"{prefix}{'.' if prefix else ''}{name} `{tensor.dtype}`"
        for prefix, module in model.named_modules()
        if isinstance(module, KeepsFp32)
        for name in module.fp32
        if (tensor := getattr(module, name)) is not None and tensor.dtype not in FULL
    ]
    if lost:
        raise TriaxError(
            f"model: {len(lost)} tensors must stay fp32; found {', '.join(lost[:5])}{' …' if len(lost) > 5 else ''}; "
            "cast with `model.to(dtype)`, which keeps them, and load them as fp32"
        )


def at_least_fp32(tensor: Tensor) -> Tensor:
    """Return the tensor in fp32, or as it is if it is wider still (fp64 models stay fp64 throughout)."""
    return tensor if tensor.dtype in FULL else tensor.float()
