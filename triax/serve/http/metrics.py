"""What the server counts, in the form that Prometheus reads."""

import time
from collections.abc import Mapping

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from starlette.types import Scope

from triax.serve.link import Link
from triax.serve.request import Request, Update

SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
GAPS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 5.0)


class Meter:
    """Counters and histograms of all requests, and the engine's own figures beside them."""

    def __init__(self, link: Link) -> None:
        self.link = link
        self.registry = CollectorRegistry()
        names = ["endpoint", "status"]
        self.requests = Counter("triax_requests", "Answers by endpoint and status.", names, registry=self.registry)
        self.endings = Counter("triax_endings", "Choices by why they ended.", ["reason"], registry=self.registry)
        self.tokens = Counter("triax_tokens", "Tokens: prompt, cached, completion.", ["kind"], registry=self.registry)
        self.first = self._histogram("triax_ttft_seconds", "From arrival at the engine to the first token.", SECONDS)
        self.gap = self._histogram("triax_itl_seconds", "Between two updates of a request.", GAPS)
        self.whole = self._histogram("triax_request_seconds", "From arrival at the engine to the end.", SECONDS)
        self._gauges: dict[str, Gauge] = {}

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(name, text, buckets=buckets, registry=self.registry)

    def count(self, scope: Scope, status: int) -> None:
        """Count an answer; paths that are not ours are one endpoint."""
        route = scope.get("route")
        self.requests.labels(getattr(route, "path", "other"), str(status)).inc()

    def watch(self, request: Request) -> "Watch":
        """Begin to time a request."""
        self.tokens.labels("prompt").inc(len(request.tokens))
        return Watch(self)

    def text(self, engine: Mapping[str, float]) -> bytes:
        """Return everything; `engine` are the figures that the engine gave, empty where it gives none."""
        link = self.link
        figures = {
            "triax_up": float(link.status == "ready"),
            "triax_load_share": link.share,
            "triax_active_requests": float(link.num_active),
            "triax_waiting_requests": float(len(link.waiting)),
            "triax_engine_deaths": float(link.num_deaths),
        }
        figures |= {f"triax_engine_{_plain(name)}": float(value) for name, value in engine.items()}
        for name, value in figures.items():
            if name not in self._gauges:
                self._gauges[name] = Gauge(name, "Figure of the moment.", registry=self.registry)
            self._gauges[name].set(value)
        return generate_latest(self.registry)


class Watch:
    """Times one request."""

    def __init__(self, meter: Meter) -> None:
        self._meter = meter
        self._start = self._last = time.perf_counter()
        self._has_begun = self._has_ended = False

    def see(self, update: Update) -> None:
        """Take an update as it comes."""
        now = time.perf_counter()
        meter = self._meter
        if update.tokens:
            (meter.gap if self._has_begun else meter.first).observe(now - self._last)
            self._last, self._has_begun = now, True
            meter.tokens.labels("completion").inc(len(update.tokens))
        if update.finish_reason is not None:
            meter.endings.labels(update.finish_reason).inc()
            if update.usage is not None:
                meter.tokens.labels("cached").inc(update.usage.cached_tokens)

    def finish(self) -> None:
        """Note that all is answered."""
        self._has_ended = True
        self._meter.whole.observe(time.perf_counter() - self._start)

    def leave(self) -> None:
        """Note the end, also of a request that its client gave up."""
        if not self._has_ended:
            self._meter.endings.labels("left").inc()


def _plain(name: str) -> str:
    return "".join(letter if letter.isalnum() else "_" for letter in name.removeprefix("serve/"))
