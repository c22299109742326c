"""Matrices in the format of their products for one step: rounded once, gradients summed in fp32.

Autocast would round every matrix anew in each microbatch, and widen and add each of its gradients in passes of their
own. For a mixture of experts, whose weights outnumber a microbatch's activations, that is a large part of a step.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from triax.model.latent_moe import Experts
from triax.model.matrix import Joins, Linear


class _Held(NamedTuple):
    """Masters whose rounded rows lie end to end, and where the model looks for them."""

    module: nn.Module
    name: str
    masters: tuple[Tensor, ...]

    def put(self, tensor: Tensor | None) -> None:
        """Let the module use a tensor."""
        place: dict[str, Any] = self.module.__dict__ if self.name == "joined" else self.module._parameters
        place[self.name] = tensor


class Narrow(nn.Parameter):
    """A rounded matrix whose gradient belongs to its fp32 master."""

    main_grad: Tensor | None
    """Sum of the gradients so far, fp32; none before the first. An operation may add to it by itself, and then returns
    no gradient: `main_grad` is the name that kernels with such an addition know elsewhere too."""


class NarrowMatrices:
    """Keeps the rounded matrices of a model, and puts them in the masters' places while a step's gradient is found.

    Values are those of autocast: it rounds the same matrices to the same format. Gradients are rounded less often:
    products that read the same input run as one, and an operation may add to `main_grad` unrounded.

    Args:
        model: Holds fp32 masters; the head's stays as it is, since the loss sums its gradient in fp32 already.
        dtype: Format of the products.
    """

    def __init__(self, model: nn.Module, dtype: torch.dtype) -> None:
        self.held = list(_held(model))
        self.dtype = dtype
        self.narrow: list[Narrow] = []

    @contextmanager
    def __call__(self) -> Iterator[None]:
        """Round the masters as they are now and let the model use that; afterwards the masters have the gradients."""
        if not self.narrow:
            self.narrow = [_narrow(held.masters, self.dtype) for held in self.held]
        masters = [master.data for held in self.held for master in held.masters]
        pairs = list(zip(self.held, self.narrow, strict=True))
        with torch.no_grad():
            torch._foreach_copy_(
                [part for held, narrow in pairs for part in _parts(narrow.data, held.masters)], masters
            )
        before = [getattr(held.module, held.name) for held in self.held]
        for held, narrow in pairs:
            narrow.main_grad = _joined_gradient(held.masters)
            held.put(narrow)
        try:
            yield
        finally:
            for (held, narrow), old in zip(pairs, before, strict=True):
                held.put(old)
                if narrow.main_grad is not None:
                    for master, part in zip(held.masters, _parts(narrow.main_grad, held.masters), strict=True):
                        master.grad = part
                narrow.main_grad = narrow.grad = None


def _held(model: nn.Module) -> Iterator[_Held]:
    """Find the matrices; products that read the same input are held, and run, as one."""
    joined: set[nn.Module] = set()
    for module in model.modules():
        if isinstance(module, Joins):
            products = module.joinable()
            masters = tuple(product.weight for product in products)
            if masters and all(map(_is_master, masters)):
                joined.update(products)
                yield _Held(module, "joined", masters)
    for module in model.modules():
        if isinstance(module, Linear | Experts) and module not in joined:
            for name, parameter in module.named_parameters(recurse=False):
                if parameter.ndim >= 2 and _is_master(parameter):
                    yield _Held(module, name, (parameter,))


def _is_master(parameter: Tensor) -> bool:
    return parameter.requires_grad and parameter.dtype is torch.float32


def _parts(whole: Tensor, masters: Sequence[Tensor]) -> Sequence[Tensor]:
    return whole.split([len(master) for master in masters])


def _joined_gradient(masters: Sequence[Tensor]) -> Tensor | None:
    found = [master.grad for master in masters]
    if all(gradient is None for gradient in found):
        return None
    if len(found) == 1:
        return found[0]
    return torch.cat([torch.zeros_like(m) if g is None else g for m, g in zip(masters, found, strict=True)])


def _narrow(masters: Sequence[Tensor], dtype: torch.dtype) -> Narrow:
    rows = sum(len(master) for master in masters)
    narrow = Narrow(torch.empty(rows, *masters[0].shape[1:], dtype=dtype, device=masters[0].device))
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
