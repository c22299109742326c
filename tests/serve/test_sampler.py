import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from triax.errors import ConfigError
from triax.serve.sampler import Sampling, choose

NAN, INF = float("nan"), float("inf")
# settings, not `Sampling` itself: the type check of its constructor draws random numbers, which strategies may not
WAYS = st.fixed_dictionaries(
    {
        "temperature": st.sampled_from([0.0, 1e-300, 0.01, 0.7, 1.0, 50.0]),
        "top_k": st.integers(0, 9),
        "top_p": st.sampled_from([1e-9, 0.3, 0.9, 1.0]),
        "min_p": st.sampled_from([0.0, 0.2, 1.0]),
    }
)


def frequencies(logits, how, num_draws=1000):
    uniform = (torch.arange(num_draws, dtype=torch.float64) + 0.5) / num_draws  # every part of the unit interval
    token = choose(torch.tensor(logits).expand(num_draws, -1), uniform, how).token
    return (token.bincount(minlength=len(logits)) / num_draws).tolist()


@given(
    rows=st.lists(
        st.lists(st.sampled_from([NAN, INF, -INF, 0.0, 1.0, -3e38, 3e38]), min_size=5, max_size=5), min_size=1
    ),
    uniform=st.floats(0, 1, exclude_max=True),
    how=WAYS,
)
def test_any_row_gives_a_token_in_range_and_bad_rows_are_flagged(rows, uniform, how):
    logits = torch.tensor(rows)
    token, logprob, is_valid = choose(logits, torch.full((len(rows),), uniform), Sampling(**how))
    assert ((token >= 0) & (token < 5)).all()
    for row, index, log, fine in zip(logits, token, logprob, is_valid, strict=True):
        assert fine == (not row.isnan().any() and bool(row.max().isfinite()))
        if fine:
            assert row[index] > -INF
            assert log <= 0


@given(rows=st.integers(1, 5), seed=st.integers(0, 2**16), how=WAYS)
def test_a_row_s_token_does_not_depend_on_other_rows(rows, seed, how):
    random = torch.Generator().manual_seed(seed)
    logits = torch.randn(rows, 9, generator=random) * 3
    uniform = torch.rand(rows, generator=random)
    together = choose(logits, uniform, Sampling(**how))
    for i in range(rows):
        alone = choose(logits[i : i + 1], uniform[i : i + 1], Sampling(**how))
        assert alone.token[0] == together.token[i]


def test_greedy_takes_the_likeliest_and_of_equal_ones_the_first():
    logits = torch.tensor([[0.0, 2.0, 2.0, 1.0], [5.0, 5.0, 5.0, 5.0]])
    assert choose(logits, torch.tensor([0.99, 0.99]), Sampling()).token.tolist() == [1, 0]


@given(how=WAYS, uniform=st.floats(0, 1, exclude_max=True))
def test_a_certain_token_is_always_taken(how, uniform):
    logits = torch.full((1, 9), -INF)
    logits[0, 4] = 7.0
    token, logprob, is_valid = choose(logits, torch.tensor([uniform], dtype=torch.float64), Sampling(**how))
    assert (token.item(), logprob.item(), is_valid.item()) == (4, 0.0, True)


def test_draws_follow_the_softmax_at_the_temperature():
    logits = [0.0, 1.0, -1.0, 2.0]
    for temperature in (0.5, 1.0, 2.0):
        expected = (torch.tensor(logits) / temperature).softmax(0).tolist()
        assert frequencies(logits, Sampling(temperature)) == pytest.approx(expected, abs=0.002)


def test_filters_keep_what_they_promise():
    shares = torch.tensor([0.1, 0.4, 0.2, 0.3])
    logits = shares.log().tolist()
    kept = {
        Sampling(1.0, top_k=1): [0, 1, 0, 0],
        Sampling(1.0, top_k=2): [0, 4, 0, 3],
        Sampling(1.0, top_k=99): [1, 4, 2, 3],
        Sampling(1.0, top_p=0.35): [0, 1, 0, 0],
        Sampling(1.0, top_p=0.45): [0, 4, 0, 3],
        Sampling(1.0, top_p=0.75): [0, 4, 2, 3],
        Sampling(1.0, top_k=2, top_p=0.5): [0, 1, 0, 0],  # of what top_k left, the first holds 4/7
        Sampling(1.0, min_p=0.45): [0, 4, 2, 3],
        Sampling(1.0, min_p=0.6): [0, 4, 0, 3],
        Sampling(1.0, min_p=1.0): [0, 1, 0, 0],
    }
    for how, weights in kept.items():
        expected = [weight / sum(weights) for weight in weights]
        assert frequencies(logits, how) == pytest.approx(expected, abs=0.002), how
    assert frequencies([0.0, 0.0], Sampling(1.0, top_p=0.5)) == [1, 0]  # the first alone holds exactly this share


def test_log_probabilities_are_the_model_s_whatever_the_filters():
    logits = torch.tensor([[0.5, 1.5, -2.0]])
    found = choose(logits, torch.tensor([0.2]), Sampling(0.3, top_k=1))
    torch.testing.assert_close(found.logprob, logits.log_softmax(-1)[:, 1])


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": -1.0},
        {"temperature": INF},
        {"temperature": NAN},
        {"top_k": -1},
        {"top_p": 0.0},
        {"top_p": 1.1},
        {"min_p": -0.1},
        {"min_p": 1.5},
    ],
)
def test_options_out_of_range_are_refused_by_name(options):
    with pytest.raises(ConfigError, match=f"{next(iter(options))} is out of range"):
        Sampling(**options)
