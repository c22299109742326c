"""K3's answers read as they are written: thinking, response, tools.

The model starts inside the section that the prompt opened, and only the markers are tokens of their own, so tag names
are collected between markers and words like `response` in an answer stay words. What the model forgets is mended and
flagged; what cannot be read is reported with its text. Nothing is dropped in silence.
Source: K3 report (arXiv 2607.24653) appendix F.
"""

import re

from triax.data.chat.call import ArgumentWriter, CallWriter
from triax.data.chat.event import Content, Event, Flag, ParseError, Promoted, Reason, Reasoning
from triax.data.chat.parser import Parser
from triax.data.chat.segment import ChatTokenizer
from triax.data.chat.xtml import CLOSE, END, OPEN, SEP, unescape

TAG = re.compile(r"\s*([A-Za-z_]+)")
ATTRIBUTE = re.compile(r'\s+([A-Za-z_]+)="([^"]*)"')
ENDS = (END, "[EOS]")
VALUES = ("argument", "json")
PLAIN = ("think", "response", "tools")  # tags that open without attributes


def xtml_parser(tokenizer: ChatTokenizer, *, thinking: bool = True, num_calls: int = 0) -> Parser:
    """Return a parser for one answer of K3.

    Args:
        tokenizer: K3's vocabulary.
        thinking: Whether the prompt ends inside the think section, not the response.
        num_calls: Calls made earlier in the conversation; ids count on from there.
    """
    return Parser(XtmlGrammar(thinking, num_calls), tokenizer)


class XtmlGrammar:
    """Where in a message the model is.

    `place` is the section that text belongs to: think, response, argument, json; `tools` and `call` between their
    tags; `message` between sections; `lost` inside what has no place; `over` behind the end of the message.
    """

    markers: tuple[str, ...] = (OPEN, CLOSE, SEP, END)

    def __init__(self, thinking: bool = True, num_calls: int = 0) -> None:
        self.events: list[Event] = []
        self.place = self._prompted = "think" if thinking else "response"
        self._seen = {self.place}
        self._first = True  # openers that come before anything else repeat those of the prompt
        self._tag: list[str] | None = None
        self._opens = True
        self._thoughts: list[str] = []
        self._blank: list[str] = []
        self._stray: list[str] = []
        self._back = ""
        self._answered = self._closed = self._ended = False
        self._call = CallWriter(self.events, num_calls)
        self._arguments = ArgumentWriter(self._call, self.events)
        self._open = {
            "message": self._open_message,
            "think": self._open_think,
            "response": self._open_response,
            "tools": self._open_tools,
            "call": self._open_call,
            "argument": self._open_argument,
            "json": self._open_json,
        }

    def text(self, text: str) -> None:
        """Take ordinary text."""
        if self._tag is not None:
            self._tag.append(text)
            self._check_overrun()
        elif self.place == "think":
            self._first = False
            self._thoughts.append(text)
            self.events.append(Reasoning(text))
        elif self.place == "response":
            self._answer(text)
        elif self.place in VALUES:
            self._arguments.write(text)
        elif self.place == "message" and not self._closed:
            self._between(text)
        else:
            self._stray.append(text)

    def control(self, name: str) -> None:
        """Take a control token."""
        if self.place == "over":
            if name in ENDS:
                self._ended = True
            else:
                self._stray.append(name)
        elif name in (OPEN, CLOSE):
            if self._tag is not None:
                self._finish_tag(whole=False)
            self._tag, self._opens = [], name == OPEN
        elif name == SEP and self._tag is not None:
            self._finish_tag(whole=True)
        elif name in ENDS:
            self._end(as_token=True)
        elif self._in_call():
            self.events.append(ParseError("stray_control", name))
            self._arguments.spoil()
        else:
            self._flag("stray_control", name)

    def finish(self, reason: str | None) -> Reason:
        """Close what is open and say why the message ended."""
        if reason not in (None, "length") and not self._ended:
            self._end(as_token=False)
        if self._tag is not None:
            self._lose_tag()
        if self.place == "lost":
            self.place = self._back
        if self.place in VALUES or self.place == "call":
            self._call.cut(rest=self._arguments.waiting() if self.place in VALUES else "")
        self._report_stray()
        if not self._ended:
            return "length"
        if "response" not in self._seen:
            self._flag("no_response")
        if not (self._answered or self._call.made):
            self.events.append(ParseError("empty"))
        return "tool_calls" if self._call.made else "stop"

    def _answer(self, text: str) -> None:
        self._first = False
        self._answered = self._answered or not text.isspace()
        self.events.append(Content(text))

    def _between(self, text: str) -> None:
        """Take text between sections: blanks are layout, words are an answer whose opener is missing."""
        self._blank.append(text)
        if not text.isspace():
            self._flag("no_response_opener")
            text = "".join(self._blank)
            self._enter("response")
            self._answer(text)

    def _enter(self, place: str) -> None:
        self.place = place
        self._seen.add(place)
        self._blank.clear()

    def _check_overrun(self) -> None:
        """Take what follows a name that has no attributes as text: the tag's separator is missing."""
        names = self._open if not self._opens else PLAIN
        raw = "".join((self._tag or [])[:16])  # long enough for every name, whatever its tokens
        for name in names:
            if raw.startswith(name) and raw[len(name) :].strip():
                raw = "".join(self._tag or ())
                self._tag = [name]
                self._finish_tag(whole=False)
                self.text(raw[len(name) :])
                return

    def _finish_tag(self, *, whole: bool) -> None:
        """Act on a tag; without its separator, what does not read as a tag is text behind it."""
        raw = "".join(self._tag or ())
        name = TAG.match(raw)
        end = name.end() if name else 0
        attributes = {}
        while match := ATTRIBUTE.match(raw, end):
            attributes[match[1]] = unescape(match[2])
            end = match.end()
        tag = name[1] if name else ""
        rest = raw[end:] if raw[end:].strip() else ""
        if tag not in self._open or (rest and (whole or not attributes)):
            self._lose_tag()
            return
        self._tag = None
        self._report_stray()
        if not whole:
            self._flag("no_separator", raw[:end])
        self._act(tag, attributes, raw)
        if rest:
            self.text(rest)

    def _act(self, tag: str, attributes: dict[str, str], raw: str) -> None:
        if self.place == "over":
            return
        if not self._opens:
            self._close(tag)
            self._first = False
        elif self._closed:
            self._second_message(raw)
        else:
            self._open[tag](attributes)
            self._first = self._first and tag == "message"

    def _lose_tag(self) -> None:
        self.events.append(ParseError("unknown_tag", "".join(self._tag or ())))
        self._tag = None

    def _report_stray(self) -> None:
        raw = "".join(self._stray)
        self._stray.clear()
        if raw.strip():
            self.events.append(ParseError("stray_text", raw))
            if self._in_call():  # it may have been an argument
                self._arguments.spoil()

    def _in_call(self) -> bool:
        return (self._back if self.place == "lost" else self.place) in (*VALUES, "call")

    def _flag(self, kind: str, detail: str = "") -> None:
        self.events.append(Flag(kind, detail))

    def _open_message(self, attributes: dict[str, str]) -> None:
        if not self._first:
            self._second_message("message " + " ".join(f'{k}="{v}"' for k, v in attributes.items()))

    def _second_message(self, raw: str) -> None:
        """The model goes on to write the next message itself: this one is over."""
        self._leave()
        self._stray.append(raw)
        self.place = "over"

    def _open_think(self, _: dict[str, str]) -> None:
        if self._first:
            self._seen.clear()
            self._enter("think")
            return
        self._flag("second_think" if "think" in self._seen else "late_think")
        if self.place != "think":
            self._leave()
            self._enter("think")

    def _open_response(self, _: dict[str, str]) -> None:
        if self._first and self._prompted == "response":
            return
        if self.place != "response":
            self._leave()
        if "response" in self._seen:
            self._flag("second_response")
        self._enter("response")

    def _open_tools(self, _: dict[str, str]) -> None:
        self._leave()
        if "tools" in self._seen:
            self._flag("second_tools")
        self._enter("tools")

    def _open_call(self, attributes: dict[str, str]) -> None:
        if self.place != "tools":
            inside = self.place in VALUES or self.place == "call"
            self._leave()
            if not inside:
                self._flag("no_tools_opener")
        self._enter("call")
        self._call.begin(attributes.get("tool") or None)
        self._arguments.begin()

    def _open_argument(self, attributes: dict[str, str]) -> None:
        if self.place in VALUES:
            self._flag("unclosed_argument")
            self._end_value()
        if self.place != "call" or "key" not in attributes or not self._arguments.accepts(raw=False):
            self._lose("argument", attributes)
            return
        self._arguments.open(attributes["key"], attributes.get("type", ""))
        self._enter("argument")

    def _open_json(self, attributes: dict[str, str]) -> None:
        if self.place in VALUES:
            self._flag("unclosed_argument")
            self._end_value()
        if self.place != "call" or not self._arguments.accepts(raw=True):
            self._lose("json", attributes)
            return
        self._flag("raw_arguments")
        self._arguments.open_raw()
        self._enter("json")

    def _lose(self, tag: str, attributes: dict[str, str]) -> None:
        """Keep the text of what has no place here for the report."""
        if self.place != "lost":
            self._back = self.place
        self.place = "lost"
        self._stray.append(" ".join([tag, *(f'{k}="{v}"' for k, v in attributes.items())]) + "\n")

    def _close(self, tag: str) -> None:
        if self.place == "lost":
            self.place = self._back
            if tag in VALUES:
                return
        if tag == "message":
            self._leave()
            self._closed = True
        elif tag == self.place:
            {"argument": self._end_value, "json": self._end_value, "call": self._end_call}.get(tag, self._rest)()
        elif tag == "response" and self.place == "think" and "response" not in self._seen:
            self._promote()
        elif tag == "call" and self.place in VALUES:
            self._flag("unclosed_argument")
            self._end_value()
            self._end_call()
        elif tag == "tools" and self.place in (*VALUES, "call"):
            self._leave()
        else:
            self._flag("stray_close", tag)

    def _rest(self) -> None:
        self.place = "message"

    def _end_value(self) -> None:
        self._arguments.close()
        self.place = "call"

    def _end_call(self) -> None:
        self._call.end(valid=self._arguments.end())
        self.place = "tools"

    def _promote(self) -> None:
        """Close a response inside thinking: the model never thought, all of it was the answer."""
        text = "".join(self._thoughts)
        self._flag("answer_in_think")
        self.events.append(Promoted(text))
        self._answered = bool(text.strip())
        self._seen.add("response")
        self.place = "message"

    def _leave(self) -> None:
        """Go back between sections and close what the model left open."""
        if self.place == "lost":
            self.place = self._back
        if self.place in VALUES:
            self._flag("unclosed_argument")
            self._end_value()
        if self.place == "call":
            self._flag("unclosed_call")
            self._end_call()
        if self.place != "message":
            self._flag(f"unclosed_{self.place}")
        self.place = "message"

    def _end(self, *, as_token: bool) -> None:
        """End the message; the engine may have kept its last token to itself."""
        if self._tag is not None:
            self._finish_tag(whole=False)
        if self.place != "over":
            if as_token and not self._closed:
                self._flag("unclosed_message")
            if not self._closed:
                self._leave()
            self.place = "over"
        self._ended = True
