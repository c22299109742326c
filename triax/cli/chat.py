"""`triax chat`: type to a checkpoint; a base model continues what is typed."""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer


def chat(
    checkpoint: Annotated[Path, typer.Argument(help="A run folder, one of its checkpoints, or released weights.")],
    max_tokens: Annotated[int, typer.Option(min=1, help="Most tokens to write at once.")] = 128,
    temperature: Annotated[float, typer.Option(min=0.0, help="0 takes the likeliest token.")] = 0.7,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the first text; each further one takes the next.")] = 0,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")] = "auto",
) -> None:
    """Type to a model; a base model continues the typed text."""
    from triax.serve.open import open_engine
    from triax.serve.talk import HELP, Manner, talk

    engine = open_engine(checkpoint, device)
    print(HELP, file=sys.stderr)
    manner = Manner(tokens=max_tokens, temperature=temperature, seed=seed)
    talk(engine, _lines(), _write, lambda text: print(text, file=sys.stderr), manner)


def _write(piece: str) -> None:
    print(piece, end="", flush=True)


def _lines() -> Iterator[str]:
    """Give what is typed, with editing and history where there is a terminal."""
    if not sys.stdin.isatty():
        yield from (line.rstrip("\n") for line in sys.stdin)
        return
    import readline  # noqa: F401  (gives `input` history and editing)

    while True:
        try:
            yield input("> ")
        except (EOFError, KeyboardInterrupt):
            print(file=sys.stderr)
            return
