"""Every parameter has a group."""

import torch

from triax.config.load import load_recipe
from triax.model.decoder import Decoder
from triax.train.groups import group_of


def test_every_parameter_of_a_whole_k3_has_the_group_that_its_name_says():
    settings = load_recipe("nano", ["model.multi_token.loss_weight=0.1"]).model
    with torch.device("meta"):
        names = [name for name, _ in Decoder(settings).named_parameters()]
    group = {name: group_of(name, settings) for name in names}
    assert set(group.values()) == {
        *("embed", "head", "attention", "kda", "dense", "router", "experts", "shared", "latent"),
        *("norms", "residual_mix", "multi_token"),
    }
    assert group["layers.0.attention.query.weight"] == "kda"
    assert group["layers.3.attention.latent_down.weight"] == "attention"
    assert group["layers.3.attention.latent_norm.weight"] == group["output_norm.weight"] == "norms"
    assert group["layers.1.mlp.latent_down.weight"] == "latent"
    assert group["layers.1.mlp_mix.norm"] == group["output_mix.query"] == "residual_mix"
    assert group["layers.0.mlp.gate.weight"] == "dense"
    assert group["layers.1.mlp.shared.gate.weight"] == "shared"
    assert group["layers.1.mlp.experts.gate"] == "experts"


def test_f67_parameters_of_a_layer_of_one_s_own_have_a_group_too():
    settings = load_recipe("nano").model
    group = {name: group_of(f"layers.1.{name}", settings) for name in ("scale", "memory.weight", "mlp.0.weight")}
    assert group == {"scale": "scale", "memory.weight": "memory", "mlp.0.weight": "dense"}
