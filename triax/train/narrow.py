"""Matrices in the format of their products for one step: rounded once, gradients summed in fp32.

Autocast would round every matrix anew in each microbatch, and widen and add each of its gradients in passes of their
own. For a mixture of experts, whose weights outnumber a microbatch's activations, that is a large part of a step.
"""

from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from triax.kernels.routed import ExpertWeights
from triax.model.latent_moe import Experts
from triax.model.matrix import Joins, Linear


class NarrowMatrices:
    """Keeps the rounded matrices of a model, and puts them in the masters' places while a step's gradient is found.

    Values are those of autocast: it rounds the same matrices to the same format. Gradients are rounded less often:
    products that read the same input run as one, and those of routed experts are added by their kernels, unrounded.

    Args:
        model: Holds fp32 masters; the head's stays as it is, since the loss sums its gradient in fp32 already.
        dtype: Format of the products.
    """

    def __init__(self, model: nn.Module, dtype: torch.dtype) -> None:
        self.model, self.dtype = model, dtype
        self.parts: list[_Rows | _Stacks] = []

    @contextmanager
    def __call__(self) -> Generator[None]:
        """Round the masters as they are now and let the model use that; afterwards the masters have the gradients."""
        if not self.parts:
            self.parts = list(_parts(self.model, self.dtype))
        masters = [master.data for part in self.parts for master in part.masters]
        copies = [copy for part in self.parts for copy in part.copies]
        with torch.no_grad():
            torch._foreach_copy_(copies, masters)
        for part in self.parts:
            part.enter()
        try:
            yield
        finally:
            for part in self.parts:
                part.leave()


class _Rows:
    """Matrices of the same input whose rounded rows lie end to end, and where the module looks for them."""

    def __init__(self, module: nn.Module, name: str, masters: Sequence[Tensor], dtype: torch.dtype) -> None:
        self.module, self.masters = module, masters
        # a parameter has its own place in a module; what is joined is an ordinary attribute
        self.place: dict[str, Any] = module.__dict__ if name == "joined" else module._parameters
        self.name = name
        self.before: Tensor | None = None
        self.total: Tensor | None = None
        rows = sum(len(master) for master in masters)
        whole = torch.empty(rows, *masters[0].shape[1:], dtype=dtype, device=masters[0].device)
        self.copies = self._cut(whole)
        self.whole = nn.Parameter(whole)
        self.whole.register_post_accumulate_grad_hook(self._add)

    def enter(self) -> None:
        self.before = getattr(self.module, self.name)
        self.place[self.name] = self.whole
        found = [master.grad for master in self.masters]
        if any(gradient is not None for gradient in found):
            pairs = zip(self.masters, found, strict=True)
            self.total = torch.cat([torch.zeros_like(m) if g is None else g for m, g in pairs])

    def leave(self) -> None:
        self.place[self.name] = self.before
        if self.total is not None:
            for master, part in zip(self.masters, self._cut(self.total), strict=True):
                master.grad = part
        self.before = self.total = self.whole.grad = None

    def _cut(self, whole: Tensor) -> Sequence[Tensor]:
        return whole.split([len(master) for master in self.masters])

    def _add(self, whole: Tensor) -> None:
        assert whole.grad is not None
        self.total = whole.grad.float() if self.total is None else self.total.add_(whole.grad)
        whole.grad = None


class _Stacks:
    """The stacks of routed experts, whose kernels take rounded copies and add to the sums of gradients themselves."""

    def __init__(self, module: Experts, dtype: torch.dtype) -> None:
        self.module, self.masters = module, ExpertWeights(module.gate, module.up, module.down)
        self.copies = ExpertWeights(*(torch.empty_like(x, dtype=dtype, requires_grad=False) for x in self.masters))

    def enter(self) -> None:
        self.module.rounded = self.copies
        self.module.sums = ExpertWeights(*(torch.zeros_like(x) if x.grad is None else x.grad for x in self.masters))

    def leave(self) -> None:
        assert self.module.sums is not None
        for master, total in zip(self.masters, self.module.sums, strict=True):
            master.grad = total
        self.module.rounded = self.module.sums = None


def _parts(model: nn.Module, dtype: torch.dtype) -> Iterator[_Rows | _Stacks]:
    joined: set[nn.Module] = set()
    for module in model.modules():
        if isinstance(module, Joins):
            products = module.joinable()
            masters = [product.weight for product in products]
            if masters and _are_masters(masters):
                joined.update(products)
                yield _Rows(module, "joined", masters, dtype)
    for module in model.modules():
        if isinstance(module, Linear) and module not in joined and _are_masters([module.weight]):
            yield _Rows(module, "weight", [module.weight], dtype)
        if isinstance(module, Experts) and _are_masters([module.gate, module.up, module.down]):
            yield _Stacks(module, dtype)


def _are_masters(parameters: Sequence[Tensor]) -> bool:
    return all(parameter.requires_grad and parameter.dtype is torch.float32 for parameter in parameters)
