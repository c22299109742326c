"""A conversation with a chat model in a terminal: lines in, thinking and answers out."""

import base64
import mimetypes
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from triax.errors import TriaxError

HELP = """\
  TEXT              say this; a line that ends with \\ goes on in the next one
  /effort LEVEL     how much to think: low, high, max, or none
  /system TEXT      what holds for the whole conversation
  /image FILE       send a picture with the next text
  /set NAME=VALUE   temperature, top_p, seed or max_tokens; /set NAME= takes the model's own; /set alone shows them
  /new              forget the conversation
  /help, /quit      Ctrl-C stops an answer"""
OPTIONS: dict[str, type[int] | type[float]] = {"temperature": float, "top_p": float, "seed": int, "max_tokens": int}
EFFORTS = ("low", "high", "max", "none")
TOLD = {"length": "the answer was cut: it reached its limit of tokens", "abort": "ended by the operator"}


Message = Mapping[str, Any]


@dataclass
class Piece:
    """News of an answer."""

    thought: str = ""
    text: str = ""
    call: str = ""
    """A part of a tool call as a person reads it."""
    reason: str | None = None
    """Why it ended, in the last piece."""
    told: dict[str, Any] = field(default_factory=dict)
    """In the last piece, the message as it is to be sent back."""


@runtime_checkable
class Speaker(Protocol):
    """Whoever answers conversations."""

    name: str
    is_base: bool
    """A base model: it only continues text."""

    def reply(self, messages: Sequence[Message], options: Mapping[str, Any]) -> Iterator[Piece]:
        """Answer, piece by piece; leaving early ends the answer."""
        ...

    def stream(self, prompt: str, max_tokens: int, **options: Any) -> Iterator[str]:
        """Continue a text, piece by piece."""
        ...


@dataclass
class Conversation:
    """What was said, and how answers are asked for.

    Args:
        speaker: Who answers.
        write: Takes pieces of an answer as they come.
        think: Takes pieces of thinking and calls.
        say: Takes a line that is about the conversation, not part of it.
        options: Sampling options and effort at first.
    """

    speaker: Speaker
    write: Callable[[str], None]
    think: Callable[[str], None]
    say: Callable[[str], None]
    options: dict[str, Any] = field(default_factory=dict)
    system: str = ""
    messages: list[dict[str, Any]] = field(default_factory=list)
    pictures: list[dict[str, Any]] = field(default_factory=list)
    num_answers: int = 0
    """Answers that came, whole or stopped."""
    num_failures: int = 0
    """Answers that failed."""

    def hold(self, lines: Iterable[str]) -> None:
        """Answer line after line until they end or one says `/quit`."""
        begun: list[str] = []
        for line in lines:
            if line.endswith("\\"):
                begun.append(line[:-1])
                continue
            text = "\n".join([*begun, line]).strip()
            begun.clear()
            if text == "/quit":
                return
            if text.startswith("/"):
                self._command(text)
            elif text:
                self._answer(text)

    def _command(self, text: str) -> None:
        word, _, rest = text.partition(" ")
        rest = rest.strip()
        if word == "/help":
            self.say(HELP)
        elif word == "/new":
            self.messages.clear()
            self.pictures.clear()
            self.say("a new conversation")
        elif word == "/system":
            self.system = rest
        elif word == "/effort":
            if rest in EFFORTS:
                self.options["reasoning_effort"] = rest
            else:
                self.say(f"/effort takes {', '.join(EFFORTS)}; found `{rest}`")
        elif word == "/image":
            self._picture(Path(rest).expanduser())
        elif word == "/set":
            self._set(rest)
        else:
            self.say(f"`{word}` is no command; /help lists them")

    def _picture(self, path: Path) -> None:
        try:
            data = base64.b64encode(path.read_bytes()).decode()
        except OSError as problem:
            self.say(f"{path}: cannot be read; found {(problem.strerror or '').lower()}; name a picture")
            return
        kind = mimetypes.guess_type(path.name)[0] or "image/png"
        self.pictures.append({"type": "image_url", "image_url": {"url": f"data:{kind};base64,{data}"}})

    def _set(self, word: str) -> None:
        if not word:
            self.say("  ".join(f"{name}={self.options.get(name, 'its own')}" for name in OPTIONS))
            return
        name, equals, value = (part.strip() for part in word.partition("="))
        if name not in OPTIONS or not equals:
            self.say(f"/set takes NAME=VALUE with {', '.join(OPTIONS)}; found `{word}`")
            return
        if not value:
            self.options.pop(name, None)
            return
        try:
            self.options[name] = OPTIONS[name](value)
        except ValueError:
            self.say(f"{name} must be a {'whole number' if OPTIONS[name] is int else 'number'}; found `{value}`")

    def _answer(self, text: str) -> None:
        content = [*self.pictures, {"type": "text", "text": text}] if self.pictures else text
        question = {"role": "user", "content": content}
        before = [{"role": "system", "content": self.system}] if self.system else []
        told: dict[str, Any] = {"role": "assistant", "content": ""}
        trouble, has_thought = "", False
        try:
            for piece in self.speaker.reply([*before, *self.messages, question], self.options):
                if piece.thought or piece.call:
                    has_thought = True
                    self.think(piece.thought + piece.call)
                if piece.text:
                    if has_thought:
                        self.think("\n")
                    has_thought = False
                    told["content"] += piece.text
                    self.write(piece.text)
                if piece.reason is not None:
                    told, trouble = piece.told, TOLD.get(piece.reason, "")
        except KeyboardInterrupt:
            trouble = "stopped"
        except TriaxError as problem:
            self.write("\n")
            self.say(str(problem))
            self.num_failures += 1
            return  # as if it had not been asked
        self.write("\n")
        self.num_answers += 1
        if trouble:
            self.say(trouble)
        self.pictures.clear()
        self.messages += [question, told]
