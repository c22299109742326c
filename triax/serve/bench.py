"""Loading a server and measuring what its clients feel: times to tokens, throughput, errors, reuse of prefixes.

The client is aiohttp: httpx looks through all of its connections whenever a request begins or ends, which with 200 of
them takes longer than the server's work, so that the client would be measured instead.
"""

import asyncio
import json
import random
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import aiohttp

from triax.errors import ConfigError

PERCENTILES = (50, 90, 99)
VOCABULARY = 1000
"""Tokens that prompts are drawn from where the server does not tell its own number."""
CONNECT_S = 10.0
IDLE_S = 3.0  # an idle connection is used again for so long; servers close theirs after 5 s or more
LINE_BYTES = 1 << 20


@dataclass(frozen=True)
class Load:
    """What is asked of a server."""

    requests: int = 100
    """Requests in all; with several turns, talks of that many turns each as far as they fill this number."""
    concurrency: int = 8
    """Talks at once, each beginning when one ends; used where `rate` is 0."""
    rate: float = 0.0
    """Talks that begin each second, at random times of a Poisson process."""
    prompt_tokens: int = 512
    """Random tokens that each turn adds."""
    answer_tokens: int = 128
    """Tokens of each answer; the model's ends are passed over."""
    turns: int = 1
    """Turns of a talk; a turn's prompt is all that was said before and something new."""
    shared_tokens: int = 0
    """Tokens that all talks begin with, as a system message and tools are shared."""
    seconds: float = 0.0
    """No talk begins after so many seconds; 0 lets all requests come."""
    pause_s: float = 0.0
    """Mean pause between the turns of a talk, as a tool takes."""
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("requests", "concurrency", "prompt_tokens", "answer_tokens", "turns"):
            if getattr(self, name) < 1:
                raise ConfigError(f"bench: {name} is out of range; found `{getattr(self, name)}`; give 1 or more")
        for name in ("rate", "shared_tokens", "seconds", "pause_s"):
            if not 0 <= getattr(self, name) < float("inf"):
                raise ConfigError(f"bench: {name} is out of range; found `{getattr(self, name)}`; give 0 or more")


@dataclass
class Measured:
    """One request as its client saw it; times in seconds, from the start of the run or of the request."""

    turn: int
    begin_s: float
    ttft_s: float = 0.0
    end_s: float = 0.0
    gaps_s: list[float] = field(default_factory=list)
    """Between two pieces of the answer."""
    prompt_tokens: int = 0
    cached_tokens: int = 0
    answer_tokens: int = 0
    error: str = ""

    @property
    def tpot_s(self) -> float:
        """Time for each token after the first."""
        return (self.end_s - self.begin_s - self.ttft_s) / max(1, self.answer_tokens - 1)


class Bench:
    """A load on one server.

    Args:
        url: Where it is, with or without `/v1`.
        load: What is asked.
        key: API key.
        ended: Called whenever a request has ended.

    Raises:
        ConfigError: The address is none.
    """

    def __init__(self, url: str, load: Load, key: str = "", ended: Callable[[], None] = lambda: None) -> None:
        if not url.startswith(("http://", "https://")):
            raise ConfigError(
                f"bench: is no address of a server; found `{url}`; give one such as http://127.0.0.1:8000"
            )
        self.url = url.rstrip("/").removesuffix("/v1")
        self.load, self.ended = load, ended
        self._headers = {"Authorization": f"Bearer {key}"} if key else {}
        self._random = random.Random(load.seed)
        self._measured: list[Measured] = []
        self._model, self._vocabulary = "", VOCABULARY
        self._start, self._begun = 0.0, 0

    def run(self) -> dict[str, Any]:
        """Load the server and return the report; after an interrupt that of the requests that had ended.

        Raises:
            ConfigError: No server answers, or it is none of this API.
        """
        is_cut = False
        try:
            asyncio.run(self._run())
        except KeyboardInterrupt:
            if not self._measured:
                raise
            is_cut = True
        wall_s = time.perf_counter() - self._start
        self._measured.sort(key=lambda one: one.begin_s)
        return report(self.load, self._measured, wall_s) | {"model": self._model, "interrupted": is_cut}

    async def _run(self) -> None:
        connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=IDLE_S)
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S)
        async with aiohttp.ClientSession(
            connector=connector, headers=self._headers, timeout=timeout, trust_env=True, read_bufsize=LINE_BYTES
        ) as http:
            await self._look(http)
            shared = self._tokens(self.load.shared_tokens)
            self._start = time.perf_counter()
            await (self._at_rate(http, shared) if self.load.rate else self._at_once(http, shared))

    async def _look(self, http: aiohttp.ClientSession) -> None:
        try:
            async with http.get(f"{self.url}/v1/models") as response:
                text = await response.text()
        except (aiohttp.ClientError, TimeoutError, ValueError) as problem:
            raise ConfigError(
                f"{self.url}: no server of this API answers; found {str(problem) or type(problem).__name__}; "
                "start one with `triax serve CHECKPOINT`"
            ) from None
        if response.status in (401, 403):
            raise ConfigError(f"{self.url}: does not let this client in; found {_reason(text)}; give --key")
        try:
            card = json.loads(text)["data"][0]
            self._model, self._vocabulary = str(card["id"]), int(card.get("vocab_size", VOCABULARY))
        except (ValueError, LookupError, TypeError):
            found = f"status {response.status} and `{text[:80]}`"
            raise ConfigError(f"{self.url}: not a server of this API; found {found}; check the URL") from None

    def _tokens(self, number: int) -> list[int]:
        return [self._random.randrange(self._vocabulary) for _ in range(number)]

    def _next(self) -> int:
        """Return the turns of the next talk; 0 where none is to begin."""
        if self.load.seconds and time.perf_counter() - self._start > self.load.seconds:
            return 0
        turns = min(self.load.turns, self.load.requests - self._begun)
        self._begun += turns
        return turns

    async def _at_rate(self, http: aiohttp.ClientSession, shared: list[int]) -> None:
        async with asyncio.TaskGroup() as group:
            while turns := self._next():
                group.create_task(self._talk(http, shared, turns))
                await asyncio.sleep(self._random.expovariate(self.load.rate))

    async def _at_once(self, http: aiohttp.ClientSession, shared: list[int]) -> None:
        async def work() -> None:
            while turns := self._next():
                await self._talk(http, shared, turns)

        async with asyncio.TaskGroup() as group:
            for _ in range(self.load.concurrency):
                group.create_task(work())

    async def _talk(self, http: aiohttp.ClientSession, shared: list[int], turns: int) -> None:
        said = list(shared)
        for turn in range(turns):
            if turn and self.load.pause_s:
                await asyncio.sleep(self._random.expovariate(1 / self.load.pause_s))
            said += self._tokens(self.load.prompt_tokens)
            one = Measured(turn, time.perf_counter() - self._start)
            try:
                said += await self._ask(http, said, one)
            except (aiohttp.ClientError, TimeoutError, ConfigError, ValueError) as problem:
                one.error = str(problem) or type(problem).__name__
                one.end_s = time.perf_counter() - self._start
            self._measured.append(one)
            self.ended()
            if one.error:
                return

    async def _ask(self, http: aiohttp.ClientSession, prompt: list[int], one: Measured) -> list[int]:
        body = {
            "model": self._model,
            "prompt": prompt,
            "max_tokens": self.load.answer_tokens,
            "temperature": 1.0,
            "seed": self._random.randrange(2**31),
            "stream": True,
            "stream_options": {"include_usage": True},
            "ignore_eos": True,
            "return_token_ids": True,
        }
        begin = last = time.perf_counter()
        answer: list[int] = []
        async with http.post(f"{self.url}/v1/completions", json=body) as response:
            if not response.ok:
                raise ConfigError(f"status {response.status}: {_reason(await response.text())}")
            async for line in response.content:
                if not line.startswith(b"data: {"):  # blank lines, comments, the end
                    continue
                tree = json.loads(line.removeprefix(b"data: "))
                if "error" in tree:
                    raise ConfigError(tree["error"]["message"])
                if usage := tree.get("usage"):
                    one.prompt_tokens, one.answer_tokens = usage["prompt_tokens"], usage["completion_tokens"]
                    one.cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0)
                tokens = [token for choice in tree["choices"] for token in choice.get("token_ids") or ()]
                if tokens or any(choice.get("text") for choice in tree["choices"]):
                    now = time.perf_counter()
                    if one.ttft_s:
                        one.gaps_s.append(now - last)
                    else:
                        one.ttft_s = now - begin
                    last, one.end_s = now, now - self._start
                    answer += tokens
        if not one.ttft_s:
            raise ConfigError("the stream ended without a token")
        return answer


def _reason(text: str) -> str:
    try:
        return json.loads(text)["error"]["message"]
    except (ValueError, LookupError, TypeError):
        return text[:200]


def report(load: Load, measured: Sequence[Measured], wall_s: float) -> dict[str, Any]:
    """Return what a run tells: percentiles of what clients felt, and sums.

    Args:
        load: What was asked.
        measured: All requests.
        wall_s: Length of the run.
    """
    fine = [one for one in measured if not one.error]
    prompt, answer = sum(one.prompt_tokens for one in fine), sum(one.answer_tokens for one in fine)
    times = {
        "ttft_s": [one.ttft_s for one in fine],
        "tpot_s": [one.tpot_s for one in fine if one.answer_tokens > 1],
        "itl_s": [gap for one in fine for gap in one.gaps_s],
        "request_s": [one.end_s - one.begin_s for one in fine],
    }
    turns = sorted({one.turn for one in fine})
    return {
        "load": asdict(load),
        "wall_s": wall_s,
        "requests": len(measured),
        "errors": dict(Counter(one.error for one in measured if one.error)),
        "requests_per_s": len(fine) / wall_s,
        "prompt_tokens_per_s": prompt / wall_s,
        "answer_tokens_per_s": answer / wall_s,
        "cached_share": sum(one.cached_tokens for one in fine) / max(1, prompt),
        "ttft_s_by_turn": {str(turn): percentile([o.ttft_s for o in fine if o.turn == turn], 50) for turn in turns},
        **{name: summary(values) for name, values in times.items()},
        "measured": [asdict(one) for one in measured],
    }


def check_files(out: Path | None, picture: Path | None) -> None:
    """Refuse files that could not be written once all is measured.

    Args:
        out: Of the report.
        picture: Of the plot.

    Raises:
        ConfigError: A folder is absent, or a picture of another kind is asked for than can be drawn.
    """
    for path in (out, picture):
        if path is not None and not path.absolute().parent.is_dir():
            raise ConfigError(f"{path}: cannot be written; found no folder `{path.parent}`; make it first")
    if picture is None:
        return
    from matplotlib.backend_bases import FigureCanvasBase

    if picture.suffix.lstrip(".").lower() not in FigureCanvasBase.get_supported_filetypes():
        raise ConfigError(f"{picture}: not a kind of picture that can be drawn; found its ending; use .png or .svg")


def percentile(values: Sequence[float], share: int) -> float:
    """Return the value that this many per cent do not exceed; 0 where there are none."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(len(ordered) * share / 100))] if ordered else 0.0


def summary(values: Sequence[float]) -> dict[str, float]:
    """Return the mean and the percentiles."""
    told = {"mean": sum(values) / max(1, len(values))}
    return told | {f"p{share}": percentile(values, share) for share in PERCENTILES}


def lines(tree: dict[str, Any]) -> list[str]:
    """Return a report as a person reads it."""
    told = [
        f"{tree['requests']} requests in {tree['wall_s']:.1f} s, {sum(tree['errors'].values())} errors, "
        f"{tree['answer_tokens_per_s']:.1f} tok/s out, {tree['prompt_tokens_per_s']:.1f} tok/s in, "
        f"{tree['cached_share']:.1%} of prompts cached",
        f"{'':12}{'mean':>10}" + "".join(f"{f'p{share}':>10}" for share in PERCENTILES) + "  ms",
    ]
    for name in ("ttft_s", "tpot_s", "itl_s", "request_s"):
        values = tree[name].values()
        told.append(f"{name.removesuffix('_s'):12}" + "".join(f"{value * 1000:10.1f}" for value in values))
    told += [f"error, {number} times: {text}" for text, number in tree["errors"].items()]
    return told


def plot(tree: dict[str, Any], path: Path) -> None:
    """Draw which share of requests was served within which time, and times to the first token over the run."""
    from matplotlib.figure import Figure

    fine = [one for one in tree["measured"] if not one["error"]]
    figure = Figure(figsize=(10, 3.4), layout="constrained")
    shares, course = figure.subplots(1, 2)
    curves = {"first token": [one["ttft_s"] for one in fine], "between pieces": [g for o in fine for g in o["gaps_s"]]}
    for name, values in curves.items():
        ordered = sorted(values)
        shares.plot(ordered, [(place + 1) / len(ordered) for place in range(len(ordered))], label=name)
    shares.set(xscale="log", xlabel="seconds", ylabel="share within", ylim=(0, 1.02))
    shares.legend(frameon=False)
    course.scatter([one["begin_s"] for one in fine], [one["ttft_s"] for one in fine], s=9)
    course.set(xlabel="start of the request, s", ylabel="first token after, s", ylim=(0, None))
    figure.savefig(path, dpi=150)
