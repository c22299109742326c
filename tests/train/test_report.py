"""Plots and the page are drawn from what a run's folder holds."""

import json
import re

from triax.train import metrics, plots, report, run_folder


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
                "router/load_max_over_mean_per_layer": {"1": 1.5, "2": 2.0},
                "attention/largest_logit_per_layer": [10.0, 30.0],
                "residual_mix/share/layer 0 mlp": [0.4, 0.6],
                "residual_mix/share/output": [0.2, 0.3, 0.5],
                "eval/bits_per_byte": 3 / step,
            }
        lines.append(json.dumps(line))
    (run_dir / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    recipe = {
        "model": {"mla_layers": [3, 7], "width": 64},
        "data": {"sources": [{"kind": "folder", "path": "/notes"}, {"kind": "stdlib"}]},
        "schedule": {"segments": [{"shape": "linear", "until": 1.0, "to": 0.5}]},
        "optim": {"lr": 0.01},
        "train": {"tokens": 99, "seed": 0},
    }
    origins = {"optim.lr": "mine.toml", "data.sources": "command line", "model.mla_layers": "mine.toml"}
    origins["schedule.segments"] = "mine.toml"
    (run_dir / "recipe.json").write_text(json.dumps({"recipe": recipe, "origins": origins}))
    (run_dir / "result.json").write_text(
        json.dumps({"steps": 30, "tokens": 15360, "bits_per_byte": 1.5, "baselines": {"xz <9>": 1.6}})
    )


def fill_sparsely(run_dir):
    """The same with numbers for one plot, which draws faster."""
    fill(run_dir)
    lines = [
        {name: line[name] for name in ("step", "train/tokens")} for line in metrics.read(run_dir / "metrics.jsonl")
    ]
    (run_dir / "metrics.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))


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


def test_f63_the_settings_hold_lists_and_where_they_were_written(tmp_path):
    fill_sparsely(tmp_path)
    given = report.write(tmp_path).read_text().partition("Settings that were given")[2].partition("All settings")[0]
    rows = re.findall(r"<tr><td>(.*?)<td>(.*?)<td class=\"from\">(.*?)(?=<tr>|</table>)", given)
    assert rows == [
        ("model.mla_layers", "[3, 7]", "mine.toml"),
        ("data.sources.0.kind", "&quot;folder&quot;", "command line"),
        ("data.sources.0.path", "&quot;/notes&quot;", "command line"),
        ("data.sources.1.kind", "&quot;stdlib&quot;", "command line"),
        ("schedule.segments.0.shape", "&quot;linear&quot;", "mine.toml"),
        ("schedule.segments.0.until", "1.0", "mine.toml"),
        ("schedule.segments.0.to", "0.5", "mine.toml"),
        ("optim.lr", "0.01", "mine.toml"),
    ]


def test_f63_a_run_that_goes_on_was_stopped_or_has_no_step_yet_has_a_page_that_says_so(tmp_path):
    assert "Not running. The first step is not done yet." in report.write(tmp_path).read_text()
    fill_sparsely(tmp_path)
    (tmp_path / "result.json").unlink()
    assert "Stopped; go on with --resume. Step 30, 15,360 of 99" in report.write(tmp_path).read_text()
    with run_folder.held(tmp_path):
        assert "Running. Step 30, 15,360 of 99" in report.write(tmp_path).read_text()


def test_f63_the_page_of_an_extended_run_does_not_show_its_old_result(tmp_path):
    fill_sparsely(tmp_path)
    (tmp_path / "result.json").write_text(json.dumps({"steps": 30, "tokens": 15360, "bits_per_byte": 7.654}))
    assert "Ended after 30 steps and 15,360 tokens." in report.write(tmp_path).read_text()
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"step": 31, "train/tokens": 15872, "train/bits_per_byte": 0.1}) + "\n")
    page = report.write(tmp_path).read_text()
    assert "7.654" not in page
    assert "Stopped" in page
