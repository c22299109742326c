"""Record which experts a model chose, and make another run choose the same: nearly tied scores hide all else.

Two correct implementations differ by rounding, and a difference of one part in a thousand flips tied experts. So
parity is measured twice: how often the choices agree, and how far the outputs are apart once the choices are equal.
"""

from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from triax.model.router import Router, Routing


@contextmanager
def record(routers: Sequence[Router]) -> Generator[list[list[Routing]]]:
    """Fill the yielded lists, one a router, with the routing of each forward inside the context."""
    recorded: list[list[Routing]] = [[] for _ in routers]
    handles = []
    for router, kept in zip(routers, recorded, strict=True):

        def keep(module: nn.Module, given: Any, routing: Routing, kept: list[Routing] = kept) -> None:
            kept.append(Routing(*(part.detach() for part in routing)))

        handles.append(router.register_forward_hook(keep))
    try:
        yield recorded
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def replay(routers: Sequence[Router], recorded: Sequence[Sequence[Routing]]) -> Generator[list[list[float]]]:
    """Force each router's forwards, in order, to the recorded experts; shares still come from its own scores.

    Fills the yielded lists, one a router, with the share of the forced experts that the router would have chosen
    itself. Forced forwards count nothing for balancing.
    """
    agreed: list[list[float]] = [[] for _ in routers]
    handles = []
    for router, routings, found in zip(routers, recorded, agreed, strict=True):
        coming = iter(routings)

        def force(
            module: nn.Module, given: tuple[Any, ...], coming: Iterator[Routing] = coming
        ) -> tuple[torch.Tensor, Routing]:
            return given[0], next(coming)

        def note(module: nn.Module, given: Any, routing: Routing, found: list[float] = found) -> None:
            assert isinstance(module, Router)
            assert module.agreement is not None
            found.append(module.agreement.item())

        handles += [router.register_forward_pre_hook(force), router.register_forward_hook(note)]
    try:
        yield agreed
    finally:
        for handle in handles:
            handle.remove()
