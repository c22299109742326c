import json

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from triax.data.mixture import PackedLoader, Part
from triax.data.pack import TokenStream
from triax.errors import CheckpointError, ConfigError, DataError

BORDER = 0


def part(name, sizes, weight=1.0, first=1, border=BORDER) -> Part:
    """A source whose tokens are numbered from `first`, so that each token tells where it is from."""
    starts = np.cumsum([0, *(size + 1 for size in sizes)]).astype(np.int64)
    tokens = np.arange(first, first + starts[-1]).astype(np.uint16)
    tokens[starts[:-1]] = border
    return Part(name, TokenStream(tokens, starts, np.array(sizes, np.int64), border), weight)


def loader(seed=3, seq_len=5, micro_tokens=10, weights=(1.0, 2.5), sizes=((9, 3, 14, 1), (7, 7, 20))):
    parts = [part(f"s{n}", size, weights[n], 1 + 1000 * n) for n, size in enumerate(sizes)]
    return PackedLoader(parts, seq_len, micro_tokens, seed)


def spelled(batch):
    return batch.tokens.tolist(), batch.targets.tolist(), batch.lengths


@given(st.integers(0, 60), st.integers(0, 50))
def test_a_resumed_run_sees_what_the_uninterrupted_run_sees(stop, seed):
    """31 and 37 tokens in the sources, 10 in a batch: stops fall inside documents, on borders, in epochs 0 to 12."""
    whole, interrupted = loader(seed), loader(seed)
    for _ in range(stop):
        assert spelled(next(whole)) == spelled(next(interrupted))
    saved = json.loads(json.dumps(interrupted.state_dict()))
    resumed = loader(seed)
    next(resumed)
    resumed.load_state_dict(saved)
    assert resumed.epochs == whole.epochs
    for _ in range(20):
        assert spelled(next(resumed)) == spelled(next(whole))
    assert resumed.state_dict() == whole.state_dict()


def test_the_position_survives_another_size_of_batch():
    whole, resumed = loader(micro_tokens=5), loader(micro_tokens=15)
    for _ in range(9):
        next(whole)
    resumed.load_state_dict(whole.state_dict())
    rows = [next(whole) for _ in range(3)]
    assert next(resumed).tokens.tolist() == torch.cat([row.tokens for row in rows]).tolist()


def test_the_saved_position_does_not_move_with_the_loader():
    running = loader()
    saved = running.state_dict()
    next(running)
    assert saved["rows"] == [0, 0]


def test_a_batch_is_rows_of_one_source_each_with_a_sequence_at_every_border_and_row():
    running = loader(seq_len=5, micro_tokens=20)
    for _ in range(30):
        batch = next(running)
        begins = np.cumsum([0, *batch.lengths]).tolist()
        assert begins.pop() == 20
        tokens = batch.tokens.tolist()
        assert begins == [n for n, token in enumerate(tokens) if token == BORDER or n % 5 == 0]
        for row in batch.tokens.view(4, 5):
            assert len({token > 1000 for token in row.tolist() if token != BORDER}) <= 1
        assert batch.tokens.dtype == batch.targets.dtype == torch.int64


def test_a_target_is_the_token_that_follows_and_after_a_document_the_border():
    running = loader(sizes=((4, 6, 11, 2),))
    documents_end = {5, 12, 24, 27}
    for _ in range(30):
        batch = next(running)
        for token, target in zip(batch.tokens.tolist(), batch.targets.tolist(), strict=True):
            if token != BORDER:
                assert target == (BORDER if token in documents_end else token + 1)


def test_tokens_come_from_the_sources_by_weight():
    running = loader(weights=(1.0, 3.0))
    tokens = torch.cat([next(running).tokens for _ in range(600)])
    share = (tokens[tokens != BORDER] > 1000).float().mean()
    assert 0.70 < share < 0.80
    assert sum(running.state_dict()["rows"]) == 1200


def test_another_seed_mixes_and_orders_otherwise():
    assert [spelled(next(loader(seed=0))) for _ in range(1)] != [spelled(next(loader(seed=1))) for _ in range(1)]


@pytest.mark.parametrize("sizes", [((99, 120), (130, 70)), ((9, 3, 14, 1), (7, 7, 20))])
def test_the_seed_decides_which_source_a_row_is_from(sizes):
    """Not only the order of documents: with the draws alone compared, two seeds must still differ."""

    def sources(seed):
        running = loader(seed, sizes=sizes, weights=(1.0, 1.0))
        rows = [next(running) for _ in range(20)]
        return [[max(row) > 1000 for row in batch.tokens.view(2, 5).tolist()] for batch in rows]

    assert sources(0) == sources(0)
    assert len({str(sources(seed)) for seed in range(5)}) == 5


def test_epochs_count_how_often_each_source_was_read():
    running = loader(sizes=((9,),), seq_len=5, micro_tokens=10)
    next(running)
    next(running)
    assert running.epochs == {"s0": 2.0}


@pytest.mark.parametrize(
    ("other", "what"),
    [
        ({"seed": 4}, "seed"),
        ({"seq_len": 2}, "seq_len"),
        ({"weights": (1.0, 1.0)}, "weights"),
        ({"sizes": ((9, 3, 14, 1), (7, 8, 20))}, "digests"),
        ({"sizes": ((9, 3, 14, 1),)}, "sources"),
    ],
)
def test_a_position_in_something_else_is_refused_by_name(other, what):
    saved = loader().state_dict()
    running = loader(**other)
    with pytest.raises(CheckpointError, match=f"`{what}` is not what the run began with"):
        running.load_state_dict(saved)
    assert set(running.state_dict()["rows"]) == {0}


def test_an_incomplete_position_is_refused():
    saved = loader().state_dict()
    del saved["rows"]
    with pytest.raises(CheckpointError, match=r"incomplete; found no `rows`"):
        loader().load_state_dict(saved)


def test_batches_that_are_not_whole_rows_are_refused():
    with pytest.raises(ConfigError, match=r"`12` is not a multiple of data.seq_len `5`; choose 10"):
        loader(micro_tokens=12)
    with pytest.raises(ConfigError, match=r"`4` is not a multiple of data.seq_len `5`; choose 5"):
        loader(micro_tokens=4)


def test_a_source_shorter_than_a_row_is_named():
    with pytest.raises(DataError, match=r"s1: data.seq_len `20` is more than the training text has; found `4` tokens"):
        loader(seq_len=20, micro_tokens=20, sizes=((30,), (3,)))


def test_sources_of_different_tokenizers_are_refused():
    with pytest.raises(DataError, match=r"found borders `\[0, 5\]`"):
        PackedLoader([part("a", [9]), part("b", [9], border=5)], 5, 5)
