"""`triax model`: what a network holds and what it costs, without building it."""

from typing import Annotated

import typer

app = typer.Typer(name="model", help="Look at networks without building them.", no_args_is_help=True)


@app.command()
def show(
    preset: Annotated[
        str, typer.Argument(help="A preset such as `k3`, a recipe, a published config.json, or its folder.")
    ],
    settings: Annotated[
        list[str] | None, typer.Argument(metavar="KEY=VALUE", help="Settings laid over a preset.")
    ] = None,
    context: Annotated[
        int | None, typer.Option("--context", min=1, help="Tokens of context for FLOPs; the model's own if not given.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the counts as JSON.")] = False,
) -> None:
    """Print the tree, the counts, bytes, FLOPs per token and cache bytes per token."""
    import json
    from dataclasses import asdict
    from pathlib import Path

    from triax.config.load import load_model
    from triax.errors import ConfigError
    from triax.model.count import render, sheet

    path = Path(preset)
    published = path.parent if path.name == "config.json" else path
    if (published / "config.json").is_file():
        if settings:
            raise ConfigError(
                f"{preset}: a published config takes no settings; found `{settings[0]}`; copy and edit it"
            )
        from triax.checkpoint.published import read_config

        network = read_config(published).settings
    else:
        network = load_model(preset, settings or ())
    print(json.dumps(asdict(sheet(network, context)), indent=1) if as_json else render(network, context))
