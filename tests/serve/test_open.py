import importlib.util
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from triax.checkpoint import sharded
from triax.checkpoint.released import save_released
from triax.config import show
from triax.config.load import Loaded
from triax.config.train import Recipe, Run
from triax.data.kimi import KimiTokenizer
from triax.data.tokenizer import Tokenizer
from triax.errors import CheckpointError, ConfigError
from triax.model.decoder import Decoder
from triax.serve.engine import Engine
from triax.serve.open import open_engine


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
    logits = engine._next_logits([[1, 2]], engine.model.empty_cache(1))[0]
    assert set(logits.isneginf().nonzero().flatten().tolist()) == slots


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
    import shutil

    copy = tmp_path / "run"
    shutil.copytree(run_dir, copy)
    weights = next((copy / "checkpoints" / "step-3").glob("*.safetensors"))
    weights.write_bytes(weights.read_bytes()[:-1])
    with pytest.raises(CheckpointError, match=weights.name):
        open_engine(copy)
