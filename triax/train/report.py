"""A run as one HTML page that needs nothing beside it: result, curves, samples, settings."""

import base64
import html
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from triax.checkpoint.run import RECIPE
from triax.train import plots
from triax.train.run_folder import ENVIRONMENT, RESULT, flat

PAGE = "report.html"

STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 62rem; margin: 2rem auto; padding: 0 1rem; color: #222 }
h1 { font-size: 1.5rem } h2 { font-size: 1.15rem; margin-top: 2rem }
table { border-collapse: collapse } td, th { padding: .15rem .8rem .15rem 0; text-align: left; vertical-align: top }
td:last-child { font-variant-numeric: tabular-nums } .plots { display: flex; flex-wrap: wrap; gap: .5rem }
.plots img { width: 30rem; max-width: 100% } pre { background: #f5f5f5; padding: .8rem; white-space: pre-wrap }
b.prompt { color: #06c } details table { font-size: .85rem }
"""


def write(run_dir: Path, samples: Sequence[tuple[str, str]] = ()) -> Path:
    """Draw the plots and write `report.html` from what the run's folder holds.

    Args:
        run_dir: The run's folder.
        samples: Prompts and how the model went on.
    """
    result, settings, environment = (_read(run_dir / name) for name in (RESULT, RECIPE, ENVIRONMENT))
    drawn = plots.draw(run_dir, result.get("baselines"))
    origins = settings.get("origins", {})
    values = flat(settings.get("recipe", {}))
    sections = [
        f"<h1>{html.escape(run_dir.name)}</h1>",
        _table(flat(result)) if result else "<p>The run has not ended yet.</p>",
        '<div class="plots">' + "".join(_image(path) for path in drawn) + "</div>",
        *(["<h2>Samples</h2>", *(_sample(*pair) for pair in samples)] if samples else []),
        "<h2>Settings</h2>",
        _table({key: value for key, value in values.items() if key in origins} or values),
        f"<details><summary>All settings</summary>{_table(values)}</details>",
        f"<h2>Environment</h2>{_table(flat(environment))}",
    ]
    page = run_dir / PAGE
    draft = page.with_name(f"{PAGE}.tmp")
    draft.write_text(
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{html.escape(run_dir.name)}</title>'
        f"<style>{STYLE}</style>{''.join(sections)}</html>\n"
    )
    draft.rename(page)
    return page


def _read(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text()) if path.exists() else {}


def _image(path: Path) -> str:
    content = base64.b64encode(path.read_bytes()).decode()
    return f'<img alt="{path.stem}" src="data:image/png;base64,{content}">'


def _sample(prompt: str, continuation: str) -> str:
    return f'<pre><b class="prompt">{html.escape(prompt)}</b>{html.escape(continuation)}</pre>'


def _table(values: Mapping[str, Any]) -> str:
    rows = (f"<tr><td>{html.escape(key)}<td>{html.escape(_shown(value))}" for key, value in values.items())
    return f"<table>{''.join(rows)}</table>"


def _shown(value: Any) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)
