"""A run's folder: what was asked for, on what machine, and everything that came out.

`recipe.json` (resolved, with origins) · `environment.json` · `tokenizer.json` · `metrics.jsonl` · `log.txt` ·
`checkpoints/` · `plots/*.png` · `result.json` · `report.html`
"""

import fcntl
import json
import os
import platform
import subprocess
import sys
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from triax.checkpoint.run import RECIPE
from triax.config.train import Recipe
from triax.errors import CheckpointError, ConfigError, TrainError

ENVIRONMENT, METRICS, RESULT, LOG, PLOTS = "environment.json", "metrics.jsonl", "result.json", "log.txt", "plots"

BEFORE_THE_TEXT = frozenset({RECIPE, f"{RECIPE}.tmp", ENVIRONMENT, f"{ENVIRONMENT}.tmp", LOG})
"""What a run writes before it reads its text; a folder that holds no more may be begun anew, with any settings."""

FREE_TO_CHANGE = ("train.", "schedule.")
"""Settings that a resumed run may change: length, rate (a branch that decays), what is written when, the device."""

FIXED = ("train.batch_tokens", "train.micro_tokens", "train.precision", "train.seed")
"""Settings below those that decide what a step computes and may not change."""


def prepare(path: Path, *, resume: bool) -> bool:
    """Make the folder, or reopen it; return whether a run was there before. Nothing in it is changed.

    Raises:
        ConfigError: The folder cannot be written, holds something else, or holds a run and `resume` is not set.
    """
    try:
        names = {entry.name for entry in path.iterdir()} if path.exists() else set()
        there = RECIPE in names and not names <= BEFORE_THE_TEXT
        if there and not resume:
            raise ConfigError(
                f"{path}: holds a run already; found `{RECIPE}`; pass --resume to go on or choose another folder"
            )
        strangers = set() if there else names - BEFORE_THE_TEXT
        if strangers:
            raise ConfigError(f"{path}: is not empty and holds no run; found `{min(strangers)}`; choose another folder")
        path.mkdir(parents=True, exist_ok=True)
        probe = path / f"{ENVIRONMENT}.tmp"
        probe.write_text("")
        probe.unlink()
    except OSError as problem:
        raise ConfigError(
            f"{path}: cannot be written; {problem.strerror or problem}; choose another run folder"
        ) from problem
    return there


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


def record(path: Path, recipe: Recipe, origins: Mapping[str, str] | None) -> None:
    """Write down what was asked for and where it runs."""
    write_json(path / ENVIRONMENT, environment(recipe.train.device))
    write_json(path / RECIPE, {"recipe": recipe.model_dump(mode="json"), "origins": dict(origins or {})})


def refuse_other_settings(checkpoint: Path, saved: Mapping[str, Any], recipe: Recipe, world_size: int) -> None:
    """Hold a checkpoint's settings against the recipe that is to continue it.

    Raises:
        CheckpointError: Model, data, optimiser, balance, batch or world size differ; names each setting.
    """
    before, now = flat(saved), flat(fingerprint(recipe, world_size))
    differing = [
        f"`{key}` was `{_shown(before.get(key))}`, is `{_shown(now.get(key))}`"
        for key in sorted(before.keys() | now.keys())
        if before.get(key) != now.get(key) and (key in FIXED or not key.startswith(FREE_TO_CHANGE))
    ]
    if differing:
        raise CheckpointError(
            f"checkpoint {checkpoint}: was written with other settings; {', '.join(differing)}; "
            "set them back or start a new run"
        )


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


def _shown(value: Any) -> str:
    return "absent" if value is None else str(value)
