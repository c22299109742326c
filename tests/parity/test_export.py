"""What triax leaves for other programs: weights, tokenizer and generation settings, opened by transformers alone."""

import json

import pytest
import torch
from torch.nn import functional as F

from triax.checkpoint import sharded
from triax.checkpoint.convert import convert
from triax.checkpoint.load import load_released
from triax.checkpoint.plan import make_plan
from triax.checkpoint.released import save_released
from triax.checkpoint.tokenizer import load_tokenizer
from triax.cli.app import main
from triax.config import show
from triax.config.load import Loaded
from triax.config.model import Model
from triax.config.optim import MuonClip
from triax.config.train import Recipe, Run
from triax.data.tokenizer import Tokenizer
from triax.model.decoder import Decoder
from triax.model.layout import Layout
from triax.optim import build

TEXT = "The state remembers by correcting itself. The key says where, the value says what. "
COMMON = {
    "vocab_size": 290,
    "width": 64,
    "num_layers": 3,
    "num_dense_layers": 1,
    "dense_dim": 96,
    "activation": {"kind": "swiglu"},
    "moe": {"num_experts": 4, "top_k": 2, "num_shared_experts": 1, "expert_dim": 32, "share_scale": 2.446},
}
MLA = {"num_heads": 2, "kv_latent_dim": 32, "nope_dim": 16, "rope_dim": 8, "value_dim": 16}
YARN = {"factor": 32.0, "original_len": 64, "beta_fast": 8.0, "beta_slow": 1.0}
K2 = COMMON | {"mla_layers": (0, 1, 2), "mla": MLA | {"q_latent_dim": 32, "rope": {"theta": 5e4, "yarn": YARN}}}
LINEAR = COMMON | {
    "mla_layers": (2,),
    "mla": MLA,
    "kda": {"num_heads": 2, "head_dim": 16, "decay": {"kind": "softplus"}, "output_gate": "low_rank"},
}
SHAPES = {"kimi_linear": LINEAR, "deepseek_v3": K2}


@pytest.fixture(scope="module")
def tokenizer():
    return Tokenizer.train([TEXT * 40], vocab_size=290)


def trained(settings, tokenizer):
    """A decoder after a few optimiser steps on text, its loss lower than at the start."""
    torch.manual_seed(0)
    model = Decoder(Model.model_validate(settings))
    optimizer = build(model, MuonClip(lr=0.01))
    tokens = torch.tensor(tokenizer.encode(TEXT))
    losses = []
    for _ in range(6):
        logits = model.logits(model(tokens[:-1], Layout.of([len(tokens) - 1])))
        loss = F.cross_entropy(logits, tokens[1:])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < 0.8 * losses[0]
    return model.eval(), tokens


@pytest.mark.parametrize("family", SHAPES)
def test_a_trained_export_is_opened_by_transformers_with_its_tokenizer_and_its_end(family, tokenizer, tmp_path):
    from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

    ours, tokens = trained(SHAPES[family], tokenizer)
    save_released(ours, tmp_path / "out", dtype=torch.float32, family=family, tokenizer=tokenizer)
    theirs, report = AutoModelForCausalLM.from_pretrained(
        tmp_path / "out", dtype=torch.float32, attn_implementation="eager", output_loading_info=True
    )
    assert not any(report.values()), report
    words = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert words(TEXT)["input_ids"] == [tokenizer.border, *tokens.tolist()]
    assert words.eos_token_id == tokenizer.border
    settings = GenerationConfig.from_pretrained(tmp_path / "out")
    assert (settings.eos_token_id, settings.max_length) == (tokenizer.border, ours.settings.context_len)
    with torch.no_grad():
        found = ours.logits(ours(tokens, Layout.of([len(tokens)])))
        expected = theirs.eval()(input_ids=tokens[None], use_cache=False).logits[0]
    assert (found - expected).abs().max() < 1e-4 * expected.abs().max()


@pytest.mark.parametrize("family", SHAPES)
def test_a_converted_export_is_opened_by_transformers(family, tokenizer, tmp_path):
    """BF16 out of MXFP4: what another program reads is what we load from the codes."""
    from transformers import AutoModelForCausalLM

    model, tokens = trained(SHAPES[family], tokenizer)
    save_released(model, tmp_path / "f32", dtype=torch.float32, family=family, tokenizer=tokenizer)
    convert(make_plan(tmp_path / "f32", "mxfp4"), tmp_path / "mx")
    convert(make_plan(tmp_path / "mx", "bf16"), tmp_path / "bf16")
    ours = load_released(tmp_path / "mx", dtype=torch.float32).eval()
    theirs, report = AutoModelForCausalLM.from_pretrained(
        tmp_path / "bf16", dtype=torch.float32, attn_implementation="eager", output_loading_info=True
    )
    assert not any(report.values()), report
    with torch.no_grad():
        found = ours.logits(ours(tokens, Layout.of([len(tokens)])))
        expected = theirs.eval()(input_ids=tokens[None], use_cache=False).logits[0]
    assert (found - expected).abs().max() < 1e-4 * expected.abs().max()


@pytest.mark.parametrize("family", SHAPES)
def test_f55_a_run_becomes_a_model_that_transformers_opens_by_itself(family, tokenizer, tmp_path):
    """`triax convert RUN OUT --to bf16`: no word about class, dtype or border is needed to go on with it."""
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    model, _ = trained(SHAPES[family], tokenizer)
    recipe = {"model": model.settings, "train": Run(tokens=4096), "data": {"tokenizer": {"vocab_size": 290}}}
    folder = tmp_path / "run"
    sharded.save(folder / "checkpoints", 6, {"model": dict(model.state_dict())}, {}, keep=1)
    tokenizer.save(folder / "tokenizer.json")
    loaded = Loaded(Recipe.model_validate(recipe), {}, folder)
    (folder / "recipe.json").write_text(json.dumps(show.as_json(loaded)))
    with pytest.raises(SystemExit) as end:
        main(["convert", str(folder), str(tmp_path / "out"), "--to", "bf16"])
    assert not end.value.code
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert (config["model_type"], config["dtype"]) == (family, "bfloat16")
    assert AutoConfig.from_pretrained(tmp_path / "out").dtype is torch.bfloat16
    theirs, report = AutoModelForCausalLM.from_pretrained(
        tmp_path / "out", dtype=torch.float32, output_loading_info=True
    )
    assert not any(report.values()), report
    theirs.eval()
    ours = load_released(tmp_path / "out", dtype=torch.float32).eval()
    words = AutoTokenizer.from_pretrained(tmp_path / "out")
    tokens = words(TEXT, return_tensors="pt")["input_ids"]
    assert tokens[0].tolist() == [*tokenizer.opening, *tokenizer.encode(TEXT)]
    with torch.no_grad():
        found = ours.logits(ours(tokens[0], Layout.of([tokens.shape[1]])))
        expected = theirs(input_ids=tokens, use_cache=False).logits[0]
    assert (found - expected).abs().max() < 1e-4 * expected.abs().max()
    written = theirs.generate(tokens[:, :8], max_new_tokens=16, do_sample=False)[0, 8:].tolist()
    prompt = tokens[0, :8]
    for token in written:
        with torch.no_grad():
            best = ours.logits(ours(prompt, Layout.of([len(prompt)])))[-1].argmax()
        assert int(best) == token
        prompt = torch.cat([prompt, best[None]])
    assert load_tokenizer(tmp_path / "out").encode(TEXT) == tokenizer.encode(TEXT)


def test_a_trained_k3_comes_back_with_everything_that_a_release_has(t0, tokenizer, tmp_path):
    ours, tokens = trained(t0.model_dump(), tokenizer)
    save_released(ours, tmp_path / "k3", dtype=torch.float32, tokenizer=tokenizer)
    names = {path.name for path in (tmp_path / "k3").iterdir()}
    assert {"config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"} < names
    back = load_released(tmp_path / "k3").eval()
    layout = Layout.of([len(tokens)])
    assert torch.equal(back(tokens, layout), ours(tokens, layout))
    config = json.loads((tmp_path / "k3" / "config.json").read_text())
    assert (config["model_type"], config["eos_token_id"]) == ("kimi_k3", tokenizer.border)


def test_the_generation_settings_of_k3_are_the_published_file():
    import hashlib
    from pathlib import Path

    from triax.checkpoint.generation import generation_config

    config = json.loads((Path(__file__).parents[1] / "checkpoint/published/kimi_k3.json").read_text())
    text = generation_config(config)
    assert len(text) == 53
    assert hashlib.sha256(text.encode()).hexdigest().startswith("c6648c25e970")
