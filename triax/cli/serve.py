"""`triax serve`: answer over HTTP."""

from pathlib import Path
from typing import Annotated

import typer


def serve(
    checkpoint: Annotated[Path, typer.Argument(help="A run folder, one of its checkpoints, or released weights.")],
    settings: Annotated[
        list[str] | None, typer.Argument(metavar="KEY=VALUE", help="Settings of the server: `http.port=9000`.")
    ] = None,
    file: Annotated[
        Path | None, typer.Option("--settings", metavar="FILE", help="A TOML file of settings below those.")
    ] = None,
    draft: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="A small model with the same tokenizer, for speculation.")
    ] = None,
    engine: Annotated[
        str | None, typer.Option(metavar="MODULE:NAME", help="What makes the engine instead; also FILE.py:NAME.")
    ] = None,
) -> None:
    """Answer over HTTP: the OpenAI API, and a chat page at `/`."""
    import json

    from triax.cli.extra import needs
    from triax.config.load import load_words
    from triax.config.serve import Serve
    from triax.log import configure

    with needs("serve", "serve"):
        from triax.serve.http.server import run
        from triax.serve.link import MAKER
    configure()
    words = [*(settings or ()), *(("drafting.kind=model", f"drafting.model={json.dumps(str(draft))}") if draft else ())]
    run(checkpoint, load_words(Serve, words, file), engine or MAKER)
