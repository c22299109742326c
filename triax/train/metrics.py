"""Where a step's numbers go: always a line of `metrics.jsonl`, on request TensorBoard and W&B.

A metric is a number, a list of numbers (one a source of a mix) or a table of numbers (one a layer, by the layer's
number as text), under a name `room/quantity_unit`.
"""

import hashlib
import json
import math
import os
from collections.abc import Mapping
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from triax.config.train import Run
from triax.errors import ConfigError, TrainError
from triax.machine import install_command

Value = float | int | list[float] | dict[str, float]
Metrics = Mapping[str, Value]


@runtime_checkable
class Sink(Protocol):
    """Takes the metrics of a step."""

    def write(self, step: int, metrics: Metrics) -> None:
        """Take the metrics of one step; a step may come in several calls."""
        ...

    def close(self) -> None:
        """Let go of files and connections."""
        ...


class JsonLines:
    """One JSON object a line, flushed at once, so it survives a kill; numbers that are not finite are null."""

    def __init__(self, path: Path, *, after_step: int = 0, position: int = 0) -> None:
        """Open the file to append, without what a resumed run will write again.

        Args:
            path: The file.
            after_step: Step of the checkpoint that is resumed from; lines of later steps are dropped.
            position: Bytes of the file when that checkpoint was written, if known; what follows is dropped.
        """
        self.path = path
        try:
            cut(path, after_step, position)
            self.file = path.open("a")
        except OSError as problem:
            raise ConfigError(
                f"{path}: cannot be written; {problem.strerror or problem}; choose another run folder"
            ) from problem

    def write(self, step: int, metrics: Metrics) -> None:
        """Append one line."""
        line = {"step": step} | {name: _finite(value) for name, value in metrics.items()}
        try:
            self.file.write(json.dumps(line) + "\n")
            self.file.flush()
        except OSError as problem:
            raise TrainError(
                f"{self.path}: metrics could not be written; {problem.strerror or problem}; make room and resume"
            ) from problem

    @property
    def position(self) -> int:
        """Bytes written so far."""
        return self.file.tell()

    def close(self) -> None:
        """Close the file; what no longer fits was reported when it was written."""
        with suppress(OSError):
            self.file.close()


class TensorBoard:
    """TensorBoard events (extra `tensorboard`)."""

    def __init__(self, folder: Path, *, after_step: int = 0) -> None:
        """Append to the folder's events, without those of steps after `after_step`."""
        module = _extra("torch.utils.tensorboard", "tensorboard", "train.tensorboard")
        self.writer = module.SummaryWriter(str(folder), purge_step=after_step + 1)

    def write(self, step: int, metrics: Metrics) -> None:
        """Write every number as a scalar."""
        for name, value in spread(metrics).items():
            self.writer.add_scalar(name, value, step)

    def close(self) -> None:
        """Write what is left and close the file."""
        self.writer.close()


class WeightsAndBiases:
    """A run of Weights & Biases (extra `wandb`)."""

    def __init__(self, project: str, folder: Path, settings: Mapping[str, Any]) -> None:
        """Open the project's run of this folder, or make it."""
        identity = hashlib.sha256(str(folder.resolve()).encode()).hexdigest()[:16]
        wandb = _extra("wandb", "wandb", "train.wandb")
        try:
            self.run = wandb.init(
                project=project, dir=str(folder), name=folder.name, config=dict(settings), resume="allow", id=identity
            )
        except wandb.Error as problem:
            raise ConfigError(
                f"train.wandb: no run can be opened; found {problem}; log in, set WANDB_MODE=offline, or leave it empty"
            ) from None

    def write(self, step: int, metrics: Metrics) -> None:
        """Log every number."""
        self.run.log(spread(metrics), step=step)

    def close(self) -> None:
        """Finish the run."""
        self.run.finish()


def require(run: Run) -> None:
    """Say at once, not after the text has been read, that an extra is missing.

    Raises:
        ConfigError: It names the package and how to install it.
    """
    if run.tensorboard:
        _extra("torch.utils.tensorboard", "tensorboard", "train.tensorboard")
    if run.wandb:
        _extra("wandb", "wandb", "train.wandb")


def spread(metrics: Metrics) -> dict[str, float | int]:
    """Return a flat table: a list becomes one name per entry, `name/0`, `name/1` and so on, a table one per layer."""
    flat: dict[str, float | int] = {}
    for name, value in metrics.items():
        if isinstance(value, list):
            flat |= {f"{name}/{i}": v for i, v in enumerate(value)}
        elif isinstance(value, dict):
            flat |= {f"{name}/{key}": v for key, v in value.items()}
        else:
            flat[name] = value
    return flat


def read(path: Path) -> list[dict[str, Any]]:
    """Return the lines of a `metrics.jsonl`, without a half-written last one."""
    if not path.exists():
        return []
    lines = path.read_text().split("\n")
    return [json.loads(line) for line in lines[:-1]]


def cut(path: Path, step: int, position: int = 0) -> None:
    """Drop the lines after a position, of steps after `step`, and a half-written last line."""
    if not path.exists():
        return
    end = 0
    with path.open("rb") as file:
        for line in file:
            beyond = 0 < position < end + len(line)
            if beyond or not line.endswith(b"\n") or json.loads(line)["step"] > step:
                break
            end += len(line)
    os.truncate(path, end)


def _finite(value: Value) -> float | int | list[float | None] | dict[str, float | None] | None:
    if isinstance(value, list):
        return [entry if math.isfinite(entry) else None for entry in value]
    if isinstance(value, dict):
        return {key: entry if math.isfinite(entry) else None for key, entry in value.items()}
    return value if math.isfinite(value) else None


def _extra(module: str, name: str, setting: str) -> Any:
    try:
        return import_module(module)
    except ImportError as problem:
        raise ConfigError(
            f"{setting}: needs the package `{name}`; {problem}; install it with `{install_command(name)}`"
        ) from None
