"""Tokens chosen without sorting, interpreted, against the definition; and that against the sampler's own."""

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from triax.errors import UnsupportedError
from triax.kernels.draw import reference
from triax.kernels.draw.reference import Ways
from triax.serve.request import Sampling
from triax.serve.sampler import choose

pytest.importorskip("triton")

from triax.kernels.draw import bisected

HOWS = [
    Sampling(),
    Sampling(temperature=1.0),
    Sampling(temperature=0.7, top_p=0.9),
    Sampling(temperature=1.3, top_k=5),
    Sampling(temperature=1.0, top_k=7, top_p=0.6),
    Sampling(temperature=0.9, min_p=0.2),
    Sampling(temperature=2.0, top_k=3, top_p=0.999, min_p=0.01),
    Sampling(temperature=1e-3, top_p=0.5),
]


def ways(hows, uniform, device="cpu"):
    columns = [[getattr(how, name) for how in hows] for name in ("temperature", "top_k", "top_p", "min_p")]
    temperature, top_k, top_p, min_p = (torch.tensor(column, dtype=torch.float32, device=device) for column in columns)
    points = torch.tensor(uniform, dtype=torch.float64, device=device)
    return Ways(temperature, top_k.int(), top_p, min_p, points)


def case(vocab, seed, coarse):
    random = torch.Generator().manual_seed(seed)
    logits = torch.randn(len(HOWS), vocab, generator=random) * 3
    if coarse:  # many ties
        logits = logits.round()
    uniform = torch.rand(len(HOWS), generator=random, dtype=torch.float64).tolist()
    return logits, uniform


@given(vocab=st.sampled_from([1, 2, 50, 5000]), seed=st.integers(0, 999), coarse=st.booleans())
@settings(max_examples=8, phases=[Phase.explicit, Phase.generate])
def test_halving_finds_what_sorting_finds(vocab, seed, coarse):
    logits, uniform = case(vocab, seed, coarse)
    barred = torch.arange(vocab) % 7 == 3
    found, expected = (form.draw(logits, barred, ways(HOWS, uniform)) for form in (bisected, reference))
    assert found.token.tolist() == expected.token.tolist()
    assert found.is_valid.all()
    torch.testing.assert_close(found.logprob, expected.logprob, rtol=1e-5, atol=1e-5)


@given(seed=st.integers(0, 999), coarse=st.booleans())
@settings(max_examples=30, phases=[Phase.explicit, Phase.generate])
def test_the_definition_is_that_of_the_sampler(seed, coarse):
    logits, uniform = case(60, seed, coarse)
    found = reference.draw(logits, None, ways(HOWS, uniform))
    for row, how in enumerate(HOWS):
        expected = choose(logits[row : row + 1], torch.tensor([uniform[row]], dtype=torch.float64), how)
        assert found.token[row] == expected.token[0]


def test_rows_without_a_distribution_say_so_and_leave_others_alone():
    logits = torch.randn(6, 100)
    logits[0, 3], logits[1, 3], logits[2], logits[3, :50] = torch.nan, torch.inf, -torch.inf, -torch.inf
    barred = torch.arange(100) >= 50
    how = [Sampling(temperature=1.0, top_p=0.9)] * 5 + [Sampling()]
    for form in (bisected, reference):
        found = form.draw(logits, barred, ways(how, [0.3] * 6))
        assert found.is_valid.tolist() == [False, False, False, False, True, True]
        assert ((found.token >= 0) & (found.token < 100)).all()
        assert not barred[found.token[4:]].any()


def test_other_formats_are_refused_by_name():
    with pytest.raises(UnsupportedError, match="float64"):
        bisected.draw(torch.randn(2, 5).double(), None, ways(HOWS[:2], [0.1, 0.2]))


@pytest.mark.kernel
def test_the_kernel_compiles_for_hopper_without_spills(hopper):
    types = dict.fromkeys(("logits", "temperature", "top_p", "min_p", "logprob"), "*fp32")
    types |= {"barred": "*i1", "top_k": "*i32", "uniform": "*fp64", "token": "*i64", "is_valid": "*i1"}
    types |= {"V": "i32", "stride": "i32"}
    wanted = {"module": "triax.kernels.draw.bisected", "kernel": "_draw", "types": types,
              "constants": {"BLOCK": bisected.BLOCK}, "options": {"num_warps": bisected.WARPS}}  # fmt: skip
    assert hopper([wanted])[0].stack == 0


@pytest.mark.gpu
@pytest.mark.parametrize("coarse", [False, True])
def test_a_gpu_finds_what_sorting_finds(coarse):
    logits, uniform = case(163_840, 5, coarse)
    barred = torch.arange(163_840) % 1000 == 3
    expected = reference.draw(logits, barred, ways(HOWS, uniform))
    found = bisected.draw(logits.cuda(), barred.cuda(), ways(HOWS, uniform, "cuda"))
    assert found.token.tolist() == expected.token.tolist()
    torch.testing.assert_close(found.logprob.cpu(), expected.logprob, rtol=1e-5, atol=1e-5)
