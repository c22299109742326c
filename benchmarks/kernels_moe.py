"""Training routed experts: 64 experts top-8 and the 2.7B recipe's 32 top-4, 2,048 to 1,024; the router not counted."""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.replay import MATRIX_CEILING, Error, Time, milliseconds, relative
from triax.kernels.moe import experts, reference
from triax.kernels.routed import ExpertWeights, Routing
from triax.kernels.situ_glu import SituGlu
from triax.kernels.situ_glu.reference import glu

WIDTH, INNER = 2048, 1024
FORWARD_BAR, BACKWARD_BAR = 400e12, 350e12
"""Floating-point operations a second, the activation's not counted."""
AGAINST_PEER = 1.4
SWIGLU, SITU = SituGlu(), SituGlu(4.0, 25.0)


class Exact(SituGlu):
    """The activation by its definition, in any format."""

    def __call__(self, gate: Tensor, up: Tensor) -> Tensor:
        """Let the gate decide how much of `up` passes."""
        return glu(gate, up, self.gate_cap, self.up_cap)


def measure() -> Iterator[Time | Error]:
    """Yield every figure of the operation."""
    for routing in ("uniform", "zipf"):
        tokens, top_k, num_experts = 16384, 8, 64
        leaves, expert = inputs(tokens, top_k, num_experts, routing)
        work = 2 * tokens * top_k * 3 * WIDTH * INNER
        with torch.no_grad():
            peer = milliseconds(lambda x=leaves, e=expert: library(x, e))
        name = f"MoE experts {num_experts} top-{top_k} {routing}"
        yield from passes(name, leaves, expert, SWIGLU, work, peer)
    leaves, expert = inputs(8192, 4, 32, "uniform", torch.float32)
    leaves[0] = leaves[0].detach().bfloat16().requires_grad_()
    rounded = ExpertWeights(*(weight.detach().bfloat16() for weight in leaves[2:]))
    sums = ExpertWeights(*(torch.zeros_like(weight) for weight in leaves[2:]))
    work = 2 * 8192 * 4 * 3 * WIDTH * INNER
    for name, options in (("", {}), (", gradients added to sums", {"sums": sums})):
        title = f"MoE experts 32 top-4, SiTU-GLU, fp32 weights rounded before{name}"
        with torch.autocast("cuda", torch.bfloat16):
            yield from passes(title, leaves, expert, SITU, work, None, rounded=rounded, **options)
    yield from errors()


def inputs(
    tokens: int, top_k: int, num_experts: int, routing: str, dtype: torch.dtype = torch.bfloat16
) -> tuple[list[Tensor], Tensor]:
    """Return what learns, and the choice of experts."""
    normal = lambda *shape: torch.randn(*shape, device="cuda")  # noqa: E731
    gate, up = (normal(num_experts, INNER, WIDTH) / WIDTH**0.5 for _ in range(2))
    down, hidden = normal(num_experts, WIDTH, INNER) / INNER**0.5, normal(tokens, WIDTH)
    odds = 1 / torch.arange(1, num_experts + 1, device="cuda") ** float(routing == "zipf")
    expert = torch.multinomial(odds.expand(tokens, -1), top_k)
    share = torch.rand(tokens, top_k, device="cuda")
    leaves = [hidden.to(dtype), share, *(weight.to(dtype) for weight in (gate, up, down))]
    return [leaf.requires_grad_() for leaf in leaves], expert


def run(leaves: Sequence[Tensor], expert: Tensor, activation: SituGlu, **options: Any) -> Tensor:
    """Run the kernels."""
    hidden, share, gate, up, down = leaves
    return experts(hidden, Routing(expert, share), ExpertWeights(gate, up, down), activation, **options)


def library(leaves: Sequence[Tensor], expert: Tensor) -> Tensor:
    """Sort, torch's grouped products, the fused activation, and sums by index: the peer."""
    hidden, share, gate, up, down = leaves
    chosen, pair = expert.flatten().sort(stable=True)
    ends = torch.searchsorted(chosen, torch.arange(len(gate), device=chosen.device), right=True).int()
    token = pair // expert.shape[1]
    rows = hidden[token]
    inner = SWIGLU(F.grouped_mm(rows, gate.mT, offs=ends), F.grouped_mm(rows, up.mT, offs=ends))
    returned = F.grouped_mm(inner, down.mT, offs=ends) * share.flatten()[pair, None].to(inner.dtype)
    return torch.zeros_like(hidden).index_add_(0, token, returned)


def passes(
    name: str,
    leaves: list[Tensor],
    expert: Tensor,
    activation: SituGlu,
    work: int,
    peer: float | None,
    **options: Any,
) -> Iterator[Time]:
    """Yield the forward pass as it is when learning, and the backward pass: both passes less the forward one."""
    weight = torch.randn_like(leaves[0])

    def both() -> Any:
        output = run(leaves, expert, activation, **options)
        return torch.autograd.grad(output, leaves, weight.to(output.dtype), allow_unused=True)

    forward = milliseconds(lambda: run(leaves, expert, activation, **options))
    beside, bar = "", work / FORWARD_BAR * 1e3
    if peer is not None:
        beside, bar = f", sort and grouped_mm {peer:.3f} ms, {peer / forward:.2f}x", min(bar, peer / AGAINST_PEER)
    rate = f"{work / forward / 1e9:.0f} TFLOP/s"
    yield Time(f"{name} forward", forward, bar, work / MATRIX_CEILING * 1e3, rate + beside)
    backward = milliseconds(both) - forward
    rate = f"{2 * work / backward / 1e9:.0f} TFLOP/s"
    yield Time(f"{name} backward", backward, 2 * work / BACKWARD_BAR * 1e3, 2 * work / MATRIX_CEILING * 1e3, rate)


def errors() -> Iterator[Error]:
    """Yield the largest errors of the output and of any gradient."""
    for routing, activation in (("uniform", SWIGLU), ("zipf", SITU)):
        leaves, expert = inputs(1024, 8, 64, routing)
        exact = [leaf.detach().double().requires_grad_() for leaf in leaves]
        weight = torch.randn_like(leaves[0])
        found = run(leaves, expert, activation)
        hidden, share, gate, up, down = exact
        caps = activation.gate_cap, activation.up_cap
        expected = reference.experts(hidden, expert, share, gate, up, down, Exact(*caps))
        yield Error(f"MoE experts {routing}, output", relative(found, expected.detach()), 6e-3)
        gradients = torch.autograd.grad(found, leaves, weight)
        right = torch.autograd.grad(expected, exact, weight.double())
        yield Error(f"MoE experts {routing}, gradients", max(map(relative, gradients, right)), 8e-3)
