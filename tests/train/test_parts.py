"""What a run is made of, from its recipe."""

from dataclasses import replace

import numpy as np
import pytest

from triax.checkpoint.run import load_model
from triax.config import data as config
from triax.config.load import load_recipe
from triax.data.kimi import KimiTokenizer
from triax.data.mixture import Part
from triax.data.pack import TokenStream
from triax.serve.http.model import open_tokenizer
from triax.train.loop import train
from triax.train.parts import build, repetitions, reporter

TOWER = "model.vision={width = 16, num_layers = 1, num_heads = 2, head_dim = 8, mlp_dim = 16, slot_token = 319}"


@pytest.fixture(scope="module")
def recipe(tmp_path_factory):
    folder = tmp_path_factory.mktemp("text")
    for number in range(8):
        (folder / f"{number}.txt").write_text("\n".join(f"part {number} line {line} is here" for line in range(300)))
    source = f'[{{kind = "folder", path = "{folder}"}}]'
    smaller = ("model.num_layers=2", "model.mla_layers=[1]", "data.tokenizer.vocab_size=300", "data.held_out_share=0.1")
    return load_recipe("nano", [f"data.sources={source}", *smaller, "train.tokens=1024", TOWER])


def test_text_freezes_the_tower_and_says_so(recipe, tmp_path):
    """U123: no optimiser state for weights that text cannot move."""
    said = []
    parts = build(recipe, tmp_path, said.append)
    assert [line for line in said if line.startswith("vision: the text holds no pictures, so the tower is frozen")]
    assert not any(weight.requires_grad for weight in parts.model.vision.parameters())
    assert parts.optimizer.parameters
    assert not [name for name in parts.optimizer.parameters if name.startswith("vision.")]


def test_a_model_with_a_tower_trains_on_text(recipe, tmp_path):
    result = train(recipe, tmp_path / "run")
    assert (result.steps, result.tokens) == (2, 1024)


def test_how_far_a_text_is_on_its_way_to_tokens_is_told_now_and_then():
    said = []
    report = reporter(said.append, every_s=0.0)
    report(250, 1000)
    report(1000, 1000)
    assert said == ["text: 25% turned into tokens, 0s left"]
    seldom = reporter(said.append, every_s=3600.0)
    seldom(500, 1000)
    assert len(said) == 1


def test_f65_a_text_read_many_times_is_told():
    tokens, starts = np.zeros(100, np.uint16), np.array([0, 100])
    part = Part("notes", TokenStream(tokens, starts, np.array([99]), border=0))
    assert repetitions([part], 400) == []
    (line,) = repetitions([part], 3700)
    assert line.startswith("notes is read 37.0 times in 3.7k tokens; after about 4 readings")
    more = replace(part, name="more", weight=3.0)
    assert [line.split(" in ")[0] for line in repetitions([part, more], 800)] == ["more is read 6.0 times"]


def test_f65_notes_of_the_text_are_said_before_it_is_read(recipe, tmp_path):
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"text": null}\n' + '{"text": "a part of a line is here, and another part of a line"}\n' * 200)
    words = f"data.sources=[{{kind='jsonl', path='{rows}'}}]"
    said = []
    build(load_recipe("nano", [words, "data.tokenizer.vocab_size=270", "train.tokens=102400"]), tmp_path, said.append)
    assert "text: data.sources.0 (jsonl): 1 of 201 documents are empty or null and are left out" in said
    assert any(line.startswith("text: held-out text: ") for line in said)
    assert any(line.startswith("text: data.sources.0 (jsonl) is read ") for line in said)


def test_f58_a_run_with_a_vocabulary_of_kimi_is_opened_with_it(recipe, tmp_path):
    kimi = KimiTokenizer.train(["part 0 line 0 is here"] * 3, 260)
    kimi.save(tmp_path / "kimi")
    data = recipe.data.model_copy(update={"tokenizer": config.Tokenizer(path=tmp_path / "kimi")})
    model = recipe.model.model_copy(update={"vocab_size": kimi.vocab_size, "vision": None})
    train(recipe.model_copy(update={"data": data, "model": model}), tmp_path / "run")
    _, tokenizer = load_model(tmp_path / "run")
    assert tokenizer.opening == (kimi.control["[BOS]"],)
    assert tokenizer.identity == kimi.identity
    (checkpoint, *_) = sorted((tmp_path / "run" / "checkpoints").glob("step-*"))
    assert open_tokenizer(checkpoint).opening == tokenizer.opening
