from itertools import pairwise
from math import ceil

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from triax.data.pack import Rows, TokenStream, encode, held_out_batches
from triax.data.source import Document
from triax.data.tokenizer import Tokenizer
from triax.errors import DataError

BORDER = 7
document_sizes = st.lists(st.integers(0, 9), min_size=1, max_size=8)


def stream_of(sizes, dtype=np.uint16, first=100) -> TokenStream:
    """Documents of these many tokens; every token of the stream but the border is a number of its own."""
    starts = np.cumsum([0, *(size + 1 for size in sizes)]).astype(np.int64)
    tokens = np.arange(first, first + starts[-1]).astype(dtype)
    tokens[starts[:-1]] = BORDER
    return TokenStream(tokens, starts, np.array(sizes, np.int64), BORDER)


def documents_of(stream) -> list[tuple[int, ...]]:
    return [tuple(stream.tokens[a:b].tolist()) for a, b in pairwise(stream.starts)]


def test_a_document_becomes_a_border_and_its_tokens():
    tokenizer = Tokenizer.train(["ab ab ab"], 258)
    steps = []
    stream = encode(
        [Document("a", "ab é"), Document("b", "x")], tokenizer, lambda done, total: steps.append((done, total))
    )
    assert stream.tokens.tolist() == [
        *(tokenizer.border, *tokenizer.encode("ab é")),
        *(tokenizer.border, *tokenizer.encode("x")),
    ]
    assert stream.starts.tolist() == [0, stream.num_tokens - 2, stream.num_tokens]
    assert stream.document_bytes.tolist() == [5, 1]
    assert (stream.num_documents, stream.num_bytes, stream.tokens.dtype) == (2, 6, np.uint16)
    assert steps == [(5, 5)]


def test_f60_no_more_text_is_encoded_at_once_than_fits_however_long_a_document(monkeypatch):
    monkeypatch.setattr("triax.data.pack.ENCODED_AT_ONCE", 50)
    monkeypatch.setattr("triax.data.tokenizer.LONGEST_PIECE", 20)
    tokenizer = Tokenizer.train(["ab ab ab"], 258)
    documents = [Document("a", "ab\n" * 100), Document("b", ""), Document("c", "x\n" * 30), Document("d", "ab")]
    calls, steps = [], []

    def encode_batch(self, texts, inner=Tokenizer.encode_batch):
        calls.append(sum(map(len, texts)))
        return inner(self, texts)

    monkeypatch.setattr(Tokenizer, "encode_batch", encode_batch)
    stream = encode(documents, tokenizer, lambda done, total: steps.append((done, total)))
    assert max(calls) <= 50
    assert len(calls) == len(steps) >= 8
    assert steps[-1] == (362, 362)
    expected = [[tokenizer.border, *tokenizer.encode(document.text)] for document in documents]
    assert documents_of(stream) == [tuple(tokens) for tokens in expected]
    assert stream.document_bytes.tolist() == [300, 0, 60, 2]


def test_no_documents_make_an_empty_stream():
    stream = encode([], Tokenizer.train(["ab ab ab"], 258))
    assert (stream.num_tokens, stream.num_bytes, stream.starts.tolist()) == (0, 0, [0])
    assert list(held_out_batches(stream, 4, 8)) == []
    assert stream.within(100) is stream


@given(document_sizes, st.integers(1, 7), st.integers(1, 3))
def test_evaluation_sees_every_token_once_and_knows_what_follows_it(sizes, seq_len, num_rows):
    stream = stream_of(sizes)
    batches = list(held_out_batches(stream, seq_len, seq_len * num_rows))
    tokens = torch.cat([batch.tokens for batch in batches])
    targets = torch.cat([batch.targets for batch in batches])
    assert tokens.tolist() == stream.tokens.tolist()
    assert targets.tolist() == [*stream.tokens[1:].tolist(), BORDER]
    assert all(len(batch.tokens) == seq_len * num_rows for batch in batches[:-1])
    for batch in batches:
        check_sequences(batch, seq_len)


def check_sequences(batch, seq_len):
    """A sequence begins at each border and at each row, and nowhere else; none is empty."""
    begins = np.cumsum([0, *batch.lengths]).tolist()
    assert begins.pop() == len(batch.tokens)
    assert begins == [n for n, token in enumerate(batch.tokens.tolist()) if token == BORDER or n % seq_len == 0]


@given(document_sizes, st.data())
def test_what_follows_a_token_in_a_row_follows_it_in_its_document(sizes, data):
    stream = stream_of(sizes)
    seq_len = data.draw(st.integers(1, stream.num_tokens))
    rows = Rows(stream, seq_len, [data.draw(st.integers(0, 99))])
    num_rows = ceil(3 * stream.num_tokens / seq_len)
    served = [tuple(rows[number].tolist()) for number in range(num_rows)]
    assert all(len(row) == seq_len + 1 for row in served)
    pairs = {(a, b) for row in served for a, b in pairwise(row)}
    inside = {(a, b) for document in documents_of(stream) for a, b in pairwise(document)}
    after = {(document[-1], BORDER) for document in documents_of(stream)}
    assert pairs <= inside | after
    assert {token for row in served for token in row} == set(stream.tokens.tolist())


@given(document_sizes.filter(lambda sizes: sum(sizes) > 0), st.data())
def test_every_epoch_serves_every_token_exactly_once(sizes, data):
    stream = stream_of(sizes)
    seq_len = data.draw(st.integers(1, stream.num_tokens))
    rows = Rows(stream, seq_len, [5])
    whole = np.concatenate([rows[number][:-1] for number in range(stream.num_tokens)])  # seq_len epochs, to the token
    values, counts = np.unique(whole, return_counts=True)
    expected = {token: seq_len for token in values.tolist()} | {BORDER: seq_len * len(sizes)}
    assert dict(zip(values.tolist(), counts.tolist(), strict=True)) == expected


@given(st.integers(0, 200), st.integers(0, 200))
def test_a_row_depends_on_its_number_only(first, second):
    stream = stream_of([5, 0, 3, 8, 1])
    rows = Rows(stream, 4, [3])
    rows[first]
    assert rows[second].tolist() == Rows(stream, 4, [3])[second].tolist()


def test_each_epoch_and_each_seed_has_an_order_of_its_own():
    stream = stream_of([3] * 50)
    in_epoch = stream.num_tokens // 4
    rows, other = Rows(stream, 4, [0]), Rows(stream, 4, [1])
    first = [rows[n].tolist()[1] for n in range(in_epoch)]
    second = [rows[n + in_epoch].tolist()[1] for n in range(in_epoch)]
    assert sorted(first) == sorted(second) == sorted(stream.tokens[1::4].tolist())
    assert first != second
    assert first != sorted(first)
    assert first != [other[n].tolist()[1] for n in range(in_epoch)]


def test_each_epoch_orders_the_documents_anew():
    """Rows hold ten whole documents each, so an order of rows alone would leave documents together for ever."""
    rows = Rows(stream_of([1] * 60), 20, [0])
    epochs = [{frozenset(rows[6 * epoch + n][:-1].tolist()) for n in range(6)} for epoch in range(3)]
    assert not epochs[0] & epochs[1]
    assert not epochs[1] & epochs[2]


def test_a_long_document_does_not_fill_rows_one_after_another():
    rows = Rows(stream_of([999, 999]), 10, [0])
    documents = [int(rows[n][1] > 1100) for n in range(100)]
    assert sum(a != b for a, b in pairwise(documents)) > 20


def test_a_row_longer_than_the_text_names_both_sizes():
    with pytest.raises(
        DataError, match=r"`512` is more than the training text has; found `12` tokens in `2` documents"
    ):
        Rows(stream_of([4, 6]), 512, [0])
    assert len(Rows(stream_of([4, 6]), 12, [0])[5]) == 13


def test_a_part_of_the_held_out_text_is_made_of_whole_documents():
    stream = stream_of([5, 9, 2, 1])
    part = stream.within(8)
    assert part.document_bytes.tolist() == [5, 2, 1]
    documents = documents_of(stream)
    assert documents_of(part) == [documents[0], documents[2], documents[3]]
    assert stream.within(0).document_bytes.tolist() == [1]
    assert stream.within(17).tokens.tolist() == stream.tokens.tolist()


def test_the_digest_tells_other_tokens_and_other_borders_apart():
    assert stream_of([3, 2]).digest == stream_of([3, 2]).digest
    assert len({stream_of([3, 2]).digest, stream_of([2, 3]).digest, stream_of([3, 2], first=101).digest}) == 3
