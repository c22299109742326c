"""`triax chat`: talk to a server or a checkpoint; a base model continues what is typed."""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from triax.serve.engine import Engine
    from triax.serve.local import Local
    from triax.serve.remote import Remote

HISTORY_LINES = 2000


def chat(
    model: Annotated[
        str,
        typer.Argument(
            metavar="URL|CHECKPOINT",
            help="A server, such as http://127.0.0.1:8000, a run folder, a checkpoint of a run, or released weights.",
        ),
    ],
    max_tokens: Annotated[
        int | None, typer.Option(min=1, help="Most tokens to write at once; 128 for a base model, else no limit.")
    ] = None,
    temperature: Annotated[
        float | None, typer.Option(min=0.0, help="0 takes the likeliest token; the model's own if not given.")
    ] = None,
    seed: Annotated[
        int | None, typer.Option(min=0, help="Same seed, same answers; a base model's texts take the next one each.")
    ] = None,
    effort: Annotated[str | None, typer.Option(help="How much to think: low, high, max, or none.")] = None,
    key: Annotated[str, typer.Option(help="API key of the server.")] = "",
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N, for a checkpoint.")] = "auto",
) -> None:
    """Talk to a model; a base model continues the typed text."""
    from triax.serve.converse import Conversation, Speaker
    from triax.serve.talk import HELP, Manner, talk

    def say(text: str) -> None:
        print(text, file=sys.stderr)

    speaker = _speaker(model, key, device)
    if not isinstance(speaker, Speaker) or speaker.is_base:
        say(HELP)
        warmth = 0.7 if temperature is None else temperature
        manner = Manner(tokens=max_tokens or 128, temperature=warmth, seed=seed or 0)
        talk(speaker, _lines(), _write, say, manner)
        return
    options = {"max_tokens": max_tokens, "temperature": temperature, "seed": seed, "reasoning_effort": effort}
    say(f"{speaker.name} listens; /help tells more")
    conversation = Conversation(
        speaker, _write, _think, say, {name: value for name, value in options.items() if value is not None}
    )
    conversation.hold(_lines())
    if callable(close := getattr(speaker, "close", None)):
        close()
    if conversation.num_failures and not conversation.num_answers and not sys.stdin.isatty():
        raise typer.Exit(1)


def _speaker(model: str, key: str, device: str) -> "Engine | Remote | Local":
    """Return who answers: the bare engine of a base model, which needs no extra, or one that holds conversations."""
    from triax.cli.extra import needs

    if model.startswith(("http://", "https://")):
        with needs("serve", "chat"):
            from triax.serve.remote import Remote
        return Remote(model, key)
    from triax.data.chat.family import chat_format
    from triax.serve.open import open_engine

    engine = open_engine(Path(model), device)
    if chat_format(engine.tokenizer) == "text":
        return engine
    with needs("serve", "chat"):
        from triax.serve.local import Local
    return Local(engine, Path(model))


def _write(piece: str) -> None:
    print(piece, end="", flush=True)


def _think(piece: str) -> None:
    """Show thinking apart from the answer, which alone goes to stdout."""
    from triax.log import wants_colour

    print(f"\033[2m{piece}\033[0m" if wants_colour(sys.stderr) else piece, end="", file=sys.stderr, flush=True)


def _lines() -> Iterator[str]:
    """Give what is typed, with editing and a history that is kept where there is a terminal."""
    if not sys.stdin.isatty():
        yield from (line.rstrip("\n") for line in sys.stdin)
        return
    import readline
    from contextlib import suppress

    path = history_file()
    with suppress(OSError):
        readline.read_history_file(path)
    readline.set_history_length(HISTORY_LINES)
    while True:
        try:
            line = input("> ")
        except (EOFError, KeyboardInterrupt):
            print(file=sys.stderr)
            return
        with suppress(OSError):
            path.parent.mkdir(parents=True, exist_ok=True)
            readline.write_history_file(path)
            path.chmod(0o600)
        yield line


def history_file() -> Path:
    """Return where typed lines are kept: below `XDG_STATE_HOME`, as programs do."""
    import os

    return Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state") / "triax" / "chat_history"
