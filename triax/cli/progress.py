"""How far long work is, on stderr: rewritten in a terminal, now and then a line elsewhere."""

import sys
import threading
import time
from types import TracebackType
from typing import NamedTuple


class Unit(NamedTuple):
    """What is counted, and how it is written."""

    name: str
    size: float
    digits: int
    """Behind the point."""


GIGABYTES = Unit("GB", 1e9, 1)
REQUESTS = Unit("requests", 1.0, 0)


class Count:
    """Counts from any number of threads and tells rate and time left."""

    def __init__(self, what: str, total: int | None = None, unit: Unit = GIGABYTES, every: float = 10.0) -> None:
        self.what, self.total, self.unit = what, total, unit
        self.is_live = sys.stderr.isatty()
        self.every = 0.5 if self.is_live else every
        self.done, self.counted = 0, 0
        self.start = self.told = time.monotonic()
        self.lock = threading.Lock()

    def __enter__(self) -> "Count":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.is_live and self.told != self.start:
            sys.stderr.write("\n")

    def skip(self, number: int) -> None:
        """Count what needs no time because it is there already."""
        with self.lock:
            self.done += number

    def add(self, number: int = 1) -> None:
        """Count what was just done."""
        with self.lock:
            self.done += number
            self.counted += number
            now = time.monotonic()
            if now - self.told >= self.every:
                self.told = now
                end = "\r" if self.is_live else "\n"
                sys.stderr.write(f"{self.line(now)}{end}")
                sys.stderr.flush()

    def line(self, now: float) -> str:
        """Return what is told at a time of the monotonic clock."""
        name, size, digits = self.unit
        rate = self.counted / max(now - self.start, 1e-9)
        text = f"{self.what}: {self.done / size:,.{digits}f}"
        if self.total is not None:
            text += f" of {self.total / size:,.{digits}f} {name} ({self.done / max(1, self.total):.0%})"
            text += f", {_span((self.total - self.done) / rate)} left" if rate else ""
        else:
            text += f" {name}"
        return f"{text}, {rate / size:.2f} {name}/s  "


def _span(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} min" if hours else f"{minutes} min {rest:02d} s"
