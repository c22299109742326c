"""What a person sees while a run goes on: one live line in a terminal, plain lines elsewhere."""

import sys
import time
from collections import deque
from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.text import Text

from triax.train.metrics import Metrics


class Progress:
    """Writes a run's line to stderr: live if it is a terminal, else one line every `every` steps."""

    def __init__(self, total_tokens: int, every: int) -> None:
        self.total_tokens, self.every = total_tokens, every
        self.stream = sys.stderr
        self.times: deque[tuple[int, float]] = deque(maxlen=65)
        self.live: Live | None = None
        if self.stream.isatty():
            self.live = Live(console=Console(file=self.stream), refresh_per_second=4, transient=True)
            self.live.start()

    def step(self, step: int, tokens: int, metrics: Metrics) -> str:
        """Show a step and return its line."""
        self.times.append((tokens, time.monotonic()))
        text = line(step, metrics, self._seconds_left(tokens))
        if self.live is not None:
            self.live.update(Text(f"{tokens / self.total_tokens:4.0%}  {text}"))
        elif step % self.every == 0:
            self._write(text)
        return text

    def say(self, text: str) -> None:
        """Show a line that stays."""
        if self.live is not None:
            self.live.console.print(Text(text))
        else:
            self._write(text)

    def show(self, text: str) -> None:
        """Show how far some work is: in the live line, or as a line."""
        if self.live is not None:
            self.live.update(Text(text))
        else:
            self._write(text)

    def close(self) -> None:
        """Take the live line away."""
        if self.live is not None:
            self.live.stop()

    def _write(self, text: str) -> None:
        self.stream.write(text + "\n")
        self.stream.flush()

    def _seconds_left(self, tokens: int) -> float | None:
        if len(self.times) < 2:
            return None
        (first, start), (last, end) = self.times[0], self.times[-1]
        return (self.total_tokens - tokens) * (end - start) / max(1, last - first)


def line(step: int, metrics: Mapping[str, Any], seconds_left: float | int | None) -> str:
    """Return a step as text, in the order that never changes: step, loss, grad, tok/s, mfu, mem, eta."""
    parts = [f"step {step}", f"loss {metrics['train/loss']:.3f}"]
    if "train/grad_norm" in metrics:
        parts.append(f"grad {metrics['train/grad_norm']:.2f}")
    if "train/tokens_per_s" in metrics:
        parts.append(f"tok/s {short(metrics['train/tokens_per_s'])}")
    if "train/mfu" in metrics:
        parts.append(f"mfu {metrics['train/mfu']:.0%}")
    if "train/memory_bytes" in metrics:
        parts.append(f"mem {metrics['train/memory_bytes'] / 1e9:.1f} GB")
    if seconds_left is not None:
        parts.append(f"eta {duration(seconds_left)}")
    return "  ".join(parts)


def short(number: float | int) -> str:
    """Return 950, 41.2k or 3.4M."""
    for bound, divisor, unit in ((1e3, 1, ""), (1e6, 1e3, "k"), (1e9, 1e6, "M")):
        if number < bound:
            return f"{number / divisor:.0f}" if divisor == 1 else f"{number / divisor:.1f}{unit}"
    return f"{number / 1e9:.1f}G"


def duration(seconds: float | int) -> str:
    """Return 45s, 3m20s or 3h12m."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02d}s"
    return f"{whole // 3600}h{whole % 3600 // 60:02d}m"
