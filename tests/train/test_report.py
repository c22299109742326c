"""Plots and the page are drawn from what a run's folder holds."""

import json
import re

from triax.train import metrics, plots, report


def fill(run_dir):
    lines = []
    for step in range(1, 31):
        line = {
            "step": step,
            "train/tokens": 512 * step,
            "train/loss": 5 / step,
            "train/bits_per_byte": 3 / step,
            "train/learning_rate": 1e-3 * step,
            "train/grad_norm": 1.0,
            "train/grad_norm/experts": 0.5,
            "train/tokens_per_s": 1e4,
        }
        if step % 10 == 0:
            line |= {
                "router/load_max_over_mean_per_layer": [1.5, 2.0],
                "attention/largest_logit_per_layer": [10.0, 30.0],
                "residual_mix/share/layer 0 mlp": [0.4, 0.6],
                "residual_mix/share/output": [0.2, 0.3, 0.5],
                "eval/bits_per_byte": 3 / step,
            }
        lines.append(json.dumps(line))
    (run_dir / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    (run_dir / "recipe.json").write_text(json.dumps({"recipe": {"optim": {"lr": 0.01}}, "origins": {"optim.lr": "x"}}))
    (run_dir / "result.json").write_text(json.dumps({"bits_per_byte": 1.5, "baselines": {"xz <9>": 1.6}}))


def test_a_plot_without_numbers_is_left_out(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "train/tokens": 5, "train/learning_rate": 0.1}\n')
    assert [path.stem for path in plots.draw(tmp_path)] == ["learning_rate"]


def test_skipped_steps_leave_a_gap_not_an_error(tmp_path):
    (tmp_path / "metrics.jsonl").write_text(
        '{"step": 1, "train/tokens": 5, "train/bits_per_byte": null}\n'
        '{"step": 2, "train/tokens": 9, "train/bits_per_byte": 2.0}\n'
    )
    assert plots.series(metrics.read(tmp_path / "metrics.jsonl"), "train/bits_per_byte") == ([9], [2.0])
    assert [path.stem for path in plots.draw(tmp_path)] == ["loss"]


def test_the_page_holds_every_plot_needs_nothing_beside_it_and_escapes_text(tmp_path):
    fill(tmp_path)
    page = report.write(tmp_path, [("def f(", "<script>")]).read_text()
    assert page.count("data:image/png;base64,") == len(plots.PLOT)
    drawn = list((tmp_path / "plots").iterdir())
    assert {path.stem for path in drawn} == set(plots.PLOT)
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in drawn)
    assert not re.search(r'(src|href)="(?!data:)', page)
    assert "<script>" not in page
    assert "&lt;script&gt;" in page
    assert "xz &lt;9&gt;" in page
    assert "optim.lr" in page


def test_a_run_that_has_not_ended_has_a_page_too(tmp_path):
    assert "has not ended yet" in report.write(tmp_path).read_text()
