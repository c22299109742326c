"""The chunk form of KDA on a CPU: its speed against the token recurrence, and its memory against the stream's length.

Run: python -m benchmarks.kda_cpu [--json]
"""

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from triax.kernels.kda import kda, reference

BAR_RATIO = 10.0
BAR_GROWTH = 2.2  # of the memory for twice the tokens
TOKENS = 2048
MEMORY_TOKENS = tuple(1024 * 2**n for n in range(7))
TYPICAL = {"tokens": 4096, "sequences": 8, "heads": 4, "channels": 32}
Report = dict[str, Any]


def inputs(tokens: int, heads: int, channels: int) -> list[Tensor]:
    """Return inputs of K3's gate, as a layer makes them."""
    torch.manual_seed(0)
    query, key, value, gate = (torch.randn(tokens, heads, channels) for _ in range(4))
    query, key = F.normalize(query, dim=-1) * channels**-0.5, F.normalize(key, dim=-1)
    leaves = [query, key, value, -5 * torch.sigmoid(2 * gate - 1), torch.rand(tokens, heads)]
    return [x.requires_grad_() for x in leaves]


def chunk_read(leaves: list[Tensor], starts: tuple[int, ...], lowest_log_decay: float = -5.0) -> Tensor:
    """Run the chunk form."""
    query, key, value, log_decay, beta = leaves
    return kda(query, key, value, log_decay, beta, None, starts, lowest_log_decay=lowest_log_decay).read


def token_read(leaves: list[Tensor], starts: tuple[int, ...]) -> Tensor:
    """Run the token recurrence."""
    query, key, value, log_decay, beta = leaves
    return reference.kda(query, key, value, log_decay, beta, None, starts).read


def seconds(run: Callable[[], Tensor], leaves: list[Tensor], runs: int) -> tuple[float, float]:
    """Return the best wall time of a forward pass, and of a forward and backward pass; neighbours only add to it."""
    forward, both = [], []
    for _ in range(runs + 1):
        start = time.perf_counter()
        read = run()
        forward.append(time.perf_counter() - start)
        torch.autograd.grad(read.sum(), leaves)
        both.append(time.perf_counter() - start)
    return min(forward[1:]), min(both[1:])


def speed() -> Report:
    """Time both forms on one sequence, and the chunk form on a packed row, in one process."""
    leaves = inputs(TOKENS, TYPICAL["heads"], TYPICAL["channels"])
    starts = (0, TOKENS)
    chunk = seconds(partial(chunk_read, leaves, starts), leaves, 7)
    token = seconds(partial(token_read, leaves, starts), leaves, 2)
    found: Report = {"tokens": TOKENS, "chunk_s": chunk[1], "recurrence_s": token[1], "ratio": token[1] / chunk[1]}
    for channels in (32, 64):
        leaves = inputs(TYPICAL["tokens"], TYPICAL["heads"], channels)
        packed = tuple(range(0, TYPICAL["tokens"] + 1, TYPICAL["tokens"] // TYPICAL["sequences"]))
        for name, lowest in (("bounded", -5.0), ("unbounded", -float("inf"))):
            forward, both = seconds(partial(chunk_read, leaves, packed, lowest), leaves, 7)
            found[f"typical_{name}_{channels}"] = {"forward_s": forward, "forward_backward_s": both}
    return found


def peak_bytes(tokens: int) -> int:
    """Return how far a forward and backward pass raises this process's resident memory at its peak (Linux)."""
    leaves = inputs(tokens, TYPICAL["heads"], TYPICAL["channels"])
    warm = inputs(64, TYPICAL["heads"], TYPICAL["channels"])
    torch.autograd.grad(chunk_read(warm, (0, 64)).sum(), warm)
    Path("/proc/self/clear_refs").write_text("5")  # sets the peak to what is resident now
    start = resident_kib("VmRSS")
    torch.autograd.grad(chunk_read(leaves, (0, tokens)).sum(), leaves)
    return (resident_kib("VmHWM") - start) * 1024


def resident_kib(name: str) -> int:
    """Read one line of this process's status."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line.split()[1] for line in lines if line.startswith(name)))


def memory() -> list[Report]:
    """Measure each length in a process of its own, whose allocator gives freed memory back at once."""
    rows = []
    environment = os.environ | {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
    for tokens in MEMORY_TOKENS:
        words = [sys.executable, "-m", "benchmarks.kda_cpu", "--peak", str(tokens)]
        done = subprocess.run(words, check=True, capture_output=True, text=True, env=environment)
        rows.append({"tokens": tokens, "peak_bytes": int(done.stdout), "bytes_per_token": int(done.stdout) / tokens})
    return rows


def main() -> None:
    """Print the figures beside their bars."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--peak", type=int, metavar="TOKENS", help="print only the peak memory of this many tokens")
    options = parser.parse_args()
    if options.peak:
        print(peak_bytes(options.peak))
        return
    report = {
        "threads": torch.get_num_threads(),
        "load": os.getloadavg()[0],
        **TYPICAL,
        "speed": speed(),
        "memory": memory(),
    }
    if options.json:
        print(json.dumps(report))
        return
    found, rows = report["speed"], report["memory"]
    print(f"{report['threads']} threads, load {report['load']:.1f}, {TYPICAL['heads']} heads, fp32")
    print(f"T={TOKENS}, K=V={TYPICAL['channels']}, forward and backward:")
    print(f"  token recurrence {found['recurrence_s'] * 1e3:8.1f} ms")
    print(f"  chunk form       {found['chunk_s'] * 1e3:8.1f} ms")
    kept = found["ratio"] >= BAR_RATIO
    print(f"  {found['ratio']:.0f} times quicker; bar {BAR_RATIO:.0f}: {'kept' if kept else 'MISSED'}")
    print(f"T={TYPICAL['tokens']} in {TYPICAL['sequences']} sequences, chunk form:")
    for name, row in found.items():
        if name.startswith("typical"):
            _, gate, channels = name.split("_")
            print(
                f"  K=V={channels}, {gate} gate: forward {row['forward_s'] * 1e3:.1f} ms, "
                f"with backward {row['forward_backward_s'] * 1e3:.1f} ms"
            )
    print("peak memory of forward and backward above the inputs:")
    for row in rows:
        print(
            f"  T={row['tokens']:6d} {row['peak_bytes'] / 2**20:8.1f} MiB {row['bytes_per_token']:8.0f} bytes a token"
        )
    growth = rows[-1]["peak_bytes"] / rows[-2]["peak_bytes"]
    print(f"  {growth:.2f} times as much for twice T; bar {BAR_GROWTH}: {'kept' if growth < BAR_GROWTH else 'MISSED'}")


if __name__ == "__main__":
    main()
