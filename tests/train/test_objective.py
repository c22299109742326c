"""Which tokens a loss is about."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from triax.train.objective import targets_after_next


def test_the_token_after_the_next_stays_inside_its_sequence():
    targets = torch.tensor([11, 12, 13, 21, -100, 23, 31])
    assert targets_after_next(targets, (3, 0, 3, 1)).tolist() == [12, 13, -100, -100, -100, -100, -100]


@given(lengths=st.lists(st.integers(0, 5), max_size=5), seed=st.integers(0, 99))
def test_every_second_target_is_the_next_ones_target(lengths, seed):
    total = sum(lengths)
    targets = torch.randint(-1, 50, (total,), generator=torch.Generator().manual_seed(seed))
    targets[targets == -1] = -100
    actual, place = targets_after_next(targets, tuple(lengths)).tolist(), 0
    for length in lengths:
        for i in range(length):
            inside = i + 1 < length and targets[place + i] != -100
            assert actual[place + i] == (targets[place + i + 1].item() if inside else -100)
        place += length
