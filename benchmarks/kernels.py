"""GPU kernels against their bars and floors on one H200: medians of CUDA-graph replays, and errors against float64.

Run: python -m benchmarks.kernels [--json]
"""

import argparse
import json
import statistics
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from triax.kernels.kda import flash, reference

CEILING = 4.3e12  # bytes a second of a device-to-device copy on an H200, read and written
FORWARD_BYTES, BACKWARD_BYTES = 1282, 2308  # per token and head of 128: each input read once, each output written once
TOKENS = 8192
Report = dict[str, Any]
# ms; peers are flash-linear-attention 0.6.0, FlashKDA and cudnn-frontend 1.32.0, quoted from one run on an H200.
FORWARD = {
    96: (1.10, "fla 2.60, FlashKDA 1.40, cudnn 1.13 / 2.41 slow"),
    32: (0.50, "fla 1.06, FlashKDA 0.98, cudnn 0.29 / 2.3 slow"),
    16: (0.35, "fla 0.69, FlashKDA 0.87, cudnn 0.15 / 2.25 slow"),
}
BOTH = {96: (5.0, "fla 12.4, cudnn 5.47 pre-activated"), 32: (1.9, "fla 4.44, cudnn 2.91 pre-activated")}
LIMITS = {"random": (6e-3, 8e-3), "slow": (6e-3, 8e-3), "repeated": (1.5e-2, 2e-2)}


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


def milliseconds(work: Callable[[], Any], replays: int = 21) -> float:
    """Return the median time of a graph's replays."""
    work()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        work()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    times = []
    for _ in range(replays):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end))
    return statistics.median(times)


def kda_times() -> list[Report]:
    """Time the forward pass, and forward with backward, beside bars, quoted peers and floors."""
    rows = []
    for heads, (bar, peer) in FORWARD.items():
        for kind in LIMITS:
            x = inputs(TOKENS, heads, kind)
            floor = TOKENS * heads * FORWARD_BYTES / CEILING * 1e3
            rows.append(row(f"KDA forward H={heads} {kind}", milliseconds(lambda x=x: run(x)), bar, peer, floor))
    for heads, (bar, peer) in BOTH.items():
        x = [tensor.requires_grad_() for tensor in inputs(TOKENS, heads, "slow")]
        weight = torch.randn_like(x[2])
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        time = milliseconds(lambda x=x, weight=weight: torch.autograd.grad(run(x).read, x, weight))
        floor = TOKENS * heads * (FORWARD_BYTES + BACKWARD_BYTES) / CEILING * 1e3
        rows.append(row(f"KDA forward+backward H={heads} slow, activated inputs", time, bar, peer, floor))
        rows[-1]["peak_bytes"] = torch.cuda.max_memory_allocated() - before
    return rows


def row(name: str, time: float, bar: float, peer: str, floor: float) -> Report:
    """Name what was measured and what it is held to."""
    return {"name": name, "ms": time, "bar_ms": bar, "met": time <= bar, "peer_ms": peer, "floor_ms": floor}


def kda_errors() -> list[Report]:
    """Return the largest relative error of outputs and of gradients for each kind of gate."""
    rows = []
    for kind, (of_outputs, of_gradients) in LIMITS.items():
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
        outputs, gradients = (max(map(relative, *pair)) for pair in zip(*outcomes, strict=True))
        bars = [of_outputs, of_gradients]
        rows.append({"name": f"KDA errors, {kind}", "outputs": outputs, "gradients": gradients, "bars": bars})
    return rows


def relative(found: Tensor, expected: Tensor) -> float:
    """Return the error's norm over the norm of what was expected."""
    return ((found.double() - expected).norm() / expected.norm()).item()


def main() -> None:
    """Print one line a figure, or JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    as_json = parser.parse_args().json
    if not torch.cuda.is_available():
        sys.exit("benchmarks.kernels needs a CUDA device; found none; run it on an H200")
    torch.manual_seed(0)
    report = {"gpu": torch.cuda.get_device_name(), "times": kda_times(), "errors": kda_errors()}
    if as_json:
        print(json.dumps(report, indent=2))
        return
    for x in report["times"]:
        verdict = "met" if x["met"] else f"missed by {x['ms'] / x['bar_ms']:.2f}x"
        peak = f"  peak {x['peak_bytes'] / 1e9:.2f} GB" if "peak_bytes" in x else ""
        print(
            f"{x['name']:52} {x['ms']:7.3f} ms  bar {x['bar_ms']:.2f} {verdict}  "
            f"floor {x['floor_ms']:.3f} x{x['ms'] / x['floor_ms']:.1f}{peak}  ({x['peer_ms']})"
        )
    for x in report["errors"]:
        print(f"{x['name']:52} outputs {x['outputs']:.1e}  gradients {x['gradients']:.1e}  bars {x['bars']}")


if __name__ == "__main__":
    main()
