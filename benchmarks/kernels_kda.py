"""Kimi Delta Attention over chunks: forward, forward with backward, and the errors of both.

Raw inputs come with K3's bounded gate or with Kimi Linear's softplus gate, which has no bound.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from importlib.util import find_spec
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.replay import CEILING, Error, Time, milliseconds, relative
from triax.kernels.kda import kda, kda_from_raw, reference
from triax.kernels.kda.hopper import passes
from triax.kernels.kda.raw import activate

FORWARD_BYTES, BACKWARD_BYTES = 1282, 2308  # per token and head of 128: each input read once, each output written once
TOKENS, LONG = 8192, 65536
# ms; peers are flash-linear-attention 0.6.0, FlashKDA and cudnn-frontend 1.32.0, quoted from one run on an H200.
FORWARD = {
    96: (1.10, "fla 2.60, FlashKDA 1.40, cudnn 1.13 / 2.41 slow"),
    32: (0.50, "fla 1.06, FlashKDA 0.98, cudnn 0.29 / 2.3 slow"),
    16: (0.35, "fla 0.69, FlashKDA 0.87, cudnn 0.15 / 2.25 slow"),
}
BOTH = {96: (5.0, "fla 12.4, cudnn 5.47 pre-activated"), 32: (1.9, "fla 4.44, cudnn 2.91 pre-activated")}
SOFTPLUS_HEADS = (32, 16)
LIMITS = {"random": (6e-3, 8e-3), "slow": (6e-3, 8e-3), "repeated": (1.5e-2, 2e-2)}
NAMES = ("query", "key", "value", "log_decay", "beta", "state")
RAW_NAMES = ("query", "key", "value", "gate", "beta", "rates", "biases", "state")


def measure() -> Iterator[Time | Error]:
    """Yield every figure of the operation."""
    for heads, (bar, peer) in FORWARD.items():
        for kind in LIMITS:
            x = inputs(TOKENS, heads, kind)
            yield Time(f"KDA forward H={heads} {kind}", milliseconds(lambda x=x: run(x)), bar, floor(heads), peer)
    yield from segmented()
    for heads, (bar, peer) in BOTH.items():
        x = raw_inputs(TOKENS, heads)
        name = f"KDA forward+backward H={heads} from raw inputs"
        yield forward_backward(name, run_raw, x, bar, floor(heads, backward=True), peer)
        x = inputs(TOKENS, heads, "slow")
        name = f"KDA forward+backward H={heads} slow, activated inputs"
        yield forward_backward(name, run, x, bar, floor(heads, backward=True), peer)
    yield from softplus()
    if find_spec("fla") is not None:
        yield from peers()
    for kind in LIMITS:
        yield from errors(kind, 512, 2, range(2))
    yield from errors("slow", TOKENS, 96, (0, 95))
    yield from raw_errors(-5.0)
    yield from raw_errors(-math.inf)


def floor(heads: int, backward: bool = False) -> float:
    """Return the time in which the bytes can be moved, in milliseconds."""
    return TOKENS * heads * (FORWARD_BYTES + backward * BACKWARD_BYTES) / CEILING * 1e3


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


def raw_inputs(tokens: int, heads: int, lowest: float = -5.0) -> list[Tensor]:
    """Return what projections give: four bf16 streams, beta's logit, the gate's numbers in fp32, memory.

    Without a bound rates are those that Kimi Linear begins with, 1 to 16: log decays from -0.1 to below -40.
    """
    normal = lambda *shape: torch.randn(*shape, device="cuda")  # noqa: E731
    streams = [normal(tokens, heads, 128).bfloat16() for _ in range(4)]
    rates = 0.3 * normal(heads) if math.isfinite(lowest) else torch.rand(heads, device="cuda").mul(15).add(1).log()
    numbers = (normal(tokens, heads).bfloat16(), rates, normal(heads, 128) - 2)
    return [*streams, *numbers, 0.1 * normal(1, heads, 128, 128)]


def run(x: Sequence[Tensor]) -> Any:
    """Run the kernels on one sequence of K3's bounded gate."""
    query, key, value, log_decay, beta, state = x
    return kda(query, key, value, log_decay, beta, state, (0, len(query)), lowest_log_decay=-5.0)


def run_raw(x: Sequence[Tensor], lowest: float = -5.0) -> Any:
    """The same from raw inputs, of either gate."""
    query, key, value, gate, beta, rates, biases, state = x
    starts = (0, len(query))
    return kda_from_raw(query, key, value, gate, beta, rates, biases, state, starts, lowest_log_decay=lowest)


def segmented() -> Iterator[Time]:
    """Yield one long sequence of few heads: walked as a whole, and in segments."""
    x = inputs(LONG, 4, "slow")
    cut = passes.segments
    try:
        passes.segments = lambda *_: None  # pyrefly: ignore
        serial = milliseconds(lambda: run(x))
    finally:
        passes.segments = cut
    yield Time(f"KDA forward H=4 T={LONG} slow, serial", serial)
    yield Time(f"KDA forward H=4 T={LONG} slow, in segments", milliseconds(lambda: run(x)), serial / 2.5)


def softplus() -> Iterator[Time]:
    """Yield the times of the softplus gate, whose numbers are applied by the kernels like those of the bounded one."""
    for heads in SOFTPLUS_HEADS:
        x, name = raw_inputs(TOKENS, heads, -math.inf), f"H={heads} from raw inputs, softplus gate"
        with torch.no_grad():
            yield Time(f"KDA forward {name}", milliseconds(lambda x=x: run_raw(x, -math.inf)), None, floor(heads))
        call = lambda x: run_raw(x, -math.inf)  # noqa: E731
        yield forward_backward(f"KDA forward+backward {name}", call, x, None, floor(heads, backward=True), "")


def forward_backward(
    name: str,
    call: Callable[[Sequence[Tensor]], Any],
    x: list[Tensor],
    bar: float | None,
    least: float | None,
    peer: str,
) -> Time:
    """Time a forward and a backward pass, with the memory at its peak above the inputs."""
    x = [tensor.requires_grad_() for tensor in x]
    weight = torch.randn_like(x[2])

    def work() -> Any:
        return torch.autograd.grad(call(x).read, x, weight)

    work()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    work()
    peak = torch.cuda.max_memory_allocated() - before
    return Time(name, milliseconds(work), bar, least, peer, peak)


def peers() -> Iterator[Time]:
    """Time flash-linear-attention's softplus gate, then the memory that its bounded gate takes at its peak.

    The latter with the first of each kernel's configurations: tuning would take minutes.
    """
    from triton.runtime import autotuner

    for heads in SOFTPLUS_HEADS:
        x, name = raw_inputs(TOKENS, heads, -math.inf), f"H={heads} from raw inputs, softplus gate"
        with torch.no_grad():
            yield Time(f"flash-linear-attention forward {name}", milliseconds(lambda x=x: peer(x, -math.inf)))
        call = lambda x: peer(x, -math.inf)  # noqa: E731
        yield forward_backward(f"flash-linear-attention forward+backward {name}", call, x, None, None, "")
    tuned: Any = autotuner.Autotuner
    choose = tuned.run

    def first(self: Any, *arguments: Any, **options: Any) -> Any:
        self.configs = self.configs[:1]
        return choose(self, *arguments, **options)

    tuned.run = first
    try:
        name = "flash-linear-attention, untuned, H=96 from raw inputs"
        yield forward_backward(name, peer, raw_inputs(TOKENS, 96), None, None, "")
    finally:
        tuned.run = choose


def peer(x: Sequence[Tensor], lowest: float = -5.0) -> Any:
    """The same with flash-linear-attention."""
    from fla.ops.kda import chunk_kda  # pyrefly: ignore

    query, key, value, gate, beta = (t[None] for t in x[:5])
    rates, biases, state = x[5:]
    bound = {"safe_gate": True, "lower_bound": lowest} if math.isfinite(lowest) else {}
    read, _ = chunk_kda(
        query, key, value, gate, beta, A_log=rates, dt_bias=biases.reshape(-1), initial_state=state,
        use_qk_l2norm_in_kernel=True, use_gate_in_kernel=True, use_beta_sigmoid_in_kernel=True,
        output_final_state=True, **bound,
    )  # fmt: skip
    return reference.KdaResult(read[0], state, state[:0])


def errors(kind: str, tokens: int, heads: int, of: Sequence[int]) -> Iterator[Error]:
    """Yield the largest relative error of outputs and of gradients for one kind of gate, of some of the heads."""
    x = inputs(tokens, heads, kind)
    weight = torch.randn_like(x[2])
    found = both_passes(run, x, weight)
    x = [(t[:, of] if n < 5 else t[0, of][None]).double() for n, t in enumerate(x)]
    expected = both_passes(run_exactly, x, weight[:, of].double())
    output_bar, gradient_bar = LIMITS[kind]
    of_outputs = [relative(found[0][0][:, of], expected[0][0]), relative(found[0][1][:, of], expected[0][1])]
    of_gradients = [relative(a[:, of], b) for a, b in zip(found[1], expected[1], strict=True)]
    name = f"{kind}, T={tokens} H={heads}"
    yield Error(f"KDA outputs and states, {name}", max(of_outputs), output_bar)
    yield Error(f"KDA gradients, {name}", max(of_gradients), gradient_bar, named(NAMES, of_gradients))


def raw_errors(lowest: float) -> Iterator[Error]:
    """The same from raw inputs."""
    x = raw_inputs(512, 2, lowest)
    weight = torch.randn_like(x[2])
    found = both_passes(lambda x: run_raw(x, lowest), x, weight)
    expected = both_passes(lambda x: run_raw_exactly(x, lowest), [t.double() for t in x], weight.double())
    name = f"{'raw inputs' if math.isfinite(lowest) else 'softplus gate'}, T=512 H=2"
    yield Error(f"KDA outputs and states, {name}", max(map(relative, found[0], expected[0])), 6e-3)
    of = list(map(relative, found[1], expected[1]))
    largest = max(error for name, error in zip(RAW_NAMES, of, strict=True) if name != "rates")
    yield Error(f"KDA gradients but rates', {name}", largest, 8e-3, named(RAW_NAMES, of))


def both_passes(call: Callable[[Sequence[Tensor]], Any], x: Sequence[Tensor], weight: Tensor) -> tuple[Any, Any]:
    """Return read and state, and the gradients of everything given."""
    leaves = [t.detach().clone().requires_grad_() for t in x]
    result = call(leaves)
    return (result.read, result.state), torch.autograd.grad(result.read, leaves, weight)


def run_exactly(x: Sequence[Tensor]) -> Any:
    """The definition."""
    query, key, value, log_decay, beta, state = x
    return reference.kda(query, key, value, log_decay, beta, state, (0, len(query)))


def run_raw_exactly(x: Sequence[Tensor], lowest: float) -> Any:
    """The definition, from raw inputs."""
    query, key, value, gate, beta, rates, biases, state = x
    query, key, log_decay, beta = activate(query, key, gate, beta, rates, biases, lowest)
    return run_exactly((query, key, value, log_decay, beta, state))


def named(names: Sequence[str], errors: Sequence[float]) -> str:
    """Return each with its name."""
    return " ".join(f"{name} {error:.1e}" for name, error in zip(names, errors, strict=True))
