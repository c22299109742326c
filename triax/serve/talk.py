"""A conversation with a base model: every line typed is a text that the model continues."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Protocol, runtime_checkable

from triax.errors import TriaxError

HELP = """\
this is a base model: it continues what you type, it does not answer
  TEXT              continue this text; \\n in it is a line break, \\t a tab
  (an empty line)   go on from where the last text stopped
  /set NAME=VALUE   tokens, temperature, top_k, top_p, min_p or seed; /set alone shows them
  /help, /quit"""


@runtime_checkable
class Continues(Protocol):
    """Whatever continues a text, such as an engine."""

    def stream(
        self,
        prompt: str,
        max_tokens: int,
        *,
        temperature: float,
        top_k: int,
        top_p: float,
        min_p: float,
        seed: int,
    ) -> Iterator[str]:
        """Continue a text, piece by piece."""
        ...


@dataclass(frozen=True)
class Manner:
    """How a text is continued."""

    tokens: int = 128
    """Most tokens to write at once."""
    temperature: float = 0.7
    """Divides the logits; 0 takes the likeliest token."""
    top_k: int = 0
    """Keep this many of the likeliest tokens; 0 keeps all."""
    top_p: float = 0.95
    """Keep the fewest likeliest tokens that hold this share of the probability."""
    min_p: float = 0.0
    """Drop tokens less likely than this share of the likeliest one."""
    seed: int = 0
    """Seed of the first text; each further one takes the next."""


def talk(
    engine: Continues, lines: Iterable[str], write: Callable[[str], None], say: Callable[[str], None], manner: Manner
) -> None:
    """Continue line after line until they end or one says `/quit`.

    Args:
        engine: What continues.
        lines: What is typed.
        write: Takes pieces of the model's text as they come.
        say: Takes a line that is about the conversation, not part of it.
        manner: How texts are continued at first.
    """
    document = ""
    for line in lines:
        word, _, rest = line.strip().partition(" ")
        if word == "/quit":
            return
        if word == "/help":
            say(HELP)
        elif word == "/set":
            manner = _set(manner, rest.strip(), say)
        elif word.startswith("/") and word[1:].isalpha():
            say(f"`{word}` is no command; /help lists them; begin with a space to continue such a text")
        elif not line.strip() and not document:
            say("nothing to go on from; type the beginning of a text")
        else:
            if line.strip():
                document = line.replace("\\n", "\n").replace("\\t", "\t")
                write(document)
            document += _continue(engine, document, write, say, manner)
            manner = replace(manner, seed=manner.seed + 1)


def _continue(
    engine: Continues, document: str, write: Callable[[str], None], say: Callable[[str], None], manner: Manner
) -> str:
    pieces: list[str] = []
    trouble = ""
    try:
        for piece in engine.stream(
            document,
            manner.tokens,
            temperature=manner.temperature,
            top_k=manner.top_k,
            top_p=manner.top_p,
            min_p=manner.min_p,
            seed=manner.seed,
        ):
            pieces.append(piece)
            write(piece)
    except KeyboardInterrupt:
        trouble = "stopped"
    except TriaxError as problem:
        trouble = str(problem)
    write("\n")
    if trouble or not pieces:
        say(trouble or "the model ended the text here")
    return "".join(pieces)


def _set(manner: Manner, word: str, say: Callable[[str], None]) -> Manner:
    if not word:
        say("  ".join(f"{name}={value}" for name, value in vars(manner).items()))
        return manner
    name, equals, value = (part.strip() for part in word.partition("="))
    known = vars(manner)
    if name not in known or not equals:
        say(f"/set takes NAME=VALUE with {', '.join(known)}; found `{word}`")
        return manner
    try:
        return replace(manner, **{name: type(known[name])(value)})
    except ValueError:
        say(f"{name} must be a {'whole number' if type(known[name]) is int else 'number'}; found `{value}`")
        return manner
