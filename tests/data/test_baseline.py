import lzma
from collections import Counter, defaultdict
from math import log2

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from triax.data.baseline import ByteModel, baselines
from triax.errors import DataError

TRAINING = b"def read(path):\n    return open(path).read()\n\ndef write(path, text):\n    open(path).write(text)\n" * 3
few_letters = st.lists(st.sampled_from(b"ab\xff"), max_size=40).map(bytes)


def naive(training: bytes, text: bytes, order: int) -> list[float]:
    """The same model with dictionaries, byte by byte."""
    followers = defaultdict(Counter)
    for n in range(len(training)):
        for length in range(min(order, n) + 1):
            followers[training[n - length : n]][training[n]] += 1
    result = []
    for n in range(len(text)):
        p = 1 / 256
        for length in range(min(order, n) + 1):
            seen = followers.get(text[n - length : n])
            if seen:
                p = (seen[text[n]] + len(seen) * p) / (sum(seen.values()) + len(seen))
        result.append(p)
    return result


@given(few_letters, few_letters, st.integers(0, 7))
def test_the_byte_model_equals_its_definition(training, text, order):
    assert ByteModel(training, order).probability(text) == pytest.approx(naive(training, text, order), rel=1e-12)


@given(few_letters, few_letters)
def test_the_next_byte_has_a_probability_of_one_in_all(training, context):
    model = ByteModel(training)
    each = [model.probability(context + bytes([byte]))[-1] for byte in range(256)]
    assert sum(each) == pytest.approx(1, abs=1e-12)
    assert min(each) > 0


def test_bits_are_the_logarithms_of_the_probabilities():
    text = b"def read(path): return write"
    expected = -sum(log2(p) for p in naive(TRAINING, text, 5))
    assert ByteModel(TRAINING).bits(text) == pytest.approx(expected)


def test_without_training_text_a_byte_costs_eight_bits():
    assert ByteModel(b"").bits(b"abc") == 24


def test_an_order_that_does_not_fit_a_word_is_refused():
    with pytest.raises(DataError, match="found `8`; choose 0 … 7"):
        ByteModel(b"abc", 8)


def test_baselines_are_bits_per_byte_of_the_held_out_text():
    random = np.random.default_rng(0)
    words = [random.bytes(12) for _ in range(40)]
    training, held_out = ([b"".join(random.permutation(words)) for _ in range(n)] for n in (8, 2))
    found = baselines(training, held_out)
    text = b"".join(held_out)
    assert found["byte_model"] == pytest.approx(ByteModel(b"".join(training)).bits(text) / len(text))
    assert found["xz"] == 8 * len(lzma.compress(text, preset=9)) / len(text)
    assert 0 < found["xz_primed"] < found["xz"]
    assert set(found) == {"byte_model", "xz", "xz_primed"}


def test_baselines_without_held_out_text_are_refused():
    with pytest.raises(DataError, match="found `0` held-out bytes"):
        baselines([b"abc"], [])
