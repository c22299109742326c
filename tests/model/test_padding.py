"""Padded batches become streams, and come back."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from triax.errors import ConfigError
from triax.model.layout import Layout, pack, unpack


def padded(lengths, side, total):
    tokens = torch.full((len(lengths), total), 511)
    mask = torch.zeros(len(lengths), total, dtype=torch.bool)
    real = torch.randint(0, 500, (sum(lengths),), generator=torch.Generator().manual_seed(3))
    for row, piece in enumerate(real.split(lengths)):
        place = slice(total - len(piece), None) if side == "left" else slice(0, len(piece))
        tokens[row, place], mask[row, place] = piece, True
    return tokens, mask, real


@given(
    lengths=st.lists(st.integers(0, 6), min_size=1, max_size=4),
    more=st.integers(0, 7),
    side=st.sampled_from(["left", "right"]),
)
@settings(max_examples=25)
def test_packing_keeps_the_real_tokens_and_unpacking_puts_them_back(lengths, more, side):
    tokens, mask, real = padded(lengths, side, max(lengths) + more)
    flat, layout, index = pack(tokens, mask)
    assert torch.equal(flat, real)
    assert layout == Layout.of(lengths)
    assert torch.equal(unpack(flat, index, tuple(tokens.shape), fill=511), tokens)


@pytest.mark.parametrize("side", ["left", "right"])
def test_real_tokens_of_a_padded_batch_equal_unpadded_runs(side, t0, awake):
    model, lengths = awake(t0), [5, 9, 2]
    tokens, mask, real = padded(lengths, side, 12)
    flat, layout, index = pack(tokens, mask)
    logits = unpack(model.logits(model(flat, layout)), index, tuple(tokens.shape))
    for row, piece in enumerate(real.split(lengths)):
        alone = model.logits(model(piece, Layout.of([len(piece)])))
        torch.testing.assert_close(logits[row, mask[row]], alone, rtol=1e-9, atol=1e-9)
    assert (logits[~mask] == 0).all()


def test_a_right_padded_prefill_decodes_like_each_row_alone(t0, awake):
    model, lengths = awake(t0), [5, 9]
    tokens, mask, real = padded(lengths, "right", 9)
    flat, layout, _ = pack(tokens, mask)
    together, alone = model.empty_cache(2), [model.empty_cache(1), model.empty_cache(1)]
    model(flat, layout, together)
    for cache, piece in zip(alone, real.split(lengths), strict=True):
        model(piece, Layout.of([len(piece)]), cache)
    for step in range(3):
        token = torch.tensor([step, step + 7])
        hidden = model(token, Layout.of([1, 1]), together)
        for row, cache in enumerate(alone):
            expected = model(token[row : row + 1], Layout.of([1]), cache)
            torch.testing.assert_close(hidden[row : row + 1], expected, rtol=1e-9, atol=1e-9)


def test_a_pad_between_real_tokens_is_refused():
    with pytest.raises(ConfigError, match="2 pieces in row 1"):
        pack(torch.zeros(2, 3, dtype=torch.long), torch.tensor([[True, True, False], [True, False, True]]))


def test_positions_sequences_and_borders_of_a_layout():
    layout = Layout.of([2, 0, 3])
    assert layout.starts == (0, 2, 2, 5)
    assert layout.positions().tolist() == [0, 1, 0, 1, 2]
    assert layout.positions([4, 9, 1]).tolist() == [4, 5, 1, 2, 3]
    assert layout.sequence().tolist() == [0, 0, 2, 2, 2]


IDS = torch.tensor([[10, 11, 12], [20, 21, 22]])


@pytest.mark.parametrize("mask", [[[1, 1, 0, 0], [1, 0, 0, 0]], [[1, 1], [1, 0]], [[1, 1, 1]], [[1, 1, 1]] * 3])
def test_f25_a_mask_of_another_shape_is_refused(mask):
    with pytest.raises(ConfigError, match=r"does not fit tokens of shape \[2, 3\].*`past`"):
        pack(IDS, torch.tensor(mask).bool())


def test_f25_a_mask_over_the_whole_conversation_counts_from_the_new_tokens_on():
    mask = torch.tensor([[0, 1, 1, 1, 1], [1, 1, 1, 0, 0]]).bool()
    tokens, layout, index = pack(IDS, mask, past=2)
    assert tokens.tolist() == [10, 11, 12, 20]
    assert layout.lengths == (3, 1)
    assert index.tolist() == [0, 1, 2, 3]
