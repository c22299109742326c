"""`triax convert`: write a folder of weights in another form."""

from pathlib import Path
from typing import Annotated

import typer


def convert(
    source: Annotated[
        Path, typer.Argument(metavar="FROM", help="A folder of weights, or a run or one of its checkpoints.")
    ],
    target: Annotated[Path, typer.Argument(metavar="TO", help="A new folder, or that of an interrupted conversion.")],
    to: Annotated[str, typer.Option("--to", metavar="FORM", help="bf16, mxfp4, fp8, int4 or triax (our own layout).")],
    layers: Annotated[
        str | None, typer.Option("--layers", metavar="A..B", help="Keep layers A to B - 1, renumbered from 0.")
    ] = None,
    like: Annotated[
        Path | None,
        typer.Option("--like", metavar="RELEASE", help="Keep its codes and scales where the weights did not change."),
    ] = None,
    workers: Annotated[int, typer.Option(min=1, help="Files written together.")] = 2,
    shard_gb: Annotated[float, typer.Option(min=0.001, help="Size of a file, in GB of 1e9 bytes.")] = 5.0,
    plan_only: Annotated[bool, typer.Option("--plan", help="Say what would be written and stop.")] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the plan, and whether it is written, as JSON.")
    ] = False,
) -> None:
    """Convert weights, file by file; the same command goes on where an interrupted one stopped."""
    import json

    from triax.checkpoint.convert import convert as convert_folder
    from triax.checkpoint.export import released_form
    from triax.checkpoint.plan import TARGETS, make_plan
    from triax.cli.progress import Count
    from triax.errors import ConfigError

    if to not in TARGETS:
        raise ConfigError(f"--to: is not a form; found `{to}`; choose one of {', '.join(TARGETS)}")
    with released_form(source, target) as folder:
        plan = make_plan(folder, to, layers=_layers(layers), shard_bytes=int(shard_gb * 1e9), like=like)
        for note in plan.notes:
            typer.echo(f"note: {note}", err=True)
        if not plan_only:
            with Count("convert", plan.nbytes) as progress:
                convert_folder(plan, target, workers=workers, skip=progress.skip, report=progress.add)
    if as_json:
        told = {"path": str(target), "form": to, "written": not plan_only, "notes": list(plan.notes)}
        print(json.dumps(told | {"tensors": plan.num_tensors, "bytes": plan.nbytes, "files": len(plan.shards)}))
        return
    what = f"{plan.num_tensors:,} tensors, {plan.nbytes:,} bytes in {len(plan.shards):,} files"
    print(f"{'plan' if plan_only else target}: {what}")


def _layers(text: str | None) -> range | None:
    from triax.errors import ConfigError

    if text is None:
        return None
    first, dots, last = text.partition("..")
    if not dots or not first.isdecimal() or not last.isdecimal():
        raise ConfigError(f"--layers: must be A..B, such as 0..4; found `{text}`; B is the layer after the last")
    return range(int(first), int(last))
