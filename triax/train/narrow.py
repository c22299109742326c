"""Matrices in the format of their products for one step: rounded once, gradients summed in fp32.

Autocast would round every matrix anew in each microbatch, and widen and add each of its gradients in passes of their
own. For a mixture of experts, whose weights outnumber a microbatch's activations, that is a large part of a step.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor, nn

from triax.model.latent_moe import Experts
from triax.model.matrix import Linear


class _Held(NamedTuple):
    module: nn.Module
    name: str
    master: nn.Parameter


class Narrow(nn.Parameter):
    """A rounded matrix whose gradient belongs to its fp32 master."""

    main_grad: Tensor | None
    """Sum of the gradients so far, fp32; none before the first. An operation may add to it by itself, and then returns
    no gradient: `main_grad` is the name that kernels with such an addition know elsewhere too."""


class NarrowMatrices:
    """Keeps the rounded matrices of a model, and puts them in the masters' places while a step's gradient is found.

    Values are those of autocast, bit for bit: it rounds the same matrices to the same format. So are gradients, but
    for those that an operation adds to `main_grad` unrounded.

    Args:
        model: Holds fp32 masters; the head's stays as it is, since the loss sums its gradient in fp32 already.
        dtype: Format of the products.
    """

    def __init__(self, model: nn.Module, dtype: torch.dtype) -> None:
        self.held = [
            _Held(module, name, parameter)
            for module in model.modules()
            if isinstance(module, Linear | Experts)
            for name, parameter in module.named_parameters(recurse=False)
            if parameter.ndim >= 2 and parameter.requires_grad and parameter.dtype is torch.float32
        ]
        self.dtype = dtype
        self.narrow: list[Narrow] = []

    @contextmanager
    def __call__(self) -> Iterator[None]:
        """Round the masters as they are now and let the model use that; afterwards the masters have the gradients."""
        masters = [held.master for held in self.held]
        if not self.narrow:
            self.narrow = [_narrow(master, self.dtype) for master in masters]
        with torch.no_grad():
            torch._foreach_copy_([narrow.data for narrow in self.narrow], [master.data for master in masters])
        for held, narrow in zip(self.held, self.narrow, strict=True):
            narrow.main_grad = held.master.grad
            held.module._parameters[held.name] = narrow
        try:
            yield
        finally:
            for held, narrow in zip(self.held, self.narrow, strict=True):
                held.module._parameters[held.name] = held.master
                held.master.grad, narrow.main_grad, narrow.grad = narrow.main_grad, None, None


def _narrow(master: nn.Parameter, dtype: torch.dtype) -> Narrow:
    narrow = Narrow(torch.empty_like(master, dtype=dtype))
    narrow.main_grad = None
    narrow.register_post_accumulate_grad_hook(_hand_over)
    return narrow


def _hand_over(narrow: Tensor) -> None:
    assert isinstance(narrow, Narrow)
    assert narrow.grad is not None
    if narrow.main_grad is None:
        narrow.main_grad = narrow.grad.to(torch.float32)
    else:
        narrow.main_grad.add_(narrow.grad)
    narrow.grad = None
