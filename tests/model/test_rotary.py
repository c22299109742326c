"""Rotary positions and YaRN."""

import itertools
import math

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from triax.config.model import Rope, Yarn
from triax.model.rotary import frequencies, magnitude, rotate, turns

K2 = Rope(theta=50000.0, yarn=Yarn(factor=32, original_len=4096, beta_fast=1, beta_slow=1))
K25 = Rope(theta=50000.0, yarn=Yarn(factor=64, original_len=4096))


@given(shift=st.integers(0, 100_000), apart=st.integers(0, 100))
@settings(max_examples=20)
def test_products_depend_on_the_distance_only(shift, apart):
    x, y = torch.randn(2, 1, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(apart))

    def product(position):
        at = torch.tensor([position, position + apart])
        cos, sin = turns(K25, 16, at)
        both = rotate(torch.cat([x, y]), cos, sin)
        return both[0] @ both[1]

    torch.testing.assert_close(product(shift), product(0), rtol=1e-9, atol=1e-9)


def test_neighbouring_channels_turn_together():
    cos, sin = turns(Rope(theta=100.0), 4, torch.tensor([2]))
    turned = rotate(torch.tensor([[1.0, 0.0, 0.0, 1.0]]), cos, sin)
    expected = [[math.cos(2), math.sin(2), -math.sin(0.2), math.cos(0.2)]]
    torch.testing.assert_close(turned, torch.tensor(expected))


def test_without_yarn_frequencies_fall_geometrically():
    assert frequencies(Rope(theta=10000.0), 4) == (1.0, 0.01)


def test_yarn_keeps_fast_pairs_and_divides_slow_ones():
    plain, stretched = frequencies(Rope(theta=50000.0), 64), frequencies(K25, 64)
    ratio = [p / s for p, s in zip(plain, stretched, strict=True)]
    assert ratio[0] == 1
    assert math.isclose(ratio[-1], 64)
    assert all(a <= b * (1 + 1e-12) for a, b in itertools.pairwise(ratio))
    # low = floor(64 ln(4096 / (32·2π)) / (2 ln 50000)) = 8, high = ceil(… with 1·2π) = 20
    assert [i for i, r in enumerate(ratio) if math.isclose(r, 1)] == list(range(9))
    assert [i for i, r in enumerate(ratio) if math.isclose(r, 64)] == list(range(20, 32))


def test_equal_betas_as_in_k2_make_a_ramp_of_one_pair():
    ratio = [p / s for p, s in zip(frequencies(Rope(theta=50000.0), 64), frequencies(K2, 64), strict=True)]
    assert [round(r, 6) for r in ratio] == [1.0] * 20 + [32.0] * 12


def test_the_temperature_grows_with_the_logarithm_of_the_factor():
    assert magnitude(None, 1.0) == 1
    assert magnitude(Yarn(factor=1), 1.0) == 1
    assert magnitude(Yarn(factor=32), 1.0) == 0.1 * math.log(32) + 1


def test_unequal_mscales_scale_the_rotation():
    rope = Rope(yarn=Yarn(factor=8, mscale=2.0, mscale_all_dim=1.0))
    cos, _ = turns(rope, 8, torch.tensor([0]))
    torch.testing.assert_close(cos, torch.full((1, 4), (0.2 * math.log(8) + 1) / (0.1 * math.log(8) + 1)).double())
