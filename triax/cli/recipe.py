"""`triax recipe`: what a recipe says, without running it."""

from typing import Annotated

import typer

app = typer.Typer(name="recipe", help="Look at recipes without running them.", no_args_is_help=True)

Name = Annotated[str | None, typer.Argument(metavar="RECIPE", help="A shipped name, a TOML file, or a run folder.")]
Words = Annotated[list[str] | None, typer.Argument(metavar="KEY=VALUE", help="Settings laid over it.")]


@app.command()
def show(
    recipe: Name = None,
    settings: Words = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print all resolved settings and origins as JSON.")] = False,
) -> None:
    """Print every value that is not the default, and where it was written. Without a name, list what is shipped."""
    import json

    from triax.config import show
    from triax.config.load import load_either, purpose, recipe_names

    if recipe is None:
        shipped = {name: purpose(name) for name in recipe_names()}
        print(json.dumps(shipped, indent=1) if as_json else "\n".join(f"{n:<16}{text}" for n, text in shipped.items()))
        return
    loaded = load_either(recipe, settings or ())
    print(json.dumps(show.as_json(loaded), indent=1) if as_json else show.as_toml(loaded))


@app.command()
def check(
    recipe: Annotated[str, typer.Argument(help="A shipped name, a TOML file, or a run folder.")],
    settings: Words = None,
) -> None:
    """Validate a recipe; every problem is one line."""
    from triax.config.load import ModelOnly, load_either, short

    loaded = load_either(recipe, settings or ())
    kind = "a model, without a run" if isinstance(loaded.settings, ModelOnly) else "a training recipe"
    print(f"{short(loaded.path)}: ok, {kind}")
