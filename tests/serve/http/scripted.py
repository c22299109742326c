"""An engine without a model: it says what a script says, so that everything around an engine can be tried.

A prompt that names a script with `@name` gets its answer; any other gets `DEFAULT`. Scripts lie in `scripts.json`
beside the tokenizer, read anew for each request: `{"name": {"answer": TEXT, ...}}`, control tokens spelled out.

Options of a script: `delay_s` before each token, `per_step` tokens a step, `cached` tokens, `logprob` of every token,
`break_at` a token with an error, `die_at` a token with SIGKILL, `hold_at` a token that waits for the file `name.go`
beside the scripts; once that is there, nothing of this script is delayed any more.
"""

import json
import os
import re
import signal
import time
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace

from triax.config.serve import Serve
from triax.data.kimi import KimiTokenizer
from triax.errors import CheckpointError, ConfigError, TriaxError
from triax.serve.request import Request, TokenInfo, Update, Usage
from triax.serve.text import Text

END = "<|close|>response<|sep|><|close|>message<|sep|><|end_of_msg|>"
DEFAULT = f"I think so.<|close|>think<|sep|><|open|>response<|sep|>Hello there!{END}"
SCRIPTS = "scripts.json"
NAME = re.compile(r"@(\w+)")


class CapacityError(TriaxError):
    """A request that never fits."""


@dataclass
class Sequence:
    """A request that runs."""

    request: Request
    script: dict
    answer: list[int]
    text: Text
    go: Path
    due: float
    arrived: float
    sent: int = 0
    infos: list[TokenInfo] = field(default_factory=list)


class ScriptedEngine:
    """The face of the real engine; `max_running` sequences advance, the others wait."""

    def __init__(self, folder: Path, settings: Serve) -> None:
        self.folder, self.settings = folder, settings
        self.tokenizer = KimiTokenizer.load(folder)
        config = json.loads((folder / "facts.json").read_text()) if (folder / "facts.json").is_file() else {}
        vision = SimpleNamespace(**config["vision"]) if "vision" in config else None
        shape = SimpleNamespace(
            vocab_size=self.tokenizer.vocab_size, context_len=config.get("context", 4096), vision=vision
        )
        self.model = SimpleNamespace(settings=shape)
        self.max_running = config.get("max_running", 64)
        self.weight_version = 0
        self.waiting: list[Sequence] = []
        self.running: list[Sequence] = []
        self.news: list[Update] = []
        self.paused = ""
        self.num_aborted = self.num_sent = 0
        self.last: dict = {}

    @property
    def has_work(self) -> bool:
        return bool(self.news) or (not self.paused and bool(self.running or self.waiting))

    def add(self, request: Request) -> None:
        words = self.tokenizer.decode(request.tokens)
        names = NAME.findall(words)
        path = self.folder / SCRIPTS
        scripts = json.loads(path.read_text()) if path.is_file() else {}
        script = scripts.get(names[-1], {}) if names else {}
        if "refuse" in script:
            kinds = {"ConfigError": ConfigError, "CapacityError": CapacityError}
            raise kinds[script["refuse"]]("prompt: cannot be served; found a script; say something else")
        self.last = {
            "words": words,
            "structure": request.structure and [request.structure.kind, request.structure.text],
            "callable": request.structure.tools if request.structure else "",
            "thinking": request.structure.thinking if request.structure else None,
            "borders": list(request.borders),
            "temperature": request.sampling.temperature,
            "top_p": request.sampling.top_p,
            "seed": request.seed,
            "max_tokens": request.max_tokens,
            "media": [[item.digest, item.start, item.length, len(item.pixels)] for item in request.media],
        }
        words = script.get("answer", DEFAULT)
        words = words if isinstance(words, str) else words[int(request.id.rpartition(".")[2])]  # one for each choice
        answer = self.tokenizer.encode(words, allow_control=True)
        now = time.monotonic()
        text = Text(self.tokenizer, request.stop)
        go = self.folder / f"{names[-1] if names else ''}.go"
        self.waiting.append(Sequence(request, script, answer, text, go, now, now))

    def abort(self, request_id: str) -> None:
        before = len(self.running) + len(self.waiting)
        self.running = [one for one in self.running if one.request.id != request_id]
        self.waiting = [one for one in self.waiting if one.request.id != request_id]
        self.num_aborted += before - len(self.running) - len(self.waiting)

    def step(self) -> list[Update]:
        while self.waiting and len(self.running) < self.max_running:
            self.running.append(self.waiting.pop(0))
        news, self.news = self.news, []
        now = time.monotonic()
        for one in list(self.running):
            limit = one.request.deadline_s
            if limit is not None and now - one.arrived > limit and one.sent:  # something is said before
                news.append(self._end(one, [], "deadline"))
            elif (one.due <= now and one.sent != one.script.get("hold_at")) or one.go.is_file():
                news += self._advance(one, now)
        if not news:
            time.sleep(0.001)
        return news

    def _advance(self, one: Sequence, now: float) -> list[Update]:
        request, script = one.request, one.script
        one.due = now + script.get("delay_s", 0)
        infos: list[TokenInfo] = []
        pieces = ""
        if request.max_tokens == 0:
            return [self._end(one, infos, "length")]
        for _ in range(script.get("per_step", 1)):
            if one.sent == script.get("die_at"):
                os.kill(os.getpid(), signal.SIGKILL)
            if one.sent == script.get("break_at"):
                return [self._end(one, infos, "invalid", error="logits: no distribution; found NaN; see the log")]
            is_end = one.sent >= len(one.answer) or one.answer[one.sent] in self.tokenizer.ends
            if is_end and not request.ignore_ends:
                return [self._end(one, infos, "stop", pieces)]
            token = one.answer[one.sent % len(one.answer)]
            top = request.top_logprobs or 0
            rivals = tuple((rank, -1.0 - rank) for rank in range(max(0, top - 1)))
            best = ((token, script.get("logprob", -0.5)),) if top else ()
            infos.append(TokenInfo(token, script.get("logprob", -0.5), best + rivals))
            one.sent += 1
            self.num_sent += 1
            pieces += one.text.push(token)
            if one.text.has_stopped:
                return [self._end(one, infos, "stop", pieces)]
            if one.sent == request.max_tokens:
                return [self._end(one, infos, "length", pieces)]
        scores = self._scores(one) if one.sent == len(infos) else ()
        return [Update(request.id, pieces, tuple(infos), scores)]

    def _scores(self, one: Sequence) -> tuple[TokenInfo, ...]:
        return tuple(TokenInfo(token, -1.5) for token in one.request.tokens[1:]) if one.request.score_prompt else ()

    def _end(self, one: Sequence, infos: list[TokenInfo], reason: str, pieces: str = "", error: str | None = None):
        self.running.remove(one)
        scores = self._scores(one) if one.sent == len(infos) else ()
        cached = min(one.script.get("cached", 0), len(one.request.tokens) - 1)
        usage = Usage(len(one.request.tokens), cached, cached, one.sent)
        by = one.text.stopped_by
        text = pieces + one.text.flush()
        return Update(one.request.id, text, tuple(infos), scores, reason, by, usage, error)

    def pause(self, mode: str) -> None:
        self.paused = mode
        if mode == "abort":
            self.news += [self._end(one, [], "abort") for one in list(self.running)]
        elif mode == "wait":
            while self.running:
                self.news += self.step()

    def resume(self) -> None:
        self.paused = ""

    def update_weights(self, source) -> int:
        if isinstance(source, Path) and not source.is_dir():
            raise CheckpointError(f"{source}: holds no model; found nothing; name a folder")
        self.weight_version += 1
        return self.weight_version

    def rest(self) -> bool:
        return False

    def metrics(self) -> dict[str, float]:
        return {
            "serve/running": len(self.running),
            "serve/waiting": len(self.waiting),
            "serve/aborted": self.num_aborted,
        }

    def cache_report(self) -> dict:
        return {"pages": {"total": 64, "free": 64 - len(self.running)}, "last": self.last, "sent": self.num_sent}

    def check_invariants(self) -> None:
        assert self.paused or not (self.running or self.waiting)


def scripted(folder: Path, settings: Serve, report) -> ScriptedEngine:
    report("weights", 0.5)
    config = json.loads((folder / "facts.json").read_text()) if (folder / "facts.json").is_file() else {}
    while config.get("holds_load") and not (folder / "load.go").is_file():
        time.sleep(0.01)
    if "cannot_load" in config:
        raise CheckpointError(config["cannot_load"])
    return ScriptedEngine(folder, settings)
