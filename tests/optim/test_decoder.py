import copy
import logging

import torch
from torch.nn import functional as F

from triax.config.optim import AdamW, MuonClip, QkClip
from triax.model.decoder import Decoder
from triax.model.layout import Layout
from triax.optim import build, roles

TOKENS = torch.arange(40) * 37 % 512
LAYOUT = Layout.of([25, 15])


def backward(model):
    F.cross_entropy(model.logits(model(TOKENS, LAYOUT)), TOKENS.roll(-1)).backward()


def test_tables_gates_convolutions_and_norms_are_adamw_s_and_products_are_muon_s(t0):
    found = roles(Decoder(t0))
    adamw = {
        name.split(".", 2)[-1] if name.startswith("layers") else name for name, r in found.items() if r.rule == "adamw"
    }
    muon = {name.split(".", 2)[-1]: role.pattern for name, role in found.items() if role.rule == "muon"}
    assert {
        "embed.weight",
        "head.weight",
        "attention.query_conv",
        "attention.decay_rate",
        "attention.decay_bias",
    } < adamw
    assert {"attention.beta.weight", "attention.norm.weight", "attention_norm.weight", "mlp_mix.query"} < adamw
    assert not {name for name in muon if "norm" in name or "conv" in name or "mix" in name}
    assert muon["attention.latent_up.weight"] == (32, 32)  # keys and values of each head apart
    assert muon["mlp.experts.gate"] == (32,)
    assert muon["mlp.router.weight"] == (8,)


def test_two_steps_move_every_weight_but_those_that_are_never_read(t0):
    model = Decoder(t0)
    optimizer = build(model, MuonClip(lr=0.01))
    before = {name: weight.detach().clone() for name, weight in model.named_parameters()}
    for _ in range(2):  # mix queries start at zero, so the gains beside them move from the second step on
        backward(model)
        moved = optimizer.step()
        optimizer.zero_grad()
        assert moved.num_orthogonalized == sum(role.num_matrices for role in optimizer.roles.values())
    still = {name for name, weight in model.named_parameters() if torch.equal(weight, before[name])}
    assert still == {"layers.0.attention_mix.norm", "layers.0.attention_mix.query"}


def test_a_hybrid_s_logits_stay_under_the_limit_and_kda_is_untouched(t0):
    model = Decoder(t0)
    with torch.no_grad():
        model.layers[3].attention.query_up.weight.mul_(50)
    backward(model)
    (largest,) = copy.deepcopy(model.largest_logits()).values()
    limit = float(largest.max()) / 3
    before = {name: weight.detach().clone() for name, weight in model.named_parameters()}
    moved = build(model, MuonClip(qk_clip=QkClip(threshold=limit))).step(rate=0.0)
    assert moved.query_key.largest_logit.keys() == {"layers.3.attention"}
    assert moved.query_key.num_clipped == int((largest > limit).sum()) > 0
    changed = {name for name, weight in model.named_parameters() if not torch.equal(weight, before[name])}
    assert changed == {"layers.3.attention.query_up.weight", "layers.3.attention.latent_up.weight"}
    backward(model)
    (after,) = model.largest_logits().values()
    torch.testing.assert_close(after, largest.clamp(max=limit), rtol=1e-4, atol=1e-4)


def test_f67_muon_warns_of_matrices_of_an_unknown_layer_and_adamw_does_not(t0, caplog, monkeypatch):
    model = Decoder(t0)
    model.layers[1].mlp = torch.nn.Sequential(torch.nn.Linear(t0.width, 9), torch.nn.Linear(9, t0.width))
    monkeypatch.setattr(logging.getLogger("triax"), "propagate", True)
    with caplog.at_level("WARNING", logger="triax"):
        build(model, AdamW())
        assert not caplog.records
        build(model, MuonClip())
    (record,) = caplog.records
    assert "no layer states `layers.1.mlp.0.weight`, `layers.1.mlp.1.weight` as matrices" in record.getMessage()
