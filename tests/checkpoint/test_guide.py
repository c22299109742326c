"""The commands of the guide, in order, on miniatures that bear the names of the releases."""

import json
import re
from pathlib import Path

import pytest
import torch

from triax.checkpoint import sharded
from triax.cli.app import main
from triax.config import show
from triax.config.load import Loaded
from triax.config.train import Recipe, Run
from triax.data.tokenizer import Tokenizer
from triax.model.decoder import Decoder

GUIDE = Path(__file__).parents[2] / "docs" / "guides" / "checkpoints.md"


def commands():
    for block in re.findall(r"^```bash\n(.*?)```", GUIDE.read_text(), flags=re.DOTALL | re.MULTILINE):
        for line in block.splitlines():
            words = line.split("#")[0].split()
            assert words[0] == "triax"
            yield words[1:]


def write_run(folder, model):
    """A run as `triax train` leaves it, without having trained."""
    torch.manual_seed(0)
    folder.mkdir(parents=True)
    tokenizer = Tokenizer.train(["def f(x):\n    return x\n" * 20], 270)
    run = {"model": model, "train": Run(tokens=4096), "data": {"tokenizer": {"vocab_size": 270}}}
    (folder / "recipe.json").write_text(json.dumps(show.as_json(Loaded(Recipe.model_validate(run), {}, folder))))
    tokenizer.save(folder / "tokenizer.json")
    sharded.save(folder / "checkpoints", 3, {"model": dict(Decoder(model).state_dict())}, {}, keep=2)


def test_every_command_of_the_guide_runs(miniature, t0, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for name, family in (("Kimi-K3", "kimi_k3"), ("Kimi-K2", "kimi_k2"), ("Kimi-Linear", "kimi_linear")):
        miniature.write(family, tmp_path / name)
    write_run(tmp_path / "runs" / "demo", t0)
    listed = list(commands())
    assert len(listed) >= 12
    for words in listed:
        with pytest.raises(SystemExit) as end:
            main(words)
        assert not end.value.code, words
    written = {path.name for path in tmp_path.iterdir()}
    assert {"k3-bf16", "k3-mxfp4", "k2-bf16", "k3-start", "linear-own", "demo-released"} <= written
    assert not [name for name in written if name.endswith((".export", ".tmp"))]
    released = {path.name for path in (tmp_path / "demo-released").iterdir()}
    assert {"config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"} < released
    assert "whole: kimi_k3" in capsys.readouterr().out
