"""The router's choice, with shares and counts: one kernel beside torch's chain of operations."""

import os
from collections.abc import Callable, Iterator

import torch

from benchmarks.replay import CEILING, Time, milliseconds
from triax.config.model import Moe
from triax.model.router import Router

SHAPES = {"K3": (896, 16, 8192), "64 experts": (64, 8, 16_384)}


def measure() -> Iterator[Time]:
    """Yield the choice alone, and with counts and gradient as in training; the logits' product is not in it."""
    for name, (num_experts, top_k, tokens) in SHAPES.items():
        moe = Moe(num_experts=num_experts, top_k=top_k, expert_dim=4, num_shared_experts=0)
        router = Router(num_experts, moe).cuda()
        logit = torch.randn(tokens, num_experts, device="cuda", requires_grad=True)
        upstream = torch.randn(tokens, top_k, device="cuda")

        def learn(router: Router = router, logit: torch.Tensor = logit, upstream: torch.Tensor = upstream) -> None:
            torch.autograd.grad(router(logit, logit=logit).share, logit, upstream)

        def answer(router: Router = router, logit: torch.Tensor = logit) -> None:
            with torch.no_grad():
                router(logit, logit=logit)

        pass_ms = tokens * num_experts * 4 / CEILING * 1e3
        for kind, work, floor in (("choice", answer, pass_ms), ("choice, counts, gradient", learn, 2 * pass_ms)):
            chain = _by_torch(work)
            yield Time(
                f"router of {name}, {tokens} tokens, {kind}", milliseconds(work), None, floor, f"torch {chain:.3f}"
            )


def _by_torch(work: Callable[[], None]) -> float:
    os.environ["TRIAX_KERNELS"] = "reference"
    try:
        return milliseconds(work)
    finally:
        del os.environ["TRIAX_KERNELS"]
