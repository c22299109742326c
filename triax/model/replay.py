"""Record which experts a model chose, and make another run choose the same: nearly tied scores hide all else.

Two correct implementations differ by rounding, and a difference of one part in a thousand flips tied experts. So
parity is measured twice: how often the choices agree, and how far the outputs are apart once the choices are equal.
"""

import math
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from triax.model.router import Router, Routing, is_recomputing


@contextmanager
def record(routers: Sequence[Router]) -> Generator[list[list[Routing]]]:
    """Fill the yielded lists, one a router, with the routing of each forward inside the context."""
    recorded: list[list[Routing]] = [[] for _ in routers]
    handles = []
    for router, kept in zip(routers, recorded, strict=True):

        def keep(module: nn.Module, given: Any, routing: Routing, kept: list[Routing] = kept) -> None:
            if not is_recomputing():
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
    itself. Forced forwards count nothing for balancing. Where activations are recomputed in the backward pass, the
    router is forced to the experts of the forward that is recomputed, found by what it reads.
    """
    agreed: list[list[float]] = [[] for _ in routers]
    handles = []
    for router, routings, found in zip(routers, recorded, agreed, strict=True):
        coming, forced = iter(routings), _Forced([], [], [])

        def force(
            module: nn.Module, given: tuple[Any, ...], coming: Iterator[Routing] = coming, forced: _Forced = forced
        ) -> tuple[Tensor, Routing]:
            read = _fingerprint(given[0])
            if is_recomputing():
                return given[0], forced.again(read)
            forced.reads.append(read)
            forced.num_recomputed.append(0)
            forced.routings.append(next(coming))
            return given[0], forced.routings[-1]

        def note(module: nn.Module, given: Any, routing: Routing, found: list[float] = found) -> None:
            assert isinstance(module, Router)
            assert module.agreement is not None
            if not is_recomputing():
                found.append(module.agreement.item())

        handles += [router.register_forward_pre_hook(force), router.register_forward_hook(note)]
    try:
        yield agreed
    finally:
        for handle in handles:
            handle.remove()


class _Forced(NamedTuple):
    """The forwards of one router so far, in order."""

    reads: list[tuple[int, float, float]]
    """Fingerprints of what was read."""
    routings: list[Routing]
    """What each was forced to."""

    num_recomputed: list[int]
    """How often each was recomputed."""

    def again(self, read: tuple[int, float, float]) -> Routing:
        """Return the routing of the forward that read almost the same: what is recomputed may differ by rounding.

        Of forwards that read exactly the same it is the last one that was not recomputed yet: a backward pass goes
        through them from the last to the first.
        """
        places = range(len(self.reads))
        place = min(places, key=lambda n: (math.dist(self.reads[n], read), self.num_recomputed[n], -n))
        self.num_recomputed[place] += 1
        return self.routings[place]


def _fingerprint(hidden: Tensor) -> tuple[int, float, float]:
    """Return the number of tokens and two sums that tell one input from another."""
    flat = hidden.detach().double().flatten()
    places = torch.arange(1, len(flat) + 1, dtype=flat.dtype, device=flat.device)
    return len(hidden), flat.sum().item(), (flat * places.sin()).sum().item()
