"""Several runs side by side: their results, the settings in which they differ, and their curves in one picture."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

from triax.checkpoint.run import RECIPE, recipe_of
from triax.errors import CheckpointError, ConfigError
from triax.model.count import sheet
from triax.train import metrics, run_folder
from triax.train.report import last
from triax.train.run_folder import METRICS, RESULT, leaves

NOT_COMPARED = ("train.device", "train.log_every", "train.save_every", "train.keep", "train.tensorboard", "train.wandb")
"""Settings that decide nothing of what a run computes."""

SMOOTHED_SHARE = 0.02
"""Share of a run's steps over which the training curve is averaged."""

COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00", "#000000", "#8c564b")
"""Colours that differ to people who see few of them (Okabe and Ito); beyond these the line style changes."""


@dataclass(frozen=True)
class Curve:
    """One run as it is compared with others."""

    name: str
    """Its folder, as short as it is unique."""
    run_dir: Path
    status: str
    """`ended`, `running` or `stopped`."""
    settings: Mapping[str, Any]
    """All settings by dotted name."""
    lines: Sequence[Mapping[str, Any]]
    """Its metrics, one a step, and those of evaluations."""
    result: Mapping[str, Any]
    """What it wrote at its end; empty before."""
    flops_per_token: float
    """Operations that a token costs in training: six per active parameter."""

    def figures(self) -> dict[str, Any]:
        """Return what the run reached, for a table; none where there is no such number."""
        steps = [line for line in self.lines if line.get("train/step_s") is not None]
        tokens = last(self.lines, "train/tokens") or 0
        seconds = sum(line["train/step_s"] for line in steps)
        batch = self.settings["train.batch_tokens"]
        return {
            "run": str(self.run_dir),
            "status": self.status,
            "steps": self.lines[-1]["step"] if self.lines else 0,
            "tokens": tokens,
            "planned_tokens": self.settings["train.tokens"],
            "loss": last(self.lines, "train/loss"),
            "training_bits_per_byte": last(self.lines, "train/bits_per_byte"),
            "held_out_bits_per_byte": last(self.lines, "eval/bits_per_byte"),
            "seconds": seconds,
            "tokens_per_s": len(steps) * batch / seconds if seconds else None,
            "flops": tokens * self.flops_per_token,
        }

    def points(self, name: str) -> tuple[dict[str, list[float]], list[float]]:
        """Return where a metric was measured, in tokens, seconds and FLOPs, and its values."""
        spent = list(accumulate(line.get("train/step_s") or 0.0 for line in self.lines))
        found = [(line, s) for line, s in zip(self.lines, spent, strict=True) if line.get(name) is not None]
        tokens = [float(line["train/tokens"]) for line, _ in found]
        axes = {"tokens": tokens, "seconds": [s for _, s in found], "flops": [t * self.flops_per_token for t in tokens]}
        return axes, [float(line[name]) for line, _ in found]


def open_curves(places: Sequence[Path]) -> list[Curve]:
    """Read the runs at some paths: run folders, or folders of them.

    Raises:
        CheckpointError: A path holds no run.
    """
    found: list[Path] = []
    for place in places:
        inner = [place] if (place / RECIPE).is_file() else sorted(path.parent for path in place.glob(f"*/{RECIPE}"))
        if not inner:
            what = "a folder without runs" if place.is_dir() else "a file" if place.exists() else "nothing"
            raise CheckpointError(f"{place}: holds no run; found {what}; name folders that `triax train` wrote")
        found += [path for path in inner if path not in found]
    names = _names(found)
    return [_open(path, name) for path, name in zip(found, names, strict=True)]


def _names(paths: Sequence[Path]) -> list[str]:
    """Return the last parts of the paths, as many as tell them apart."""
    parts = [path.absolute().parts for path in paths]
    for count in range(1, max(map(len, parts), default=1) + 1):
        names = ["/".join(part[-count:]) for part in parts]
        if len(set(names)) == len(names):
            return names
    return [str(path) for path in paths]


def _open(path: Path, name: str) -> Curve:
    recipe = recipe_of(path)
    lines = metrics.read(path / METRICS)
    result = json.loads((path / RESULT).read_text()) if (path / RESULT).exists() else {}
    is_whole = bool(result) and result["steps"] >= max((line["step"] for line in lines), default=0)
    status = "ended" if is_whole else "running" if run_folder.is_running(path) else "stopped"
    settings = leaves(recipe.model_dump(mode="json"))
    flops = 6.0 * sheet(recipe.model).active_parameters
    return Curve(name, path, status, settings, lines, result if is_whole else {}, flops)


def differing(curves: Sequence[Curve]) -> dict[str, list[Any]]:
    """Return the settings in which runs differ, each with its value in every run; none where a run has no such one."""
    keys = {key: None for curve in curves for key in curve.settings if not key.startswith(NOT_COMPARED)}
    found = {key: [curve.settings.get(key) for curve in curves] for key in keys}
    return {key: values for key, values in found.items() if any(value != values[0] for value in values)}


def smooth(values: Sequence[float], window: int) -> list[float]:
    """Return the mean of each value and those before it, at most `window` in all."""
    sums = [0.0, *accumulate(values)]
    return [(sums[i + 1] - sums[max(0, i + 1 - window)]) / (i + 1 - max(0, i + 1 - window)) for i in range(len(values))]


def plot(curves: Sequence[Curve], path: Path) -> None:
    """Draw loss against tokens, time and FLOPs, all runs over one another, into a picture.

    Lines are training batches, averaged over 2 % of the steps; circles are held-out text. Both are in bits per byte, so
    that runs with other vocabularies can be compared.

    Raises:
        ConfigError: The picture cannot be written, or not in the form that its name asks for.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib.figure import Figure
    from matplotlib.ticker import EngFormatter

    figure = Figure(figsize=(13.5, 4.6 + 0.2 * ((len(curves) + 2) // 3)), dpi=120, layout="constrained")
    panels = figure.subplots(1, 3, sharey=True)
    for panel, (axis, label, unit) in zip(
        panels,
        (("tokens", "tokens", ""), ("seconds", "time in steps", "s"), ("flops", "operations", "FLOP")),
        strict=True,
    ):
        for number, curve in enumerate(curves):
            style = {"color": COLOURS[number % len(COLOURS)], "ls": ("-", "--", ":")[number // len(COLOURS) % 3]}
            axes, values = curve.points("train/bits_per_byte")
            shown = smooth(values, max(1, round(SMOOTHED_SHARE * len(values))))
            panel.plot(axes[axis], shown, lw=1.3, label=curve.name, **style)
            axes, values = curve.points("eval/bits_per_byte")
            panel.plot(axes[axis], values, "o", ms=4.5, mfc="white", color=style["color"])
        panel.set_xlabel(label)
        panel.xaxis.set_major_formatter(EngFormatter(unit))
        panel.grid(alpha=0.25)
        panel.spines[["top", "right"]].set_visible(False)
    panels[0].set_ylabel("bits per byte")
    _set_range(panels[0], curves)
    figure.suptitle("Loss: lines are training batches (smoothed), circles are held-out text", fontsize=11)
    figure.legend(
        *panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=3, frameon=False, fontsize=9
    )
    try:
        figure.savefig(path)
    except (OSError, ValueError) as problem:
        raise ConfigError(
            f"{path}: cannot be drawn; {problem}; name a .png or .svg in a folder that is there"
        ) from None


def _set_range(panel: Any, curves: Sequence[Curve]) -> None:
    """Leave the first tenth of the training out of the choice of the range: it is far above all else."""
    values = []
    for curve in curves:
        smoothed = curve.points("train/bits_per_byte")[1]
        smoothed = smooth(smoothed, max(1, round(SMOOTHED_SHARE * len(smoothed))))
        values += smoothed[len(smoothed) // 10 :] + curve.points("eval/bits_per_byte")[1]
    if values:
        low, high = min(values), max(values)
        room = 0.05 * (high - low) or 0.1
        panel.set_ylim(low - room, high + room)
