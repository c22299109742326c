"""A run that goes on somewhere else: with more tokens, text that moved, another run's weights, released weights."""

import json
import shutil

import pytest
import torch

from triax.checkpoint import sharded
from triax.cli.app import main
from triax.data.tokenizer import Tokenizer
from triax.errors import CheckpointError, ConfigError
from triax.optim.schedule import rate
from triax.train import metrics
from triax.train.branch import open_branch, trunk
from triax.train.loop import train
from triax.train.run import Run


def test_a_run_is_not_continued_with_another_model_and_keeps_its_recipe(ended, recipe):
    before = (ended[0] / "recipe.json").read_bytes()
    with pytest.raises(CheckpointError, match=r"`model.kda.num_heads` was `2`, is `1`"):
        train(recipe("model.kda.num_heads=1"), ended[0], resume=True)
    assert (ended[0] / "recipe.json").read_bytes() == before


def test_f27_a_run_is_not_continued_on_text_that_changed_and_the_file_is_named(ended, recipe, folder):
    path = folder / "part3.txt"
    before = path.read_text()
    path.write_text(before + "one more line\n")
    try:
        with pytest.raises(CheckpointError, match=r"data position: `digests` is not .*; changed: `part3.txt`$"):
            train(recipe("train.tokens=4096"), ended[0], resume=True)
    finally:
        path.write_text(before)


def test_f27_text_may_move_to_another_folder(ended, recipe, folder, tmp_path):
    shutil.copytree(folder, tmp_path / "moved")
    shutil.copytree(ended[0], tmp_path / "run")
    moved = recipe("train.tokens=2688", f'data.sources=[{{kind = "folder", path = "{tmp_path / "moved"}"}}]')
    assert train(moved, tmp_path / "run", resume=True).steps == 21
    branch = train(moved, tmp_path / "branch", branch=ended[0])
    assert branch.steps == 21
    (tmp_path / "moved" / "part3.txt").unlink()
    (tmp_path / "moved" / "part99.txt").write_text("some other text\n" * 20)
    with pytest.raises(CheckpointError, match=r"; new: `part99.txt`; missing: `part3.txt`$"):
        train(recipe("train.tokens=4096", *sources(tmp_path / "moved")), tmp_path / "run", resume=True)


def sources(place):
    return [f'data.sources=[{{kind = "folder", path = "{place}"}}]']


def test_a_branch_decays_from_a_checkpoint_of_another_run(ended, recipe, tmp_path):
    segments = "{shape='constant', until=0.8, to=1.0}, {shape='linear', until=1.0, to=0.0}"
    decay = recipe("train.tokens=1536", f"schedule.segments=[{segments}]")
    result = train(decay, tmp_path / "branch", branch=ended[0] / "checkpoints/step-10")
    steps = [line for line in metrics.read(tmp_path / "branch" / "metrics.jsonl") if "train/loss" in line]
    assert [line["step"] for line in steps] == [11, 12]
    assert [line["train/learning_rate"] / decay.optim.lr for line in steps] == pytest.approx([0.625, 0.625 / 3])
    assert result.tokens == 1536


def test_a_run_is_a_trunk_to_branch_off_from_and_anything_else_is_refused(ended, recipe, tmp_path):
    assert trunk(ended[0]) == ended[0] / "checkpoints" / "step-20"
    for place in (tmp_path, tmp_path / "absent"):
        with pytest.raises(CheckpointError, match="no checkpoint to branch off from"):
            train(recipe(), tmp_path / "branch", branch=place)
    assert not (tmp_path / "branch" / "recipe.json").exists()


def test_f59_a_branch_takes_weights_to_other_text_rate_and_batch_and_says_so(ended, recipe, tmp_path):
    (tmp_path / "other").mkdir()
    for number in range(6):
        (tmp_path / "other" / f"{number}.txt").write_text(f"quite other text, number {number}; " * 40)
    settings = ("optim.lr=2e-3", "train.batch_tokens=64", "train.tokens=192", *sources(tmp_path / "other"))
    with Run(recipe(*settings), tmp_path) as run:
        (tmp_path / "tokenizer.json").write_bytes((ended[0] / "tokenizer.json").read_bytes())
        run.prepare(None, open_branch(ended[0], run.recipe))
        saved = sharded.load(ended[0] / "checkpoints" / "step-20")
        assert all(torch.equal(p, saved["model"][name]) for name, p in run.parts.model.named_parameters())
        assert all(torch.equal(t, saved["optimizer"][n]) for n, t in run.parts.optimizer.state_dict().items())
    result = train(recipe(*settings), tmp_path / "branch", branch=str(ended[0]))
    assert (result.steps, result.tokens) == (3, 192)
    lines = [line for line in metrics.read(tmp_path / "branch" / "metrics.jsonl") if "train/loss" in line]
    assert [line["step"] for line in lines] == [1, 2, 3]
    assert lines[0]["train/learning_rate"] < 2e-3
    assert (tmp_path / "branch" / "tokenizer.json").read_bytes() == (ended[0] / "tokenizer.json").read_bytes()
    told = (tmp_path / "branch" / "log.txt").read_text()
    assert "branch: weights and optimiser state of" in told
    assert "changed: `optim.lr`, `train.batch_tokens`, changed: " not in told
    assert "`optim.lr`, `train.batch_tokens`" in told
    assert "steps, tokens and the schedule begin at 0; the text is read from its beginning" in told
    assert json.loads((tmp_path / "branch" / "recipe.json").read_text())["branch"].endswith("checkpoints/step-20")
    again = train(recipe(*settings, "train.tokens=256"), tmp_path / "branch", resume=True)
    assert again.steps == 4
    assert json.loads((tmp_path / "branch" / "recipe.json").read_text())["branch"].endswith("checkpoints/step-20")


def test_f59_a_branch_with_another_rate_goes_on_in_the_text(ended, recipe, tmp_path):
    with Run(recipe("optim.lr=2e-3"), tmp_path) as run:
        (tmp_path / "tokenizer.json").write_bytes((ended[0] / "tokenizer.json").read_bytes())
        run.prepare(None, open_branch(ended[0] / "checkpoints" / "step-10", run.recipe))
        saved = sharded.load(ended[0] / "checkpoints" / "step-10")
        assert run.parts.loader.state_dict()["rows"] == saved["loader"]["rows"] != [0]
        assert (run.step, run.tokens, run.position) == (0, 0, 0)


def test_f59_a_branch_with_another_optimiser_begins_its_state_anew(ended, recipe, tmp_path):
    settings = ("optim.kind=adamw", "optim.lr=1e-3", "train.tokens=128")
    assert train(recipe(*settings), tmp_path / "run", branch=ended[0]).steps == 1
    assert "branch: weights of" in (tmp_path / "run" / "log.txt").read_text()


def test_f59_a_branch_keeps_the_model_and_the_tokenizer(ended, recipe, folder, tmp_path):
    with pytest.raises(CheckpointError, match=r"weights of another model; `model.kda.num_heads` was `2`, is `1`"):
        train(recipe("model.kda.num_heads=1"), tmp_path / "a", branch=ended[0])
    other = Tokenizer.train([path.read_text() for path in folder.iterdir()], 280)
    other.save(tmp_path / "other.json")
    named = f"data.tokenizer.path={tmp_path / 'other.json'}"
    with pytest.raises(ConfigError, match="is another tokenizer than that of"):
        train(recipe(named), tmp_path / "b", branch=ended[0])
    same = f"data.tokenizer.path={ended[0] / 'tokenizer.json'}"
    assert open_branch(ended[0], recipe(same)).changed == {}
    assert list(tmp_path.glob("[ab]/*")) == []


def test_f59_released_weights_are_trained_on(ended, recipe, tmp_path):
    with pytest.raises(SystemExit, match="0"):
        main(["convert", str(ended[0]), str(tmp_path / "released"), "--to", "bf16"])
    settings = ("train.tokens=128", "train.seed=5", "train.check_after=0")
    result = train(recipe(*settings), tmp_path / "run", branch=tmp_path / "released")
    assert result.steps == 1
    assert result.loss < 5.0  # a new model begins at ln(320) = 5.77
    told = (tmp_path / "run" / "log.txt").read_text()
    assert f"the weights are those of {tmp_path / 'released'}; the optimiser begins at 0" in told
    with pytest.raises(CheckpointError, match=r"weights of another model; .*`model.num_layers` was `4`, is `3`"):
        train(recipe("model.num_layers=3", "model.mla_layers=[2]"), tmp_path / "b", branch=tmp_path / "released")


def test_f30_a_rate_that_jumps_because_a_run_is_extended_is_told_before_the_first_step(ended, recipe, tmp_path):
    shutil.copytree(ended[0], tmp_path / "run")
    with Run(recipe("train.tokens=5120"), tmp_path / "run") as run:
        run.prepare(tmp_path / "run" / "checkpoints" / "step-20")
    told = (tmp_path / "run" / "log.txt").read_text().rpartition("resumed from")[2]
    now, before = (0.01 * rate(run.recipe.schedule, tokens) for tokens in ((2560 + 64) / 5120, (2560 - 64) / 2560))
    assert f"was {before:.3g} at the last step and is {now:.3g} at the next: train.tokens was `2560`, is `5120`" in told
    with Run(recipe(), tmp_path / "run") as run:  # as planned: nothing to tell
        run.prepare(tmp_path / "run" / "checkpoints" / "step-10")
    assert "learning rate" not in (tmp_path / "run" / "log.txt").read_text().rpartition("resumed from")[2]
