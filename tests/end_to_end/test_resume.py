"""A run that is stopped and resumed is the run that was not, bit for bit."""

import random

import pytest
import torch

from triax.checkpoint import sharded
from triax.config.load import load_recipe
from triax.train import metrics
from triax.train.run import Run

OVERRIDES = [
    *("train.tokens=1024", "train.batch_tokens=128", "train.micro_tokens=64", "train.log_every=3"),
    *("model.num_layers=2", "model.mla_layers=[1]"),
    *("data.tokenizer.vocab_size=300", "model.multi_token.loss_weight=0.1", "optim.qk_clip.threshold=0.01"),
]


@pytest.fixture(scope="module")
def recipe(tmp_path_factory):
    """A mixture of two sources, one so small that its epochs end within the run."""
    place = tmp_path_factory.mktemp("text")
    for name, rows in (("long", 300), ("short", 8)):
        (place / name).mkdir()
        for part in range(3):
            text = "".join(f"{name} {part} {n}: {n * n * (part + 3)}\n" for n in range(rows))
            (place / name / f"{part}.txt").write_text(text)
    sources = ", ".join(f'{{kind = "folder", path = "{place / name}", weight = 1.0}}' for name in ("long", "short"))
    return load_recipe("nano", [f"data.sources=[{sources}]", *OVERRIDES])


def everything(run):
    tensors = [*run.parts.model.named_parameters(), *run.parts.model.named_buffers()]
    return {
        "tensors": {name: tensor.detach().clone() for name, tensor in tensors},
        "optimizer": run.parts.optimizer.state_dict(),
        "loader": run.parts.loader.state_dict(),
        "random": torch.get_rng_state(),
        "spikes": run.spikes.state_dict(),
        "position": (run.step, run.tokens, run.skipped),
    }


def assert_equal(left, right, draws=True):
    for part in ("tensors", "optimizer"):
        assert left[part].keys() == right[part].keys()
        for name, tensor in left[part].items():
            assert torch.equal(tensor, right[part][name]), name
    if draws:
        assert torch.equal(left["random"], right["random"])
    for part in ("loader", "spikes", "position"):
        assert left[part] == right[part]


@pytest.fixture(scope="module")
def uninterrupted(recipe, tmp_path_factory):
    run_dir = tmp_path_factory.mktemp("whole")
    with Run(recipe, run_dir) as run:
        run.prepare(None)
        while run.tokens < recipe.train.tokens:
            run.advance()
    return everything(run), losses(run_dir)


def losses(run_dir):
    lines = metrics.read(run_dir / "metrics.jsonl")
    return [(line["step"], line["train/loss"], line["train/grad_norm"]) for line in lines]


@pytest.mark.parametrize("at", [1, 6])
def test_losses_weights_and_optimiser_state_equal_the_uninterrupted_runs(
    recipe, tmp_path, uninterrupted, at, monkeypatch
):
    with Run(recipe, tmp_path) as run:
        run.prepare(None)
        for _ in range(at):
            run.advance()
        torch.rand(3)  # whoever draws moves the generators on, and a resumed run finds them there
        kept = []
        monkeypatch.setattr(run, "state_dict", lambda take=run.state_dict: kept.append(take()) or kept[-1])
        run.save()
        saved = everything(run)
        run.advance()  # lost: after the last checkpoint
    torch.manual_seed(99)
    given = []  # Python's own generator moves at every check of a type in these tests: look at what it was set to
    monkeypatch.setattr(random, "setstate", given.append)
    with Run(recipe, tmp_path) as run:
        run.prepare(sharded.newest(tmp_path / "checkpoints"))
        assert_equal(everything(run), saved)
        assert given == [kept[0]["random"]["python"]]
        while run.tokens < recipe.train.tokens:
            run.advance()
    assert_equal(everything(run), uninterrupted[0], draws=False)
    assert losses(tmp_path) == uninterrupted[1]


def test_skipped_steps_time_and_the_last_loss_come_back_and_only_a_branch_begins_new_metrics(recipe, tmp_path):
    with Run(recipe, tmp_path) as run:
        run.prepare(None)
        run.step, run.tokens, run.skipped, run.seconds, run.loss = 3, 384, 2, 12.5, 3.25
        state = run.state_dict()
        state["progress"]["position"] = 77
        checkpoint = tmp_path / "checkpoints" / "step-3"
        for source, position in ((checkpoint, 77), (tmp_path / "elsewhere" / "checkpoints" / "step-3", 0)):
            run.step = run.tokens = run.skipped = run.position = 0
            run.seconds, run.loss = 0.0, float("nan")
            run.load_state_dict(state, source)
            assert (run.step, run.tokens, run.skipped, run.seconds, run.loss) == (3, 384, 2, 12.5, 3.25)
            assert run.position == position


def test_short_epochs_end_within_the_run(uninterrupted):
    """Else the test above would not cover the turn of an epoch."""
    rows = uninterrupted[0]["loader"]["rows"]
    assert min(rows) >= 5
