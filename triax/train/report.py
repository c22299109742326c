"""A run as one HTML page that needs nothing beside it: result, curves, samples, settings; at any time of the run."""

import base64
import html
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from triax.checkpoint.run import RECIPE
from triax.config.show import origin, toml
from triax.train import metrics, plots, run_folder
from triax.train.progress import duration
from triax.train.run_folder import ENVIRONMENT, LOG, METRICS, RESULT, SAMPLES, flat, leaves
from triax.train.samples import newest

PAGE = "report.html"

STYLE = """
:root { color-scheme: light dark; --line: #ddd; --quiet: #666; --back: #f5f5f5; --prompt: #06c }
@media (prefers-color-scheme: dark) { :root { --line: #444; --quiet: #aaa; --back: #222; --prompt: #6bf } }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 64rem; margin: 2rem auto; padding: 0 1rem }
h1 { font-size: 1.6rem; margin-bottom: 0 } h2 { font-size: 1.15rem; margin: 2.2rem 0 .5rem }
p.state { color: var(--quiet); margin-top: .2rem }
.figures { display: flex; flex-wrap: wrap; gap: .6rem 2.4rem; margin: 1.2rem 0 }
.figures div { font-size: 1.35rem; font-variant-numeric: tabular-nums }
.figures span { display: block; font-size: .8rem; color: var(--quiet) }
table { border-collapse: collapse; width: 100% }
td, th { padding: .2rem .8rem .2rem 0; text-align: left; vertical-align: top; border-bottom: 1px solid var(--line) }
td { font-variant-numeric: tabular-nums; overflow-wrap: anywhere } td:first-child { white-space: nowrap }
td.from { color: var(--quiet); font-size: .85rem }
.plots { display: grid; grid-template-columns: repeat(auto-fill, minmax(26rem, 1fr)); gap: .6rem }
.plots img { width: 100%; background: #fff; border-radius: .3rem }
pre { background: var(--back); padding: .8rem; white-space: pre-wrap; overflow-wrap: anywhere; border-radius: .3rem }
b.prompt { color: var(--prompt) } details { margin-top: .8rem } summary { cursor: pointer }
"""


def write(run_dir: Path | str, samples: Sequence[tuple[str, str]] = (), *, is_running: bool | None = None) -> Path:
    """Draw the plots and write `report.html` from what the run's folder holds, whether it goes on or has ended.

    Args:
        run_dir: The run's folder.
        samples: Prompts and how the model went on; if none are given, the newest that the run wrote.
        is_running: Whether a process trains there; looked up if not given.
    """
    run_dir = Path(run_dir)
    result, settings, environment = (_read(run_dir / name) for name in (RESULT, RECIPE, ENVIRONMENT))
    lines = metrics.read(run_dir / METRICS)
    if int(result.get("steps", 0)) < max((line["step"] for line in lines), default=0):
        result = {}  # of a shorter run, which was extended since
    if is_running is None:
        is_running = run_folder.is_running(run_dir)
    drawn = plots.draw(run_dir, result.get("baselines"))
    origins, recipe = settings.get("origins", {}), settings.get("recipe", {})
    values = leaves(recipe)
    written = {key: value for key, value in values.items() if origin(origins, _without_places(key)) != "default"}
    if not samples:
        samples = [(row["prompt"], row["text"]) for row in newest(run_dir / SAMPLES)]
    sections = [
        f"<h1>{html.escape(run_dir.absolute().name)}</h1>",
        f'<p class="state">{html.escape(state(result, recipe, lines, is_running=is_running))}</p>',
        _figures(_summary(result, lines)),
        '<div class="plots">' + "".join(_image(path) for path in drawn) + "</div>" if drawn else "<p>No step yet.</p>",
        *(["<h2>Samples</h2>", *(_sample(*pair) for pair in samples)] if samples else []),
        *(["<h2>Baselines, bits per byte</h2>", _table(result["baselines"])] if result.get("baselines") else []),
        "<h2>Settings that were given</h2>",
        _settings(written or values, origins),
        f"<details><summary>All settings</summary>{_settings(values, origins)}</details>",
        f"<details><summary>Environment</summary>{_table(flat(environment))}</details>",
        f"<details><summary>End of the log</summary>{_log(run_dir / LOG)}</details>",
    ]
    page = run_dir / PAGE
    draft = page.with_name(f"{PAGE}.tmp")
    draft.write_text(
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{html.escape(run_dir.absolute().name)}</title>'
        f"<style>{STYLE}</style>{''.join(sections)}</html>\n",
        encoding="utf-8",
    )
    draft.rename(page)
    return page


def state(
    result: Mapping[str, Any], recipe: Mapping[str, Any], lines: Sequence[Mapping[str, Any]], *, is_running: bool
) -> str:
    """Say in one sentence whether a run has ended, goes on or was stopped, and how far it is."""
    if result:
        return f"Ended after {result.get('steps', 0):,} steps and {result.get('tokens', 0):,} tokens."
    if not lines:
        how = "The first step is not done yet."
        return f"Running. {how}" if is_running else f"Not running. {how}"
    tokens, planned = lines[-1].get("train/tokens", 0), recipe.get("train", {}).get("tokens", 0)
    share = f" of {planned:,} ({tokens / planned:.0%})" if planned else ""
    how = "Running" if is_running else "Stopped; go on with --resume"
    return f"{how}. Step {lines[-1]['step']:,}, {tokens:,}{share} tokens."


def last(lines: Sequence[Mapping[str, Any]], name: str) -> Any:
    """Return the newest value of a metric, or none."""
    return next((line[name] for line in reversed(lines) if line.get(name) is not None), None)


def _summary(result: Mapping[str, Any], lines: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """Return the few figures that a reader looks for first."""
    held_out = result.get("bits_per_byte") or last(lines, "eval/bits_per_byte")
    loss = result.get("loss") or last(lines, "train/loss")
    seconds = result.get("seconds") or sum(line.get("train/step_s") or 0.0 for line in lines)
    found: dict[str, Any] = {
        "held-out text, bits per byte": held_out and f"{held_out:.4f}",
        "loss of the last step, nats per token": loss and f"{loss:.4f}",
        "steps": f"{lines[-1]['step']:,}" if lines else "",
        "tokens": (tokens := last(lines, "train/tokens")) and f"{tokens:,}",
        "time of training": seconds and duration(seconds),
        "skipped steps": (skipped := last(lines, "train/skipped_steps")) and f"{skipped}",
    }
    return {name: text for name, text in found.items() if text}


def _without_places(key: str) -> str:
    """Return a dotted name up to its first place in a list: an origin is that of a list as a whole."""
    names = key.split(".")
    return ".".join(names[: next((i for i, name in enumerate(names) if name.isdigit()), len(names))])


def _read(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}


def _image(path: Path) -> str:
    content = base64.b64encode(path.read_bytes()).decode()
    return f'<img alt="{path.stem}" src="data:image/png;base64,{content}">'


def _sample(prompt: str, continuation: str) -> str:
    return f'<pre><b class="prompt">{html.escape(prompt)}</b>{html.escape(continuation)}</pre>'


def _figures(values: Mapping[str, str]) -> str:
    cells = (f"<div>{html.escape(text)}<span>{html.escape(name)}</span></div>" for name, text in values.items())
    return f'<div class="figures">{"".join(cells)}</div>'


def _table(values: Mapping[str, Any]) -> str:
    rows = (f"<tr><td>{html.escape(key)}<td>{html.escape(_shown(value))}" for key, value in values.items())
    return f"<table>{''.join(rows)}</table>"


def _settings(values: Mapping[str, Any], origins: Mapping[str, str]) -> str:
    rows = (
        f"<tr><td>{html.escape(key)}<td>{html.escape(toml(value))}"
        f'<td class="from">{html.escape(origin(origins, _without_places(key)))}'
        for key, value in values.items()
    )
    return f"<table>{''.join(rows)}</table>"


def _log(path: Path) -> str:
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines() if path.exists() else []
    return f"<pre>{html.escape(chr(10).join(lines[-40:]))}</pre>"


def _shown(value: Any) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)
