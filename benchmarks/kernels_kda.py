"""Kimi Delta Attention over chunks: forward, forward with backward, and the errors of both."""

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.replay import CEILING, Error, Time, milliseconds, relative
from triax.kernels.kda import flash, reference

FORWARD_BYTES, BACKWARD_BYTES = 1282, 2308  # per token and head of 128: each input read once, each output written once
TOKENS = 8192
# ms; peers are flash-linear-attention 0.6.0, FlashKDA and cudnn-frontend 1.32.0, quoted from one run on an H200.
FORWARD = {
    96: (1.10, "fla 2.60, FlashKDA 1.40, cudnn 1.13 / 2.41 slow"),
    32: (0.50, "fla 1.06, FlashKDA 0.98, cudnn 0.29 / 2.3 slow"),
    16: (0.35, "fla 0.69, FlashKDA 0.87, cudnn 0.15 / 2.25 slow"),
}
BOTH = {96: (5.0, "fla 12.4, cudnn 5.47 pre-activated"), 32: (1.9, "fla 4.44, cudnn 2.91 pre-activated")}
LIMITS = {"random": (6e-3, 8e-3), "slow": (6e-3, 8e-3), "repeated": (1.5e-2, 2e-2)}
NAMES = ("query", "key", "value", "log_decay", "beta", "state")


def measure() -> Iterator[Time | Error]:
    """Yield every figure of the operation."""
    for heads, (bar, peer) in FORWARD.items():
        for kind in LIMITS:
            x = inputs(TOKENS, heads, kind)
            floor = TOKENS * heads * FORWARD_BYTES / CEILING * 1e3
            yield Time(f"KDA forward H={heads} {kind}", milliseconds(lambda x=x: run(x)), bar, floor, peer)
    for heads, (bar, peer) in BOTH.items():
        x = [tensor.requires_grad_() for tensor in inputs(TOKENS, heads, "slow")]
        weight = torch.randn_like(x[2])
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        time = milliseconds(lambda x=x, weight=weight: torch.autograd.grad(run(x).read, x, weight))
        floor = TOKENS * heads * (FORWARD_BYTES + BACKWARD_BYTES) / CEILING * 1e3
        peak = torch.cuda.max_memory_allocated() - before
        yield Time(f"KDA forward+backward H={heads} slow, activated inputs", time, bar, floor, peer, peak)
    for kind in LIMITS:
        yield from errors(kind)


def inputs(tokens: int, heads: int, kind: str) -> list[Tensor]:
    """Return activated inputs: bf16 streams, fp32 gates and memory."""
    normal = lambda *shape: torch.randn(*shape, device="cuda")  # noqa: E731
    key = normal(tokens, heads, 128)
    beta, gate = torch.sigmoid(normal(tokens, heads)), -5 * torch.sigmoid(2 * normal(tokens, heads, 128) - 1)
    if kind != "random":
        slowness = torch.exp(torch.rand(heads, 128, device="cuda") * 11.5)
        gate = (-(0.5 + torch.rand(tokens, heads, 128, device="cuda")) / slowness).clamp(min=-5)
    if kind == "repeated":
        key = key[::64].repeat_interleave(64, 0)[:tokens] + 0.2 * key
        beta = 0.9 + 0.1 * beta
    streams = (F.normalize(normal(tokens, heads, 128), dim=-1) * 128**-0.5, F.normalize(key, dim=-1))
    value = normal(tokens, heads, 128)
    return [*(x.bfloat16() for x in (*streams, value)), gate, beta, 0.1 * normal(1, heads, 128, 128)]


def run(x: list[Tensor]) -> Any:
    """Run the kernels on one sequence of K3's bounded gate."""
    query, key, value, log_decay, beta, state = x
    return flash.kda(query, key, value, log_decay, beta, state, (0, len(query)), lowest_log_decay=-5.0)


def errors(kind: str) -> Iterator[Error]:
    """Yield the largest relative error of outputs and of gradients for one kind of gate."""
    x = inputs(512, 2, kind)
    weight = torch.randn_like(x[2])
    outcomes = []
    for leaves in ([t.clone() for t in x], [t.double() for t in x]):
        leaves = [t.requires_grad_() for t in leaves]
        exact = leaves[0].dtype == torch.float64
        query, key, value, log_decay, beta, state = leaves
        starts = (0, len(query))
        result = reference.kda(query, key, value, log_decay, beta, state, starts) if exact else run(leaves)
        outcomes.append((result[:2], torch.autograd.grad(result[0], leaves, weight.to(result[0].dtype))))
    of_outputs, of_gradients = (list(map(relative, *pair)) for pair in zip(*outcomes, strict=True))
    output_bar, gradient_bar = LIMITS[kind]
    each = " ".join(f"{name} {error:.1e}" for name, error in zip(NAMES, of_gradients, strict=True))
    yield Error(f"KDA outputs and states, {kind}", max(of_outputs), output_bar)
    yield Error(f"KDA gradients, {kind}", max(of_gradients), gradient_bar, each)
