"""A whole K3, small: text in, weights, curves and a page out."""

import gzip
import json
import math
import re
import resource
import shutil
import signal

import pytest
import torch

from triax.checkpoint import sharded
from triax.checkpoint.run import load_model
from triax.data.tokenizer import Tokenizer
from triax.errors import CheckpointError, ConfigError, TrainError
from triax.model.layout import Layout
from triax.train import metrics, report, run_folder
from triax.train.loop import train
from triax.train.run import Run


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
        *("recipe.json", "environment.json", "tokenizer.json", "tokenizer_config.json", "metrics.jsonl", "log.txt"),
        "result.json",
        *("report.html", "plots", "checkpoints", "text.json"),
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
    assert list(detailed["router/load_max_over_mean_per_layer"]) == ["1", "2", "3"]
    assert list(detailed["moe/latent_rms_per_layer"]) == ["1", "2", "3"]
    assert list(detailed["kda/keep_mean_per_layer"]) == ["0", "1", "2"]
    assert list(detailed["attention/largest_logit_per_layer"]) == ["3"]
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


def test_f64_a_run_that_failed_before_its_first_checkpoint_is_begun_anew_with_other_settings(shallow, tmp_path):
    class Spoilt(Run):
        def prepare(self, start, branch=None):
            super().prepare(start, branch)
            self.parts.model.embed.weight.register_hook(torch.zeros_like)

    with Spoilt(shallow("train.check_after=2"), tmp_path) as run:
        run_folder.record(tmp_path, run.recipe, None)
        run.prepare(None)
        with pytest.raises(TrainError, match="have not moved"):
            go_on(run)
    assert len(metrics.read(tmp_path / "metrics.jsonl")) == 2
    mended = shallow("model.kda.num_heads=1", "data.tokenizer.vocab_size=290", "train.tokens=128")
    assert train(mended, tmp_path).steps == 1
    assert [line["step"] for line in metrics.read(tmp_path / "metrics.jsonl") if "train/loss" in line] == [1]
    assert Tokenizer.load(tmp_path / "tokenizer.json").vocab_size == 290
    assert "ended before its first checkpoint; the run begins anew" in (tmp_path / "log.txt").read_text()


def test_f68_folders_may_be_given_as_text(shallow, tmp_path):
    assert train(shallow("train.tokens=128"), str(tmp_path / "run")).steps == 1
    assert load_model(str(tmp_path / "run"))[1].border is not None
    assert report.write(str(tmp_path / "run")).name == "report.html"
    result = train(shallow("train.tokens=256"), str(tmp_path / "branch"), branch=str(tmp_path / "run"))
    assert result.steps == 2


def test_f63_samples_are_written_by_setting_and_change_no_number_of_the_run(shallow, tmp_path):
    plain = shallow("train.tokens=512", "train.eval_every=0")
    talkative = shallow(
        "train.tokens=512", "train.eval_every=0", "train.samples.every=2", 'train.samples.prompts=["row", ""]'
    )
    for name, settings in (("plain", plain), ("talkative", talkative)):
        train(settings, tmp_path / name)
    losses = [
        [line["train/loss"] for line in metrics.read(tmp_path / name / "metrics.jsonl") if "train/loss" in line]
        for name in ("plain", "talkative")
    ]
    assert losses[0] == losses[1]
    rows = metrics.read(tmp_path / "talkative" / "samples.jsonl")
    assert [(row["step"], row["prompt"]) for row in rows] == [(2, "row"), (2, ""), (4, "row"), (4, "")]
    assert not (tmp_path / "plain" / "samples.jsonl").exists()
    page = (tmp_path / "talkative" / "report.html").read_text()
    assert '<pre><b class="prompt">row</b>' in page
    assert "step 4  sample: row" in (tmp_path / "talkative" / "log.txt").read_text()
    shutil.rmtree(tmp_path / "talkative" / "checkpoints")
    with Run(talkative, tmp_path / "talkative") as run:  # again from its beginning: later samples are dropped
        run.prepare(None)
    assert metrics.read(tmp_path / "talkative" / "samples.jsonl") == []


def test_f63_a_stopped_run_has_a_page(shallow, tmp_path):
    result = train(shallow("train.tokens=640"), tmp_path, on_step=lambda *_: signal.raise_signal(signal.SIGTERM))
    assert result.stopped == "SIGTERM"
    page = (tmp_path / "report.html").read_text()
    assert "Stopped; go on with --resume. Step 1, 128 of 640 (20%) tokens." in page
    assert page.count("data:image/png") >= 3
    assert "row" not in page or "part0" not in page


def test_f29_a_long_evaluation_tells_how_far_it_is_and_how_long_it_takes(shallow, tmp_path, monkeypatch):
    monkeypatch.setattr("triax.train.run.TOLD_EVERY_S", 0.0)
    with Run(shallow("train.micro_tokens=64"), tmp_path) as run:
        run.prepare(None)
        shown = []
        monkeypatch.setattr(run.progress, "show", shown.append)
        found = run.evaluate()
    assert len(shown) == -(-found.num_tokens // 64) - 1  # the last one is the result itself
    assert re.fullmatch(r"step 0  held-out text: \d+% measured, \d+s left", shown[0])
    shares = [int(text.partition("%")[0].rpartition(" ")[2]) for text in shown]
    assert shares == sorted(shares)


def test_a_profile_records_the_steps_that_were_asked_for(shallow, tmp_path):
    train(shallow("train.tokens=768"), tmp_path, profile=2)
    trace = json.loads(gzip.decompress((tmp_path / "profile" / "steps-4-5.json.gz").read_bytes()))
    names = {event.get("name") for event in trace["traceEvents"]}
    assert {"aten::mm", "aten::embedding"} <= names
    assert "Self CPU" in (tmp_path / "profile" / "steps-4-5.txt").read_text()
    assert "profile: steps 4 to 5 are in" in (tmp_path / "log.txt").read_text()


@pytest.mark.parametrize(("tokens", "files"), [(384, []), (512, ["steps-4-4.json.gz", "steps-4-4.txt"])])
def test_a_profile_of_a_shorter_run_is_of_what_there_was(shallow, tmp_path, tokens, files):
    train(shallow(f"train.tokens={tokens}"), tmp_path, profile=9)
    assert sorted(path.name for path in tmp_path.glob("profile/*")) == files
    assert ("nothing was recorded; the run took 3 steps" in (tmp_path / "log.txt").read_text()) is not bool(files)


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
        def prepare(self, start, branch=None):
            super().prepare(start, branch)
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
