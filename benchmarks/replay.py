"""What the benchmarks of GPU kernels share: times of graph replays beside bars, peers and floors, and errors."""

import statistics
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

CEILING = 4.3e12
"""Bytes a second of a device-to-device copy on an H200, read and written."""
MATRIX_CEILING = 790e12
"""Floating-point operations a second of a large bf16 matrix product on an H200."""


@dataclass(frozen=True)
class Time:
    """One measured time in milliseconds; `bar_ms` is what it is held to, `floor_ms` what the hardware allows."""

    name: str
    ms: float
    bar_ms: float | None = None
    floor_ms: float | None = None
    peer: str = ""
    peak_bytes: int | None = None

    def line(self) -> str:
        """Return a line for people."""
        parts = [f"{self.name:60} {self.ms:8.3f} ms"]
        if self.bar_ms is not None:
            verdict = "met" if self.ms <= self.bar_ms else f"missed by {self.ms / self.bar_ms:.2f}x"
            parts.append(f"bar {self.bar_ms:.3f} {verdict}")
        if self.floor_ms is not None:
            parts.append(f"floor {self.floor_ms:.3f} x{self.ms / self.floor_ms:.2f}")
        if self.peak_bytes is not None:
            parts.append(f"peak {self.peak_bytes / 1e9:.2f} GB")
        if self.peer:
            parts.append(f"({self.peer})")
        return "  ".join(parts)


@dataclass(frozen=True)
class Error:
    """One largest relative error (L2, against float64) and what it is held to."""

    name: str
    error: float
    bar: float
    where: str = ""

    def line(self) -> str:
        """Return a line for people."""
        verdict = "met" if self.error <= self.bar else f"missed by {self.error / self.bar:.2f}x"
        return f"{self.name:60} {self.error:.2e}  bar {self.bar:.1e} {verdict}  {self.where}"


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


def relative(found: Tensor, expected: Tensor) -> float:
    """Return the error's norm over the norm of what was expected."""
    return ((found.double() - expected).norm() / expected.norm()).item()
