import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.checkpoint import checkpoint

from triax.config.model import Moe, Situ
from triax.model.latent_moe import LatentMoe
from triax.model.replay import record, replay
from triax.model.router import Router, Routing

SITU = Situ()


def moe(**changes):
    return Moe(**{"num_experts": 8, "top_k": 2, "expert_dim": 4, "num_shared_experts": 0} | changes)


def reading(scores, **changes):
    """A router and an input that give exactly these scores up to rounding."""
    router = Router(scores.shape[1], moe(num_experts=scores.shape[1], **changes))
    with torch.no_grad():
        router.weight.copy_(torch.eye(scores.shape[1]))
    return router, scores.logit()


def test_shares_are_plain_scores_over_their_sum_whatever_the_bias():
    router = Router(16, moe(share_scale=2.5))
    router.balance_bias.copy_(torch.linspace(1, -1, 8))
    hidden = torch.randn(20, 16)
    expert, share = router(hidden)
    score = (hidden.double() @ router.weight.double().T).sigmoid()
    assert torch.equal(expert, (score + router.balance_bias).topk(2).indices)
    kept = score.gather(1, expert)
    torch.testing.assert_close(share.double(), 2.5 * kept / kept.sum(1, keepdim=True), rtol=1e-6, atol=1e-7)


def test_without_renormalising_a_share_is_the_score_itself():
    router = Router(16, moe(renormalize=False, share_scale=0.5))
    hidden = torch.randn(20, 16)
    expert, share = router(hidden)
    torch.testing.assert_close(share, 0.5 * (hidden @ router.weight.T).sigmoid().gather(1, expert))


@given(seed=st.integers(0, 2**16))
def test_a_common_offset_of_the_bias_changes_nothing(seed):
    generator = torch.Generator().manual_seed(seed)
    scores = torch.randint(1, 64, (6, 5), generator=generator) / 64 + torch.arange(5) / 512
    router, hidden = reading(scores.double())
    before = router(hidden)
    router.balance_bias += 0.25
    after = router(hidden)
    assert torch.equal(before.expert, after.expert)
    assert torch.equal(before.share, after.share)


def test_group_limited_choice_follows_the_two_best_of_each_group():
    # Group sums of the two best: 1.0, 1.2, 1.1; the single best expert sits in the group that loses.
    scores = torch.tensor([[0.95, 0.05, 0.02, 0.6, 0.6, 0.1, 0.7, 0.4, 0.3]])
    router, hidden = reading(scores, num_groups=3, top_groups=2, top_k=3)
    assert sorted(router(hidden).expert[0].tolist()) == [3, 4, 6]
    router.balance_bias[0] = 0.3
    assert 0 in router(hidden).expert[0].tolist()


def test_groups_of_one_expert_and_full_use_of_the_eligible_are_legal():
    router, hidden = reading(torch.rand(10, 6) * 0.8 + 0.1, num_groups=6, top_groups=2, top_k=2)
    expert, _ = router(hidden)
    assert torch.equal(expert.sort(1).values, hidden.topk(2).indices.sort(1).values)
    assert router.counts.margins.sum() == 60


@pytest.mark.parametrize(("num_experts", "top_k"), [(1, 1), (4, 4)])
def test_using_every_expert_is_legal_and_has_nothing_to_balance(num_experts, top_k):
    router = Router(8, moe(num_experts=num_experts, top_k=top_k))
    expert, share = router(torch.randn(6, 8))
    assert torch.equal(expert.sort(1).values, torch.arange(num_experts).expand(6, -1))
    torch.testing.assert_close(share.sum(1), torch.ones(6))
    assert router.counts.margins.numel() == 0
    assert router.counts.load.tolist() == [6] * num_experts


def test_no_tokens_are_routed_to_nobody():
    router = Router(16, moe())
    expert, share = router(torch.randn(0, 16))
    assert expert.shape == share.shape == (0, 2)
    assert not router.counts.load.any()


def test_scores_are_fp32_under_autocast_and_in_a_bf16_model():
    router = Router(64, moe())
    hidden = torch.randn(50, 64).bfloat16()
    expected = router(hidden.float())
    with torch.autocast("cpu", torch.bfloat16):
        got = router(hidden)
    assert torch.equal(got.expert, expected.expert)
    assert torch.equal(got.share, expected.share)
    router.bfloat16()
    rounded = Router(64, moe())
    rounded.load_state_dict({n: t.float() for n, t in router.state_dict().items()})
    assert torch.equal(router(hidden).share, rounded(hidden.float()).share)


def test_scores_are_fp64_in_an_fp64_model():
    router = Router(16, moe()).double()
    assert router(torch.randn(3, 16, dtype=torch.float64)).share.dtype is torch.float64


def test_the_bias_stays_unrounded_when_the_model_is_cast():
    router = Router(16, moe())
    router.balance_bias.copy_(torch.linspace(-0.1234567, 0.1234567, 8))
    before = router.balance_bias.clone()
    router.to(torch.bfloat16)
    assert router.weight.dtype is torch.bfloat16
    assert router.balance_bias.dtype is torch.float32
    assert torch.equal(router.balance_bias, before)


def test_only_the_weight_and_the_bias_are_in_a_checkpoint_and_only_the_weight_learns():
    router = Router(16, moe())
    router(torch.randn(5, 16))
    assert set(router.state_dict()) == {"weight", "balance_bias"}
    assert [name for name, _ in router.named_parameters()] == ["weight"]


def test_only_training_forwards_with_gradients_count():
    router, hidden = Router(16, moe()), torch.randn(5, 16)
    router.eval()
    router(hidden)
    router.train()
    with torch.no_grad():
        router(hidden)
    assert router.counts is None
    router(hidden)
    assert router.counts.load.sum() == 10
    assert router.counts.margins.sum(1).tolist() == [5] * 8


@pytest.mark.parametrize("whole", [True, False], ids=["whole layer", "router only"])
def test_recomputing_activations_does_not_count_twice(whole):
    layer = LatentMoe(16, moe(latent_dim=8), SITU)
    hidden = torch.randn(12, 16, requires_grad=True)
    layer(hidden).sum().backward()
    plain = [part.clone() for part in layer.router.counts]
    expected = layer.router.weight.grad.clone()
    layer.router.counts = None
    layer.zero_grad()
    if whole:
        output = checkpoint(layer, hidden, use_reentrant=False)
    else:
        routing = checkpoint(layer.router, hidden, use_reentrant=False)
        output = layer.latent_up(layer.latent_norm(layer.experts(layer.latent_down(hidden), routing)))
    output.sum().backward()
    assert all(torch.equal(once, part) for once, part in zip(plain, layer.router.counts, strict=True))
    torch.testing.assert_close(layer.router.weight.grad, expected)


def test_values_that_are_not_numbers_do_not_crash():
    router = Router(16, moe())
    hidden = torch.randn(4, 16)
    hidden[1] = float("nan")
    hidden[2] = float("inf")
    expert, share = router(hidden)
    assert ((expert >= 0) & (expert < 8)).all()
    assert share[1].isnan().all()
    assert share[0].isfinite().all()


def test_forced_routing_uses_the_recorded_experts_with_own_shares_and_counts_nothing():
    router, other = Router(16, moe()), Router(16, moe())
    hidden = torch.randn(30, 16)
    recorded = other(hidden)
    expert, share = router(hidden, forced=recorded)
    assert torch.equal(expert, recorded.expert)
    kept = (hidden @ router.weight.T).sigmoid().gather(1, expert)
    torch.testing.assert_close(share, kept / kept.sum(1, keepdim=True))
    assert router.counts is None
    own = router(hidden).expert
    agreed = [len(set(a) & set(b)) / 2 for a, b in zip(own.tolist(), recorded.expert.tolist(), strict=True)]
    assert router.agreement.item() == pytest.approx(sum(agreed) / 30)
    share.sum().backward()


def test_replaying_a_recorded_run_takes_ties_out_of_a_comparison():
    layers = torch.nn.ModuleList(LatentMoe(16, moe(), SITU, init_std=0.5) for _ in range(2)).eval()
    routers = [layer.router for layer in layers]

    def run(hidden):
        for layer in layers:
            hidden = hidden + layer(hidden)
        return hidden

    hidden = torch.randn(200, 16)
    with record(routers) as recorded:
        expected = run(hidden)
    with torch.no_grad():
        for router in routers:
            router.weight += 1e-2 * torch.randn_like(router.weight)  # another implementation, another rounding
    free = (run(hidden) - expected).abs().max()
    with replay(routers, recorded) as agreed:
        forced = (run(hidden) - expected).abs().max()
    assert forced < free / 3
    assert [len(found) for found in agreed] == [1, 1]
    assert all(0.8 < found[0] < 1 for found in agreed)
    assert torch.equal(run(hidden), run(hidden))
    assert isinstance(recorded[0][0], Routing)
