"""Slots and pages: in the exact mode a token's bits depend on nothing but the tokens before it."""

from itertools import pairwise

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from triax.errors import ConfigError
from triax.kernels.dispatch import batch_invariant, mode
from triax.kernels.linear import tiled
from triax.model.decoder import Decoder
from triax.model.layout import Layout
from triax.model.logprob import exact_logprobs, logprobs
from triax.model.memory import Arena, Memory, Part

KINDS = ["k3", "kimi_linear", "k2"]
PAGE = 8


@pytest.fixture(scope="module")
def models(family, awake):
    return {kind: awake(family[kind], torch.float32) for kind in KINDS}


def tokens_of(count, seed=0):
    return torch.randint(0, 512, (count,), generator=torch.Generator().manual_seed(seed))


def arena_of(model, num_slots=6, num_pages=40):
    """Slots and pages full of NaN: what was not written must not be read."""
    arena = Arena.empty(model.settings, num_slots, num_pages, PAGE)
    for part in (arena.state, arena.window, arena.latent):
        part.fill_(float("nan"))
    return arena


def forward(model, arena, parts, streams, is_invariant=True):
    """Run one forward: early parts (one token, or tried) first; return each part's logits and the memory."""
    early = [n for n, part in enumerate(parts) if part.length == 1 or not part.is_kept]
    order = early + [n for n in range(len(parts)) if n not in early]
    tokens = torch.cat([streams[n] for n in order])
    pads = -len(tokens) % tiled.ROWS if is_invariant else 0
    padded = torch.nn.functional.pad(tokens, (0, pads))
    with batch_invariant(is_invariant), torch.no_grad():
        memory = Memory.of(model.settings, arena, [parts[n] for n in order], len(early), pads)
        logits = model.logits(model(padded, memory.layout, memory))
    starts = memory.layout.starts
    return {n: logits[starts[i] : starts[i + 1]] for i, n in enumerate(order)}, memory


def clear(arena, slot):
    arena.state[:, slot] = 0
    arena.window[:, slot] = 0


@pytest.mark.parametrize("kind", KINDS)
@given(cuts=st.lists(st.integers(0, 40), max_size=5), company=st.integers(0, 2), seed=st.integers(0, 2**16))
@settings(max_examples=6, phases=[Phase.explicit, Phase.generate])
def test_a_token_has_the_same_bits_however_its_sequence_is_cut_and_whatever_runs_beside_it(
    models, kind, cuts, company, seed
):
    model, tokens = models[kind], tokens_of(40, seed)
    arena = arena_of(model)
    clear(arena, 1)
    whole, _ = forward(model, arena, [Part(1, (1, 2, 3, 4, 5), 0, 40)], [tokens])
    edges = sorted({0, 40, *cuts})
    got = []
    clear(arena, 2)
    for step, (first, end) in enumerate(pairwise(edges)):
        parts, streams = [Part(2, (9, 7, 8, 12, 11), first, end - first)], [tokens[first:end]]
        for other in range(company):
            clear(arena, 3 + other)
            length = 1 + (seed + 7 * step + other) % 11
            parts.append(Part(3 + other, (20 + 2 * other, 21 + 2 * other), 0, length))
            streams.append(tokens_of(length, seed + step))
        logits, _ = forward(model, arena, parts, streams)
        got.append(logits[0])
    assert torch.equal(torch.cat(got), whole[0])
    for part in (arena.state, arena.window):
        assert torch.equal(part[:, 1], part[:, 2])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("is_invariant", [True, False])
def test_the_memory_gives_what_the_plain_forward_gives(models, kind, is_invariant):
    model, tokens = models[kind], tokens_of(30)
    arena = arena_of(model)
    clear(arena, 4)
    first, _ = forward(model, arena, [Part(4, (5, 6, 3), 0, 20)], [tokens[:20]], is_invariant)
    tail = [
        forward(model, arena, [Part(4, (5, 6, 3, 2), t, 1)], [tokens[t : t + 1]], is_invariant)[0][0]
        for t in range(20, 30)
    ]
    with torch.no_grad():
        expected = model.logits(model(tokens, Layout.of([30])))
    torch.testing.assert_close(torch.cat([first[0], *tail]), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("accepted", range(5))
def test_accepting_tried_tokens_leaves_the_bits_of_decoding_them(models, kind, accepted):
    model, tokens = models[kind], tokens_of(24, 3)
    arena = arena_of(model)
    for slot in (1, 2):
        clear(arena, slot)
        forward(model, arena, [Part(slot, (slot * 4, slot * 4 + 1), 0, 10)], [tokens[:10]])
    plain = [
        forward(model, arena, [Part(1, (4, 5), t, 1)], [tokens[t : t + 1]])[0][0] for t in range(10, 10 + accepted)
    ]
    clear(arena, 3)
    parts = [Part(2, (8, 9), 10, 4, is_kept=False), Part(3, (30, 31), 0, 12)]
    before = arena.state[:, 2].clone()
    logits, memory = forward(model, arena, parts, [tokens[10:14], tokens[:12]])
    assert torch.equal(arena.state[:, 2], before), "trying changes nothing"
    memory.accept([accepted])
    for part in (arena.state, arena.window):
        assert torch.equal(part[:, 1], part[:, 2])
    if accepted:
        assert torch.equal(logits[0][:accepted], torch.cat(plain))


def test_slots_that_are_not_named_stay_as_they_are(models):
    model = models["k3"]
    arena = arena_of(model)
    arena.state[:, 5], arena.window[:, 5], arena.latent[:, 30] = 1.5, 2.5, 3.5
    clear(arena, 1)
    forward(model, arena, [Part(1, (1, 2), 0, 9)], [tokens_of(9)])
    assert (arena.state[:, 5] == 1.5).all()
    assert (arena.window[:, 5] == 2.5).all()
    assert (arena.latent[:, 30] == 3.5).all()


def test_another_layout_than_the_memory_s_is_refused(models):
    model = models["k3"]
    memory = Memory.of(model.settings, arena_of(model), [Part(1, (1,), 0, 3)], 0)
    with pytest.raises(ConfigError, match=r"the layout must be the memory's own"):
        model(tokens_of(4), Layout.of([4]), memory)


@pytest.mark.parametrize("kind", KINDS)
def test_f02_exact_logprobs_are_those_of_the_equations_and_the_same_in_any_batch(family, awake, models, kind):
    """In fp32 they may be as far from fp64 as a rounding of every weight moves them, and a few times that."""
    model, tokens, layout = models[kind], tokens_of(50), Layout.of([20, 1, 29])
    found = exact_logprobs(model, tokens, layout)
    for start, length in zip(layout.starts, layout.lengths, strict=False):
        alone = exact_logprobs(model, tokens[start : start + length], Layout.of([length]))
        assert torch.equal(alone, found[start : start + length])
        assert alone[0] == 0
    assert mode() == "fast"

    wide, weights = awake(family[kind]), {name: weight.double() for name, weight in model.state_dict().items()}
    before = [t for first, end in pairwise(layout.starts) for t in range(first, end - 1)]
    after = [t + 1 for t in before]

    @torch.no_grad()
    def of(network, weights):
        network.load_state_dict(weights)
        table = logprobs(network.logits(network(tokens, layout)))
        return table[before].gather(-1, tokens[after, None]).squeeze(-1)

    expected, noise = of(wide, weights), torch.Generator().manual_seed(0)
    rounded = [
        {name: w * (1 + 2**-24 * torch.empty_like(w).uniform_(-1, 1, generator=noise)) for name, w in weights.items()}
        for _ in range(4)
    ]
    moved = max((of(wide, some) - expected).abs().max() for some in rounded)
    assert (found[after] - expected).abs().max() <= 16 * moved
    assert (of(model, model.state_dict()) - expected).abs().max() <= 16 * moved, "the ordinary forward"


def test_every_place_of_a_tile_counts_the_same_on_this_machine(models):
    shapes = {(w.shape[1], w.shape[0]) for m in models.values() for w in m.parameters() if w.dim() == 2}
    assert all(tiled.is_even(*shape, torch.float32, "cpu") for shape in shapes)


def test_a_narrow_product_is_padded_to_full_columns():
    rows, weight = torch.randn(40, 33), torch.randn(7, 33)
    product = tiled.linear(rows, weight, torch.ones(7))
    torch.testing.assert_close(product, torch.nn.functional.linear(rows, weight, torch.ones(7)))
    assert all(torch.equal(tiled.linear(rows[n : n + 1], weight, torch.ones(7)), product[n : n + 1]) for n in range(40))


def test_decoders_are_what_they_were_after_exact_logprobs(models):
    model = models["k3"]
    assert isinstance(model, Decoder)
    model.train()
    exact_logprobs(model, tokens_of(3), Layout.of([3]))
    assert model.training
    model.eval()
