import math
from itertools import product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from triax.config.model import Moe
from triax.config.optim import Balance
from triax.model.balance import evenness, forget, prepare, quantile_bias, rebalance
from triax.model.router import Router, bins

QUANTILE = Balance()


def reading(scores, top_k=1, num_bins=1000):
    """A router and an input that give exactly these scores up to rounding."""
    num_experts = scores.shape[1]
    router = Router(num_experts, Moe(num_experts=num_experts, top_k=top_k, expert_dim=1))
    prepare([router], Balance(num_bins=num_bins))
    with torch.no_grad():
        router.weight.copy_(torch.eye(num_experts))
    return router, scores.logit()


def exact(width_in=8, num_experts=6, top_k=2, seed=0):
    """A router and an input whose products are exact in fp32, so that no order of summation rounds differently."""
    generator = torch.Generator().manual_seed(seed)
    router = Router(width_in, Moe(num_experts=num_experts, top_k=top_k, expert_dim=1))
    with torch.no_grad():
        router.weight.copy_(torch.randint(-8, 9, router.weight.shape, generator=generator) / 8)
    return router, torch.randint(-8, 9, (8 * 16, width_in), generator=generator) / 8


def violation(router, hidden):
    with torch.no_grad():
        load = router(hidden).expert.flatten().bincount(minlength=router.moe.num_experts)
    return (load.max() / load.double().mean() - 1).item()


def skewed(tokens, num_experts, seed=0):
    generator = torch.Generator().manual_seed(seed)
    pull = torch.linspace(-1.5, 1.5, num_experts)
    return (torch.randn(tokens, num_experts, generator=generator) + pull).sigmoid()


def test_the_example_of_the_report_becomes_even():
    scores = torch.tensor(
        [
            [0.90, 0.40, 0.30, 0.10],
            [0.85, 0.60, 0.20, 0.30],
            [0.80, 0.30, 0.55, 0.20],
            [0.75, 0.50, 0.40, 0.45],
            [0.50, 0.90, 0.20, 0.30],
            [0.40, 0.85, 0.50, 0.20],
            [0.30, 0.80, 0.40, 0.60],
            [0.45, 0.40, 0.80, 0.50],
        ]
    )
    router, hidden = reading(scores)
    assert router(hidden).expert.flatten().bincount(minlength=4).tolist() == [4, 3, 1, 0]
    for _ in range(8):
        rebalance([router], QUANTILE)
        load = router(hidden).expert.flatten().bincount(minlength=4).tolist()
    assert load == [2, 2, 2, 2]


def test_a_few_updates_even_skewed_scores():
    router, hidden = reading(skewed(4096, 64), top_k=4)
    found = [violation(router, hidden)]
    for _ in range(5):
        router(hidden)
        rebalance([router], QUANTILE)
        found.append(violation(router, hidden))
    assert found[0] > 3
    assert found[1] < 0.5
    assert found[5] < 0.15


def test_random_scores_with_random_offsets_become_even():
    generator = torch.Generator().manual_seed(3)
    scores = (torch.rand(20000, 32, generator=generator) + torch.rand(32, generator=generator)) / 2
    router, hidden = reading(scores.clamp(1e-4, 1 - 1e-4), top_k=4)
    before = violation(router, hidden)
    for _ in range(5):
        router(hidden)
        rebalance([router], QUANTILE)
    assert before > 1
    assert violation(router, hidden) < 0.1


@given(tokens=st.integers(1, 60), num_experts=st.integers(2, 6), top_k=st.integers(1, 5), seed=st.integers(0, 2**16))
def test_the_histogram_is_within_a_bin_of_the_exact_quantile(tokens, num_experts, top_k, seed):
    top_k = min(top_k, num_experts - 1)
    generator = torch.Generator().manual_seed(seed)
    router, hidden = reading(torch.rand(tokens, num_experts, generator=generator) * 0.98 + 0.01, top_k)
    router.balance_bias.copy_(torch.randn(num_experts, generator=generator) * 0.3)
    router(hidden)
    low, width = (edge.item() for edge in bins(router.balance_bias, 1000))
    score = hidden.double().sigmoid()
    cutoff = (score + router.balance_bias).topk(top_k + 1).values[:, -1:]
    margins = (cutoff - score).sort(0).values
    assert low <= margins.min()
    assert margins.max() <= low + 1000 * width
    needed = -(-tokens * top_k // num_experts)
    exactly = margins[needed - 1]
    got = quantile_bias(router.counts.margins, router.balance_bias, top_k)
    # Each lies within its bin, and centring moves all by the mean of such errors.
    assert ((got - got.mean()) - (exactly - exactly.mean())).abs().max() <= 2 * width + 1e-6


def test_interpolation_inside_the_bin_is_the_published_formula():
    margins = torch.zeros(2, 10, dtype=torch.int64)
    margins[0, 2], margins[0, 5], margins[0, 9] = 3, 4, 1
    margins[1, 7] = 8
    got = quantile_bias(margins, torch.zeros(2), top_k=1)
    # q = 8 * 1 / 2 = 4. Expert 0: bin 5 holds the 4th, 3 before, 4 inside. Expert 1: bin 7, none before, 8 inside.
    expected = torch.tensor([-1 + (5 + 1 / 4) * 0.2, -1 + (7 + 4 / 8) * 0.2], dtype=torch.float64)
    torch.testing.assert_close(got, expected - expected.mean())


@settings(max_examples=8)
@given(seed=st.integers(0, 2**16))
def test_alternating_updates_reach_the_best_even_assignment(seed):
    """On tiny cases the even assignment with the largest sum of scores is found by trying all."""
    generator = torch.Generator().manual_seed(seed)
    scores = torch.rand(6, 3, generator=generator).double() * 0.9 + 0.05
    choices = [c for c in product(range(3), repeat=6) if all(c.count(e) == 2 for e in range(3))]
    best = max(sum(scores[i, e].item() for i, e in enumerate(c)) for c in choices)
    router, hidden = reading(scores, num_bins=10_000)
    for _ in range(12):
        router(hidden)
        rebalance([router], Balance(num_bins=10_000))
    expert = router(hidden).expert.flatten()
    assert expert.bincount(minlength=3).tolist() == [2, 2, 2]
    assert scores.gather(1, expert[:, None]).sum().item() == pytest.approx(best)
    dual = (scores + router.balance_bias).max(1).values.sum().item() - 2 * router.balance_bias.sum().item()
    assert dual == pytest.approx(best, abs=1e-2)


@pytest.mark.parametrize("rule", ["quantile", "sign"])
def test_the_bias_does_not_depend_on_how_a_step_is_split(rule):
    balance, found = Balance(rule=rule, step=0.01), []
    for parts in (1, 2, 8):
        router, hidden = exact()
        prepare([router], balance)
        for step in range(3):
            for part in (hidden + step / 8).chunk(parts):
                router(part)
            rebalance([router], balance)
        found.append(router.balance_bias.clone())
    assert found[0].abs().max() > 0
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])


def test_uneven_and_empty_microbatches_count_by_their_tokens():
    found = []
    for lengths in ((128,), (4, 100, 0, 24), (0, 1, 127)):
        router, hidden = exact()
        for part in hidden.split(list(lengths)):
            router(part)
        rebalance([router], QUANTILE)
        found.append(router.balance_bias.clone())
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])


def test_ranks_are_joined_by_one_integer_reduction_for_all_layers():
    whole = [exact(seed=seed) for seed in range(3)]
    for router, hidden in whole:
        router(hidden)
    rebalance([router for router, _ in whole], QUANTILE)

    ranks = [[exact(seed=seed) for seed in range(3)] for _ in range(2)]
    ranks.append([exact(seed=seed) for seed in range(3)])  # a rank that saw no token at all
    for place, rank in enumerate(ranks[:2]):
        for router, hidden in rank:
            router(hidden.chunk(2)[place])
    sent = []
    for rank in ranks:
        rebalance([router for router, _ in rank], QUANTILE, reduce=lambda counts: sent.append(counts.clone()) or counts)
    assert len(sent) == 3
    assert all(counts.dtype is torch.int64 for counts in sent)
    for rank in ranks:
        for router, _ in rank:
            router.balance_bias.zero_()
    for place, rank in enumerate(ranks[:2]):
        for router, hidden in rank:
            router(hidden.chunk(2)[place])
    for rank in ranks:
        rebalance([router for router, _ in rank], QUANTILE, reduce=lambda counts: sum(sent))
        for (router, _), (right, _) in zip(rank, whole, strict=True):
            assert torch.equal(router.balance_bias, right.balance_bias)
            assert torch.equal(router.tally.load, right.tally.load)


def test_the_new_bias_is_centred_and_the_counts_start_again():
    router, hidden = exact()
    router(hidden)
    rebalance([router], QUANTILE)
    assert abs(router.balance_bias.mean().item()) < 1e-7
    assert not any(part.any() for part in router.counts)


def test_a_step_without_tokens_leaves_the_bias():
    router, hidden = exact()
    router(hidden)
    rebalance([router], QUANTILE)
    before = router.balance_bias.clone()
    rebalance([router], QUANTILE)
    rebalance([router], Balance(rule="sign"))
    torch.testing.assert_close(router.balance_bias, before, rtol=0, atol=1e-8)


def test_a_skipped_step_is_forgotten():
    router, hidden = exact()
    router(torch.full_like(hidden, float("nan")))
    forget([router])
    router(hidden)
    rebalance([router], QUANTILE)
    clean, _ = exact()
    clean(hidden)
    rebalance([clean], QUANTILE)
    assert torch.equal(router.balance_bias, clean.balance_bias)


def test_ema_keeps_its_share_of_the_old_bias():
    router, hidden = exact()
    router.balance_bias.copy_(torch.linspace(-0.1, 0.1, 6))
    router(hidden)
    fresh = quantile_bias(router.counts.margins, router.balance_bias, 2)
    expected = (0.75 * router.balance_bias + 0.25 * fresh).float()
    rebalance([router], Balance(ema=0.75))
    torch.testing.assert_close(router.balance_bias, expected)


def test_the_sign_rule_moves_each_bias_one_centred_step_by_exact_counts():
    router = Router(4, Moe(num_experts=4, top_k=1, expert_dim=1)).to(torch.bfloat16)
    rule = Balance(rule="sign", step=0.001)
    prepare([router], rule)
    total = [40_001, 40_000, 39_999, 40_000]  # a 16-bit float holds multiples of 256 here and would see no difference
    router(torch.randn(3, 4).bfloat16())
    router.counts.load.copy_(torch.tensor(total))
    rebalance([router], rule)
    assert router.counts.margins.numel() == 0
    torch.testing.assert_close(router.balance_bias, torch.tensor([-0.001, 0.0, 0.001, 0.0]))


def test_the_sign_rule_is_centred():
    router, hidden = exact()
    rule = Balance(rule="sign", step=0.01)
    prepare([router], rule)
    load = router(hidden).expert.flatten().bincount(minlength=6)
    rebalance([router], rule)
    step = 0.01 * (load.double().mean() - load).sign()
    torch.testing.assert_close(router.balance_bias, (step - step.mean()).float())


def test_without_a_rule_the_bias_never_moves_but_loads_are_known():
    router, hidden = exact()
    rule = Balance(rule="none")
    prepare([router], rule)
    router(hidden)
    rebalance([router], rule)
    assert not router.balance_bias.any()
    assert router.tally.load.sum() == 2 * len(hidden)


@pytest.mark.parametrize("rule", ["quantile", "sign"])
@pytest.mark.parametrize(("num_experts", "top_k"), [(1, 1), (3, 3)])
def test_with_every_expert_in_use_the_bias_stays_zero(num_experts, top_k, rule):
    router, hidden = exact(num_experts=num_experts, top_k=top_k)
    prepare([router], Balance(rule=rule))
    router(hidden)
    rebalance([router], Balance(rule=rule))
    assert not router.balance_bias.any()


def test_group_limited_choice_is_evened_too():
    scores = skewed(2048, 16)
    router = Router(16, Moe(num_experts=16, top_k=2, expert_dim=1, num_groups=4, top_groups=2))
    with torch.no_grad():
        router.weight.copy_(torch.eye(16))
    before = violation(router, scores.logit())
    for _ in range(20):
        router(scores.logit())
        rebalance([router], QUANTILE)
    assert violation(router, scores.logit()) < before / 4


def test_other_bins_than_counted_are_refused():
    router, hidden = exact()
    router(hidden)
    with pytest.raises(AssertionError, match="prepare"):
        rebalance([router], Balance(num_bins=10))


def test_evenness_states_the_loads_of_the_step():
    scores = torch.tensor([[0.9, 0.1, 0.2, 0.3]] * 3 + [[0.1, 0.9, 0.2, 0.3]])
    router, hidden = reading(scores)
    assert evenness([router]) == {}
    for token in hidden.split(2):
        router(token)
    rebalance([router], QUANTILE)
    entropy = -(0.75 * torch.tensor(0.75).log() + 0.25 * torch.tensor(0.25).log())
    expected = {
        "load_max_over_mean": 3.0,  # loads 3, 1, 0, 0 with 1 each being even
        "load_cv": 1.5**0.5,
        "dead_share": 0.5,
        "load_diversity": entropy.exp().item() / 4,
        "balance_bias_range": (router.balance_bias.max() - router.balance_bias.min()).item(),
        "score_mean": 0.375,
        "margins_at_edges": 0.0,
        "worst_violation": 3.0,  # the first two tokens went to one expert
    }
    found = evenness([router, router])
    assert {name: len(values) for name, values in found.items()} == dict.fromkeys(expected, 2)
    assert {name: values[1] for name, values in found.items()} == pytest.approx(expected, abs=1e-5)


def test_a_router_that_saw_no_token_has_finite_evenness():
    router, _ = reading(torch.full((1, 4), 0.5))
    rebalance([router], QUANTILE)
    found = evenness([router])
    assert found["dead_share"] == [1.0]
    assert all(math.isfinite(value) for (value,) in found.values())


def test_training_with_a_balanced_router_keeps_diversity_near_one():
    router, hidden = reading(skewed(2048, 16), top_k=2)
    for _ in range(4):
        router(hidden)
        rebalance([router], QUANTILE)
    router(hidden)
    rebalance([router], QUANTILE)
    assert evenness([router])["load_diversity"][0] > 0.98


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_f24_the_margin_of_the_best_loser_is_its_bias_however_its_score_was_rounded(dtype):
    """At first all biases are 0, which is a border of two bins: the last bit of a score must not choose the side."""
    counts = []
    noise = torch.Generator().manual_seed(0)
    for shift in (0, 1, -1):
        router, _ = exact()
        prepare([router], QUANTILE)
        score = torch.rand(64, 6, generator=noise.manual_seed(0), dtype=dtype)
        for _ in range(abs(shift)):
            score = torch.nextafter(score, torch.full_like(score, float(shift > 0)))
        router._count(score, *router._choose(score))
        counts.append(router.counts.margins[:, 499:502].clone())
    assert counts[0].sum(0).max() >= 64, "one loser a token is the best, and all of them share a bin"
    assert torch.equal(counts[0], counts[1])
    assert torch.equal(counts[0], counts[2])


@pytest.mark.parametrize("rows", [1, 2, 3, 8])
def test_f24_scores_that_are_equal_to_the_bit_give_a_bias_that_is(rows):
    found = []
    for size in (8, rows):
        router, _ = exact()
        prepare([router], QUANTILE)
        for step in range(3):
            score = torch.rand(8, 6, generator=torch.Generator().manual_seed(step), dtype=torch.float64)
            for part in score.split(size):
                router._count(part, *router._choose(part))
            rebalance([router], QUANTILE)
        found.append(router.balance_bias.clone())
    assert torch.equal(*found)
