"""`triax train`: pre-train or fine-tune; the recipe decides."""

from pathlib import Path
from typing import Annotated

import typer


def train(
    recipe: Annotated[str, typer.Argument(help="A shipped name such as `tiny`, a TOML file, or a run folder.")],
    settings: Annotated[
        list[str] | None, typer.Argument(metavar="KEY=VALUE", help="Settings laid over it: `optim.lr=1e-3`.")
    ] = None,
    run: Annotated[
        Path | None,
        typer.Option("--run", metavar="DIR", help="Run folder; if not given, RECIPE if it is one, else runs/NAME."),
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on from the newest checkpoint, or start if there is no run.")
    ] = False,
    branch: Annotated[
        Path | None,
        typer.Option(
            "--branch", metavar="WEIGHTS", help="Start from another run, one of its checkpoints, or released weights."
        ),
    ] = None,
    profile: Annotated[
        int, typer.Option(min=0, metavar="N", help="Record N steps with torch's profiler, as a trace for Perfetto.")
    ] = 0,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Check everything, print the plan, train nothing.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
) -> None:
    """Train a model on text."""
    import json
    from dataclasses import asdict

    from triax.config.load import load
    from triax.config.show import as_toml
    from triax.config.train import Recipe
    from triax.model.count import sheet

    loaded = load(Recipe, recipe, settings or ())
    plan = loaded.settings.train
    folder = run or (loaded.path.parent if loaded.path.name == "recipe.json" else Path("runs") / loaded.path.stem)
    if dry_run:
        from triax.train.check import check

        told = check(loaded.settings, folder, resume=resume, branch=branch)
        counted = sheet(loaded.settings.model, loaded.settings.data.seq_len)
        print(as_toml(loaded))
        print(f"# {counted.parameters:,} parameters, {counted.active_parameters:,} active for one token")
        print(f"# {-(-plan.tokens // plan.batch_tokens):,} steps of {plan.batch_tokens:,} tokens, into {folder}")
        print("\n".join(f"# {line}" for line in told))
        return

    import torch

    from triax import log, machine
    from triax.train.loop import train as learn

    log.configure()
    on_cpu = plan.device == "cpu" or (plan.device == "auto" and not torch.cuda.is_available())
    threads = machine.thread_warnings(torch.get_num_threads(), machine.cores()) if on_cpu else []
    for text in [*threads, *machine.precision_warnings(plan.precision, on_cpu=on_cpu)]:
        log.logger("train").warning(text)
    if on_cpu:
        machine.keep_freed_memory()
    result = learn(loaded.settings, folder, resume=resume, origins=loaded.origins, branch=branch, profile=profile)
    if as_json:
        print(json.dumps(asdict(result)))
    else:
        measured = f", {result.bits_per_byte:.4f} bits per byte" if result.bits_per_byte is not None else ""
        print(f"{folder}: {result.steps:,} steps, {result.tokens:,} tokens{measured}")
    if result.stopped and result.tokens < plan.tokens:
        raise typer.Exit(1)
