"""A training run from its recipe to its report; it may be stopped anywhere and goes on as if it never was."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path

from triax.checkpoint import sharded
from triax.checkpoint.run import CHECKPOINTS, recipe_of
from triax.config.train import Recipe
from triax.errors import CheckpointError
from triax.train import report, run_folder
from triax.train.metrics import Metrics
from triax.train.run import Result, Run
from triax.train.run_folder import RESULT
from triax.train.stop import Stop

OnStep = Callable[[int, Metrics], None]


def train(
    recipe: Recipe,
    run_dir: Path,
    *,
    resume: bool = False,
    origins: Mapping[str, str] | None = None,
    on_step: OnStep | None = None,
    branch: Path | None = None,
) -> Result:
    """Train what the recipe says and leave everything in the run's folder.

    Args:
        recipe: Model, data, optimiser, run.
        run_dir: Folder of the run; new or empty unless `resume`.
        resume: Go on from the newest checkpoint of the folder, or begin if there is none.
        origins: Where the recipe's values came from; written down.
        on_step: Called after each step with its number and metrics.
        branch: Another run, or one of its checkpoints, to start from, such as for a decay; length and schedule may
            differ.

    Raises:
        ConfigError: The folder cannot be used, or another process trains there.
        DataError: The text cannot be read or is too short.
        CheckpointError: The checkpoint is damaged, of other settings, or cannot be written.
        TrainError: Too many steps were skipped, or a weight never moves.
    """
    there = run_folder.prepare(run_dir, resume=resume)
    with run_folder.held(run_dir):
        return _train(recipe, run_dir, there, origins, on_step, branch)


def _train(
    recipe: Recipe,
    run_dir: Path,
    there: bool,
    origins: Mapping[str, str] | None,
    on_step: OnStep | None,
    branch: Path | None,
) -> Result:
    found = sharded.steps(run_dir / CHECKPOINTS)
    start = found[0] if found else trunk(branch)
    if start is not None:
        run_folder.refuse_other_settings(start, sharded.settings_of(start), recipe, run_folder.world_size())
    elif there:
        saved = run_folder.fingerprint(recipe_of(run_dir), run_folder.world_size())
        run_folder.refuse_other_settings(run_dir, saved, recipe, run_folder.world_size())
    run_folder.record(run_dir, recipe, origins)
    if (ended := _ended(run_dir, recipe, start)) is not None:
        return ended
    with Stop() as stop, Run(recipe, run_dir) as run:
        run.prepare(start)
        while run.tokens < recipe.train.tokens and not stop.asked:
            metrics = run.advance()
            if on_step is not None:
                on_step(run.step, metrics)
        return run.end(stop.asked)


def trunk(branch: Path | None) -> Path | None:
    """Return the checkpoint to branch off from: the one that is named, or the newest of a run.

    Raises:
        CheckpointError: The path is neither.
    """
    if branch is None or (branch / sharded.MANIFEST).exists():
        return branch
    if (branch / CHECKPOINTS).is_dir():
        return sharded.newest(branch / CHECKPOINTS)
    found = "a folder of something else" if branch.is_dir() else "a file" if branch.exists() else "nothing"
    raise CheckpointError(
        f"{branch}: no checkpoint to branch off from; found {found}; name a run folder or one of its checkpoints"
    )


def _ended(run_dir: Path, recipe: Recipe, start: Path | None) -> Result | None:
    """Return the result of a run that has nothing left to do."""
    path = run_dir / RESULT
    if start is None or not path.exists():
        return None
    result = Result(**json.loads(path.read_text()))
    wants_baselines = recipe.train.baselines and not result.baselines
    if result.tokens < recipe.train.tokens or wants_baselines:
        return None
    if not (run_dir / report.PAGE).exists():
        report.write(run_dir)  # the run ended, but there was no room for its page
    return result
