"""Drafts: where they come from, how many, and that keeping or rejecting them changes no distribution."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from triax.config.serve import Drafting
from triax.serve.request import Sampling
from triax.serve.sampler import Draw, distribution, infos, sample, uniform
from triax.serve.speculative import Length, NgramDrafter, Ngrams, agree, reject


@given(tokens=st.lists(st.integers(0, 3), max_size=40), longest=st.integers(1, 4), most=st.integers(1, 6))
def test_a_continuation_is_what_followed_the_latest_equal_run(tokens, longest, most):
    ngrams = Ngrams(longest)
    half = len(tokens) // 2
    ngrams.extend(tokens[:half])
    ngrams.extend(tokens[half:])
    expected = ()
    for length in range(min(longest, len(tokens)), 0, -1):
        run = tokens[len(tokens) - length :]
        places = [i for i in range(length, len(tokens)) if tokens[i - length : i] == run]
        if places:
            found = tokens[places[-1] :]
            expected = tuple((found * most)[:most])
            break
    assert ngrams.continuation(most) == expected


def test_agreement_counts_the_first_drafts_that_were_drawn():
    assert agree((1, 2, 3), [1, 2, 3, 9]) == 3
    assert agree((1, 2, 3), [1, 5, 3, 9]) == 1
    assert agree((1,), [2, 2]) == 0


@pytest.mark.parametrize("seed", range(3))
def test_rejection_keeps_the_target_s_distribution_exactly(seed):
    """Enumerate: integrate over all draws of a draft of two tokens, on a grid of the numbers that decide."""
    random = torch.Generator().manual_seed(seed)
    target = torch.rand(3, 4, generator=random, dtype=torch.float64)
    odds = torch.rand(2, 4, generator=random, dtype=torch.float64)
    target[0, 1], odds[0, 2] = 0, 0
    target, odds = target / target.sum(-1, keepdim=True), odds / odds.sum(-1, keepdim=True)
    steps = 24
    grid = [(n + 0.5) / steps for n in range(steps)]
    first = torch.zeros(4, dtype=torch.float64)
    for draft in range(4):
        for accept in grid:
            for draw in grid:
                tokens = reject(target[:2], odds[:1], (draft,), [accept], [draw, draw])
                first[tokens[0]] += odds[0, draft] / steps**2
                assert len(tokens) in (1, 2)
    torch.testing.assert_close(first, target[0], rtol=0, atol=1.5 / steps)


def test_rejection_of_many_drawn_drafts_has_the_target_s_pairs():
    target = torch.tensor([[0.1, 0.6, 0.3], [0.5, 0.2, 0.3], [0.2, 0.2, 0.6]], dtype=torch.float64)
    odds = torch.tensor([[0.5, 0.3, 0.2], [0.3, 0.4, 0.3]], dtype=torch.float64)
    random, counts, num = torch.Generator().manual_seed(0), torch.zeros(3, 3), 6000
    for points in torch.rand(num, 8, generator=random, dtype=torch.float64).tolist():
        drafts = tuple(int(torch.searchsorted(odds[n].cumsum(0), points[n])) for n in range(2))
        tokens = reject(target, odds, drafts, points[2:4], points[4:7])
        second = tokens[1] if len(tokens) > 1 else int(torch.searchsorted(target[1].cumsum(0), points[7]))
        counts[tokens[0], second] += 1
    expected = target[0][:, None] * target[1]
    torch.testing.assert_close(counts.double() / num, expected, rtol=0, atol=0.02)


def test_the_number_of_drafts_follows_how_many_were_right():
    length = Length(4)
    for _ in range(40):
        length.learn(4, 4)
    assert length.choose() == 4
    for _ in range(60):
        length.learn(1, 0)
    plain = [length.choose() for _ in range(64)]
    assert plain.count(0) >= 62, "drafting that never pays is off"
    assert 1 in plain, "now and then one draft finds out"
    assert Length(3, is_adaptive=False).choose() == 3


def test_a_drafter_forgets_a_sequence_that_left():
    drafter = NgramDrafter(Drafting(max_drafts=3, is_adaptive=False))
    assert drafter.propose(1, [1, 2, 3, 1, 2], 8) == (3, 1, 2)
    assert drafter.propose(1, [1, 2, 3, 1, 2, 3], 2) == (1, 2)
    drafter.drop(1)
    assert drafter.propose(1, [5], 3) == ()


@given(seed=st.integers(0, 2**64 - 1), place=st.integers(0, 2**40))
def test_the_number_that_decides_a_draw_is_fixed_by_seed_and_place(seed, place):
    assert 0 <= uniform(seed, place) < 1
    assert uniform(seed, place) == uniform(seed, place)
    assert uniform(seed, place) != uniform(seed, place + 1)


def test_bias_penalties_and_structure_come_before_the_choice():
    logits = torch.tensor([[1.0, 2.0, 3.0, -1.0]])

    def likeliest(answer=(), prompt=(), allowed=None, **how):
        token, is_valid = sample(logits, [Draw(Sampling(**how), 0.0, prompt, answer, allowed)])
        assert bool(is_valid)
        return int(token)

    assert likeliest() == 2
    assert likeliest(bias=((0, 5.0),)) == 0
    assert likeliest(answer=(2,), presence_penalty=1.5) == 1
    assert likeliest(answer=(2,), frequency_penalty=0.6) == 2
    assert likeliest(answer=(2, 2), frequency_penalty=0.6) == 1
    assert likeliest(prompt=(2,), repetition_penalty=2.0) == 1
    assert likeliest(answer=(3,), repetition_penalty=0.1) == 2, "a negative score shrinks towards 0 and stays below"
    assert likeliest(allowed=torch.tensor([True, False, False, True])) == 0
    token, is_valid = sample(logits, [Draw(Sampling(), 0.0)], torch.tensor([2]))
    assert (int(token), bool(is_valid)) == (1, True)


def test_nothing_allowed_is_flagged_and_rows_keep_their_own_ways():
    logits = torch.tensor([[1.0, 2.0], [1.0, 2.0], [float("nan"), 1.0]])
    draws = [
        Draw(Sampling(), 0.0, allowed=torch.tensor([False, False])),
        Draw(Sampling(temperature=1.0), 0.001),
        Draw(Sampling(temperature=1.0, top_k=1), 0.001),
    ]
    token, is_valid = sample(logits, draws)
    assert is_valid.tolist() == [False, True, False]
    assert int(token[1]) == 0


def test_reports_name_the_likeliest_tokens_of_the_plain_logits():
    logits = torch.tensor([[0.0, 1.0, 1.0, -5.0], [0.0, 0.0, 0.0, 0.0]])
    first, second = infos(logits, [0, 3], [2, 0])
    expected = logits.double().log_softmax(-1)
    assert [token for token, _ in first.top] == [1, 2], "of equal ones the smaller first"
    assert first.logprob == pytest.approx(float(expected[0, 0]))
    assert first.top[0][1] == pytest.approx(float(expected[0, 1]))
    assert (second.top, second.logprob) == ((), pytest.approx(float(expected[1, 3])))


def test_the_distribution_is_what_draws_have():
    logits, how = torch.tensor([[2.0, 1.0, 0.0, -1.0]]), Sampling(temperature=0.7, top_p=0.9)
    num = 4000
    points = [(n + 0.5) / num for n in range(num)]
    token, _ = sample(logits.expand(num, -1), [Draw(how, point) for point in points])
    shares = token.bincount(minlength=4).double() / num
    torch.testing.assert_close(shares, distribution(logits, how)[0], rtol=0, atol=1e-3)
    assert distribution(logits, Sampling()).tolist() == [[1, 0, 0, 0]]
