"""Runs side by side: figures, the settings that differ, curves in one picture."""

import json

import matplotlib.image
import pytest

from triax.config.load import load_recipe
from triax.errors import CheckpointError, ConfigError
from triax.model.count import sheet
from triax.train import compare, run_folder


def write_run(path, *words, steps=4, eval_at=2, step_s=0.5):
    """Write the folder of a run that reads 512 tokens a step, whose loss is 6 over the step."""
    recipe = load_recipe("nano", words)
    path.mkdir(parents=True)
    run_folder.record(path, recipe, None)
    lines = []
    for step in range(1, steps + 1):
        line = {"step": step, "train/tokens": 512 * step, "train/loss": 6 / step, "train/bits_per_byte": 3 / step}
        lines.append(line | {"train/step_s": step_s})
        if step == eval_at:
            lines.append({"step": step, "train/tokens": 512 * step, "eval/bits_per_byte": 4 / step})
    (path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return recipe


def test_figures_are_those_of_the_folder(tmp_path):
    recipe = write_run(tmp_path / "a")
    (curve,) = compare.open_curves([tmp_path / "a"])
    assert curve.figures() == {
        "run": str(tmp_path / "a"),
        "status": "stopped",
        "steps": 4,
        "tokens": 2048,
        "planned_tokens": recipe.train.tokens,
        "loss": 1.5,
        "training_bits_per_byte": 0.75,
        "held_out_bits_per_byte": 2.0,
        "seconds": 2.0,
        "tokens_per_s": 1024.0,
        "flops": 6 * sheet(recipe.model).active_parameters * 2048,
    }


def test_a_curve_is_measured_in_tokens_seconds_and_operations(tmp_path):
    recipe = write_run(tmp_path / "a")
    (curve,) = compare.open_curves([tmp_path / "a"])
    axes, values = curve.points("eval/bits_per_byte")
    assert (axes["tokens"], axes["seconds"], values) == ([1024.0], [1.0], [2.0])
    axes, values = curve.points("train/bits_per_byte")
    assert axes["seconds"] == [0.5, 1.0, 1.5, 2.0]
    assert axes["flops"] == [6 * sheet(recipe.model).active_parameters * tokens for tokens in axes["tokens"]]
    assert values == [3.0, 1.5, 1.0, 0.75]


def test_the_status_tells_ended_running_and_stopped_runs(tmp_path):
    for name in ("ended", "extended", "running", "stopped"):
        write_run(tmp_path / name)
    (tmp_path / "ended" / "result.json").write_text('{"steps": 4}')
    (tmp_path / "extended" / "result.json").write_text('{"steps": 3}')
    with run_folder.held(tmp_path / "running"):
        curves = compare.open_curves([tmp_path])
    assert {curve.name: curve.status for curve in curves} == {
        "ended": "ended",
        "extended": "stopped",
        "running": "running",
        "stopped": "stopped",
    }


def test_a_folder_of_runs_is_read_once_and_names_are_as_short_as_they_are_unique(tmp_path):
    for name in ("one/a", "one/b", "two/a"):
        write_run(tmp_path / name)
    curves = compare.open_curves([tmp_path / "one", tmp_path / "one" / "a", tmp_path / "two" / "a"])
    assert [curve.name for curve in curves] == ["one/a", "one/b", "two/a"]
    assert [curve.name for curve in compare.open_curves([tmp_path / "one"])] == ["a", "b"]


@pytest.mark.parametrize("name", ["", "absent", "file"])
def test_a_path_without_runs_is_refused(tmp_path, name):
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match=r"holds no run; found .*; name folders that `triax train` wrote"):
        compare.open_curves([tmp_path / name])


def test_settings_that_differ_are_told_and_those_that_decide_nothing_are_not(tmp_path):
    write_run(tmp_path / "a", "optim.lr=0.02", "train.log_every=3")
    write_run(tmp_path / "b", "optim.kind=adamw", "optim.lr=0.02", "model.mla_layers=[2]")
    found = compare.differing(compare.open_curves([tmp_path]))
    assert found["optim.kind"] == ["muonclip", "adamw"]
    assert found["model.mla_layers"] == [[3], [2]]
    assert found["optim.momentum"] == [0.95, None]
    assert not {"optim.lr", "train.log_every", "train.tokens"} & found.keys()


def test_smoothing_is_the_mean_of_a_value_and_those_before_it():
    assert compare.smooth([4.0, 2.0, 6.0, 0.0], 2) == [4.0, 3.0, 4.0, 3.0]
    assert compare.smooth([4.0, 2.0], 1) == [4.0, 2.0]
    assert compare.smooth([], 3) == []


def test_all_runs_are_drawn_over_one_another(tmp_path):
    write_run(tmp_path / "runs" / "a")
    write_run(tmp_path / "runs" / "b", steps=2, eval_at=0)
    write_run(tmp_path / "runs" / "empty", steps=0)
    compare.plot(compare.open_curves([tmp_path / "runs"]), tmp_path / "p.png")
    picture = matplotlib.image.imread(tmp_path / "p.png")[..., :3]
    for colour in compare.COLOURS[:2]:
        wanted = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        assert (abs(picture - wanted).max(-1) < 0.02).sum() > 100
    for name in ("absent/p.png", "p.docx"):
        with pytest.raises(ConfigError, match="cannot be drawn"):
            compare.plot(compare.open_curves([tmp_path / "runs"]), tmp_path / name)
