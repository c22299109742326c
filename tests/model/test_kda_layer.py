"""The KDA layer: equations, packing, gates over their whole range, tensors that stay fp32."""

import copy

import pytest
import torch

from triax.config.model import Kda
from triax.errors import TriaxError
from triax.model.cache import KdaCache
from triax.model.kda import KDA
from triax.model.layout import Layout
from triax.model.precision import check_precision

BOUNDED = Kda(num_heads=2, head_dim=16)
SOFTPLUS = Kda(num_heads=2, head_dim=16, decay={"kind": "softplus"}, output_gate="low_rank")
WIDTH = 24


@pytest.fixture
def layer_of(waken):
    return lambda settings: waken(KDA(WIDTH, settings, 1e-5, 0.02).double())


def hidden_of(count, seed=0):
    return torch.randn(count, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("settings", [BOUNDED, SOFTPLUS], ids=["bounded", "softplus"])
def test_the_layer_computes_the_equations(settings, layer_of, equations):
    layer, hidden = layer_of(settings), hidden_of(9)
    weights = {f"x.{name}": tensor.detach() for name, tensor in layer.state_dict().items()}
    expected = torch.stack(equations.kda(weights, "x", list(hidden), settings, 1e-5))
    torch.testing.assert_close(layer(hidden, Layout.of([9])), expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("settings", [BOUNDED, SOFTPLUS], ids=["bounded", "softplus"])
def test_state_and_window_reset_at_every_border(settings, layer_of):
    layer, hidden, lengths = layer_of(settings), hidden_of(17), [5, 3, 9]  # 3 is shorter than the window
    packed = layer(hidden, Layout.of(lengths))
    alone = torch.cat([layer(part, Layout.of([len(part)])) for part in hidden.split(lengths)])
    torch.testing.assert_close(packed, alone, rtol=1e-9, atol=1e-9)


def test_the_bounded_gate_covers_its_range_and_nothing_else(layer_of):
    layer, hidden = layer_of(BOUNDED), 50 * hidden_of(200)
    log_decay = layer.log_decay(hidden)
    assert -5 <= log_decay.min() < -4.9
    assert -0.1 < log_decay.max() <= 0
    with torch.no_grad():
        layer.decay_rate.zero_()
        layer.decay_bias.zero_()
        assert (layer.log_decay(torch.zeros(1, WIDTH, dtype=torch.float64)) == -2.5).all()


def test_fast_forgetting_stays_finite_without_a_bound(layer_of):
    layer, hidden = layer_of(SOFTPLUS).float(), hidden_of(70).float().requires_grad_()
    with torch.no_grad():
        layer.decay_bias.fill_(60.0)
        layer.decay_rate.zero_()
    assert layer.log_decay(hidden).min() < -55
    output = layer(hidden, Layout.of([70]))
    output.square().sum().backward()
    for tensor in (output, hidden.grad, *(p.grad for p in layer.parameters())):
        assert tensor.isfinite().all()


@pytest.mark.parametrize("settings", [BOUNDED, SOFTPLUS], ids=["bounded", "softplus"])
def test_a_token_of_zeros_has_a_finite_gradient(settings, layer_of):
    layer, hidden = layer_of(settings), hidden_of(6)
    hidden[:3] = 0  # the first query and key are exactly zero
    hidden.requires_grad_()
    layer(hidden, Layout.of([6])).square().sum().backward()
    assert hidden.grad.isfinite().all()
    for parameter in layer.parameters():
        assert parameter.grad.isfinite().all()


@pytest.mark.parametrize("cast", [lambda m: m.to(torch.bfloat16), lambda m: m.bfloat16(), lambda m: m.half()])
def test_special_tensors_survive_a_cast_bit_for_bit(cast, layer_of):
    layer = layer_of(BOUNDED).float()
    before = copy.deepcopy(dict(layer.named_parameters()))
    layer(hidden_of(4).float(), Layout.of([4])).sum().backward()
    cast(layer)
    for name in (*KDA.fp32, "norm.weight"):
        tensor = layer.get_parameter(name)
        assert tensor.dtype is tensor.grad.dtype is torch.float32
        assert torch.equal(tensor, before[name])
    assert layer.query.weight.dtype is not torch.float32
    check_precision(layer)
    assert layer.double().decay_rate.dtype is torch.float64
    assert KDA(WIDTH, BOUNDED, 1e-5, 0.02).to(torch.bfloat16).load_state_dict(layer.float().state_dict())


@pytest.mark.parametrize("settings", [BOUNDED, SOFTPLUS], ids=["bounded", "softplus"])
def test_matrices_are_one_a_head_where_rows_belong_to_heads(settings, layer_of):
    gates = ("gate",) if settings.output_gate == "full" else ("gate_down", "gate_up")
    by_head = ("query", "key", "value", "decay_down", "decay_up", *gates)
    expected = {f"{name}.weight": (settings.head_dim,) for name in by_head} | {"output.weight": (WIDTH,)}
    assert layer_of(settings).matrices() == expected, "beta's rows are single heads, so it is no matrix"


def test_a_lost_fp32_tensor_is_named(layer_of):
    model = torch.nn.Sequential(layer_of(BOUNDED).float())
    model[0].decay_bias.data = model[0].decay_bias.data.bfloat16()
    model[0].norm.weight.data = model[0].norm.weight.data.half()
    with pytest.raises(TriaxError, match=r"0\.decay_bias `torch.bfloat16`, 0\.norm\.weight `torch.float16`"):
        check_precision(model)


def test_fresh_gates_start_where_the_publications_say():
    many = 4096
    bounded = KDA(8, Kda(num_heads=many // 16, head_dim=16), 1e-5, 0.02)
    assert (bounded.decay_rate == 0).all()
    step = torch.nn.functional.softplus(bounded.decay_bias.detach())
    assert 0.00099 < step.min() < 0.0012
    assert 0.08 < step.max() < 0.1001
    assert abs(step.log().mean() - torch.tensor([1e-3, 1e-1]).log().mean()) < 0.1
    softplus = KDA(8, Kda(num_heads=many, head_dim=2, decay={"kind": "softplus"}), 1e-5, 0.02)
    rate = softplus.decay_rate.detach().exp()
    assert 1 <= rate.min() < 1.1
    assert 15.9 < rate.max() <= 16
    assert abs(rate.mean() - 8.5) < 0.3
    assert bounded.query_conv.abs().max() <= 0.5


def test_the_cache_is_continued_in_place(layer_of):
    layer, hidden = layer_of(BOUNDED), hidden_of(9)
    cache = KdaCache.empty(BOUNDED, 1, "cpu", torch.float64)
    parts = [layer(hidden[a:b], Layout.of([b - a]), cache) for a, b in ((0, 2), (2, 2), (2, 8), (8, 9))]
    torch.testing.assert_close(torch.cat(parts), layer(hidden, Layout.of([9])), rtol=1e-9, atol=1e-9)
