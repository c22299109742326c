"""What a model has to beat: bits per byte of an order-5 byte model and of `xz` on the same held-out text."""

import logging
import lzma
import time
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from jaxtyping import Float64, UInt8

from triax.errors import DataError

log = logging.getLogger(__name__)

LONGEST_ORDER = 7  # a context and its next byte are packed into one 64-bit word


class _Order(NamedTuple):
    """Counts of one context length; `grams` holds context and next byte, `contexts` the context alone, both sorted."""

    grams: np.ndarray
    counts: np.ndarray
    contexts: np.ndarray
    totals: np.ndarray
    """How often each context was seen."""
    kinds: np.ndarray
    """How many different bytes followed each context."""


class ByteModel:
    """Witten-Bell interpolation of the contexts of 0 … order bytes, on a uniform base of 1/256.

    p_n(byte | context) = (count(context, byte) + kinds(context) p_{n-1}(byte | shorter context))
                          / (total(context) + kinds(context))
    and p_n = p_{n-1} where the context was never seen.

    Source: Witten and Bell, IEEE Transactions on Information Theory 37 (1991), method C.
    """

    def __init__(self, training: bytes, order: int = 5) -> None:
        """Count the training text."""
        if not 0 <= order <= LONGEST_ORDER:
            raise DataError(f"byte model: order is out of range; found `{order}`; choose 0 … {LONGEST_ORDER}")
        data = np.frombuffer(training, np.uint8)
        self._orders = [_count(_grams(data, length)) for length in range(order + 1)]

    def probability(self, data: bytes) -> Float64[np.ndarray, " T"]:
        """Return the probability of each byte after those before it (at most `order` of them)."""
        text = np.frombuffer(data, np.uint8)
        probability = np.full(len(text), 1 / 256)
        for length, order in enumerate(self._orders):
            if len(text) <= length or not len(order.grams):
                break
            grams = _grams(text, length)
            context, seen = _find(order.contexts, grams >> np.uint64(8))
            gram, met = _find(order.grams, grams)
            total = np.where(seen, order.totals[context], 0)
            kinds = np.where(seen, order.kinds[context], 1)  # never seen: the shorter context decides alone
            count = np.where(met, order.counts[gram], 0)
            probability[length:] = (count + kinds * probability[length:]) / (total + kinds)
        return probability

    def bits(self, data: bytes) -> float:
        """Return the bits that a text costs."""
        return float(-np.log2(self.probability(data)).sum())


def _grams(data: UInt8[np.ndarray, " T"], length: int) -> np.ndarray:
    """Return each byte behind its context of `length` bytes, packed into a word; only where the context is whole."""
    grams = np.zeros(max(len(data) - length, 0), np.uint64)
    for shift in range(length + 1):
        grams = grams << np.uint64(8) | data[shift : shift + len(grams)]
    return grams


def _count(grams: np.ndarray) -> _Order:
    grams, counts = np.unique(grams, return_counts=True)
    contexts, first, kinds = np.unique(grams >> np.uint64(8), return_index=True, return_counts=True)
    totals = np.add.reduceat(counts, first) if len(first) else counts
    return _Order(grams, counts, contexts, totals, kinds)


def _find(table: np.ndarray, wanted: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return where each word stands in a sorted table, and whether it does."""
    place = np.minimum(np.searchsorted(table, wanted), len(table) - 1)
    return place, table[place] == wanted


def baselines(training: Sequence[bytes], held_out: Sequence[bytes]) -> dict[str, float]:
    """Measure held-out documents, laid end to end, with what needs no neural network.

    `xz` is `xz -9`: it sees at most the last 64 MiB and takes about 0.7 GB of memory. All three take about 3 s a
    megabyte of training text on one core.

    Returns:
        Bits per byte of held-out text: `byte_model` (order 5, fitted on the training text), `xz` (held-out text
        alone), `xz_primed` (after the training text: size of both less size of the first).
    """
    before, text = b"".join(training), b"".join(held_out)
    if not text:
        raise DataError("baselines: no text to measure; found `0` held-out bytes; set data.held_out_share above 0")
    marks, names = [time.monotonic()], ("byte_model", "xz", "xz_primed")
    byte_model = ByteModel(before).bits(text)
    marks.append(time.monotonic())
    alone = 8 * len(lzma.compress(text, preset=9))
    marks.append(time.monotonic())
    primed = 8 * (len(lzma.compress(before + text, preset=9)) - len(lzma.compress(before, preset=9)))
    marks.append(time.monotonic())
    result = {name: bits / len(text) for name, bits in zip(names, (byte_model, alone, primed), strict=True)}
    for name, (begin, end) in zip(names, pairwise(marks), strict=True):
        log.info("baseline %s: %.3f bits/byte in %.1f s", name, result[name], end - begin)
    return result
