"""A whole K3, small: text in, weights, curves and a page out."""

import json
import math
import resource
import shutil
import signal

import pytest
import torch

from triax.checkpoint import sharded
from triax.checkpoint.run import load_model
from triax.config.load import load_recipe
from triax.errors import CheckpointError, ConfigError, TrainError
from triax.model.layout import Layout
from triax.train import metrics
from triax.train.loop import train, trunk
from triax.train.run import Run

TEXT = "".join(f"line {n}: the square of {n} is {n * n}, and of {n + 1} it is {(n + 1) ** 2}.\n" for n in range(40))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    place = tmp_path_factory.mktemp("text")
    for number in range(12):
        (place / f"part{number}.txt").write_text(TEXT.replace("line", f"row {number}"))
    return place


@pytest.fixture(scope="module")
def recipe(folder):
    def build(*overrides):
        source = f'[{{kind = "folder", path = "{folder}"}}]'
        ours = ("train.tokens=2560", "train.batch_tokens=128", "train.micro_tokens=64", "train.log_every=8")
        less = ("train.eval_every=8", "train.save_every=10", "data.held_out_share=0.02")
        return load_recipe(
            "nano", [f"data.sources={source}", "data.tokenizer.vocab_size=300", *ours, *less, *overrides]
        )

    return build


@pytest.fixture(scope="module")
def shallow(recipe):
    """The same with two layers, where the network does not matter."""
    return lambda *overrides: recipe("model.num_layers=2", "model.mla_layers=[1]", *overrides)


@pytest.fixture(scope="module")
def ended(recipe, tmp_path_factory):
    """One finished run, looked at by several tests."""
    run_dir = tmp_path_factory.mktemp("runs") / "nano"
    seen = []
    result = train(recipe("train.baselines=true"), run_dir, on_step=lambda step, _: seen.append(step))
    return run_dir, result, seen


def test_the_loss_falls_and_the_held_out_text_is_measured(ended):
    run_dir, result, seen = ended
    lines = metrics.read(run_dir / "metrics.jsonl")
    losses = [line["train/loss"] for line in lines if "train/loss" in line]
    assert len(losses) == result.steps == 20
    assert seen == list(range(1, 21))
    assert losses[0] == pytest.approx(math.log(320), rel=0.05)
    assert losses[-1] < 0.8 * losses[0]
    held_out = [line["eval/bits_per_byte"] for line in lines if "eval/bits_per_byte" in line]
    assert held_out[-1] == result.bits_per_byte < held_out[0]
    assert result.baselines.keys() == {"byte_model", "xz", "xz_primed"}


def test_the_folder_holds_what_it_promises(ended):
    run_dir, result, _ = ended
    names = {path.name for path in run_dir.iterdir()}
    assert names == {
        *("recipe.json", "environment.json", "tokenizer.json", "metrics.jsonl", "log.txt", "result.json"),
        *("report.html", "plots", "checkpoints"),
    }
    assert [path.name for path in sharded.whole(run_dir / "checkpoints")] == ["step-20", "step-10"]
    drawn = {path.stem for path in (run_dir / "plots").iterdir()}
    assert drawn >= {"loss", "learning_rate", "grad_norm", "router_load", "largest_logit", "residual_mix"}
    assert "step 20  loss" in (run_dir / "log.txt").read_text()
    assert json.loads((run_dir / "result.json").read_text())["bits_per_byte"] == result.bits_per_byte


def test_every_promised_metric_is_there_and_finite(ended):
    lines = metrics.read(ended[0] / "metrics.jsonl")
    every = next(line for line in lines if line["step"] == 9)
    assert every.keys() >= {
        *("train/tokens", "train/loss", "train/bits_per_byte", "train/learning_rate", "train/grad_norm"),
        *("train/grad_norm/kda", "train/grad_norm/attention", "train/grad_norm/experts", "train/grad_norm/router"),
        *("train/tokens_per_s", "train/data_wait_s", "train/memory_bytes", "train/skipped_steps", "train/spike_score"),
        *("attention/largest_logit", "attention/clipped_heads", "attention/smallest_clip_factor"),
        *("router/load_max_over_mean", "router/load_max_over_mean_per_layer", "router/load_cv", "router/dead_share"),
        *("router/balance_bias_range",),
    }
    detailed = next(line for line in lines if line["step"] == 16)
    assert detailed.keys() - every.keys() >= {
        *("train/update_rms/kda", "train/weight_rms/experts", "kda/keep_mean", "kda/keep_smallest", "kda/beta_mean"),
        *("kda/keep_mean_per_layer", "mlp/situ_saturated_share", "model/activation_largest"),
        *("residual_mix/share/output", "residual_mix/entropy_nats", "residual_mix/embedding_share"),
    }
    for line in lines:
        for name, value in metrics.spread(line).items():
            assert math.isfinite(math.nan if value is None else value), (line["step"], name)
    assert len(detailed["router/load_max_over_mean_per_layer"]) == 3
    assert len(detailed["kda/keep_mean_per_layer"]) == 3
    assert sum(detailed["residual_mix/share/output"]) == pytest.approx(1, abs=1e-3)


def test_the_saved_model_is_the_one_that_was_measured(ended, recipe):
    run_dir, result, _ = ended
    model, tokenizer = load_model(run_dir)
    with Run(recipe(), run_dir) as run:
        run.prepare(run_dir / "checkpoints" / "step-20")
        found = run.evaluate()
    assert found.bits_per_byte == result.bits_per_byte
    tokens = torch.tensor([tokenizer.border, *tokenizer.encode("row 3: the square")])
    layout = Layout.of([len(tokens)])
    run.parts.model.eval()
    with torch.no_grad():
        torch.testing.assert_close(model(tokens, layout), run.parts.model(tokens, layout), rtol=0, atol=0)
    older, _ = load_model(run_dir / "checkpoints" / "step-10")
    assert not torch.equal(older.head.weight, model.head.weight)


def test_a_finished_run_has_nothing_left_to_do(ended, recipe):
    run_dir, result, _ = ended
    before = (run_dir / "metrics.jsonl").read_bytes()
    assert train(recipe("train.baselines=true"), run_dir, resume=True) == result
    assert (run_dir / "metrics.jsonl").read_bytes() == before


def test_a_run_is_not_overwritten(ended, recipe):
    with pytest.raises(ConfigError, match="holds a run already"):
        train(recipe(), ended[0])


def test_a_run_is_not_continued_with_another_model_and_keeps_its_recipe(ended, recipe):
    before = (ended[0] / "recipe.json").read_bytes()
    with pytest.raises(CheckpointError, match=r"`model.kda.num_heads` was `2`, is `1`"):
        train(recipe("model.kda.num_heads=1"), ended[0], resume=True)
    assert (ended[0] / "recipe.json").read_bytes() == before


def test_a_run_is_not_continued_on_text_that_changed(ended, recipe, folder):
    path = folder / "part3.txt"
    before = path.read_text()
    path.write_text(before + "one more line\n")
    try:
        with pytest.raises(CheckpointError, match=r"data position: `digests` is not what the run began with"):
            train(recipe("train.tokens=4096"), ended[0], resume=True)
    finally:
        path.write_text(before)


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


def test_a_page_that_found_no_room_is_written_on_the_next_call(ended, recipe, tmp_path):
    shutil.copytree(ended[0], tmp_path / "run")
    (tmp_path / "run" / "report.html").unlink()
    train(recipe("train.baselines=true"), tmp_path / "run", resume=True)
    assert "</html>" in (tmp_path / "run" / "report.html").read_text()


def test_a_signal_saves_and_the_run_goes_on(shallow, tmp_path):
    def interrupt(step, _):
        if step == 3:
            signal.raise_signal(signal.SIGTERM)

    result = train(shallow("train.tokens=640"), tmp_path / "run", on_step=interrupt)
    assert (result.stopped, result.steps, result.bits_per_byte) == ("SIGTERM", 3, None)
    assert sharded.newest(tmp_path / "run" / "checkpoints").name == "step-3"
    assert "stopped by SIGTERM at step 3; saved; go on with --resume" in (tmp_path / "run" / "log.txt").read_text()
    result = train(shallow("train.tokens=640"), tmp_path / "run", resume=True)
    assert (result.stopped, result.steps) == ("", 5)
    assert result.bits_per_byte > 0


def test_a_full_disk_stops_the_run_and_loses_nothing_saved_before(shallow, tmp_path):
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    with Run(shallow("train.save_every=2"), tmp_path) as run:
        run.prepare(None)
        run.advance()
        run.advance()
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limits[1]))
        try:
            run.advance()
            with pytest.raises(CheckpointError, match=r"step-4: the checkpoint could not be written.*remain: `step-2`"):
                run.advance()
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    with Run(shallow(), tmp_path) as run:
        run.prepare(sharded.newest(tmp_path / "checkpoints"))
        assert run.advance()["train/skipped_steps"] == 0
    assert [line["step"] for line in metrics.read(tmp_path / "metrics.jsonl")] == [1, 2, 3]


def go_on(run):
    for _ in range(10):
        run.advance()


def test_too_many_skipped_steps_stop_the_run_and_name_the_layer(shallow, tmp_path):
    class Spoilt(Run):
        def prepare(self, start):
            super().prepare(start)
            self.parts.model.layers[1].mlp_norm.weight.register_hook(lambda grad: grad * math.inf)

    with Spoilt(shallow("train.max_skipped=2"), tmp_path) as run:
        run.prepare(None)
        before = {name: p.clone() for name, p in run.parts.model.named_parameters()}
        with pytest.raises(TrainError, match=r"step 3: 3 steps were skipped.*gradient of `layers.1.mlp_norm.weight`"):
            go_on(run)
        assert all(torch.equal(p, before[name]) for name, p in run.parts.model.named_parameters())
    assert [line["train/skipped_steps"] for line in metrics.read(tmp_path / "metrics.jsonl")] == [1, 2, 3]


def test_a_spike_is_skipped_by_the_rule_and_counted(shallow, tmp_path):
    with Run(shallow("train.spike_sigmas=6"), tmp_path) as run:
        run.prepare(None)
        for _ in range(16):
            run.spikes.accept(1.0 + 1e-3 * len(run.spikes.losses))
        found = run.advance()
    assert found["train/skipped_steps"] == 1
    assert found["train/spike_score"] > 6
    assert len(run.spikes.losses) == 16


@pytest.mark.parametrize("name", ["layers.1.mlp.experts.up", "layers.0.attention.decay_bias", "embed.weight"])
def test_a_weight_that_never_moves_stops_the_run(shallow, tmp_path, name):
    with Run(shallow("train.check_after=4"), tmp_path) as run:
        run.prepare(None)
        parameter = run.parts.model.get_parameter(name)
        parameter.register_hook(torch.zeros_like)
        with pytest.raises(TrainError, match=rf"after 4 steps .* have not moved beyond weight decay; found `{name}"):
            go_on(run)
