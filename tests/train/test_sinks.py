"""The extra sinks are tried with the real packages: what they wrote is read back."""

import time

import pytest
import wandb
from tensorboard.backend.event_processing import event_accumulator as events

from triax.errors import ConfigError
from triax.train.metrics import TensorBoard, WeightsAndBiases

STEPS = [{"train/loss": 2.5, "router/load_cv_per_layer": {"3": 0.1, "7": 0.2}}, {"train/loss": 2.25}]


def test_tensorboard_reads_back_every_number_and_forgets_the_steps_after_a_resume(tmp_path):
    first = TensorBoard(tmp_path)
    for step, metrics in enumerate([*STEPS, {"train/loss": 9.0}], start=1):
        first.write(step, metrics)
    first.close()
    resumed = TensorBoard(tmp_path, after_step=2)
    resumed.write(3, {"train/loss": 2.0})
    resumed.close()
    read = events.EventAccumulator(str(tmp_path))
    read.Reload()
    assert [(event.step, event.value) for event in read.Scalars("train/loss")] == [(1, 2.5), (2, 2.25), (3, 2.0)]
    assert [event.value for event in read.Scalars("router/load_cv_per_layer/7")] == pytest.approx([0.2])


def test_weights_and_biases_keeps_a_run_offline(tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    sink = WeightsAndBiases("triax", tmp_path, {"model": {"width": 8}})
    for step, metrics in enumerate(STEPS, start=1):
        sink.write(step, metrics)
    sink.close()
    (kept,) = tmp_path.glob("wandb/offline-run-*/run-*.wandb")
    wanted = (b"router/load_cv_per_layer/7", b"2.25")
    for _ in range(600):  # the library's own process writes it, a moment after the run is finished
        if all(word in kept.read_bytes() for word in wanted):
            break
        time.sleep(0.1)
    assert [word for word in wanted if word not in kept.read_bytes()] == []


def test_weights_and_biases_without_a_login_is_refused_with_the_remedy(tmp_path, monkeypatch):

    def init(**options):  # as the real one ends without a key, which is asked for once in a process only
        raise wandb.errors.UsageError("No API key configured. Use `wandb login` to log in.")

    monkeypatch.setattr(wandb, "init", init)
    with pytest.raises(ConfigError, match=r"train\.wandb: no run can be opened.*No API key.*WANDB_MODE=offline"):
        WeightsAndBiases("triax", tmp_path, {})
