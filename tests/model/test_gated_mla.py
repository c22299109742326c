"""The MLA layer: equations, absorbed decoding, positions or none, logits that can be watched and shrunk."""

import pytest
import torch

from triax.config.model import Mla, Rope, Yarn
from triax.model.cache import MlaCache
from triax.model.gated_mla import GatedMLA
from triax.model.layout import Layout

SHAPE = {"num_heads": 3, "kv_latent_dim": 12, "nope_dim": 8, "rope_dim": 4, "value_dim": 6}
K3 = Mla(**SHAPE, q_latent_dim=10, output_gate=True)
KIMI_LINEAR = Mla(**SHAPE)
ROPE = Rope(theta=1000.0, yarn=Yarn(factor=4, original_len=8, beta_fast=2.0, mscale=0.7, mscale_all_dim=0.9))
K2 = Mla(**SHAPE, q_latent_dim=10, rope=ROPE)
ALL = pytest.mark.parametrize("settings", [K3, KIMI_LINEAR, K2], ids=["k3", "kimi_linear", "k2"])
WIDTH = 20


@pytest.fixture
def layer_of(waken):
    return lambda settings: waken(GatedMLA(WIDTH, settings, 0.02).double())


def hidden_of(count, seed=0):
    return torch.randn(count, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def prefilled(layer, hidden, lengths):
    cache = MlaCache.empty(layer.settings, len(lengths), "cpu", torch.float64)
    layer(hidden, Layout.of(lengths), cache)
    return cache


@ALL
def test_the_layer_computes_the_equations(settings, layer_of, equations):
    layer, hidden = layer_of(settings), hidden_of(9)
    weights = {f"x.{name}": tensor.detach() for name, tensor in layer.state_dict().items()}
    expected = torch.stack(equations.mla(weights, "x", list(hidden), settings))
    torch.testing.assert_close(layer(hidden, Layout.of([9])), expected, rtol=1e-9, atol=1e-9)


@ALL
def test_absorbed_decoding_equals_expanded_attention(settings, layer_of, monkeypatch):
    layer, hidden = layer_of(settings), hidden_of(14)
    results = []
    for absorb in (True, False):
        cache = prefilled(layer, hidden[:10], [7, 0, 3])
        monkeypatch.setattr(layer, "_absorbing_is_cheaper", lambda _, choice=absorb: choice)
        results.append(layer(hidden[10:], Layout.of([1, 2, 1]), cache))
    torch.testing.assert_close(results[0], results[1], rtol=1e-9, atol=1e-9)


def test_decoding_absorbs_and_long_chunks_expand(layer_of):
    layer = layer_of(Mla(num_heads=2, kv_latent_dim=512, nope_dim=128, rope_dim=64, value_dim=128))
    assert layer._absorbing_is_cheaper(Layout.of([1, 1, 1]))
    assert layer._absorbing_is_cheaper(Layout.of([170]))
    assert not layer._absorbing_is_cheaper(Layout.of([171]))
    assert not layer._absorbing_is_cheaper(Layout.of([100] + [1] * 40))  # padding would cost more


@pytest.mark.parametrize("settings", [K3, KIMI_LINEAR], ids=["k3", "kimi_linear"])
def test_without_rope_the_order_of_past_tokens_does_not_matter(settings, layer_of):
    layer, hidden = layer_of(settings), hidden_of(9)
    cache = prefilled(layer, hidden[:8], [8])
    shuffled = MlaCache(cache.latent[:, torch.randperm(8)], cache.lengths)
    assert cache.latent.shape[1] >= 8
    expected = layer(hidden[8:], Layout.of([1]), cache)
    torch.testing.assert_close(layer(hidden[8:], Layout.of([1]), shuffled), expected, rtol=1e-9, atol=1e-9)


def test_with_rope_only_distances_matter(layer_of, equations):
    layer, hidden = layer_of(K2), hidden_of(6)
    weights = {f"x.{name}": tensor.detach() for name, tensor in layer.state_dict().items()}
    shifted = torch.stack(equations.mla(weights, "x", list(hidden), K2, first_position=1000))
    torch.testing.assert_close(layer(hidden, Layout.of([6])), shifted, rtol=1e-8, atol=1e-8)
    reversed_past = torch.cat([hidden[:5].flip(0), hidden[5:]])
    assert not torch.allclose(layer(hidden, Layout.of([6]))[5], layer(reversed_past, Layout.of([6]))[5])


@ALL
def test_the_largest_logit_is_the_true_maximum_over_training_forwards(settings, layer_of):
    layer, hidden = layer_of(settings), hidden_of(9)
    expected = []
    for length in (9, 4):
        query, latent = layer._query_and_latent(hidden[:length], Layout.of([length]), None)
        latent, shared = latent.split([12, 4], dim=-1)
        content = layer.latent_up(latent).unflatten(-1, (3, -1))[..., :8]
        logit = torch.einsum("thk,shk->hts", query[..., :8], content)
        logit = (logit + torch.einsum("thk,sk->hts", query[..., 8:], shared)) * layer.scale
        expected.append(torch.stack([logit[:, t, : t + 1].amax(-1) for t in range(length)]).amax(0))
    layer.train()
    layer(hidden[:4], Layout.of([4]))
    torch.testing.assert_close(layer.largest_logit, expected[1])
    layer.reset_largest_logit()
    layer(hidden, Layout.of([9]))
    layer(hidden[:4], Layout.of([4]))  # the last forward alone has a smaller one
    torch.testing.assert_close(layer.largest_logit, expected[0])
    assert (expected[0] > expected[1]).any()
    assert not layer.largest_logit.requires_grad
    layer.reset_largest_logit()
    with torch.no_grad():
        layer(hidden, Layout.of([9]))
    layer.eval()
    layer(hidden, Layout.of([9]))
    assert layer.largest_logit is None


@ALL
@pytest.mark.parametrize("alpha", [0.0, 0.5, 1.0])
def test_shrinking_scales_the_logits_of_the_named_heads_and_no_bit_of_the_others(settings, alpha, layer_of):
    layer, hidden = layer_of(settings).train(), hidden_of(9)
    layer(hidden, Layout.of([9]))
    before, largest = {n: p.detach().clone() for n, p in layer.named_parameters()}, layer.largest_logit
    factor = torch.tensor([1.0, 0.25, 0.6], dtype=torch.float64)
    layer.shrink_query_key(factor, alpha)
    layer.reset_largest_logit()
    layer(hidden, Layout.of([9]))
    torch.testing.assert_close(layer.largest_logit, largest * factor, rtol=1e-9, atol=1e-9)
    query = "query_up.weight" if settings.q_latent_dim else "query.weight"
    for name, parameter in layer.named_parameters():
        if name in (query, "latent_up.weight"):
            parameter, old = parameter.unflatten(0, (3, -1)), before[name].unflatten(0, (3, -1))
            assert torch.equal(parameter[0], old[0])
            if name == "latent_up.weight":
                assert torch.equal(parameter[:, 8:], old[:, 8:])  # values
        else:
            assert torch.equal(parameter, before[name])
    moved = {name for name, parameter in layer.named_parameters() if not torch.equal(parameter, before[name])}
    own = layer.get_parameter(query).unflatten(0, (3, -1))[:, :8]  # the query's part that is no head's shared key
    if alpha == 1:
        assert moved == {query}, "all of the factor goes to the query"
    if alpha == 0:
        assert torch.equal(own, before[query].unflatten(0, (3, -1))[:, :8]), "all of the factor goes to the key"
        assert "latent_up.weight" in moved


@ALL
def test_matrices_are_one_a_head_where_rows_belong_to_heads_and_keys_stand_apart_from_values(settings, layer_of):
    layer = layer_of(settings)
    head, rest = (
        (settings.nope_dim + settings.rope_dim,),
        {"latent_down.weight": (settings.kv_latent_dim + settings.rope_dim,)},
    )
    rest |= {"latent_up.weight": (settings.nope_dim, settings.value_dim), "output.weight": (layer.output.out_features,)}
    if settings.output_gate:
        rest |= {"gate.weight": (settings.value_dim,)}
    if settings.q_latent_dim:
        expected = rest | {"query_down.weight": (settings.q_latent_dim,), "query_up.weight": head}
    else:
        expected = rest | {"query.weight": head}
    assert layer.matrices() == expected


def test_training_gates_an_fp32_attention_output(layer_of):
    layer, hidden = layer_of(K3).float().train(), hidden_of(64).float()
    exact = layer_of(K3)(hidden.double(), Layout.of([64]))
    seen = []
    layer.output.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    with torch.autocast("cpu", torch.bfloat16):
        output = layer(hidden, Layout.of([64]))
    assert seen[0].dtype is torch.float32
    assert (output.double() - exact).norm() < 0.02 * exact.norm()
