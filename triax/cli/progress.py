"""How far a long read or write of weights is, on stderr: rewritten in a terminal, now and then a line elsewhere."""

import sys
import threading
import time
from types import TracebackType


class Bytes:
    """Counts bytes from any number of threads and tells rate and time left."""

    def __init__(self, what: str, total: int | None = None, every: float = 10.0) -> None:
        self.what, self.total = what, total
        self.is_live = sys.stderr.isatty()
        self.every = 0.5 if self.is_live else every
        self.done, self.counted = 0, 0
        self.start = self.told = time.monotonic()
        self.lock = threading.Lock()

    def __enter__(self) -> "Bytes":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.is_live and self.told != self.start:
            sys.stderr.write("\n")

    def skip(self, nbytes: int) -> None:
        """Count bytes that need no time because they are there already."""
        with self.lock:
            self.done += nbytes

    def add(self, nbytes: int) -> None:
        """Count bytes that were just read or written."""
        with self.lock:
            self.done += nbytes
            self.counted += nbytes
            now = time.monotonic()
            if now - self.told >= self.every:
                self.told = now
                end = "\r" if self.is_live else "\n"
                sys.stderr.write(f"{self.line(now)}{end}")
                sys.stderr.flush()

    def line(self, now: float) -> str:
        """Return what is told at a time of the monotonic clock."""
        rate = self.counted / max(now - self.start, 1e-9)
        text = f"{self.what}: {self.done / 1e9:,.1f}"
        if self.total is not None:
            left = (self.total - self.done) / max(rate, 1.0)
            text += f" of {self.total / 1e9:,.1f} GB ({self.done / max(1, self.total):.0%}), {_span(left)} left"
        else:
            text += " GB"
        return f"{text}, {rate / 1e9:.2f} GB/s  "


def _span(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} min" if hours else f"{minutes} min {rest:02d} s"
