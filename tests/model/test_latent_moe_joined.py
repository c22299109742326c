"""The router and the way into the latent as one product, for answering."""

import pytest
import torch

from triax.config.model import Moe, Situ
from triax.kernels.linear import linear_fp32
from triax.model.latent_moe import LatentMoe
from triax.model.replay import record, replay


def layer_of(latent_dim=16, width=32, num_experts=8, expert_dim=4, top_k=2):
    moe = Moe(num_experts=num_experts, top_k=top_k, expert_dim=expert_dim, num_shared_experts=1, latent_dim=latent_dim)
    return LatentMoe(width, moe, Situ()).eval()


def twins(**shape):
    single, joined = layer_of(**shape), layer_of(**shape)
    joined.load_state_dict(single.state_dict())
    joined.join()
    return single, joined


@torch.no_grad()
def test_one_product_says_what_two_say_also_after_new_weights():
    single, joined = twins()
    hidden = torch.randn(9, 32)
    torch.testing.assert_close(joined(hidden), single(hidden))
    logit, latent = joined._both(hidden)
    torch.testing.assert_close(logit, hidden @ single.router.weight.T)
    torch.testing.assert_close(latent, single.latent_down(hidden))
    for layer in (single, joined):
        layer.router.weight.mul_(-2)
        layer.latent_down.weight.add_(0.1)
    torch.testing.assert_close(joined(hidden), single(hidden))


@torch.no_grad()
def test_nearly_tied_scores_choose_the_same_experts():
    single, joined = twins(num_experts=32, top_k=4)
    for layer in (single, joined):
        layer.router.weight[1::2] = layer.router.weight[::2] * (1 + 2.0**-18)
    hidden = torch.randn(200, 32)
    assert torch.equal(single.router(hidden).expert, joined.router(hidden, None, joined._both(hidden)[0]).expert)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
@torch.no_grad()
def test_casting_undoes_it_and_narrow_formats_on_a_cpu_do_without(dtype):
    single, joined = twins()
    joined.to(dtype)
    assert joined.joined is None
    joined.join()
    hidden = torch.randn(9, 32).to(dtype)
    torch.testing.assert_close(joined(hidden), single.to(dtype)(hidden))


def test_gradients_take_the_way_of_the_single_weights():
    single, joined = twins()
    hidden, weight = torch.randn(5, 32), torch.randn(5, 32)
    for layer in (single, joined):
        (layer(hidden) * weight).sum().backward()
    for (name, expected), (_, found) in zip(single.named_parameters(), joined.named_parameters(), strict=True):
        assert expected.grad.any(), name
        torch.testing.assert_close(found.grad, expected.grad, msg=name)


def test_autocast_does_not_round_the_scores_of_a_joined_layer():
    single, joined = twins(num_experts=32, top_k=4)
    hidden = torch.randn(50, 32)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        with record([single.router]) as one:
            single(hidden)
        with record([joined.router]) as other:
            joined(hidden)
    assert torch.equal(one[0][0].share, other[0][0].share)


@torch.no_grad()
def test_a_recorded_routing_is_followed_by_a_joined_layer_too():
    single, joined = twins()
    hidden = torch.randn(9, 32)
    with record([single.router]) as kept:
        single(hidden)
    kept[0][0] = kept[0][0]._replace(expert=(kept[0][0].expert + 1) % 8)
    results = []
    for layer in (single, joined):
        with replay([layer.router], kept):
            results.append(layer(hidden))
    torch.testing.assert_close(*results)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("tokens", [1, 7, 64])
@torch.no_grad()
def test_on_a_gpu_bf16_scores_come_in_fp32_out_of_one_product(tokens):
    single, joined = (layer.bfloat16().cuda() for layer in twins(latent_dim=512, width=1024, num_experts=64, top_k=4))
    joined.join()
    hidden = torch.randn(tokens, 1024, device="cuda").bfloat16()
    logit, latent = joined._both(hidden)
    assert logit.dtype is torch.float32
    torch.testing.assert_close(logit, linear_fp32(hidden, single.router.weight), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(latent, single.latent_down(hidden), rtol=1e-2, atol=1e-2)
    torch.testing.assert_close(joined(hidden), single(hidden), rtol=3e-2, atol=3e-2)
