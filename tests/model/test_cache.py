"""A sequence may be cut anywhere; a cache survives being split, merged and reset."""

import itertools

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from triax.errors import ConfigError
from triax.model.cache import Cache, KdaCache
from triax.model.layout import Layout

KINDS = ["k3", "kimi_linear", "k2"]


@pytest.fixture(scope="module")
def models(family, awake):
    return {kind: awake(family[kind]) for kind in KINDS}


def tokens_of(count, seed=0):
    return torch.randint(0, 512, (count,), generator=torch.Generator().manual_seed(seed))


def run(model, tokens, cuts):
    """Feed one sequence in pieces; return what came out and the cache."""
    cache = model.empty_cache(1)
    edges = [0, *cuts, len(tokens)]
    pieces = [model(tokens[a:b], Layout.of([b - a]), cache) for a, b in itertools.pairwise(edges)]
    return torch.cat(pieces), cache


def assert_same(cache, other, **tolerance):
    assert cache.lengths == other.lengths
    for one, two in zip(cache.layers, other.layers, strict=True):
        if isinstance(one, KdaCache):
            torch.testing.assert_close(one.state, two.state, **tolerance)
            torch.testing.assert_close(one.window, two.window, **tolerance)
        else:
            assert one.lengths == two.lengths
            torch.testing.assert_close(one.flat(), two.flat(), **tolerance)


CLOSE = {"rtol": 1e-9, "atol": 1e-9}


@given(
    kind=st.sampled_from(KINDS),
    length=st.integers(1, 9),
    data=st.data(),
    seed=st.integers(0, 2**16),
)
@settings(max_examples=6, phases=[Phase.explicit, Phase.generate])
def test_a_sequence_may_be_cut_anywhere(models, kind, length, data, seed):
    model, tokens = models[kind], tokens_of(length, seed)
    cuts = sorted(data.draw(st.lists(st.integers(0, length), max_size=4)))
    with torch.no_grad():
        whole = model(tokens, Layout.of([length]))
        pieces, cache = run(model, tokens, cuts)
        steps, last = run(model, tokens, range(1, length))
    torch.testing.assert_close(pieces, whole, **CLOSE)
    torch.testing.assert_close(steps, whole, **CLOSE)
    assert_same(cache, last, **CLOSE)


@pytest.mark.parametrize("cuts", [(1,), (3,), (4,), (16,), (49,), (16, 32, 48), (17, 34), (5, 49)])
def test_prefill_in_chunks_equals_one_shot_at_every_layer(cuts, models):
    model, tokens = models["k3"], tokens_of(50)
    whole = {}
    model(tokens, Layout.of([50]), taps=whole)
    cache, edges = model.empty_cache(1), [0, *cuts, 50]
    for a, b in itertools.pairwise(edges):
        part = {}
        model(tokens[a:b], Layout.of([b - a]), cache, taps=part)
        for layer in range(model.settings.num_layers + 1):
            torch.testing.assert_close(part[layer], whole[layer][a:b], **CLOSE, msg=f"tokens {a}:{b}, layer {layer}")


@pytest.mark.parametrize("length", [8, 9, 10, 17])
def test_two_requests_in_a_row_do_not_meet_after_a_reset(length, models):
    model = models["k3"]
    first, second = tokens_of(length, 1), tokens_of(length, 2)
    _, cache = run(model, first, range(8, length, 8))
    cache.reset(0)
    assert cache.lengths == [0]
    hidden = model(second, Layout.of([length]), cache)
    torch.testing.assert_close(hidden, model(second, Layout.of([length])), **CLOSE)
    # and without a reset a call of many tokens continues the sequence
    longer = model(first, Layout.of([length]), cache)
    whole = model(torch.cat([second, first]), Layout.of([2 * length]))[length:]
    torch.testing.assert_close(longer, whole, **CLOSE)


def test_rows_without_new_tokens_stay_as_they_are(models):
    for model in models.values():
        cache = model.empty_cache(3)
        model(tokens_of(9), Layout.of([4, 0, 5]), cache)
        before = cache.select([0, 1, 2])
        hidden = model(tokens_of(2, 5), Layout.of([0, 2, 0]), cache)
        assert cache.lengths == [4, 2, 5]
        assert_same(cache.select([0, 2]), before.select([0, 2]), rtol=0, atol=0)
        torch.testing.assert_close(hidden, model(tokens_of(2, 5), Layout.of([2])), **CLOSE)


@pytest.mark.parametrize("kind", KINDS)
def test_splitting_merging_and_forking_keep_every_sequence(kind, models):
    model = models[kind]
    prompts = [tokens_of(n, n) for n in (3, 8, 5)]
    cache = model.empty_cache(3)
    model(torch.cat(prompts), Layout.of([3, 8, 5]), cache)
    merged = Cache.cat([cache.select([2, 0]), cache.select([1, 1])])
    assert merged.lengths == [5, 3, 8, 8]
    new = torch.tensor([7, 8, 9, 10])
    hidden = model(new, Layout.of([1] * 4), merged)
    for row, (prompt, token) in enumerate(zip([prompts[2], prompts[0], prompts[1], prompts[1]], new, strict=True)):
        whole = torch.cat([prompt, token[None]])
        torch.testing.assert_close(hidden[row], model(whole, Layout.of([len(whole)]))[-1], **CLOSE)
    # the cache it came from has not moved
    hidden = model(new[:3], Layout.of([1] * 3), cache)
    whole = torch.cat([prompts[0], new[:1]])
    torch.testing.assert_close(hidden[0], model(whole, Layout.of([4]))[-1], **CLOSE)


def test_an_empty_selection_and_a_reset_row_are_like_new(models):
    model = models["k3"]
    cache = model.empty_cache(2)
    model(tokens_of(6), Layout.of([3, 3]), cache)
    assert len(cache.select([])) == 0
    cache.reset(1)
    hidden = model(tokens_of(4, 3), Layout.of([0, 4]), cache)
    torch.testing.assert_close(hidden, model(tokens_of(4, 3), Layout.of([4])), **CLOSE)


def test_kda_states_stay_fp32_in_a_bf16_cache(t0, awake):
    model = awake(t0, torch.bfloat16)
    cache = model.empty_cache(1)
    assert cache.layers[3].latent.dtype is torch.bfloat16
    model(tokens_of(5), Layout.of([5]), cache)
    model(tokens_of(1), Layout.of([1]), cache)
    assert cache.layers[0].state.dtype is torch.float32
    assert cache.layers[0].window.dtype is torch.bfloat16
    assert Cache.empty(t0, 2).layers[0].state.shape == (2, 2, 32, 32)


def test_a_cached_call_carries_no_gradient(models):
    model = models["k3"]
    assert not model(tokens_of(3), Layout.of([3]), model.empty_cache(1)).requires_grad


def test_a_layout_with_another_number_of_sequences_is_refused(models):
    model = models["k3"]
    with pytest.raises(ConfigError, match="found 1 sequences for 2 rows"):
        model(tokens_of(3), Layout.of([3]), model.empty_cache(2))
