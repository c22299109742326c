"""Numbers reach their files, survive a kill, and are not doubled by a resumed run."""

import json

import pytest

from triax.errors import ConfigError, TrainError
from triax.train import metrics


def test_each_step_is_a_line_that_can_be_read_at_once(tmp_path):
    sink = metrics.JsonLines(tmp_path / "metrics.jsonl")
    sink.write(1, {"train/loss": float("nan"), "router/load": [1.0, float("inf")]})
    written = json.loads((tmp_path / "metrics.jsonl").read_text(), parse_constant=pytest.fail)
    sink.close()
    assert written == {"step": 1, "train/loss": None, "router/load": [1.0, None]}


def test_a_resumed_run_drops_what_it_will_write_again_and_half_a_line(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text(
        '{"step": 1, "a": 1}\n{"step": 2, "a": 2}\n{"step": 2, "b": 2}\n{"step": 3, "a": 3}\n{"step": 4, "a'
    )
    sink = metrics.JsonLines(path, after_step=2)
    sink.write(3, {"a": 30})
    sink.close()
    assert metrics.read(path) == [{"step": 1, "a": 1}, {"step": 2, "a": 2}, {"step": 2, "b": 2}, {"step": 3, "a": 30}]


def test_lines_written_after_the_checkpoint_are_dropped_though_their_step_is_not_later(tmp_path):
    path = tmp_path / "metrics.jsonl"
    sink = metrics.JsonLines(path)
    sink.write(1, {"a": 1.0})
    position = sink.position
    sink.write(1, {"eval": 2.0})
    sink.close()
    metrics.JsonLines(path, after_step=1, position=position).close()
    assert metrics.read(path) == [{"step": 1, "a": 1.0}]
    metrics.JsonLines(path, after_step=1, position=10**6).close()
    assert metrics.read(path) == [{"step": 1, "a": 1.0}]


def test_half_a_last_line_is_not_read(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n{"st')
    assert metrics.read(path) == [{"step": 1}]


def test_a_full_disk_stops_the_run_with_advice():
    sink = metrics.JsonLines.__new__(metrics.JsonLines)
    sink.path = "/dev/full"
    sink.file = open("/dev/full", "w")  # noqa: SIM115
    with pytest.raises(TrainError, match="No space left on device; make room and resume"):
        sink.write(1, {"train/loss": 1.0})
    sink.close()  # has nothing to add
    assert sink.file.closed


def test_a_file_that_cannot_be_written_is_reported(tmp_path):
    with pytest.raises(ConfigError, match="cannot be written"):
        metrics.JsonLines(tmp_path / "absent" / "metrics.jsonl")


def test_lists_are_spread_for_sinks_that_take_scalars():
    assert metrics.spread({"a": 1.0, "b": [2.0, 3.0]}) == {"a": 1.0, "b/0": 2.0, "b/1": 3.0}


def test_an_absent_extra_says_how_to_get_it():
    with pytest.raises(ConfigError, match=r"train\.wandb: needs the package `no_such`.*pip install .*\[no_such\]"):
        metrics._extra("no_such_module", "no_such", "train.wandb")
