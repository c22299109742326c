"""K2's answers read as they are written, with the ids and section markers that the models were seen to invent.

Source: Kimi K2 documentation, "Tool calling guidance".
"""

import re
from collections.abc import Mapping, Sequence

from triax.data.chat.call import CallWriter
from triax.data.chat.event import Content, Event, Flag, ParseError, Reason, Reasoning
from triax.data.chat.k2 import (
    CALL_ARGUMENTS,
    CALL_BEGIN,
    CALL_END,
    END,
    HEADERS,
    MIDDLE,
    SECTION_BEGIN,
    SECTION_END,
    THINK,
    THINK_END,
)
from triax.data.chat.message import is_object, parse_json
from triax.data.chat.parser import Parser
from triax.data.chat.segment import ChatTokenizer
from triax.data.chat.tool import Tool, tool_name

ONE_BEGIN, ONE_END = "<|tool_call_section_begin|>", "<|tool_call_section_end|>"  # the models' other spelling, as text
MAX_BLANKS = 64  # after a spelled marker, before it counts as text
CANONICAL = re.compile(r"(?:functions\.)?([^\s:]+):\d+\Z|functions\.([^\s:]+)\Z")
ENDS = (END, "[EOS]")


def k2_parser(
    tokenizer: ChatTokenizer, *, tools: Sequence[Tool] = (), open_think: bool = False, num_calls: int = 0
) -> Parser:
    """Return a parser for one answer of K2.

    Args:
        tokenizer: K2's vocabulary.
        tools: Declared tools; names that the model garbles are looked for among them.
        open_think: Whether the prompt ends inside the think section.
        num_calls: Calls made earlier in the conversation; ids count on from there.
    """
    return Parser(K2Grammar(tools, open_think, num_calls), tokenizer)


class K2Grammar:
    """Where in a message the model is: think, content, section (between calls), header, arguments or over."""

    markers: tuple[str, ...] = (END, THINK, THINK_END, SECTION_BEGIN, SECTION_END, CALL_BEGIN, CALL_ARGUMENTS, CALL_END)

    def __init__(self, tools: Sequence[Tool] = (), open_think: bool = False, num_calls: int = 0) -> None:
        self.events: list[Event] = []
        self._tools = {tool_name(tool): tool for tool in tools}
        self.place = "think" if open_think else "content"
        self._header: list[str] = []
        self._body: list[str] = []
        self._stray: list[str] = []
        self._held = ""
        self._unnamed = False
        self._bare = False
        self._first = True
        self._answered = self._ended = False
        self._call = CallWriter(self.events, num_calls)

    def text(self, text: str) -> None:
        """Take ordinary text."""
        place = self.place
        if place == "arguments":
            self._body.append(text)
            self._call.write(text)
        elif place in ("think", "content"):
            self._first = False
            if self._held or "<" in text:
                text = self._hold(self._held + text)
            if text:
                self._pass(text)
        elif place == "header":
            self._header.append(text)
        elif place == "section" and self._bare and not text.isspace():
            self._flag("unclosed_tools")
            self.place = "content"
            text = "".join([*self._stray, text])
            self._stray.clear()
            self.text(text)
        else:
            self._stray.append(text)

    def control(self, name: str) -> None:
        """Take a control token."""
        spelled = False
        if self._held:
            spelled = self._release(keep=name != CALL_BEGIN)
        if self.place == "over":
            if name in ENDS:
                self._ended = True
            else:
                self._stray.append(name)
        elif name in ENDS:
            self._end()
        elif name == CALL_BEGIN:
            self._begin_call(spelled=spelled)
        elif name == CALL_ARGUMENTS and self.place == "header":
            self._begin_arguments()
        elif name == CALL_END and self.place in ("header", "arguments"):
            self._end_call()
        elif name in (SECTION_BEGIN, SECTION_END):
            self._section(name)
        elif name in (THINK, THINK_END):
            self._think(name)
        elif name in HEADERS.values() or name == MIDDLE:
            self._leave()
            self.place = "over"
            self._stray.append(name)
        else:
            self._flag("stray_control", name)
        self._first = False

    def finish(self, reason: str | None) -> Reason:
        """Close what is open and say why the message ended."""
        if self._held:
            self._release(keep=True)
        if reason not in (None, "length") and not self._ended:
            self._end()
        if self.place == "header":
            self.events.append(ParseError("cut_call", "".join(self._header)))
        elif self.place == "arguments":
            self._call.cut(header="".join(self._header))
        self._report_stray()
        if not self._ended:
            return "length"
        if not (self._answered or self._call.made):
            self.events.append(ParseError("empty"))
        return "tool_calls" if self._call.made else "stop"

    def _flag(self, kind: str, detail: str = "") -> None:
        self.events.append(Flag(kind, detail))

    def _pass(self, text: str) -> None:
        if self.place == "think":
            self.events.append(Reasoning(text))
        else:
            self._answered = self._answered or not text.isspace()
            self.events.append(Content(text))

    def _hold(self, text: str) -> str:
        """Return what is text for sure; a spelled section marker, or a start of one, is held back."""
        at = text.find(ONE_BEGIN)
        while at >= 0:
            after = text[at + len(ONE_BEGIN) :]
            if len(after) <= MAX_BLANKS and not after.strip():
                self._held = text[at:]
                return text[:at]
            at = text.find(ONE_BEGIN, at + 1)
        for at in range(max(0, len(text) - len(ONE_BEGIN) + 1), len(text)):
            if ONE_BEGIN.startswith(text[at:]):
                self._held = text[at:]
                return text[:at]
        self._held = ""
        return text

    def _release(self, *, keep: bool) -> bool:
        """Decide what was held: before a call a whole marker is structure, anywhere else it is text."""
        held, self._held = self._held, ""
        spelled = not keep and held.startswith(ONE_BEGIN)
        if not spelled:
            self._pass(held)
        return spelled

    def _begin_call(self, *, spelled: bool) -> None:
        """Start a call; its section may be `spelled` as text or missing."""
        if self.place in ("header", "arguments"):
            self._flag("unclosed_call")
            self._end_call()
        elif self.place == "think":
            self._flag("unclosed_think")
        if self.place != "section":
            self._bare = not spelled
            self._flag("spelled_section" if spelled else "no_section")
        self._report_stray()
        self.place, self._header, self._body = "header", [], []

    def _begin_arguments(self) -> None:
        header = "".join(self._header).strip()
        name = find_name(header, self._tools)
        self._unnamed = name is None
        if name is not None and not re.fullmatch(rf"functions\.{re.escape(name)}:\d+", header):
            self._flag("call_id", header)
        self._call.begin(name)
        self.place = "arguments"

    def _end_call(self) -> None:
        if self.place == "header":  # arguments without their marker, or none
            header = "".join(self._header)
            brace = header.find("{")
            self._header = [header if brace < 0 else header[:brace]]
            self._flag("no_arguments_marker", header)
            self._begin_arguments()
            self.text("{}" if brace < 0 else header[brace:])
        words = "".join(self._body)
        if not words.strip():
            words = "{}"
            self._call.write(words)
        valid = is_object(words)
        if self._unnamed and (name := find_by_arguments(words, self._tools)) is not None:
            self._flag("name_from_arguments", "".join(self._header))
            self._call.name(name)
            self._unnamed = False
        if not self._unnamed and not valid:
            self.events.append(ParseError("arguments", words))
        self._call.end(valid=valid, header="".join(self._header))
        self.place = "section"

    def _section(self, name: str) -> None:
        if self.place in ("header", "arguments"):
            self._flag("unclosed_call")
            self._end_call()
        if name == SECTION_BEGIN:
            if self.place == "think":
                self._flag("unclosed_think")
            self.place, self._bare = "section", False
        elif self.place == "section":
            self._report_stray()
            self.place = "content"
        else:
            self._flag("stray_close", name)

    def _think(self, name: str) -> None:
        if name == THINK and (self._first or self.place == "content"):
            if not self._first:
                self._flag("second_think")
            self.place = "think"
        elif name == THINK_END and self.place == "think":
            self.place = "content"
        else:
            self._flag("stray_think", name)

    def _report_stray(self) -> None:
        raw = "".join(self._stray).replace(ONE_END, "")
        self._stray.clear()
        if raw.strip():
            self.events.append(ParseError("stray_text", raw))

    def _leave(self) -> None:
        if self.place in ("header", "arguments"):
            self._flag("unclosed_call")
            self._end_call()
        if self.place == "section":
            self._report_stray()

    def _end(self) -> None:
        self._leave()
        if self.place == "think":
            self._flag("unclosed_think")
        self.place = "over"
        self._ended = True


def find_name(header: str, tools: Mapping[str, Tool]) -> str | None:
    """Return the tool that a call's id names.

    The proper form is `functions.name:number`. Where the model dropped a dot, a colon or the prefix, the name is
    looked for among the declared tools, the longest first.
    """
    header = header.strip()
    canonical = CANONICAL.match(header)
    name = canonical and (canonical[1] or canonical[2])
    if name in tools:
        return name
    plain = _letters(header)
    bare = plain.removeprefix("functions")
    for candidate in sorted(tools, key=len, reverse=True):
        letters = _letters(candidate)
        if any(re.fullmatch(re.escape(letters) + r"\d*", form) for form in (plain, bare)):
            return candidate
    return name


def find_by_arguments(words: str, tools: Mapping[str, Tool]) -> str | None:
    """Return the one declared tool that takes these arguments, None where several or none do."""
    try:
        given = parse_json(words)
    except ValueError:
        return None
    if not isinstance(given, dict):
        return None
    fitting = [
        name
        for name, tool in tools.items()
        if (schema := tool["function"].get("parameters") or {}) is not None
        and set(given) <= set(schema.get("properties") or {})
        and set(schema.get("required") or ()) <= set(given)
    ]
    return fitting[0] if len(fitting) == 1 else None


def _letters(name: str) -> str:
    return re.sub(r"[^A-Za-z0-9]", "", name).lower()
