"""A recipe of the smallest whole K3 on a little text, and one finished run of it, for the tests of this folder."""

import pytest

from triax.config.load import load_recipe
from triax.train.loop import train

TEXT = "".join(f"line {n}: the square of {n} is {n * n}, and of {n + 1} it is {(n + 1) ** 2}.\n" for n in range(40))


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    place = tmp_path_factory.mktemp("text")
    for number in range(12):
        (place / f"part{number}.txt").write_text(TEXT.replace("line", f"row {number}"))
    return place


@pytest.fixture(scope="session")
def recipe(folder):
    def build(*overrides):
        source = f'[{{kind = "folder", path = "{folder}"}}]'
        ours = ("train.tokens=2560", "train.batch_tokens=128", "train.micro_tokens=64", "train.log_every=8")
        less = ("train.eval_every=8", "train.save_every=10", "data.held_out_share=0.02")
        return load_recipe(
            "nano", [f"data.sources={source}", "data.tokenizer.vocab_size=300", *ours, *less, *overrides]
        )

    return build


@pytest.fixture(scope="session")
def shallow(recipe):
    """The same with two layers, where the network does not matter."""
    return lambda *overrides: recipe("model.num_layers=2", "model.mla_layers=[1]", *overrides)


@pytest.fixture(scope="session")
def ended(recipe, tmp_path_factory):
    """One finished run, looked at by several tests."""
    run_dir = tmp_path_factory.mktemp("runs") / "nano"
    seen = []
    result = train(recipe("train.baselines=true"), run_dir, on_step=lambda step, _: seen.append(step))
    return run_dir, result, seen
