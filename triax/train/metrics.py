"""Where a step's numbers go: always a line of `metrics.jsonl`, on request TensorBoard and W&B.

A metric is a number, or a list of numbers (one a layer, or one a source), under a name `room/quantity_unit`.
"""

import json
import math
import os
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from triax.errors import ConfigError, TrainError

Value = float | int | list[float]
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

    def __init__(self, path: Path, *, after_step: int = 0) -> None:
        """Open the file to append, without lines of steps after `after_step` and without half a last line."""
        self.path = path
        try:
            cut(path, after_step)
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

    def close(self) -> None:
        """Close the file."""
        self.file.close()


class TensorBoard:
    """TensorBoard events (extra `tensorboard`)."""

    def __init__(self, folder: Path) -> None:
        self.writer = _extra("torch.utils.tensorboard", "tensorboard", "train.tensorboard").SummaryWriter(str(folder))

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
        self.run = _extra("wandb", "wandb", "train.wandb").init(
            project=project, dir=str(folder), name=folder.name, config=dict(settings), resume="allow", id=folder.name
        )

    def write(self, step: int, metrics: Metrics) -> None:
        """Log every number."""
        self.run.log(spread(metrics), step=step)

    def close(self) -> None:
        """Finish the run."""
        self.run.finish()


def spread(metrics: Metrics) -> dict[str, float | int]:
    """Return a flat table: a list becomes one name per entry, `name/0`, `name/1` and so on."""
    flat: dict[str, float | int] = {}
    for name, value in metrics.items():
        flat |= {f"{name}/{i}": v for i, v in enumerate(value)} if isinstance(value, list) else {name: value}
    return flat


def read(path: Path) -> list[dict[str, Any]]:
    """Return the lines of a `metrics.jsonl`, without a half-written last one."""
    if not path.exists():
        return []
    lines = path.read_text().split("\n")
    return [json.loads(line) for line in lines[:-1]]


def cut(path: Path, step: int) -> None:
    """Drop the lines of steps after `step`, and a half-written last line: a resumed run writes them again."""
    if not path.exists():
        return
    end = 0
    with path.open("rb") as file:
        for line in file:
            if not line.endswith(b"\n") or json.loads(line)["step"] > step:
                break
            end += len(line)
    os.truncate(path, end)


def _finite(value: Value) -> float | int | list[float | None] | None:
    if isinstance(value, list):
        return [entry if math.isfinite(entry) else None for entry in value]
    return value if math.isfinite(value) else None


def _extra(module: str, name: str, setting: str) -> Any:
    try:
        return import_module(module)
    except ImportError as problem:
        raise ConfigError(
            f"{setting}: needs the package `{name}`; {problem}; install it with `pip install 'triax[{name}]'`"
        ) from None
