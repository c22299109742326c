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
        Path | None, typer.Option("--run", metavar="DIR", help="Run folder; runs/NAME if not given.")
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on from the newest whole checkpoint, or start if there is no run.")
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Check everything, print the plan, train nothing.")
    ] = False,
) -> None:
    """Train a model on text."""
    from triax.config.load import load
    from triax.config.show import as_toml
    from triax.config.train import Recipe

    loaded = load(Recipe, recipe, settings or ())
    folder = run or Path("runs") / (loaded.path.parent.name if loaded.path.name == "recipe.json" else loaded.path.stem)
    if dry_run:
        from triax.model.count import sheet

        plan, counted = loaded.settings.train, sheet(loaded.settings.model, loaded.settings.data.seq_len)
        print(as_toml(loaded))
        print(f"# {counted.parameters:,} parameters, {counted.active_parameters:,} active for one token")
        print(f"# {-(-plan.tokens // plan.batch_tokens):,} steps of {plan.batch_tokens:,} tokens, into {folder}")
        return

    import torch

    from triax import log, machine
    from triax.train.loop import train as learn

    log.configure()
    run_on = loaded.settings.train
    on_cpu = run_on.device == "cpu" or (run_on.device == "auto" and not torch.cuda.is_available())
    warnings = machine.thread_warnings(torch.get_num_threads(), machine.cores()) if on_cpu else []
    for text in [*warnings, *machine.precision_warnings(run_on.precision, on_cpu=on_cpu)]:
        log.logger("train").warning(text)
    learn(loaded.settings, origins=loaded.origins, run_dir=folder, resume=resume)
