"""A training run from its recipe to its report; it may be stopped anywhere and goes on as if it never was."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path

from triax.checkpoint import sharded
from triax.checkpoint.run import CHECKPOINTS, recipe_of
from triax.config.train import Recipe
from triax.train import report, run_folder
from triax.train.branch import open_branch, take_tokenizer
from triax.train.metrics import Metrics
from triax.train.profile import Profile
from triax.train.run import Result, Run
from triax.train.run_folder import RESULT
from triax.train.stop import Stop

OnStep = Callable[[int, Metrics], None]


def train(
    recipe: Recipe,
    run_dir: Path | str,
    *,
    resume: bool = False,
    origins: Mapping[str, str] | None = None,
    on_step: OnStep | None = None,
    branch: Path | str | None = None,
    profile: int = 0,
) -> Result:
    """Train what the recipe says and leave everything in the run's folder.

    Args:
        recipe: Model, data, optimiser, run.
        run_dir: Folder of the run; new or empty unless `resume`.
        resume: Go on from the newest checkpoint of the folder, or begin if there is none.
        origins: Where the recipe's values came from; written down.
        on_step: Called after each step with its number and metrics.
        branch: Another run, one of its checkpoints, or released weights, to start from. With another length or
            schedule alone, such as for a decay, it goes on in that run's place; with other text, optimiser or batch
            it is a new run on those weights, whose steps, tokens and schedule begin at 0.
        profile: Steps to record with torch's profiler, after the first ones; 0 records none.

    Raises:
        ConfigError: The folder cannot be used, or another process trains there.
        DataError: The text cannot be read or is too short.
        CheckpointError: The checkpoint is damaged, of other settings, or cannot be written.
        TrainError: Too many steps were skipped, or a weight never moves.
    """
    run_dir = Path(run_dir)
    there = run_folder.prepare(run_dir, resume=resume)
    with run_folder.held(run_dir):
        return _train(recipe, run_dir, there, origins, on_step, None if branch is None else Path(branch), profile)


def _train(
    recipe: Recipe,
    run_dir: Path,
    there: bool,
    origins: Mapping[str, str] | None,
    on_step: OnStep | None,
    branch_from: Path | None,
    profile: int,
) -> Result:
    found = sharded.steps(run_dir / CHECKPOINTS)
    start = found[0] if found else None
    branch = None if found else open_branch(branch_from, recipe)
    if start is not None:
        run_folder.refuse_other_settings(start, sharded.settings_of(start), recipe, run_folder.world_size())
    elif there:
        saved = run_folder.fingerprint(recipe_of(run_dir), run_folder.world_size())
        run_folder.refuse_other_settings(run_dir, saved, recipe, run_folder.world_size())
    anew = not there and run_folder.clear(run_dir)
    source = branch.place if branch is not None else run_folder.branch_of(run_dir) if found else None
    run_folder.record(run_dir, recipe, origins, source)
    if (ended := _ended(run_dir, recipe, start)) is not None:
        return ended
    if branch is not None:
        take_tokenizer(branch, recipe, run_dir)
    with Stop() as stop, Run(recipe, run_dir) as run:
        if anew:
            run.say("the last attempt here ended before its first checkpoint; the run begins anew")
        run.prepare(start, branch)
        with Profile(run_dir, profile, run.say) as profiler:
            while run.tokens < recipe.train.tokens and not stop.asked:
                metrics = run.advance()
                profiler.step(run.step)
                if on_step is not None:
                    on_step(run.step, metrics)
        return run.end(stop.asked)


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
