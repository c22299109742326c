"""All sequences' attention in one launch: on a GPU against the definition, elsewhere refused by name."""

import pytest
import torch

from triax.errors import UnsupportedError
from triax.kernels.mla import attend, ragged, reference


def test_a_processor_and_wide_values_are_refused_by_name():
    query = torch.randn(3, 2, 16, dtype=torch.bfloat16)
    with pytest.raises(UnsupportedError, match="this device"):
        ragged.attend(query, query, query, [0, 3], [0, 3], 1.0)
    with pytest.raises(UnsupportedError, match="values of `32`"):
        ragged.attend(query, query, torch.randn(3, 2, 32, dtype=torch.bfloat16), [0, 3], [0, 3], 1.0)


@pytest.mark.gpu
@pytest.mark.parametrize(("keys", "values"), [(192, 128), (64, 64), (96, 32)])
def test_sequences_with_a_past_and_without_are_attended_to_as_defined(keys, values):
    random = torch.Generator().manual_seed(0)
    own, total = (70, 0, 1, 300, 33), (70, 0, 129, 700, 64)
    starts = [[sum(lengths[:n]) for n in range(6)] for lengths in (own, total)]
    query, key = (torch.randn(start[-1], 3, keys, generator=random).bfloat16() for start in starts)
    value = torch.randn(starts[1][-1], 3, 256, generator=random).bfloat16()[..., :values]  # a slice of wider rows
    expected, _ = reference.attend(query.double(), key.double(), value.double(), *starts, keys**-0.5)
    with torch.no_grad():
        found, _ = attend(query.cuda(), key.cuda(), value.cuda(), *starts, keys**-0.5, with_largest=False)
    assert found.dtype is torch.bfloat16
    assert ((found.cpu().double() - expected).norm() / expected.norm()).item() < 6e-3
