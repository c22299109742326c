"""Messages of a conversation in the shape of the OpenAI API, read and checked once."""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Any, Literal

from triax.data.chat.tool import Tool, check_tools
from triax.errors import DataError

Role = Literal["system", "user", "assistant", "tool"]
ROLES: dict[str, Role] = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "assistant": "assistant",
    "tool": "tool",
}
LONE_SURROGATE = re.compile("[\ud800-\udfff]")


@dataclass(frozen=True, slots=True)
class Image:
    """A picture's place in a message; the pixels travel beside the tokens."""

    width: int
    """Of the original picture, in pixels."""
    height: int
    num_tokens: int
    """Slots that the vision tower fills."""
    number: int = field(default=0, compare=False)
    """Place among the pictures of the conversation, in the order of its messages; `read_messages` sets it."""


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call the assistant made."""

    name: str
    arguments: Mapping[str, Any] | str
    """Arguments by name, or the raw text where it was no JSON object."""
    id: str | None = None
    raw: str | None = None
    """The arguments' text, where they came as text."""

    @property
    def json(self) -> str:
        """Arguments as text: as they came, or written anew."""
        if self.raw is not None:
            return self.raw
        return self.arguments if isinstance(self.arguments, str) else json.dumps(self.arguments, ensure_ascii=False)


@dataclass(frozen=True, slots=True)
class Message:
    """One message; fields that its role does not have are empty."""

    role: Role
    content: tuple[str | Image, ...] = ()
    reasoning: str = ""
    calls: tuple[ToolCall, ...] = ()
    call_id: str | None = None
    """The call whose result this is."""
    name: str | None = None
    """Who speaks, or the tool whose result this is."""
    tools: tuple[Tool, ...] = ()
    """Tools that a system message adds in mid-session."""
    partial: bool = False
    """Whether the assistant's answer is only begun: the model continues it."""


def read_messages(messages: Sequence[Any], images: Sequence[Image] = ()) -> list[Message]:
    """Check messages and bring them to one shape.

    Args:
        messages: Of the OpenAI shape: `role`, `content` (text, None or parts), `reasoning_content` or `reasoning`,
            `tool_calls`, `tool_call_id`, `name`, and `tools` on system messages.
        images: Size and slots of the image parts, in order.

    Raises:
        DataError: A message cannot be rendered; names it by its number.
    """
    pictures = iter(images)
    read = [
        message if isinstance(message, Message) else _read(message, f"messages[{number}]", pictures)
        for number, message in enumerate(messages)
    ]
    read = _number_pictures(read)
    if left := len(list(pictures)):
        raise DataError(
            f"images: more are given than the messages have; found `{left}` too many; give one for each image part"
        )
    return read


def _number_pictures(messages: list[Message]) -> list[Message]:
    """Tell each picture its place, since a renderer may bring messages into another order."""
    numbers = count()
    return [
        replace(
            message,
            content=tuple(
                replace(part, number=next(numbers)) if isinstance(part, Image) else part for part in message.content
            ),
        )
        if any(isinstance(part, Image) for part in message.content)
        else message
        for message in messages
    ]


def _read(message: object, where: str, pictures: Iterator[Image]) -> Message:
    if not isinstance(message, Mapping):
        raise DataError(f"{where}: must be an object; found `{message!r}`; give a role and content")
    role = message.get("role")
    if not isinstance(role, str) or role not in ROLES:
        raise DataError(f"{where}.role: not a role; found `{role!r}`; use system, developer, user, assistant or tool")
    reasoning = message.get("reasoning_content") or message.get("reasoning")
    call_id = message.get("tool_call_id", message.get("id") if role == "tool" else None)
    return Message(
        role=ROLES[role],
        content=_content(message.get("content"), f"{where}.content", pictures),
        reasoning=_words(reasoning, f"{where}.reasoning_content") or "",
        calls=_calls(message.get("tool_calls"), f"{where}.tool_calls") if role == "assistant" else (),
        call_id=None if call_id is None else str(call_id),
        name=_words(message.get("tool") or message.get("name"), f"{where}.name") or None,
        tools=check_tools(message.get("tools"), f"{where}.tools") if ROLES[role] == "system" else (),
        partial=role == "assistant" and message.get("partial") is True,
    )


def _words(value: object, where: str) -> str | None:
    """Return a text field; half a surrogate pair has no bytes and is refused here, where the field is known."""
    if value is None:
        return None
    if not isinstance(value, str):
        raise DataError(f"{where}: must be text; found `{value!r}`; give a string")
    if half := LONE_SURROGATE.search(value):
        raise DataError(
            f"{where}: not valid Unicode; found a lone surrogate `{half[0]!a}` at character {half.start()}; "
            "repair or remove it"
        )
    return value


def _content(content: object, where: str, pictures: Iterator[Image]) -> tuple[str | Image, ...]:
    if content is None or isinstance(content, str):
        words = _words(content, where)
        return (words,) if words else ()
    if not isinstance(content, Sequence):
        raise DataError(f"{where}: must be text, null or a list of parts; found `{content!r}`; give a string")
    return tuple(_part(part, f"{where}[{number}]", pictures) for number, part in enumerate(content))


def _part(part: object, where: str, pictures: Iterator[Image]) -> str | Image:
    kind = part.get("type") if isinstance(part, Mapping) else None
    if isinstance(part, Mapping) and kind == "text":
        return _words(part.get("text"), f"{where}.text") or ""
    if kind in ("image", "image_url"):
        if (picture := next(pictures, None)) is None:
            raise DataError(f"{where}: an image of unknown size; found no more images; give one for each image part")
        return picture
    raise DataError(f"{where}.type: not a part of a message; found `{kind!r}`; use text or image_url")


def _calls(calls: object, where: str) -> tuple[ToolCall, ...]:
    if calls is None:
        return ()
    if not isinstance(calls, Sequence) or isinstance(calls, str):
        raise DataError(f"{where}: must be a list; found `{calls!r}`; give the calls of this message")
    return tuple(_call(call, f"{where}[{number}]") for number, call in enumerate(calls))


def _call(call: object, where: str) -> ToolCall:
    function = call.get("function", call) if isinstance(call, Mapping) else None
    name = function.get("name") if isinstance(function, Mapping) else None
    if not isinstance(call, Mapping) or not isinstance(function, Mapping) or not isinstance(name, str) or not name:
        raise DataError(f"{where}: a call without a name; found `{call!r}`; give function.name and function.arguments")
    _words(name, f"{where}.function.name")
    id_ = call.get("id")
    arguments = _arguments(function.get("arguments"), f"{where}.function.arguments")
    given = function.get("arguments")
    raw = given if isinstance(given, str) and given.strip() else None
    return ToolCall(name, arguments, None if id_ is None else str(id_), raw)


def _arguments(arguments: object, where: str) -> Mapping[str, Any] | str:
    """Return arguments as an object; a text that is no JSON is kept as it is."""
    if arguments is None or (isinstance(arguments, str) and not arguments.strip()):
        return {}
    if isinstance(arguments, str):
        _words(arguments, where)
        try:
            tree = parse_json(arguments)
        except ValueError:
            return arguments
        if LONE_SURROGATE.search(json.dumps(tree, ensure_ascii=False)):
            return arguments  # escapes of half a character: text as it came is all that has bytes
        arguments = tree
    if not isinstance(arguments, Mapping):
        raise DataError(f"{where}: must be a JSON object; found `{arguments!r}`; give arguments by name")
    try:
        _words(json.dumps(arguments, ensure_ascii=False, allow_nan=False), where)
    except (TypeError, ValueError, RecursionError) as problem:
        if isinstance(problem, DataError):
            raise
        raise DataError(f"{where}: cannot be written as JSON; found {problem}; use JSON values only") from None
    if strange := [key for key in arguments if not isinstance(key, str)]:
        raise DataError(f"{where}: names must be text; found `{strange[0]!r}`; use string keys")
    return arguments


def parse_json(words: str) -> Any:
    """Return the value a text stands for.

    Stricter than `json.loads`: NaN and infinities are no JSON.

    Raises:
        ValueError: The text stands for no value, or for one too deep or too long for the reader.
    """
    try:
        return json.loads(words, parse_constant=_refuse)
    except RecursionError:
        raise ValueError("nested too deeply") from None


def is_object(words: str) -> bool:
    """Return whether a text is a JSON object."""
    try:
        return isinstance(parse_json(words), dict)
    except ValueError:
        return False


def _refuse(name: str) -> None:
    raise ValueError(name)


def answers(messages: Sequence[Message]) -> list[int | None]:
    """Return, for each message, the place of the call it answers among the last assistant's calls.

    Matched by id. An id that several calls share stands for them in turn. None for messages that are not results, and
    for results whose id no call has.
    """
    places: list[int | None] = []
    waiting: dict[str, list[int]] = {}
    for message in messages:
        place = None
        if message.role == "assistant":
            waiting = {}
            for number, call in enumerate(message.calls):
                if call.id is not None:
                    waiting.setdefault(call.id, []).append(number)
        elif message.role == "tool" and message.call_id in waiting:
            queue = waiting[message.call_id]
            place = queue.pop(0) if len(queue) > 1 else queue[0]
        places.append(place)
    return places
