"""`triax report`: the page of a run, at any time."""

from pathlib import Path
from typing import Annotated

import typer


def report(
    run: Annotated[Path, typer.Argument(help="A run folder; it may be training.", metavar="RUN")],
) -> None:
    """Write the page of a run, running or ended, and print where it is."""
    from triax.checkpoint.run import recipe_of
    from triax.train.report import write

    recipe_of(run)  # refuses what is no run
    print(write(run))
