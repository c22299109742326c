"""K3's chat format XTML: a conversation as segments, the reference for serving and training alike.

A tag is `open name attributes sep`, then its body, then `close name sep`; a message ends with `end_of_msg`. Only the
four markers and the slots of images are control tokens: everything else is encoded as text, piece by piece.
Source: K3 report (arXiv 2607.24653) appendix F.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from triax.data.chat.message import Image, Message, ToolCall, answers, read_messages
from triax.data.chat.options import Options
from triax.data.chat.segment import ChatTokenizer, Prompt, Segment, control, encode, slots, text, train
from triax.data.chat.tool import compact, sort_keys
from triax.errors import DataError

OPEN, CLOSE, SEP, END = "<|open|>", "<|close|>", "<|sep|>", "<|end_of_msg|>"
NUM_OPENER = 3  # segments of the last opener: open, think or response, sep

TOOLS = "# Tools\nHere are the available tools, described in JSONSchema.\n\n"
MORE_TOOLS = (
    "## New Tools Available\n"
    "The system dynamically extends the toolset via lazy-loading.\n"
    "You have access to all existing and extended tools.\n"
    "Here are the specs for the extended tools.\n\n"
)
EFFORT = (
    "`thinking_effort` guides on how much to think in your thinking channel (not including the response channel), "
    "supported values include `low`, `medium`, `high`, and `max`.\n"
    "Now the system is invoked with `thinking_effort={effort}`."
)
CHOICE = {
    "required": "The system is invoked with `tool_choice=required`.\nYou MUST call tools in the next message.",
    "none": "The system is invoked with `tool_choice=none`.\nYou MUST NOT call any tools in the next message.",
}
FORMAT = (
    "The system is invoked with `response_format={kind}`.\n"
    "Your response must be raw JSON data without markdown code blocks (```json) or any additional formatting."
)
SCHEMA = "\nThe JSON data must match the following schema:\n"


def prompt(
    tokenizer: ChatTokenizer,
    messages: Sequence[Mapping[str, Any] | Message],
    options: Options | None = None,
    images: Sequence[Image] = (),
    *,
    generate: bool = True,
) -> Prompt:
    """Return a conversation as tokens, with what the loss counts.

    Args:
        tokenizer: K3's vocabulary.
        messages: As `read_messages` takes them.
        options: Tools, thinking and what the next message must be.
        images: Size and slots of the image parts, in order.
        generate: Open the next assistant message, or continue the last one where it is `partial`. Otherwise the
            conversation is whole (training): the one-shot options then stand where the last assistant message saw
            them, so the tokens equal those of serving.

    Raises:
        DataError: A message or option cannot be rendered.
    """
    pieces = segments(messages, options, images, generate=generate)
    is_open = generate and pieces[-1].control and pieces[-1].text == SEP  # else the text of a begun answer comes last
    return encode(pieces, tokenizer, NUM_OPENER if is_open else 0)


def segments(
    messages: Sequence[Mapping[str, Any] | Message],
    options: Options | None = None,
    images: Sequence[Image] = (),
    *,
    generate: bool = True,
) -> list[Segment]:
    """Return a conversation as segments; arguments as in `prompt`."""
    options = options or Options()
    read = _name_results(read_messages(messages, images))
    if options.tool_choice == "required" and not (options.tools or any(message.tools for message, _ in read)):
        raise DataError("tool_choice: there is nothing to call; found `required` without tools; declare tools")
    begun = read.pop()[0] if generate and read and read[-1][0].partial else Message("assistant")
    before = not generate and bool(read) and read[-1][0].role == "assistant"
    pieces: list[Segment] = []
    if options.tools:
        pieces += _note("tool-declare", TOOLS + _fence(options.tools))
    if options.thinking and options.effort:
        pieces += _note("thinking-effort", EFFORT.format(effort=options.effort))
    for message, number in read[:-1] if before else read:
        pieces += _message(message, number, options)
    pieces += _one_shot(options)
    if before:
        pieces += _message(*read[-1], options)
    if generate:
        pieces += _begun(begun, options)
    return pieces


def _begun(message: Message, options: Options) -> list[Segment]:
    """Return an assistant message up to where the model goes on."""
    pieces = _open("message", role="assistant", name=message.name)
    if options.thinking:
        pieces += _open("think") + text(message.reasoning)
        if not message.content:
            return pieces
        pieces += _close("think")
    return pieces + _open("response") + _content(message)


def _message(message: Message, number: int, options: Options) -> list[Segment]:
    """Return one message; `number` is that of a tool result."""
    if message.tools:
        return _note("tool-declare", MORE_TOOLS + _fence(message.tools))
    if message.role == "assistant":
        opening = _open("message", role="assistant", name=message.name)  # the prompt's when the model answers
        return opening + _assistant(message, options)
    if message.role == "tool":
        opening = _open("message", role="tool", tool=message.name, index=str(number))
    else:
        opening = _open("message", role=message.role, name=message.name)
    return opening + _content(message) + _close("message") + [control(END)]


def _assistant(message: Message, options: Options) -> list[Segment]:
    """Return the body of an assistant message; what serving's prompt supplies is not trained.

    An empty think section stands for reasoning that is not known: trained, it would teach to skip thinking.
    """
    pieces: list[Segment] = []
    if options.thinking:
        pieces += _open("think")
        if message.reasoning.strip():
            pieces += train(text(message.reasoning) + _close("think"))
        else:
            pieces += _close("think")
        pieces += train(_open("response"))
    else:
        pieces += _open("response")
    pieces += train(_content(message) + _close("response"))
    if message.calls:
        pieces += train(_open("tools"))
        for number, call in enumerate(message.calls, 1):
            pieces += train(_open("call", tool=call.name, index=str(number)))
            pieces += _arguments(call)
            pieces += train(_close("call"))
        pieces += train(_close("tools"))
    return pieces + train([*_close("message"), control(END)])


def _arguments(call: ToolCall) -> list[Segment]:
    if isinstance(call.arguments, str):  # the model never writes this block, so its loss is masked
        return _open("json", type="object") + text(call.arguments) + _close("json")
    pieces: list[Segment] = []
    for key, value in call.arguments.items():
        words = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
        pieces += _open("argument", key=key, type=type_name(value)) + text(words) + _close("argument")
    return train(pieces)


def type_name(value: object) -> str:
    """Return XTML's name for the type of a JSON value."""
    if isinstance(value, bool):
        return "boolean"
    if value is None:
        return "null"
    if isinstance(value, int | float):
        return "number"
    if isinstance(value, str):
        return "string"
    return "object" if isinstance(value, Mapping) else "array"


def _content(message: Message) -> list[Segment]:
    pieces: list[Segment] = []
    for part in message.content:
        if isinstance(part, Image):
            pieces += [control("<|media_begin|>"), *text(f"image {part.width}x{part.height}")]
            pieces += [control("<|media_content|>"), slots(part.number, part.num_tokens)]
            pieces += [control("<|media_end|>")]
        else:
            pieces += text(part)
    return pieces


def _one_shot(options: Options) -> list[Segment]:
    """Return what holds for the next message only: last, so that history keeps its cache."""
    pieces: list[Segment] = []
    if options.tool_choice != "auto":
        pieces += _note("tool-choice", CHOICE[options.tool_choice])
    form = (options.response_format or {}).get("type", "text")
    if form != "text":
        body = FORMAT.format(kind=form)
        pieces += _note("response-format", body + SCHEMA + _fence(options.schema) if options.schema else body)
    return pieces


def _name_results(messages: list[Message]) -> list[tuple[Message, int]]:
    """Give results the name of their call and their number since the last assistant message.

    A run of results goes into the order of its calls if all of them resolve; otherwise it stays as it came.
    """
    places = answers(messages)
    ordered: list[tuple[Message, int]] = []
    calls: Sequence[ToolCall] = ()
    number = start = 0
    while start < len(messages):
        message = messages[start]
        if message.role != "tool":
            if message.role == "assistant":
                calls, number = message.calls, 0
            if message.tools and message.content:
                raise DataError(
                    f"messages[{start}]: a system message with tools shows no content; found both; "
                    "put the content in a message of its own"
                )
            ordered.append((message, 0))
            start += 1
            continue
        end = start
        while end < len(messages) and messages[end].role == "tool":
            end += 1
        order: Iterable[int] = range(start, end)
        resolved = all(places[at] is not None for at in order)
        if resolved:
            order = sorted(order, key=lambda at: (places[at] or 0, at))
        for at in order:
            number += 1
            place = places[at] if resolved else None
            name = calls[place].name if place is not None else messages[at].name
            if name is None and number <= len(calls):
                name = calls[number - 1].name
            if name is None:
                raise DataError(
                    f"messages[{at}]: a tool result that answers no call; found tool_call_id "
                    f"`{messages[at].call_id}`; give the id of a call of the last assistant message"
                )
            ordered.append((replace(messages[at], name=name), number))
        start = end
    return ordered


def _open(tag: str, **attributes: str | None) -> list[Segment]:
    pieces = [control(OPEN), *text(tag)]
    for name, value in attributes.items():
        if value is not None:
            pieces += text(f" {name}") + text('="') + text(escape(value)) + text('"')
    return [*pieces, control(SEP)]


def _close(tag: str) -> list[Segment]:
    return [control(CLOSE), *text(tag), control(SEP)]


def escape(value: str) -> str:
    """Return an attribute's value as it stands between quotes."""
    return value.replace("&", "&amp;").replace('"', "&quot;")


def unescape(value: str) -> str:
    """Return what an attribute's value stands for."""
    return value.replace("&quot;", '"').replace("&amp;", "&")


def _note(kind: str, body: str) -> list[Segment]:
    """Return a message that the system writes itself."""
    return [*_open("message", role="system", type=kind), *text(body.strip()), *_close("message"), control(END)]


def _fence(tree: Any) -> str:
    return f"```json\n{compact(sort_keys(tree))}\n```"
