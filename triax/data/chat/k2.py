"""K2's chat format: a conversation as segments.

Every message is `im_role name im_middle body im_end`. What stands between two control tokens is one piece, as the
published template writes it.
Source: Kimi K2 documentation, "Tool calling guidance", and the published chat template.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from triax.data.chat.call import call_id
from triax.data.chat.message import Image, Message, answers, is_object, read_messages
from triax.data.chat.segment import ChatTokenizer, Prompt, Segment, control, encode, slots, text, train
from triax.data.chat.tool import Tool, check_tools, compact
from triax.errors import DataError

HEADERS = {"user": "<|im_user|>", "assistant": "<|im_assistant|>", "system": "<|im_system|>", "tool": "<|im_system|>"}
MIDDLE, END = "<|im_middle|>", "<|im_end|>"
SECTION_BEGIN, SECTION_END = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
CALL_BEGIN, CALL_ARGUMENTS, CALL_END = "<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"
THINK, THINK_END = "<think>", "</think>"
DEFAULT_SYSTEM = "You are Kimi, an AI assistant created by Moonshot AI."


@dataclass(frozen=True)
class K2Options:
    """What a K2 prompt holds beside its messages."""

    tools: Sequence[Tool] = ()
    thinking: bool = False
    """Whether the model is a thinking one: think sections stand before the content."""
    keep: Literal["last", "all"] = "last"
    """Reasoning shown again: what follows the last answer without calls, or all of it."""
    open_think: bool = False
    """Whether the prompt opens the think section (K2.5 and later) or leaves that to the model."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "tools", check_tools(self.tools))


def prompt(
    tokenizer: ChatTokenizer,
    messages: Sequence[Mapping[str, Any] | Message],
    options: K2Options | None = None,
    images: Sequence[Image] = (),
    *,
    generate: bool = True,
) -> Prompt:
    """Return a conversation as tokens, with what the loss counts.

    Args:
        tokenizer: K2's vocabulary.
        messages: As `read_messages` takes them; whatever ids calls have, they become K2's own.
        options: Tools and thinking.
        images: Size and slots of the image parts, in order.
        generate: Open the next assistant message, or continue the last one where it is `partial`.

    Raises:
        DataError: A message cannot be rendered.
    """
    return encode(segments(messages, options, images, generate=generate), tokenizer)


def segments(
    messages: Sequence[Mapping[str, Any] | Message],
    options: K2Options | None = None,
    images: Sequence[Image] = (),
    *,
    generate: bool = True,
) -> list[Segment]:
    """Return a conversation as segments; arguments as in `prompt`."""
    options = options or K2Options()
    read = _name_calls(read_messages(messages, images))
    begun = read.pop() if generate and read and read[-1].partial else Message("assistant")
    pieces: list[Segment] = []
    if options.tools:
        pieces += _message("system", "tool_declare", text(compact(options.tools)))
    if not read or read[0].role != "system":
        pieces += _message("system", "system", text(DEFAULT_SYSTEM))
    answered = max((at for at, m in enumerate(read) if m.role == "assistant" and not m.calls), default=-1)
    for at, message in enumerate(read):
        last = at == len(read) - 1 and not generate
        current = options.keep == "all" or at > answered or last
        pieces += _render(message, options, current=current)
    if generate:
        pieces += [control(HEADERS["assistant"]), *text(begun.name or "assistant"), control(MIDDLE)]
        pieces += _begun(begun, options)
    return pieces


def _begun(message: Message, options: K2Options) -> list[Segment]:
    """Return the body of an assistant message up to where the model goes on."""
    pieces: list[Segment] = []
    if options.thinking and (options.open_think or message.reasoning or message.content):
        pieces = [control(THINK), *text(message.reasoning)]
        if message.content:
            pieces.append(control(THINK_END))
    return pieces + _content(message)


def _render(message: Message, options: K2Options, *, current: bool) -> list[Segment]:
    name = message.name or message.role
    if message.role == "tool":
        return _message("tool", name, _join([*text(f"## Return of {message.call_id}\n"), *_content(message)]))
    if message.role != "assistant":
        return _message(message.role, name, _content(message))
    body = _content(message)
    if message.calls:
        body.append(control(SECTION_BEGIN))
        for call in message.calls:
            body += [control(CALL_BEGIN), *text(call.id or ""), control(CALL_ARGUMENTS)]
            body += [*text(call.json), control(CALL_END)]
        body.append(control(SECTION_END))
    body = [*train(body), replace(control(END), trained=True)]
    body = _mask_broken(message, body)
    if options.thinking:
        body = _thinking(message, options, current=current) + body
        if not current:  # shown without its reasoning, which is not how the model wrote it: nothing to learn
            body = [replace(piece, trained=False) for piece in body]
    return [control(HEADERS["assistant"]), *text(name), control(MIDDLE), *body]


def _thinking(message: Message, options: K2Options, *, current: bool) -> list[Segment]:
    if not current or not message.reasoning.strip():  # an empty section is never trained: it would teach to skip it
        return [control(THINK), control(THINK_END)]
    opener = replace(control(THINK), trained=not options.open_think)
    return [opener, *train([*text(message.reasoning), control(THINK_END)])]


def _mask_broken(message: Message, body: list[Segment]) -> list[Segment]:
    """Do not train arguments that are no JSON object."""
    broken = {call.json for call in message.calls if not is_object(call.json)}
    return [
        replace(piece, trained=False) if before.text == CALL_ARGUMENTS and piece.text in broken else piece
        for before, piece in zip([control(END), *body], body, strict=False)
    ]


def _message(role: str, name: str, body: list[Segment]) -> list[Segment]:
    return [control(HEADERS[role]), *text(name), control(MIDDLE), *body, control(END)]


def _content(message: Message) -> list[Segment]:
    pieces: list[Segment] = []
    for part in message.content:
        if isinstance(part, Image):
            pieces += [control("<|media_begin|>"), *text("image"), control("<|media_content|>")]
            pieces += [slots(part.number, part.num_tokens), control("<|media_end|>")]
        else:
            pieces += text(part)
    return _join(pieces)


def _join(pieces: list[Segment]) -> list[Segment]:
    """Make neighbouring texts one piece."""
    joined: list[Segment] = []
    for piece in pieces:
        if joined and not piece.control and not joined[-1].control:
            joined[-1] = text(joined[-1].text + piece.text)[0]
        else:
            joined.append(piece)
    return joined


def _name_calls(messages: list[Message]) -> list[Message]:
    """Give calls their canonical ids and results the id of the call they answer, by id or else by order."""
    places = answers(messages)
    renamed: list[Message] = []
    ids: list[str] = []
    free: list[int] = []
    number = 0
    for at, message in enumerate(messages):
        if message.tools:
            raise DataError(
                f"messages[{at}].tools: K2 has no tools in mid-session; found `{len(message.tools)}`; "
                "declare all tools at the start"
            )
        if message.role == "assistant":
            ids = [call_id(call.name, number + place) for place, call in enumerate(message.calls)]
            number += len(ids)
            free = list(range(len(ids)))
            calls = tuple(replace(call, id=id_) for call, id_ in zip(message.calls, ids, strict=True))
            renamed.append(replace(message, calls=calls))
            continue
        if message.role == "tool":
            place = places[at]
            if place not in free:
                place = next((call for call in free if call not in _claimed(messages, places, at)), None)
            if place is None:
                raise DataError(
                    f"messages[{at}]: a tool result that answers no call; found tool_call_id `{message.call_id}`; "
                    "give one result for each call of the last assistant message"
                )
            free.remove(place)
            message = replace(message, call_id=ids[place])
        renamed.append(message)
    return renamed


def _claimed(messages: list[Message], places: list[int | None], at: int) -> set[int | None]:
    """Return the calls that later results of the same turn name by id."""
    claimed: set[int | None] = set()
    for message, place in zip(messages[at + 1 :], places[at + 1 :], strict=True):
        if message.role == "assistant":
            break
        claimed.add(place)
    return claimed
