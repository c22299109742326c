"""`triax checkpoint`: look into a folder of weights and say whether it is whole."""

from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(name="checkpoint", help="Verify released weights and look into them.", no_args_is_help=True)

Folder = Annotated[Path, typer.Argument(metavar="PATH", help="A folder with config.json and safetensors files.")]
MOST_NAMES = 20  # of one kind, in words: one file that is cut short hides thousands of tensors
Json = Annotated[bool, typer.Option("--json", help="Print everything as JSON.")]


@app.command()
def verify(
    path: Folder,
    structure: Annotated[
        bool, typer.Option("--structure", help="Only config, index, headers and file sizes; no numbers.")
    ] = False,
    workers: Annotated[int, typer.Option(min=1, help="Files looked at together.")] = 2,
    as_json: Json = False,
) -> None:
    """Hold names, shapes, sizes and numbers against the config; status 1 and a list if anything is wrong."""
    import json

    from triax.checkpoint.verify import verify as verify_folder
    from triax.cli.progress import Count

    total = sum(file.stat().st_size for file in path.glob("*.safetensors"))  # headers are next to nothing
    with Count("verify", total or None) as progress:
        found = verify_folder(path, structure=structure, workers=workers, report=progress.add)
    if as_json:
        told = {
            "path": str(path),
            "family": found.family,
            "whole": found.is_whole,
            "structure_only": found.is_structure_only,
            "files": found.files,
            "tensors": found.tensors,
            "bytes": found.nbytes,
            "parameters": found.parameters,
            "classes": [row._asdict() for row in found.rows],
            "problems": found.problems,
            "notes": found.notes,
        }
        print(json.dumps(told, indent=1))
    else:
        for row in found.rows:
            print(f"{row.part:<12} {row.form:<6} {row.tensors:>9,} tensors {row.nbytes:>21,} bytes", end="")
            print(f" {row.parameters:>21,} parameters")
        for note in found.notes:
            print(f"note: {note}")
        for kind, names in found.problems.items():
            print(f"{len(names):,} {kind}:")
            for name in names[:MOST_NAMES]:
                print(f"  {name}")
            if len(names) > MOST_NAMES:
                print(f"  … and {len(names) - MOST_NAMES:,} more; `--json` lists all")
        how = "headers only" if found.is_structure_only else "every number looked at"
        print(
            f"{'whole' if found.is_whole else 'REFUSED'}: {found.family}, {found.files:,} files, "
            f"{found.tensors:,} tensors, {found.nbytes:,} bytes, {found.parameters:,} parameters; {how}"
        )
    if not found.is_whole:
        raise typer.Exit(1)


@app.command()
def inspect(
    path: Folder,
    layer: Annotated[int | None, typer.Option("--layer", min=0, help="Show the weights of this layer.")] = None,
    as_json: Json = False,
) -> None:
    """Print the tree of weights with their forms and sizes, from headers alone."""
    import json

    from triax.checkpoint.account import examine
    from triax.checkpoint.inspect import tree

    ledger = examine(path)
    branches = tree(ledger, layer)
    if as_json:
        print(json.dumps([branch._asdict() for branch in branches], indent=1))
        return
    longest = max((len(branch.name) for branch in branches), default=0)
    for branch in branches:
        shape = "x".join(str(size) for size in branch.shape or ())
        print(f"{branch.name:<{longest}} {branch.form:<10} {shape:>16} {branch.tensors:>9,} {branch.nbytes:>19,} bytes")
    print(f"{sum(b.tensors for b in branches):,} tensors, {sum(b.nbytes for b in branches):,} bytes")
    wrong = sum(len(names) for names in ledger.problems.values())
    if wrong:
        print(f"{wrong:,} things are wrong with this folder: `triax checkpoint verify {path} --structure` lists them")
