"""The kernel that routes, interpreted, against the router's own chain of torch operations."""

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from triax.config.model import Moe
from triax.kernels.moe.router import MarginBins
from triax.kernels.moe.router import choose as dispatched
from triax.model.router import SCORE_UNIT, Router, bins

pytest.importorskip("triton")

from triax.kernels.moe import router_fused

ON_GPU = torch.cuda.is_available()
DEVICE = "cuda" if ON_GPU else "cpu"


def router_of(num_experts, top_k, bins=16, **changes):
    moe = Moe(num_experts=num_experts, top_k=top_k, expert_dim=4, num_shared_experts=0, **changes)
    router = Router(num_experts, moe)
    router.num_bins = bins
    with torch.no_grad():
        router.weight.copy_(torch.eye(num_experts))
        router.balance_bias.copy_(torch.randn(num_experts) * 0.2)
    return router.to(DEVICE)


def chain(router, logit, monkeypatch):
    """What torch's operations make of it, on whatever device."""
    with monkeypatch.context() as patch:
        patch.setenv("TRIAX_KERNELS", "reference")
        return router(logit)


def places_of(router):
    num_bins = router.num_bins if router.moe.top_k < router.moe.num_experts else 0
    margins = torch.zeros(router.moe.num_experts, num_bins, dtype=torch.long, device=DEVICE)
    return MarginBins(margins, *bins(router.balance_bias, max(1, num_bins)), SCORE_UNIT)


def chosen(router, logit, places=None):
    moe = router.moe
    return router_fused.choose(
        logit, router.balance_bias, moe.top_k, moe.share_scale, renormalize=moe.renormalize, places=places
    )


@given(
    tokens=st.integers(0, 9),
    num_experts=st.integers(1, 20),
    renormalize=st.booleans(),
    seed=st.integers(0, 99),
)
@settings(max_examples=15, phases=[Phase.explicit, Phase.generate])
def test_experts_shares_counts_and_gradients_are_those_of_torch(tokens, num_experts, renormalize, seed):
    torch.manual_seed(seed)
    top_k = min(num_experts, 1 + seed % 5)
    router = router_of(num_experts, top_k, renormalize=renormalize, share_scale=2.5)
    logit = torch.randn(tokens, num_experts, device=DEVICE, requires_grad=True)
    with pytest.MonkeyPatch.context() as patch:
        expected = chain(router, logit, patch)
    places = places_of(router)
    expert, share, tallied = chosen(router, logit, places)
    assert torch.equal(expert, expected.expert)
    torch.testing.assert_close(share, expected.share)
    assert torch.equal(tallied.load, router.counts.load)
    assert (tallied.score - router.counts.score).abs() <= tokens * num_experts // 8 + 1
    assert places.margins.sum() == router.counts.margins.sum()
    assert (places.margins.cumsum(1) - router.counts.margins.cumsum(1)).abs().sum() <= 1 + tokens // 4
    upstream = torch.randn_like(share)
    found, wanted = (torch.autograd.grad(x, logit, upstream)[0] for x in (share, expected.share))
    torch.testing.assert_close(found, wanted)


def test_rows_of_a_wider_product_are_read_where_they_are():
    router, wide = router_of(12, 3), torch.randn(7, 40, device=DEVICE)
    expert, share, none = chosen(router, wide[:, :12])
    assert none is None
    again = chosen(router, wide[:, :12].contiguous())
    assert torch.equal(expert, again[0])
    assert torch.equal(share, again[1])


def test_of_equal_scores_the_first_expert_is_chosen_and_all_others_are_at_the_border():
    router = router_of(5, 3, bins=1000)
    router.balance_bias.zero_()
    places = places_of(router)
    expert, _, tallied = chosen(router, torch.zeros(2, 5, device=DEVICE), places)
    assert expert.tolist() == [[0, 1, 2]] * 2
    assert tallied.load.tolist() == [2, 2, 2, 0, 0]
    assert tallied.score == 5 * 2**20
    assert places.margins[:, 499:501].sum(1).tolist() == [2] * 5


def test_a_margin_beyond_the_bins_is_counted_in_the_last():
    router = router_of(4, 1)
    places = places_of(router)._replace(low=torch.tensor(-0.1, device=DEVICE), width=torch.tensor(1e-3, device=DEVICE))
    chosen(router, torch.randn(50, 4, device=DEVICE), places)
    assert places.margins.sum(1).tolist() == [50] * 4
    assert places.margins[:, [0, -1]].sum() > 150


def test_no_gpu_or_a_wish_for_the_definition_means_no_kernel(monkeypatch):
    router, logit = router_of(4, 1), torch.randn(3, 4, device=DEVICE)
    monkeypatch.setenv("TRIAX_KERNELS", "reference")
    assert dispatched(logit, router.balance_bias, 1, 1.0, renormalize=True) is None
    monkeypatch.delenv("TRIAX_KERNELS")
    assert dispatched(logit.cpu(), router.balance_bias.cpu(), 1, 1.0, renormalize=True) is None
    assert router_fused.unsupported(logit.double()) == "dtype `torch.float64`"


def test_kernels_compile_for_hopper_without_spilling(hopper):
    module, shape = "triax.kernels.moe.router_fused", {"E": 896, "EE": 1024, "K": 16, "KK": 16, "RENORMALIZE": True}
    given = dict.fromkeys(("logit", "bias", "share", "kept_score", "low", "width", "upstream", "to_logit"), "*fp32")
    given |= dict.fromkeys(("expert", "margins", "tally"), "*i64") | {"row": "i32", "scale": "fp32", "per_unit": "fp32"}
    wanted = [
        {"module": module, "kernel": "_choose", "types": given, "constants": shape | {"BINS": 1000, "WAYS": 64}},
        {"module": module, "kernel": "_lead_back", "types": given, "constants": shape},
    ]
    for kernel in hopper([one | {"options": {"num_warps": 2}} for one in wanted]):
        assert kernel.stack == 0
        assert kernel.registers <= 160


@pytest.mark.gpu
@pytest.mark.skipif(not ON_GPU, reason="needs a GPU")
@pytest.mark.parametrize(("num_experts", "top_k"), [(896, 16), (64, 8), (256, 8)])
def test_on_a_gpu_a_training_router_counts_and_learns_as_torch_does(num_experts, top_k, monkeypatch):
    torch.manual_seed(0)
    router = router_of(num_experts, top_k, bins=1000)
    logit = torch.randn(5000, num_experts, device="cuda", requires_grad=True)
    expected = chain(router, logit, monkeypatch)
    counts, router.counts = router.counts, None
    found = router(logit)
    agreement = (found.expert == expected.expert).all(1)
    assert agreement.float().mean() > 0.999
    torch.testing.assert_close(found.share[agreement], expected.share[agreement], rtol=1e-5, atol=1e-6)
    assert router.counts.margins.sum() == counts.margins.sum()
    assert (router.counts.margins.cumsum(1) - counts.margins.cumsum(1)).abs().sum() < 1e-4 * logit.numel() + 50
    assert (router.counts.load - counts.load).abs().sum() <= 20
    torch.testing.assert_close(router.counts.score.float(), counts.score.float(), rtol=1e-6, atol=0)
    upstream = torch.randn_like(found.share)
    one, other = (torch.autograd.grad(x.share, logit, upstream, retain_graph=True)[0] for x in (found, expected))
    torch.testing.assert_close(one[agreement], other[agreement], rtol=1e-4, atol=1e-6)
