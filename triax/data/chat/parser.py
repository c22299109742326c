"""From tokens or text to events: one path for streaming and for whole outputs."""

import codecs
import re
from collections.abc import Iterable, Sequence
from typing import Protocol, runtime_checkable

from triax.data.chat.event import Event, Finish, Reason, Reply, collect
from triax.data.chat.segment import ChatTokenizer

NOTHING: Sequence[Event] = ()


@runtime_checkable
class Grammar(Protocol):
    """A chat format's states; appends to `events` what it finds."""

    events: list[Event]
    place: str
    """Section that the next text belongs to."""
    markers: tuple[str, ...]
    """Control names that text may spell when only text is known."""

    def text(self, text: str) -> None:
        """Take ordinary text."""
        ...

    def control(self, name: str) -> None:
        """Take a control token."""
        ...

    def finish(self, reason: str | None) -> Reason:
        """Close what is open; the reason is None where generation was cut or its end is not known."""
        ...


class Parser:
    """Feed what a model writes, token by token or in pieces of text; every call returns what became known.

    The text of the events does not depend on how the output was cut. Bytes of an incomplete character wait for the
    rest of it.
    """

    def __init__(self, grammar: Grammar, tokenizer: ChatTokenizer) -> None:
        """Start where the prompt ended."""
        self._grammar = grammar
        self._tokenizer = tokenizer
        self._control = {token: name for name, token in tokenizer.control.items()}
        self._bytes: dict[int, bytes] = {}
        self._decode = codecs.getincrementaldecoder("utf-8")("replace").decode
        self._spelled = re.compile("|".join(map(re.escape, grammar.markers)))
        self._longest = max(map(len, grammar.markers))
        self._held = ""
        self._over = False

    @property
    def section(self) -> str:
        """Where the model writes now, such as think, response or content; a grammar for answers starts there."""
        return self._grammar.place

    def feed(self, token: int) -> Sequence[Event]:
        """Take one token."""
        grammar = self._grammar
        name = self._control.get(token)
        if name is None:
            data = self._bytes.get(token)
            if data is None:
                data = self._bytes[token] = self._tokenizer.decode_bytes([token])
            text = self._decode(data)
            if text:
                grammar.text(text)
        else:
            self._rest()
            grammar.control(name)
        if grammar.events:
            events = grammar.events.copy()
            grammar.events.clear()
            return events
        return NOTHING

    def feed_text(self, text: str) -> Sequence[Event]:
        """Take a piece of text in which control tokens are spelled out; for sources that give no tokens.

        Such a text cannot tell a marker from an answer that quotes one: feed tokens wherever there are any.
        """
        text = self._held + text
        start = 0
        for match in self._spelled.finditer(text):
            if match.start() > start:
                self._grammar.text(text[start : match.start()])
            self._grammar.control(match[0])
            start = match.end()
        end = self._safe(text, start)
        if end > start:
            self._grammar.text(text[start:end])
        self._held = text[end:]
        return self._taken()

    def finish(self, reason: str | None = None) -> Sequence[Event]:
        """End the output.

        Args:
            reason: "stop" where the engine saw the end of the message and did not feed it; "length" where it was cut;
                None to find out from what was fed.

        Returns:
            The last events; the very last is `Finish`.
        """
        if self._over:
            return NOTHING
        self._over = True
        self._rest()
        if self._held:
            self._grammar.text(self._held)
        self._grammar.events.append(Finish(self._grammar.finish(reason)))
        return self._taken()

    def parse(self, tokens: Iterable[int], reason: str | None = None) -> Reply:
        """Return the message of a whole output."""
        events = [event for token in tokens for event in self.feed(token)]
        return collect([*events, *self.finish(reason)])

    def _rest(self) -> None:
        """Give what is left of a broken character."""
        text = self._decode(b"", final=True)
        if text:
            self._grammar.text(text)

    def _safe(self, text: str, start: int) -> int:
        """Return where a marker may have begun at the end of the text."""
        for at in range(max(start, len(text) - self._longest + 1), len(text)):
            tail = text[at:]
            if any(marker.startswith(tail) for marker in self._grammar.markers):
                return at
        return len(text)

    def _taken(self) -> Sequence[Event]:
        events = self._grammar.events.copy()
        self._grammar.events.clear()
        return events
