"""A run's folder: what was asked for, on what machine, and everything that came out.

`recipe.json` (resolved, with origins) · `environment.json` · `tokenizer.json` · `text.json` (hashes of what was read) ·
`metrics.jsonl` · `samples.jsonl` · `log.txt` · `checkpoints/` · `profile/` · `plots/*.png` · `result.json` ·
`report.html`
"""

import fcntl
import json
import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from triax.checkpoint import sharded
from triax.checkpoint.run import CHECKPOINTS, RECIPE
from triax.checkpoint.tokenizer import TOKENIZER_FILES
from triax.config.train import Recipe
from triax.errors import CheckpointError, ConfigError, TrainError

ENVIRONMENT, METRICS, RESULT, LOG, PLOTS = "environment.json", "metrics.jsonl", "result.json", "log.txt", "plots"
SAMPLES, TEXT = "samples.jsonl", "text.json"

BEFORE_THE_TEXT = frozenset({RECIPE, f"{RECIPE}.tmp", ENVIRONMENT, f"{ENVIRONMENT}.tmp", LOG})
"""What a run writes before it reads its text."""

OF_AN_ATTEMPT = (*TOKENIZER_FILES, TEXT, f"{TEXT}.tmp", METRICS, SAMPLES, "tensorboard")
"""What an attempt that saved no checkpoint leaves, and the next one must not read or go on writing."""

FREE_TO_CHANGE = re.compile(r"(train|schedule)\.|data\.(sources\.\d+|tokenizer)\.path$")
"""Settings that a resumed run may change: length, rate (a branch that decays), what is written when, the device; and
where text lies, since hashes tell whether it is the same."""

FIXED = ("train.batch_tokens", "train.micro_tokens", "train.precision", "train.seed")
"""Settings among those that decide what a step computes and may not change."""


def prepare(path: Path, *, resume: bool) -> bool:
    """Make the folder, or reopen it; return whether work of a run is kept there. Nothing in it is changed.

    Raises:
        ConfigError: The folder cannot be written, holds something else, or holds a run and `resume` is not set.
    """
    there = inspect(path, resume=resume)
    try:
        path.mkdir(parents=True, exist_ok=True)
        probe = path / f"{ENVIRONMENT}.tmp"
        probe.write_text("")
        probe.unlink()
    except OSError as problem:
        raise _unwritable(path, problem) from problem
    return there


def inspect(path: Path, *, resume: bool) -> bool:
    """Return whether a folder holds work of a run, a checkpoint or a result, that is to be gone on with; write nothing.

    A run that ended before its first checkpoint has nothing to go on from, so that its folder may be begun anew, with
    any settings.

    Raises:
        ConfigError: As `prepare`.
    """
    try:
        names = {entry.name for entry in path.iterdir()} if path.exists() else set()
    except OSError as problem:
        raise _unwritable(path, problem) from problem
    kept = [RESULT] if RESULT in names else [f"{CHECKPOINTS}/{step.name}" for step in sharded.steps(path / CHECKPOINTS)]
    if kept and RECIPE in names:
        if not resume:
            raise ConfigError(
                f"{path}: holds a run already, with `{kept[0]}`; pass --resume to go on or choose another folder"
            )
        return True
    strangers = names - BEFORE_THE_TEXT
    if strangers and RECIPE not in names:
        raise ConfigError(f"{path}: is not empty and holds no run; found `{min(strangers)}`; choose another folder")
    there = next(place for place in (path, *path.absolute().parents) if place.exists())
    if not there.is_dir():
        raise ConfigError(f"{path}: cannot be written; Not a directory; choose another run folder")
    return False


def _unwritable(path: Path, problem: OSError) -> ConfigError:
    return ConfigError(f"{path}: cannot be written; {problem.strerror or problem}; choose another run folder")


def clear(path: Path) -> bool:
    """Drop what an attempt without a checkpoint left behind; return whether there was anything."""
    left = [path / name for name in OF_AN_ATTEMPT if (path / name).exists()]
    for place in left:
        if place.is_dir():
            shutil.rmtree(place)
        else:
            place.unlink()
    return bool(left)


def is_running(path: Path) -> bool:
    """Return whether a process trains in a folder now."""
    try:
        with held(path):
            return False
    except ConfigError:
        return True


@contextmanager
def held(path: Path) -> Generator[None]:
    """Hold a run's folder against a second run in it; the system lets go when the process ends, however it ends.

    Raises:
        ConfigError: Another process trains there.
    """
    if torch.distributed.is_initialized() and torch.distributed.get_rank() != 0:
        yield  # the first process of a run holds it for all
        return
    handle = os.open(path, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(handle)
        raise ConfigError(
            f"{path}: another process trains here; found its lock; wait for its end or choose another run folder"
        ) from None
    except OSError:  # a file system without locks for folders, such as NFS
        pass
    try:
        yield
    finally:
        os.close(handle)


def record(path: Path, recipe: Recipe, origins: Mapping[str, str] | None, branch: Path | None = None) -> None:
    """Write down what was asked for and where it runs; paths of text are absolute, so it holds in any folder.

    Args:
        path: The run's folder.
        recipe: Its settings.
        origins: Where they were written.
        branch: Where its weights come from, if from another run or from released ones.
    """
    tree = recipe.model_dump(mode="json")
    for table in (*tree["data"]["sources"], tree["data"]["tokenizer"]):
        if table.get("path"):
            table["path"] = str(Path(table["path"]).expanduser().absolute())
    found = {"recipe": tree, "origins": dict(origins or {})}
    write_json(path / ENVIRONMENT, environment(recipe.train.device))
    write_json(path / RECIPE, found | ({"branch": str(branch.absolute())} if branch is not None else {}))


def branch_of(path: Path) -> Path | None:
    """Return where a run took its weights from, if from elsewhere."""
    try:
        place = json.loads((path / RECIPE).read_text()).get("branch")
    except (OSError, ValueError, AttributeError):
        return None
    return Path(place) if place else None


def differences(saved: Mapping[str, Any], recipe: Recipe, world_size: int) -> dict[str, tuple[Any, Any]]:
    """Return the settings, before and now, in which a recipe differs from what a checkpoint was written with.

    What a resumed run is free to change is left out.
    """
    before, now = flat(saved), flat(fingerprint(recipe, world_size))
    return {
        key: (before.get(key), now.get(key))
        for key in sorted(before.keys() | now.keys())
        if before.get(key) != now.get(key) and (key in FIXED or not FREE_TO_CHANGE.match(key))
    }


def refuse_other_settings(checkpoint: Path, saved: Mapping[str, Any], recipe: Recipe, world_size: int) -> None:
    """Hold a checkpoint's settings against the recipe that is to continue it.

    Raises:
        CheckpointError: Model, data, optimiser, balance, batch or world size differ; names each setting.
    """
    if differing := differences(saved, recipe, world_size):
        raise CheckpointError(
            f"checkpoint {checkpoint}: was written with other settings; {in_words(differing)}; "
            f"set them back, or start a new run from its weights with --branch {checkpoint}"
        )


def in_words(differing: Mapping[str, tuple[Any, Any]]) -> str:
    """Return settings that differ as text."""
    return ", ".join(f"`{key}` was `{_shown(old)}`, is `{_shown(new)}`" for key, (old, new) in differing.items())


def fingerprint(recipe: Recipe, world_size: int) -> dict[str, Any]:
    """Return what a checkpoint remembers of its run: the resolved recipe and the number of processes."""
    return recipe.model_dump(mode="json") | {"world_size": world_size}


def world_size() -> int:
    """Return the number of processes of the run."""
    return torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1


def environment(device: str) -> dict[str, Any]:
    """Return versions, machine and commit: what a reader needs to repeat a run."""
    packages = ("triax", "torch", "numpy", "safetensors", "tokenizers", "pydantic")
    versions = {}
    for name in packages:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            versions[name] = "not installed"
    gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    return {
        "python": sys.version.split()[0],
        "platform": platform.platform(),
        "versions": versions,
        "device": device,
        "gpus": gpus,
        "cpus": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "commit": _commit(),
    }


def write_json(path: Path, content: Any) -> None:
    """Write a file that is either the old or the new one, never a part of it."""
    draft = path.with_name(f"{path.name}.tmp")
    try:
        draft.write_text(json.dumps(content, indent=1) + "\n")
        draft.rename(path)
    except OSError as problem:
        raise TrainError(
            f"{path}: could not be written; found {problem.strerror or problem}; make room and go on with --resume"
        ) from problem


def _commit() -> str:
    """Return the git commit of this package's sources, `+` if they were changed since, or nothing."""
    here = Path(__file__).parent

    def git(*words: str) -> str:
        return subprocess.run(
            ["git", "-C", str(here), *words], capture_output=True, text=True, timeout=10, check=True
        ).stdout

    try:
        return git("rev-parse", "HEAD").strip() + (
            "+" if git("status", "--porcelain", "--", str(here.parent)).strip() else ""
        )
    except (OSError, subprocess.SubprocessError):
        return ""


def flat(tree: Any, name: str = "") -> dict[str, Any]:
    """Return a nest of tables and lists as one table of dotted names."""
    if isinstance(tree, Mapping) and tree:
        return {k: v for key, value in tree.items() for k, v in flat(value, f"{name}.{key}" if name else key).items()}
    if isinstance(tree, list | tuple):
        return {k: v for i, value in enumerate(tree) for k, v in flat(value, f"{name}.{i}").items()} or {name: []}
    return {name: tree}


def leaves(tree: Any, name: str = "") -> dict[str, Any]:
    """Return a nest of settings as one table of dotted names, with lists of plain values as one value each."""
    if isinstance(tree, Mapping) and tree:
        return {k: v for key, value in tree.items() for k, v in leaves(value, f"{name}.{key}" if name else key).items()}
    if isinstance(tree, list | tuple) and any(isinstance(value, Mapping) for value in tree):
        return {k: v for i, value in enumerate(tree) for k, v in leaves(value, f"{name}.{i}").items()}
    return {name: tree}


def _shown(value: Any) -> str:
    return "absent" if value is None else str(value)
