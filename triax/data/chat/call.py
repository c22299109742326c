"""A tool call while it is written: its start, its arguments as JSON text, its end."""

import json
from json.encoder import encode_basestring

from triax.data.chat.event import Arguments, CallEnd, CallStart, Event, Flag, ParseError
from triax.data.chat.message import parse_json

TYPES = {
    "string": str,
    "number": (int, float),
    "boolean": bool,
    "null": type(None),
    "object": dict,
    "array": list,
}


def call_id(name: str, number: int) -> str:
    """Return the id of a conversation's call: the one form that Kimi models know, counted over all turns from 0."""
    return f"functions.{name}:{number}"


class CallWriter:
    """Reports the calls of one message.

    A call whose name is not known yet is kept back: nothing can be sent before its start.
    """

    def __init__(self, events: list[Event], num_before: int = 0) -> None:
        """Report to `events`; `num_before` calls were made earlier in the conversation."""
        self.made = False
        """Whether a call that can be made was read."""
        self._events = events
        self._before = num_before
        self._index = -1
        self._named = False
        self._kept: list[str] = []

    def begin(self, name: str | None) -> None:
        """Start a call."""
        self._kept = []
        self._named = name is not None
        if name is not None:
            self._index += 1
            self._events.append(CallStart(self._index, call_id(name, self._before + self._index), name))

    def name(self, name: str) -> None:
        """Give the call that was begun without a name the one that was found for it."""
        kept = "".join(self._kept)
        self.begin(name)
        self.write(kept)

    def write(self, words: str) -> None:
        """Add to the arguments' JSON."""
        if not self._named:
            self._kept.append(words)
        elif words:
            self._events.append(Arguments(self._index, words))

    def end(self, *, valid: bool, header: str = "") -> None:
        """Finish a call; `header` is what stood for the name that it lacks."""
        if self._named:
            self._events.append(CallEnd(self._index, valid))
            self.made = self.made or valid
        else:
            self._events.append(ParseError("call_without_name", "".join([header, *self._kept])))

    def cut(self, *, header: str = "", rest: str = "") -> None:
        """End a call that the output stops in; what was not sent of it is reported.

        Args:
            header: What stood for the name that the call lacks.
            rest: Text that waited for its end.
        """
        self._events.append(ParseError("cut_call", rest if self._named else "".join([header, *self._kept, rest])))
        if self._named:
            self._events.append(CallEnd(self._index, False))


class ArgumentWriter:
    """Turns typed arguments into one JSON object as they come.

    Strings, objects and arrays are passed on at once. A number, boolean or null is short and waits for its end, so
    that one that is none can still be sent as a string.
    """

    def __init__(self, call: CallWriter, events: list[Event]) -> None:
        """Write to `call`, report what is wrong to `events`."""
        self._call = call
        self._events = events
        self._keys: set[str] = set()
        self._raw = False
        self._type = "string"
        self._value: list[str] = []
        self._valid = True

    def begin(self) -> None:
        """Start the arguments of a call."""
        self._keys = set()
        self._raw = False
        self._valid = True

    def accepts(self, *, raw: bool) -> bool:
        """Return whether an argument, or a raw block, may come now: a call has one or the other."""
        return not self._raw and not (raw and self._keys)

    def open(self, key: str, kind: str) -> None:
        """Start an argument."""
        if kind not in TYPES:
            self._events.append(Flag("unknown_type", kind))
            kind = "string"
        if key in self._keys:
            self._events.append(ParseError("duplicate_argument", key))
            self._valid = False
        self._call.write(("{" if not self._keys else ", ") + json.dumps(key, ensure_ascii=False) + ": ")
        self._keys.add(key)
        self._type, self._value = kind, []
        if kind == "string":
            self._call.write('"')

    def open_raw(self) -> None:
        """Start a block that holds all arguments as they are."""
        self._raw = True
        self._type, self._value = "object", []

    def write(self, text: str) -> None:
        """Add to a value."""
        if self._type == "string":
            self._call.write(encode_basestring(text)[1:-1])
            return
        self._value.append(text)
        if self._type in ("object", "array"):
            self._call.write(text)

    def close(self) -> None:
        """End an argument or block."""
        if self._type == "string":
            self._call.write('"')
            return
        words = "".join(self._value)
        try:
            value = parse_json(words)
        except ValueError:
            self._broken(words)
            return
        if not isinstance(value, TYPES[self._type]) or (self._type == "number" and isinstance(value, bool)):
            if self._raw:
                self._broken(words)
                return
            self._events.append(Flag("other_type", self._type))
        if self._type not in ("object", "array"):
            self._call.write(words)

    def spoil(self) -> None:
        """Remember that a part of the arguments could not be read: such a call must not be made."""
        self._valid = False

    def waiting(self) -> str:
        """Return the text of a value that waits for its end."""
        return "" if self._type in ("string", "object", "array") else "".join(self._value)

    def end(self) -> bool:
        """Finish the arguments; returns whether they are a JSON object."""
        if not self._raw:
            self._call.write("}" if self._keys else "{}")
        return self._valid

    def _broken(self, words: str) -> None:
        if self._type in ("object", "array"):  # already sent as it is
            self._events.append(ParseError("arguments", words))
            self._valid = False
        else:
            self._events.append(Flag("other_type", self._type))
            self._call.write(json.dumps(words, ensure_ascii=False))
