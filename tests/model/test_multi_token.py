"""The layer that predicts the token after the next."""

import pytest
import torch

from triax.config.model import Model
from triax.errors import ConfigError
from triax.model.layout import Layout


@pytest.fixture(scope="module")
def settings_of(family):
    return lambda kind: Model.model_validate(family[kind].model_dump() | {"multi_token": {"loss_weight": 0.3}})


@pytest.mark.parametrize("kind", ["k3", "kimi_linear", "k2"])
def test_it_computes_its_equation(kind, settings_of, awake, equations):
    settings = settings_of(kind)
    model, tokens, following = awake(settings), torch.arange(6), torch.arange(1, 7) * 3
    weights = {name: tensor.detach() for name, tensor in model.state_dict().items()}
    table = weights["embed.weight"]
    expected = equations.second_logits(weights, table[tokens], table[following], settings)
    output = model.forward_training(tokens, following, Layout.of([6]))
    torch.testing.assert_close(model.logits(output.second), expected, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(output.hidden, model(tokens, Layout.of([6])), rtol=0, atol=0)


def test_its_sequences_are_as_separate_as_the_decoders(settings_of, awake):
    model = awake(settings_of("k3"))
    tokens, following, lengths = torch.arange(12), torch.arange(12) * 7, [5, 1, 6]
    packed = model.forward_training(tokens, following, Layout.of(lengths)).second
    alone = [
        model.forward_training(t, n, Layout.of([len(t)])).second
        for t, n in zip(tokens.split(lengths), following.split(lengths), strict=True)
    ]
    torch.testing.assert_close(packed, torch.cat(alone), rtol=1e-9, atol=1e-9)


def test_its_loss_reaches_the_whole_network_and_the_plain_forward_does_not_pay_for_it(settings_of, awake):
    model = awake(settings_of("k3"))
    model.forward_training(torch.arange(9), torch.arange(9), Layout.of([9])).second.square().sum().backward()
    reached = {name for name, p in model.named_parameters() if p.grad is not None and p.grad.abs().max() > 0}
    assert {
        "embed.weight",
        "output_norm.weight",
        "multi_token.project.weight",
        "layers.0.attention.query.weight",
    } <= reached
    model.zero_grad(set_to_none=True)
    model(torch.arange(9), Layout.of([9])).square().sum().backward()
    assert all(p.grad is None for n, p in model.named_parameters() if n.startswith("multi_token."))


def test_its_attention_is_of_the_kind_of_the_last_layer(settings_of, awake):
    for kind, is_mla in (("k3", True), ("k2", True)):
        model = awake(settings_of(kind))
        assert ("multi_token.layer.attention" in model.mla_layers()) == is_mla
    tree = settings_of("k3").model_dump() | {"mla_layers": (1,)}
    assert "multi_token.layer.attention" not in awake(Model.model_validate(tree)).mla_layers()


def test_a_model_without_the_layer_says_so(t0, awake):
    model = awake(t0)
    assert model.forward_training(torch.arange(3), torch.arange(3), Layout.of([3])).second is None
    with pytest.raises(ConfigError, match=r"add the table `model\.multi_token`"):
        model.multi_token_hidden(torch.zeros(3, t0.width).double(), torch.arange(3), Layout.of([3]))
