"""What a parser reports while a model writes, and the message that these reports add up to."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Literal

Reason = Literal["stop", "tool_calls", "length"]


@dataclass(slots=True)
class Reasoning:
    """More of the thinking."""

    text: str


@dataclass(slots=True)
class Content:
    """More of the answer."""

    text: str


@dataclass(slots=True)
class Promoted:
    """All that was reported as thinking was the answer: the model skipped thinking inside an open think section."""

    text: str


@dataclass(slots=True)
class CallStart:
    """A tool call begins."""

    index: int
    id: str
    name: str


@dataclass(slots=True)
class Arguments:
    """More of a call's arguments, a JSON object as text."""

    index: int
    text: str


@dataclass(slots=True)
class CallEnd:
    """A call is over; `valid` where its arguments are a whole JSON object."""

    index: int
    valid: bool


@dataclass(slots=True)
class Flag:
    """The format was not kept; it was mended and nothing is lost."""

    kind: str
    detail: str = ""


@dataclass(slots=True)
class ParseError:
    """Something the model wrote that is no part of the message; `raw` is its text."""

    kind: str
    raw: str = ""


@dataclass(slots=True)
class Finish:
    """The message is over; always the last event."""

    reason: Reason


Event = Reasoning | Content | Promoted | CallStart | Arguments | CallEnd | Flag | ParseError | Finish


@dataclass(slots=True)
class Call:
    """A tool call as parsed."""

    id: str
    name: str
    arguments: str = ""
    valid: bool = False


@dataclass(slots=True)
class Reply:
    """An assistant's message."""

    reasoning: str = ""
    content: str = ""
    calls: list[Call] = field(default_factory=list)
    finish: Reason | None = None
    flags: list[str] = field(default_factory=list)
    """Kinds of what was mended."""
    errors: list[ParseError] = field(default_factory=list)
    """What could not be read."""

    def message(self) -> dict[str, Any]:
        """Return the message in the shape of the OpenAI API, with the calls that can be made."""
        message: dict[str, Any] = {"role": "assistant", "content": self.content or None}
        if self.reasoning:
            message["reasoning_content"] = self.reasoning
        calls = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in self.calls
            if call.valid
        ]
        return message | ({"tool_calls": calls} if calls else {})


def collect(events: Iterable[Event]) -> Reply:
    """Add events up; the one way to a whole message, whether it was streamed or not."""
    reply = Reply()
    reasoning: list[str] = []
    content: list[str] = []
    arguments: dict[int, list[str]] = {}
    for event in events:
        match event:
            case Reasoning(text):
                reasoning.append(text)
            case Content(text):
                content.append(text)
            case Promoted(text):
                reasoning.clear()
                content.append(text)
            case CallStart(index, id_, name):
                arguments[index] = []
                reply.calls.append(Call(id_, name))
            case Arguments(index, text):
                arguments[index].append(text)
            case CallEnd(index, valid):
                reply.calls[index].valid = valid
            case Flag(kind):
                reply.flags.append(kind)
            case ParseError():
                reply.errors.append(event)
            case Finish(reason):
                reply.finish = reason
    reply.reasoning, reply.content = "".join(reasoning), "".join(content)
    for call, (_, pieces) in zip(reply.calls, sorted(arguments.items()), strict=True):
        call.arguments = "".join(pieces)
    return reply
