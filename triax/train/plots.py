"""A run's curves as PNG files."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from triax.train import metrics as lines
from triax.train.run_folder import METRICS, PLOTS

Line = Mapping[str, Any]


def draw(run_dir: Path, baselines: Mapping[str, float] | None = None) -> list[Path]:
    """Draw every plot for which the run has numbers and return the files.

    Args:
        run_dir: The run's folder; its `metrics.jsonl` is read.
        baselines: Bits per byte of other compressors on the held-out text, by name.
    """
    import matplotlib  # slow to import, and needed only here

    matplotlib.use("Agg")
    from matplotlib.figure import Figure
    from matplotlib.ticker import EngFormatter

    steps = lines.read(run_dir / METRICS)
    (run_dir / PLOTS).mkdir(exist_ok=True)
    drawn = []
    for name, (title, unit, fill) in PLOT.items():
        figure = Figure(figsize=(7.2, 4.2), dpi=110)
        figure.subplots_adjust(left=0.11, right=0.79, top=0.92, bottom=0.24 if name == "residual_mix" else 0.12)
        axes = figure.add_subplot()
        fill(axes, steps, baselines or {})
        if not axes.has_data():
            continue
        axes.set(title=title, ylabel=unit)
        if name != "residual_mix":
            axes.set_xlabel("tokens")
            axes.xaxis.set_major_formatter(EngFormatter(sep=""))
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
        if axes.get_legend_handles_labels()[0]:
            axes.legend(fontsize=8, frameon=False, loc="upper left", bbox_to_anchor=(1.0, 1.0))
        path = run_dir / PLOTS / f"{name}.png"
        figure.savefig(path)
        drawn.append(path)
    return drawn


def series(steps: list[Line], name: str) -> tuple[list[int], list[Any]]:
    """Return tokens and values of the steps that have a value under this name."""
    found = [(line["train/tokens"], line[name]) for line in steps if line.get(name) is not None]
    return [tokens for tokens, _ in found], [value for _, value in found]


def _line(axes: Any, tokens: list[int], values: list[Any], **style: Any) -> None:
    if tokens:
        axes.plot(tokens, values, **style)


def _loss(axes: Any, steps: list[Line], baselines: Mapping[str, float]) -> None:
    training, held_out = series(steps, "train/bits_per_byte"), series(steps, "eval/bits_per_byte")
    _line(axes, *training, lw=0.8, alpha=0.7, label="training batches")
    _line(axes, *held_out, marker="o", ms=3, label="held-out text")
    if axes.has_data():
        for i, (name, value) in enumerate(baselines.items()):
            axes.axhline(value, ls=(0, (4, 2 + i)), lw=1, color=f"C{i + 2}", label=f"{name} {value:.3f}")
        lowest = min([*baselines.values(), *held_out[1], *training[1]])
        axes.set_ylim(bottom=0.9 * lowest)


def _curve(name: str, *, log: bool = False) -> Callable[..., None]:
    def fill(axes: Any, steps: list[Line], _: Any) -> None:
        tokens, values = series(steps, name)
        _line(axes, tokens, values, lw=1)
        if log and any(value > 0 for value in values):
            axes.set_yscale("log")

    return fill


def _groups(prefix: str) -> Callable[..., None]:
    """Draw a metric of all parameters in black, and of each group of them in a colour."""

    def fill(axes: Any, steps: list[Line], _: Any) -> None:
        from matplotlib import colormaps

        names = sorted({name for line in steps for name in line if name.startswith(f"{prefix}/")})
        _line(axes, *series(steps, prefix), lw=1.6, color="black", label="all")
        for i, name in enumerate(names):
            colour = colormaps["turbo"]((i + 0.5) / len(names))
            _line(axes, *series(steps, name), lw=0.9, color=colour, label=name.removeprefix(f"{prefix}/"))
        if axes.has_data():
            axes.set_yscale("log")

    return fill


def _layers(name: str) -> Callable[..., None]:
    """Draw a metric that is one number a layer: each layer a line, from blue (first) to yellow (last)."""

    def fill(axes: Any, steps: list[Line], _: Any) -> None:
        from matplotlib import colormaps

        tokens, values = series(steps, name)
        rows = [row if isinstance(row, dict) else dict(enumerate(row)) for row in values]  # lists: runs of old versions
        layers = list(dict.fromkeys(layer for row in rows for layer in row))
        for place, layer in enumerate(layers):
            kept = [(x, row[layer]) for x, row in zip(tokens, rows, strict=True) if row.get(layer) is not None]
            is_named = len(layers) <= 12 or place in (0, len(layers) - 1)
            axes.plot(
                [x for x, _ in kept],
                [y for _, y in kept],
                lw=1,
                color=colormaps["viridis"](place / max(1, len(layers) - 1)),
                label=f"layer {layer}" if is_named else None,
            )

    return fill


def _mix(axes: Any, steps: list[Line], _: Any) -> None:
    """Draw, for the last measured step, which source each sublayer reads."""
    last = next((line for line in reversed(steps) if any(n.startswith("residual_mix/share/") for n in line)), None)
    if last is None:
        return
    rows = {n.removeprefix("residual_mix/share/"): v for n, v in last.items() if n.startswith("residual_mix/share/")}
    bottom = [0.0] * len(rows)
    for source in range(max(map(len, rows.values()))):
        heights = [row[source] if source < len(row) else 0.0 for row in rows.values()]
        axes.bar(range(len(rows)), heights, bottom=bottom, label="embedding" if source == 0 else f"source {source}")
        bottom = [b + h for b, h in zip(bottom, heights, strict=True)]
    axes.set_xticks(range(len(rows)), rows, rotation=90, fontsize=6)


PLOT: dict[str, tuple[str, str, Callable[..., None]]] = {
    "loss": ("Loss", "bits per byte", _loss),
    "learning_rate": ("Learning rate", "", _curve("train/learning_rate")),
    "grad_norm": ("Gradient norms before clipping", "", _groups("train/grad_norm")),
    "router_load": ("Load of the busiest expert over the mean", "", _layers("router/load_max_over_mean_per_layer")),
    "largest_logit": ("Largest attention logit", "", _layers("attention/largest_logit_per_layer")),
    "residual_mix": ("Where each sublayer reads (mean weight per source)", "share", _mix),
    "throughput": ("Throughput", "tokens per second", _curve("train/tokens_per_s")),
}
