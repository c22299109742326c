"""What a run is made of, from its recipe."""

import pytest

from triax.config.load import load_recipe
from triax.train.loop import train
from triax.train.parts import build, reporter

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
