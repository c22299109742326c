import importlib.util
import io
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from triax.checkpoint import sharded
from triax.checkpoint.convert import convert
from triax.checkpoint.plan import make_plan
from triax.checkpoint.released import save_released
from triax.cli.app import main
from triax.config import show
from triax.config.load import Loaded
from triax.config.serve import Serve
from triax.config.train import Recipe, Run
from triax.data.kimi import KimiTokenizer
from triax.data.tokenizer import Tokenizer
from triax.errors import CheckpointError, ConfigError, DataError
from triax.model.decoder import Decoder
from triax.model.layout import Layout
from triax.serve.engine import Engine
from triax.serve.open import open_engine
from triax.serve.request import Request


@pytest.fixture(scope="module")
def model(t0):
    torch.manual_seed(0)
    return Decoder(t0)


@pytest.fixture(scope="module")
def tokenizer():
    return Tokenizer.train(["def f(x):\n    return x\n" * 20], 270)


@pytest.fixture(scope="module")
def run_dir(t0, model, tokenizer, tmp_path_factory):
    """A run as `triax train` leaves it, without having trained."""
    import json

    folder = tmp_path_factory.mktemp("run")
    recipe = Recipe.model_validate({"model": t0, "train": Run(tokens=4096), "data": {"tokenizer": {"vocab_size": 270}}})
    (folder / "recipe.json").write_text(json.dumps(show.as_json(Loaded(recipe, {}, folder))))
    tokenizer.save(folder / "tokenizer.json")
    sharded.save(folder / "checkpoints", 3, {"model": dict(model.state_dict())}, {}, keep=2)
    return folder


def test_a_run_and_its_checkpoint_give_the_model_that_was_saved(model, tokenizer, run_dir):
    expected = Engine(model, tokenizer).generate(["def f"], 12)
    assert open_engine(run_dir).generate(["def f"], 12) == expected
    assert open_engine(run_dir / "checkpoints" / "step-3").generate(["def f"], 12) == expected


def test_released_weights_with_a_tokenizer_beside_them_answer(model, tokenizer, tmp_path):
    folder = tmp_path / "released"
    save_released(model, folder, dtype=torch.float32)
    with pytest.raises(CheckpointError, match=r"has no `tiktoken\.model` and no `tokenizer\.json`"):
        open_engine(folder)
    tokenizer.save(folder / "tokenizer.json")
    assert open_engine(folder).generate(["def f"], 12) == Engine(model, tokenizer).generate(["def f"], 12)


def test_a_small_model_of_the_settings_drafts_and_must_have_the_same_tokenizer(model, tokenizer, run_dir, tmp_path):
    settings = Serve.model_validate({"drafting": {"kind": "model", "model": str(run_dir)}, "device": "cpu"})
    engine = open_engine(run_dir, settings=settings)
    expected = Engine(model, tokenizer).generate(["def f"], 12)[0].tokens
    assert engine.generate(["def f"], 12)[0].tokens == expected
    engine.add(Request("drafted", (1, 2, 3), 12))
    updates = [update for _ in range(20) for update in engine.step()]
    assert updates[-1].usage.accepted_tokens > 5, "a model that drafts for itself is right"
    other = tmp_path / "other"
    save_released(model, other, dtype=torch.float32)
    Tokenizer.train(["another text of other words\n" * 20], 270).save(other / "tokenizer.json")
    wrong = settings.model_copy(update={"drafting": settings.drafting.model_copy(update={"model": str(other)})})
    with pytest.raises(ConfigError, match="has another tokenizer"):
        open_engine(run_dir, settings=wrong)


@pytest.fixture(scope="module")
def miniature():
    """The module that writes small folders in the released layouts and number formats."""
    path = Path(__file__).parents[1] / "checkpoint" / "miniature.py"
    spec = importlib.util.spec_from_file_location("miniature", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("family", ["kimi_k3", "kimi_linear", "kimi_k2", "kimi_k25", "moonlight"])
def test_released_folders_in_their_own_formats_answer_with_their_own_tokenizer(miniature, family, tmp_path):
    folder = tmp_path / family
    spoken = KimiTokenizer.train(["def f(x):\n    return x\n" * 40], 262, "k3" if family == "kimi_k3" else "k2")
    miniature.write(family, folder, replace(miniature.toy(family), vocab=spoken.vocab_size))
    with pytest.raises(CheckpointError, match=r"has no `tiktoken\.model` and no `tokenizer\.json`"):
        open_engine(folder)
    spoken.save(folder)
    engine = open_engine(folder)
    options = {"max_tokens": 24, "temperature": 5.0}
    done = engine.generate(["def f", "", "<|im_end|>[EOS]"], seed=[3, 4, 5], **options)
    assert done == open_engine(folder).generate(["def f", "", "<|im_end|>[EOS]"], seed=[3, 4, 5], **options)
    slots = {spoken.control["<|media_pad|>"]}
    if engine.model.settings.vision:
        slots.add(engine.model.settings.vision.slot_token)
    written = [token for one in done for token in one.tokens]
    assert len(written) > 20
    assert not spoken.ends & set(written)
    assert set(engine.runner.unsaid.tolist()) == slots
    assert not slots & set(written)


@pytest.fixture(scope="module")
def spoken():
    """A small vocabulary with the control tokens of K3."""
    return KimiTokenizer.train(["def f(x):\n    return x\n" * 40], 262, "k3")


@pytest.fixture(scope="module")
def packed(miniature, spoken, tmp_path_factory):
    """A K3 miniature with packed experts and its tokenizer."""
    folder = tmp_path_factory.mktemp("packed") / "k3"
    miniature.write("kimi_k3", folder, replace(miniature.toy("kimi_k3"), vocab=spoken.vocab_size))
    spoken.save(folder)
    return folder


def test_a_converted_folder_answers_as_the_one_it_was_made_from(packed, spoken, tmp_path):
    options = {"max_tokens": 12, "temperature": 5.0, "seed": [5, 6]}
    expected = open_engine(packed).generate(["def f", ""], **options)
    assert all(one.tokens and one.text for one in expected)
    for form, config in (("triax", "triax.json"), ("bf16", "config.json")):
        folder = tmp_path / form
        convert(make_plan(packed, form), folder)
        assert (folder / config).is_file()
        assert [one.tokens for one in open_engine(folder).generate(["def f", ""], **options)] == [
            one.tokens for one in expected
        ]
    (tmp_path / "triax" / "tiktoken.model").unlink()
    with pytest.raises(CheckpointError, match=r"has no `tiktoken\.model` and no `tokenizer\.json`"):
        open_engine(tmp_path / "triax")


def test_a_released_prompt_has_nothing_before_it_and_an_empty_one_begins_the_text(packed, spoken):
    engine = open_engine(packed)
    options = {"max_tokens": 6, "temperature": 5.0, "seed": 7}
    for text, tokens in (("", [spoken.control["[BOS]"]]), ("[EOS]x", spoken.encode_ordinary("[EOS]x"))):
        assert engine.generate([text], **options) == engine.generate([tokens], **options)


@pytest.mark.parametrize("end", ["[EOS]", "<|end_of_msg|>"])
def test_each_end_of_a_released_tokenizer_stops_a_text(packed, spoken, end):
    engine = open_engine(packed)
    with torch.no_grad():
        hidden = engine.model(torch.tensor([1, 2]), Layout.of([2]), engine.model.empty_cache(1))[-1]
        engine.model.head.weight[spoken.control[end]] = 100 * hidden
    assert engine.generate([[1, 2]], 5)[0].finish_reason == "stop"
    assert engine.generate([[1, 2]], 5)[0].tokens == ()


def test_a_tokenizer_of_another_model_is_refused(packed, tmp_path):
    for name in ("config.json", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((packed / name).read_bytes())
    other = KimiTokenizer.train(["def f(x):\n    return x\n" * 40], 261, "k3")
    other.save(tmp_path / "other")
    (tmp_path / "tiktoken.model").write_bytes((tmp_path / "other" / "tiktoken.model").read_bytes())
    with pytest.raises(DataError, match=r"tiktoken\.model: not the vocabulary that it should be"):
        open_engine(tmp_path)


def test_a_tokenizer_with_more_tokens_than_the_model_is_refused(packed, tmp_path):
    folder = tmp_path / "k3"
    shutil.copytree(packed, folder)
    KimiTokenizer.train(["def f(x):\n    return x\n" * 40], 264, "k3").save(folder)
    with pytest.raises(CheckpointError, match="more tokens than the model"):
        open_engine(folder)


def test_sample_and_chat_read_a_converted_folder(packed, tmp_path, capsys, monkeypatch):
    folder = tmp_path / "ours"
    convert(make_plan(packed, "triax"), folder)

    def said(*words):
        monkeypatch.setattr("sys.stdin", io.StringIO("def f\n/quit\n"))
        with pytest.raises(SystemExit) as end:
            main([*words, "--max-tokens", "8", "--seed", "3", "--device", "cpu"])
        assert end.value.code == 0
        return capsys.readouterr()

    first = said("sample", str(folder), "def f").out
    assert first.startswith("def f")
    assert len(first) > len("def f\n")
    assert said("sample", str(folder), "def f").out == first
    talk = said("chat", str(folder))  # a chat model converses: it thinks first, on stderr, and here no further
    assert "its limit of tokens" in talk.err
    assert said("chat", str(folder)) == talk


@pytest.mark.parametrize("device", ["tpu", "", "meta", "cuda:4096"])
def test_a_device_that_is_not_there_is_refused_by_name(run_dir, device):
    with pytest.raises(ConfigError, match=rf"^device: .*`{device}`"):
        open_engine(run_dir, device)


def test_a_folder_without_a_model_is_refused_by_name(tmp_path):
    (tmp_path / "file").write_text("")
    for path, found in (
        (tmp_path, "a folder of something else"),
        (tmp_path / "file", "a file"),
        (tmp_path / "x", "nothing"),
    ):
        with pytest.raises(CheckpointError, match=f"{path}: holds no model; found {found}"):
            open_engine(path)


def test_a_damaged_checkpoint_is_refused_by_name(run_dir, tmp_path):
    copy = tmp_path / "run"
    shutil.copytree(run_dir, copy)
    weights = next((copy / "checkpoints" / "step-3").glob("*.safetensors"))
    weights.write_bytes(weights.read_bytes()[:-1])
    with pytest.raises(CheckpointError, match=weights.name):
        open_engine(copy)
