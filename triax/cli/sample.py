"""`triax sample`: continue a prompt once."""

import sys
from pathlib import Path
from typing import Annotated

import typer


def sample(
    checkpoint: Annotated[Path, typer.Argument(help="A run folder, one of its checkpoints, or released weights.")],
    prompt: Annotated[str, typer.Argument(help="The beginning of a text; `-` reads it from stdin.")],
    max_tokens: Annotated[int, typer.Option(min=0, help="Most tokens to write.")] = 128,
    temperature: Annotated[float, typer.Option(min=0.0, help="0 takes the likeliest token.")] = 0.7,
    top_k: Annotated[int, typer.Option(min=0, help="Keep this many likeliest tokens; 0 keeps all.")] = 0,
    top_p: Annotated[float, typer.Option(help="Keep the likeliest tokens that hold this share.")] = 0.95,
    min_p: Annotated[float, typer.Option(help="Drop tokens less likely than this share of the likeliest.")] = 0.0,
    seed: Annotated[int, typer.Option(min=0, help="Same seed, same text.")] = 0,
    stop: Annotated[list[str] | None, typer.Option(help="Text that ends the continuation; may be repeated.")] = None,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")] = "auto",
    as_json: Annotated[bool, typer.Option("--json", help="Print text, token count and why it ended, as JSON.")] = False,
) -> None:
    """Continue a prompt once."""
    import json

    from triax.serve.open import open_engine

    engine = open_engine(checkpoint, device)
    text = sys.stdin.read() if prompt == "-" else prompt
    options = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p, "seed": seed}
    if as_json:
        done = engine.generate([text], max_tokens, stop=stop or (), **options)[0]
        told = {"prompt": text, "text": done.text, "tokens": len(done.tokens), "finish_reason": done.finish_reason}
        print(json.dumps(told, ensure_ascii=False))
        return
    pieces = engine.stream(text, max_tokens, stop=stop or (), **options)  # refuses before anything is written
    print(text, end="", flush=True)
    for piece in pieces:
        print(piece, end="", flush=True)
    print()
