"""`triax runs`: several runs side by side."""

from pathlib import Path
from typing import Annotated, Any

import typer


def runs(
    folders: Annotated[list[Path], typer.Argument(metavar="FOLDER...", help="Run folders, or folders of run folders.")],
    plot: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Draw loss against tokens, time and FLOPs into this picture.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print figures and differing settings as JSON.")] = False,
) -> None:
    """Compare runs: what each reached, the settings in which they differ, and their curves in one picture."""
    import json

    from triax.train import compare

    curves = compare.open_curves(folders)
    settings = compare.differing(curves)
    if as_json:
        rows = [
            curve.figures() | {"settings": {key: values[n] for key, values in settings.items()}}
            for n, curve in enumerate(curves)
        ]
        print(json.dumps(rows, indent=1))
    else:
        print(_table(curves, settings))
    if plot is not None:
        compare.plot(curves, plot)
        typer.echo(f"{plot}: loss against tokens, time and FLOPs", err=True)


def _table(curves: list[Any], settings: dict[str, list[Any]]) -> str:
    from triax.config.show import toml
    from triax.train.progress import duration, short

    head = ["run", "status", "steps", "tokens", "loss", "held-out b/B", "time", "tok/s", "FLOP"]
    rows = []
    for curve in curves:
        found = curve.figures()
        held_out, loss, rate = (found[name] for name in ("held_out_bits_per_byte", "loss", "tokens_per_s"))
        rows.append(
            [
                *(curve.name, found["status"], f"{found['steps']:,}", short(found["tokens"])),
                *("-" if loss is None else f"{loss:.4f}", "-" if held_out is None else f"{held_out:.4f}"),
                *(duration(found["seconds"]), "-" if rate is None else short(rate), f"{found['flops']:.2e}"),
            ]
        )
    text = [_aligned([head, *rows])]
    if settings:
        names = ["setting", *(curve.name for curve in curves)]
        text += ["", _aligned([names, *([key, *map(toml, values)] for key, values in settings.items())])]
    elif len(curves) > 1:
        text += ["", "no setting differs"]
    return "\n".join(text)


def _aligned(rows: list[list[str]]) -> str:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return "\n".join(
        "  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    )
