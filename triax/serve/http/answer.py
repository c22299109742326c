"""An answer while it is written: updates of the engine become events, counts and logprobs, streamed or not alike."""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar, runtime_checkable

from fastapi import Request as HttpRequest

from triax.data.chat import Arguments, CallEnd, CallStart, Content, Event, Finish, Flag, ParseError, Promoted, Reasoning
from triax.data.kimi import KimiTokenizer
from triax.serve.http.fault import Fault
from triax.serve.http.metrics import Meter
from triax.serve.http.model import Model
from triax.serve.http.prompt import Prepared
from triax.serve.link import Link
from triax.serve.request import Request, TokenInfo, Update, Usage
from triax.serve.text import Stops

T = TypeVar("T")
MAX_WARNINGS = 32
OF_ANSWER = ("response", "content")
ABNORMAL = ("abort", "deadline")
"""Reasons of the engine that no parser knows; they are told as they are."""


@dataclass
class Turn:
    """One choice of one answer.

    Args:
        model: Whose tokens these are.
        prepared: Its prompt.
        stop: Strings that end the answer; they are looked for in the answer alone, not in thinking or calls.
    """

    model: Model
    prepared: Prepared
    stop: Sequence[str] = ()
    reason: str | None = None
    """Why it ended, in the API's words."""
    num_tokens: int = 0
    num_thinking: int = 0
    usage: Usage | None = None
    tokens: list[int] = field(default_factory=list)
    logprobs: list[dict[str, Any]] = field(default_factory=list)
    """Those of the answer's tokens that were not taken yet."""
    warnings: list[dict[str, str]] = field(default_factory=list)
    """What the format lacked and what could not be read."""

    def __post_init__(self) -> None:
        self._parser = self.prepared.parser() if self.prepared.parser else None
        self._stops = Stops(self.stop)
        self._unsure: list[TokenInfo] = []
        self._noted: list[tuple[int, int, list[TokenInfo]]] = []
        self._num_read = self._num_told = 0  # characters of the answer, with and without those held back
        tokenizer = self.model.tokenizer
        self._num_calls = 0
        self._control = frozenset(tokenizer.control.values() if isinstance(tokenizer, KimiTokenizer) else ())

    def read(self, update: Update) -> list[Event]:
        """Take an update; neighbouring pieces of text come as one.

        Raises:
            Fault: The engine could not go on.
        """
        if self.reason is not None:
            return []
        self.usage = update.usage or self.usage
        if update.finish_reason in ("invalid", "error"):
            message = update.error or f"engine: the answer broke off; found `{update.finish_reason}`; send it again"
            raise Fault(500, message, code=f"{update.finish_reason}_output")
        events = self._of_tokens(update.tokens)
        if update.finish_reason is not None and self.reason is None:
            events += self._end(update.finish_reason)
        return _joined(events)

    def take_logprobs(self) -> list[dict[str, Any]]:
        """Return the logprobs since the last call."""
        taken, self.logprobs = self.logprobs, []
        return taken

    def _of_tokens(self, tokens: Sequence[TokenInfo]) -> list[Event]:
        parser = self._parser
        assert parser is not None
        events: list[Event] = []
        for info in tokens:
            before = parser.section
            found = self._allowed(parser.feed(info.token))
            self.num_tokens += 1
            self.tokens.append(info.token)
            self.num_thinking += before == "think"
            length = sum(len(event.text) for event in found if isinstance(event, Content))
            if before in OF_ANSWER:
                self._note(info, length)
            self._num_read += length
            events += self._stopped(found)
            if self._stops.met is not None:
                self._tell_logprobs(is_last=True)
                self.reason = "stop"
                return [*events, Finish("stop")]
            if self._num_calls == self.prepared.max_calls and found and isinstance(found[-1], CallEnd):
                self.reason = "tool_calls"
                return [*events, Finish("tool_calls")]
        return events

    def _allowed(self, events: Sequence[Event]) -> Sequence[Event]:
        """Leave out calls that the request does not allow; what follows the last allowed one is not read."""
        most = self.prepared.max_calls
        if most is None or not events:
            return events
        kept: list[Event] = []
        for event in events:
            match event:
                case CallStart(_, _, name) if most == 0:
                    self._warn("unasked_call", name)
                case Arguments() | CallEnd() if most == 0:
                    pass
                case Finish("tool_calls") if most == 0:
                    kept.append(Finish("stop"))
                case CallEnd(_, valid):
                    kept.append(event)
                    self._num_calls += valid
                    if self._num_calls == most:
                        break
                case _:
                    kept.append(event)
        return kept

    def _note(self, info: TokenInfo, length: int) -> None:
        """Keep the logprob of a token of the answer; one without text may be a part of a character, or of a tag."""
        self._unsure.append(info)
        if length:
            self._noted.append((self._num_read, self._num_read + length, self._unsure))
            self._unsure = []
        elif info.token in self._control:
            self._unsure.clear()

    def _tell_logprobs(self, *, is_last: bool = False) -> None:
        """Let go of the logprobs of text that is told; the last token may reach into a stop string."""
        while self._noted and (self._noted[0][1] <= self._num_told or (is_last and self._noted[0][0] < self._num_told)):
            self.logprobs += [self.logprob(one) for one in self._noted.pop(0)[2]]

    def _stopped(self, events: Sequence[Event]) -> list[Event]:
        """Hold back what may begin a stop string; what is no answer lets go of it."""
        if not self.stop:
            kept = list(events)
        else:
            kept = []
            for event in events:
                if isinstance(event, Content):
                    text = self._stops.push(event.text)
                    kept += [Content(text)] if text else []
                    if self._stops.met is not None:
                        break
                else:
                    rest = "" if isinstance(event, Flag) else self._stops.flush()
                    kept += [*([Content(rest)] if rest else []), event]
        self._num_told += sum(len(event.text) for event in kept if isinstance(event, Content))
        self._tell_logprobs()
        for event in kept:
            match event:
                case Flag(kind, detail) | ParseError(kind, detail):
                    self._warn(kind, detail)
                case CallEnd(index, valid) if not valid:
                    self._warn("invalid_call", str(index))
        return kept

    def _warn(self, kind: str, detail: str) -> None:
        if len(self.warnings) < MAX_WARNINGS:
            self.warnings.append({"kind": kind, "detail": detail})

    def _end(self, reason: str) -> list[Event]:
        assert self._parser is not None
        events = self._stopped(self._allowed(self._parser.finish("stop" if reason == "stop" else "length")))
        last = events[-1]
        assert isinstance(last, Finish)
        self.reason = reason if reason in ABNORMAL else last.reason
        structure = self.prepared.structure
        if self.reason == "length" and structure is not None and structure.kind != "auto":
            self._warn("unfinished_form", f"max_tokens {self.num_tokens}")
        return events

    def logprob(self, info: TokenInfo) -> dict[str, Any]:
        """Return a token's logprob as chats tell it."""
        return self._one(info.token, info.logprob) | {"top_logprobs": [self._one(*pair) for pair in info.top]}

    def _one(self, token: int, logprob: float) -> dict[str, Any]:
        data = self.model.tokenizer.token_bytes(token)
        return {"token": data.decode("utf-8", "replace"), "logprob": max(logprob, -9999.0), "bytes": list(data)}


def _joined(events: Sequence[Event]) -> list[Event]:
    """Make neighbouring pieces of one text one piece."""
    joined: list[Event] = []
    for event in events:
        last = joined[-1] if joined else None
        match last, event:
            case (Reasoning(before), Reasoning(text)):
                joined[-1] = Reasoning(before + text)
            case (Content(before), Content(text)):
                joined[-1] = Content(before + text)
            case (Arguments(index, before), Arguments(other, text)) if index == other:
                joined[-1] = Arguments(index, before + text)
            case _:
                joined.append(event)
    return joined


@dataclass
class Whole:
    """A message that is added up from events; the one way, whether they were streamed or not."""

    reasoning: str = ""
    content: str = ""
    calls: list[dict[str, Any]] = field(default_factory=list)
    broken: set[int] = field(default_factory=set)
    """Calls whose arguments are no JSON object."""

    def message(self, reason: str | None) -> dict[str, Any]:
        """Return the message; a broken call is text of the answer, so that no client takes it for one to make.

        Args:
            reason: Why the answer ended; one that was cut keeps the call that it was cut in.
        """
        calls, content = self.calls, self.content
        if reason != "length":
            calls = [call for number, call in enumerate(self.calls) if number not in self.broken]
            for number in sorted(self.broken):
                content += f"{self.calls[number]['function']['name']} {self.calls[number]['function']['arguments']}"
        told: dict[str, Any] = {"role": "assistant", "content": content or None, "refusal": None}
        if self.reasoning:
            told["reasoning_content"] = self.reasoning
        if calls:
            told["tool_calls"] = calls
        return told

    def add(self, event: Event) -> None:
        """Take one more event."""
        match event:
            case Reasoning(text):
                self.reasoning += text
            case Content(text):
                self.content += text
            case Promoted(text):
                self.reasoning, self.content = "", self.content + text
            case CallStart(_, id_, name):
                self.calls.append({"id": id_, "type": "function", "function": {"name": name, "arguments": ""}})
            case Arguments(index, text):
                self.calls[index]["function"]["arguments"] += text
            case CallEnd(index, valid) if not valid:
                self.broken.add(index)


@runtime_checkable
class Cost(Protocol):
    """What a choice has cost so far."""

    usage: Usage | None
    num_tokens: int
    num_thinking: int


def usage_tree(prepared: Prepared, turns: Sequence[Cost]) -> dict[str, Any]:
    """Return what an answer cost; what we tell beyond the API is cached and matched prefixes and drafts."""
    told = [turn.usage for turn in turns if turn.usage is not None]
    completion = sum(turn.num_tokens for turn in turns)
    cached = min((usage.cached_tokens for usage in told), default=0)
    matched = min((usage.matched_tokens for usage in told), default=0)
    return {
        "prompt_tokens": prepared.num_billed,
        "completion_tokens": completion,
        "total_tokens": prepared.num_billed + completion,
        "prompt_tokens_details": {"cached_tokens": min(cached, prepared.num_billed), "matched_tokens": matched},
        "completion_tokens_details": {
            "reasoning_tokens": sum(turn.num_thinking for turn in turns),
            "accepted_prediction_tokens": sum(usage.accepted_tokens for usage in told),
            "rejected_prediction_tokens": sum(usage.draft_tokens - usage.accepted_tokens for usage in told),
        },
    }


async def run(link: Link, meter: Meter, requests: Sequence[Request]) -> AsyncGenerator[list[tuple[int, Update]], None]:
    """Run the choices of one answer; yield numbers of choices with their updates, as many at a time as have come.

    An empty list is a sign of life while nothing comes.

    Raises:
        TriaxError: The engine cannot answer.
    """
    places = {request.id: number for number, request in enumerate(requests)}
    watch = meter.watch(requests[0])
    try:
        async with aclosing(link.updates(requests)) as updates:
            async for news in updates:
                for _, update in news:
                    watch.see(update)
                yield [(places[id_], update) for id_, update in news]
        watch.finish()
    finally:
        watch.leave()


async def unless_gone(request: HttpRequest, work: Awaitable[T]) -> T:
    """Return what comes of some work, or stop it when the client has gone.

    Raises:
        Fault: The client has gone; nobody reads this.
    """
    task = asyncio.ensure_future(work)

    async def watch() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    gone = asyncio.create_task(watch())
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise Fault(499, "request: the client has gone; found a closed connection; nothing to do")
        return task.result()
    finally:
        for one in (task, gone):
            one.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)
