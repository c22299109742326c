import pytest
import torch
from torch.utils.checkpoint import checkpoint

from triax.config.model import Moe, Situ, Swiglu
from triax.config.optim import Balance
from triax.model.balance import rebalance
from triax.model.latent_moe import LatentMoe

SITU = Situ()
K3_LIKE = Moe(num_experts=6, top_k=2, num_shared_experts=2, expert_dim=8, latent_dim=12)
KIMI_LINEAR_LIKE = Moe(num_experts=6, top_k=2, num_shared_experts=1, expert_dim=8, share_scale=2.446)


def layer_of(moe=K3_LIKE, activation=SITU, width=16, dtype=torch.float64):
    layer = LatentMoe(width, moe, activation, init_std=0.3).to(dtype)
    with torch.no_grad():
        if layer.latent_norm is not None:
            layer.latent_norm.weight.uniform_(0.5, 1.5)
        layer.router.balance_bias.copy_(torch.linspace(-0.1, 0.1, moe.num_experts))
    return layer


def situ(gate, up):
    return 4 * torch.tanh(gate / 4) * torch.sigmoid(gate) * 25 * torch.tanh(up / 25)


def silu(gate, up):
    return gate * torch.sigmoid(gate) * up


@pytest.mark.parametrize(
    ("moe", "activation", "act"), [(K3_LIKE, SITU, situ), (KIMI_LINEAR_LIKE, Swiglu(), silu)], ids=["K3", "Kimi Linear"]
)
def test_the_layer_is_the_published_equation(moe, activation, act):
    layer = layer_of(moe, activation)
    weight = {name: tensor.detach() for name, tensor in layer.state_dict().items()}
    hidden = torch.randn(9, 16, dtype=torch.float64)
    expected = []
    for x in hidden:
        score = torch.sigmoid(weight["router.weight"] @ x)
        chosen = sorted(range(6), key=lambda j: -(score[j] + weight["router.balance_bias"][j]))[:2]
        z = weight["latent_down.weight"] @ x if moe.latent_dim else x
        u = sum(
            score[j]
            / (score[chosen].sum() + 1e-20)
            * moe.share_scale
            * (weight["experts.down"][j] @ act(weight["experts.gate"][j] @ z, weight["experts.up"][j] @ z))
            for j in chosen
        )
        if moe.latent_dim:
            u = weight["latent_up.weight"] @ (u / (u.square().mean() + 1e-5).sqrt() * weight["latent_norm.weight"])
        gated = act(weight["shared.gate.weight"] @ x, weight["shared.up.weight"] @ x)
        expected.append(u + weight["shared.down.weight"] @ gated)
    torch.testing.assert_close(layer(hidden), torch.stack(expected), rtol=1e-10, atol=1e-10)


def test_the_scale_of_the_shares_is_lost_in_the_norm():
    layer = layer_of()
    hidden = torch.randn(9, 16, dtype=torch.float64)
    scaled = layer_of(K3_LIKE.model_copy(update={"share_scale": 3.0}))
    scaled.load_state_dict(layer.state_dict())
    torch.testing.assert_close(scaled(hidden), layer(hidden), rtol=1e-3, atol=1e-3)


def test_parameters_have_the_names_and_shapes_of_the_tree():
    with torch.device("meta"):
        layer = LatentMoe(16, K3_LIKE, SITU)
        plain = LatentMoe(16, KIMI_LINEAR_LIKE.model_copy(update={"num_shared_experts": 0}), Swiglu())
        bare = LatentMoe(16, K3_LIKE.model_copy(update={"latent_norm": False}), SITU)
    assert {name: tuple(tensor.shape) for name, tensor in layer.state_dict().items()} == {
        "router.weight": (6, 16),
        "router.balance_bias": (6,),
        "latent_down.weight": (12, 16),
        "latent_norm.weight": (12,),
        "latent_up.weight": (16, 12),
        "experts.gate": (6, 8, 12),
        "experts.up": (6, 8, 12),
        "experts.down": (6, 12, 8),
        "shared.gate.weight": (16, 16),
        "shared.up.weight": (16, 16),
        "shared.down.weight": (16, 16),
    }
    assert set(plain.state_dict()) == {
        "router.weight",
        "router.balance_bias",
        "experts.gate",
        "experts.up",
        "experts.down",
    }
    assert plain.experts.down.shape == (6, 16, 8)
    assert set(layer.state_dict()) - set(bare.state_dict()) == {"latent_norm.weight"}


def test_every_matrix_is_stated_for_the_optimiser_by_its_owner():
    layer = LatentMoe(16, K3_LIKE, SITU)
    stated = {
        f"{where}.{name}".lstrip("."): rows
        for where, module in layer.named_modules()
        if hasattr(module, "matrices")
        for name, rows in module.matrices().items()
    }
    assert stated == {
        "router.weight": (6,),
        "latent_down.weight": (12,),
        "latent_up.weight": (16,),
        "experts.gate": (8,),
        "experts.up": (8,),
        "experts.down": (12,),
        "shared.gate.weight": (16,),
        "shared.up.weight": (16,),
        "shared.down.weight": (16,),
    }
    sizes = {name: parameter for name, parameter in layer.named_parameters()}
    assert set(sizes) - set(stated) == {"latent_norm.weight"}
    assert all(sizes[name].flatten(0, -2).shape[0] % sum(rows) == 0 for name, rows in stated.items())


@pytest.mark.parametrize("name", ["router.weight", "experts.gate", "experts.up", "experts.down", "latent_down.weight"])
def test_gradients_are_those_of_finite_differences(name):
    layer = layer_of()
    hidden, weight = torch.randn(2, 7, 16, dtype=torch.float64)

    def loss():
        return (layer(hidden) * weight).sum()

    loss().backward()
    parameter = layer.get_parameter(name)
    expert = layer.router(hidden).expert[0, 0].item()
    place = (expert, 3) if parameter.dim() == 2 and name.startswith("router") else (expert, 3, 5)[-parameter.dim() :]
    step = 1e-6
    with torch.no_grad():
        parameter[place] += step
        above = loss()
        parameter[place] -= 2 * step
        below = loss()
    slope = (above - below).item() / (2 * step)
    assert abs(slope) > 1e-6
    assert parameter.grad[place].item() == pytest.approx(slope, rel=1e-5)


def test_every_expert_with_tokens_learns_and_the_others_get_exact_zeros():
    layer = layer_of()
    with torch.no_grad():
        layer.router.balance_bias[3:] = -5
    layer(torch.randn(40, 16, dtype=torch.float64)).square().sum().backward()
    load = layer.router.counts.load
    assert load[:3].min() > 0
    assert not load[3:].any()
    for parameter in (layer.experts.gate, layer.experts.up, layer.experts.down):
        assert (parameter.grad[:3].flatten(1).abs().amax(1) > 0).all()
        assert not parameter.grad[3:].any()


def step(layer, hidden, upstream, parts):
    """Accumulate one step's gradients over this many microbatches, then balance."""
    layer.zero_grad()
    for x, dy in zip(hidden.chunk(parts), upstream.chunk(parts), strict=True):
        layer(x).backward(dy)
    rebalance([layer.router], Balance())
    return {name: parameter.grad.clone() for name, parameter in layer.named_parameters()}


def test_any_split_of_a_batch_gives_the_same_gradients_and_bias():
    hidden, upstream = torch.randn(2, 64, 16, dtype=torch.float64)
    start, found = layer_of().state_dict(), []
    for parts in (1, 2, 8):
        layer = layer_of()
        layer.load_state_dict(start)
        steps = [step(layer, hidden + shift, upstream, parts) for shift in (0.0, 0.3, 0.6)]
        found.append((steps, layer.router.balance_bias.clone()))
    for steps, bias in found[1:]:
        assert torch.equal(bias, found[0][1])
        for got, expected in zip(steps, found[0][0], strict=True):
            for name, gradient in expected.items():
                torch.testing.assert_close(
                    got[name], gradient, rtol=1e-9, atol=1e-11, msg=lambda m, n=name: f"{n}: {m}"
                )


def test_recomputing_the_layer_changes_neither_gradients_nor_bias():
    hidden, upstream = torch.randn(2, 32, 16, dtype=torch.float64)
    plain, recomputed = layer_of(), layer_of()
    recomputed.load_state_dict(plain.state_dict())
    plain(hidden).backward(upstream)
    checkpoint(recomputed, hidden, use_reentrant=False).backward(upstream)
    for layer in (plain, recomputed):
        rebalance([layer.router], Balance())
    assert torch.equal(plain.router.balance_bias, recomputed.router.balance_bias)
    for one, other in zip(plain.parameters(), recomputed.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad)


def test_under_autocast_parameters_stay_fp32_and_every_one_learns():
    layer = layer_of(dtype=torch.float32)
    hidden = torch.randn(40, 16)
    expected = layer(hidden)
    with torch.autocast("cpu", torch.bfloat16):
        output = layer(hidden)
    assert output.dtype is torch.bfloat16
    output.float().square().sum().backward()
    torch.testing.assert_close(output.float(), expected, rtol=0.05, atol=0.05 * expected.abs().max().item())
    for name, parameter in layer.named_parameters():
        assert parameter.grad.dtype is torch.float32, name
        assert parameter.grad.any(), name


def test_the_rms_of_the_experts_sum_is_noted_in_training():
    layer = layer_of()
    hidden = torch.randn(5, 16, dtype=torch.float64)
    layer.eval()(hidden)
    assert layer.latent_rms is None
    layer.train()(hidden)
    summed = layer.experts(layer.latent_down(hidden), layer.router(hidden))
    assert layer.latent_rms.item() == pytest.approx(summed.square().mean().sqrt().item(), rel=1e-5)


def test_no_tokens_pass_through():
    layer = layer_of()
    output = layer(torch.randn(0, 16, dtype=torch.float64))
    output.sum().backward()
    assert output.shape == (0, 16)
    assert not layer.experts.gate.grad.any()
