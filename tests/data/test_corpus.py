import json

import numpy as np
import pytest

from triax.config import data as config
from triax.data.corpus import Corpus, read_tokenizer, within
from triax.data.kimi import KimiTokenizer
from triax.data.mixture import PackedLoader
from triax.data.pack import encode, held_out_batches
from triax.data.source import Document
from triax.data.tokenizer import Tokenizer
from triax.errors import DataError


@pytest.fixture
def settings(tmp_path):
    for n in range(30):
        (tmp_path / f"{n}.txt").write_text(f"document {n} says hello to document {n + 1}\n" * 3)
    rows = [{"text": f"row {n} says hello to row {n + 1}\n" * 3} for n in range(20)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows) + '{"text": ""}\n')
    return config.Data(
        sources=(config.Folder(path=tmp_path, weight=3), config.Jsonl(path=tmp_path / "rows.jsonl")),
        tokenizer=config.Tokenizer(vocab_size=290),
        held_out_share=0.2,
        seq_len=16,
    )


def test_from_settings_to_batches(settings):
    corpus = Corpus.read(settings)
    assert corpus.names == ("data.sources.0 (folder)", "data.sources.1 (jsonl)")
    assert sum(map(len, corpus.training)) + len(corpus.held_out) == 50
    assert corpus.num_empty == 1
    steps = []
    tokenizer = corpus.tokenizer(settings.tokenizer)
    parts, held_out = corpus.encode(tokenizer, lambda done, total: steps.append((done, total)))
    characters = sum(len(document.text) for side in (*corpus.training, corpus.held_out) for document in side)
    assert steps[-1] == (characters, characters)
    assert steps == sorted(steps)
    assert [part.weight for part in parts] == [3, 1]
    assert held_out.num_bytes == sum(len(document.text.encode()) for document in corpus.held_out)
    batch = next(PackedLoader(parts, settings.seq_len, 64))
    assert len(batch.tokens) == 64
    texts = "".join(tokenizer.decode(batch.tokens.tolist()) for batch in held_out_batches(held_out, 16, 64))
    assert texts == "".join(document.text for document in corpus.held_out)


def test_the_tokenizer_is_learned_from_the_training_side_only(settings):
    corpus = Corpus.read(settings)
    learned = corpus.tokenizer(settings.tokenizer)
    training = [document.text for source in corpus.training for document in source]
    assert learned.identity == Tokenizer.train(training, 290).identity


def test_a_given_tokenizer_is_used(settings, tmp_path):
    given = Tokenizer.train(["other text, other text"], 262)
    given.save(tmp_path / "tokenizer.json")
    corpus = Corpus.read(settings)
    assert corpus.tokenizer(config.Tokenizer(path=tmp_path / "tokenizer.json")).identity == given.identity


@pytest.fixture
def kimi():
    return KimiTokenizer.train(["other text, other text"] * 3, 262)


@pytest.mark.parametrize("border", ["", "[EOS]"])
def test_f58_a_vocabulary_of_kimi_is_used_with_its_border(settings, kimi, tmp_path, border):
    kimi.save(tmp_path / "kimi")
    corpus = Corpus.read(settings)
    wanted = kimi.control[border or "[BOS]"]
    for path in (tmp_path / "kimi", tmp_path / "kimi" / "tiktoken.model"):
        tokenizer = corpus.tokenizer(config.Tokenizer(path=path, border=border))
        assert (tokenizer.opening, tokenizer.start) == ((wanted,), wanted)
        assert wanted in tokenizer.ends
        assert tokenizer.encode("a text[BOS]") == kimi.encode("a text[BOS]")
    parts, held_out = corpus.encode(tokenizer)
    assert {part.stream.border for part in parts} == {wanted}
    documents = [document.text for document in corpus.held_out]
    assert held_out.tokens.tolist() == [token for text in documents for token in (wanted, *kimi.encode(text))]
    tokenizer.save(tmp_path / "again")
    assert KimiTokenizer.load(tmp_path / "again").opening == (wanted,)


def test_f58_a_border_that_kimi_does_not_have_is_named(settings, kimi, tmp_path):
    kimi.save(tmp_path)
    with pytest.raises(DataError, match=r"data.tokenizer.border `<s>`: no control token .* choose one of .*`\[BOS\]`"):
        Corpus.read(settings).tokenizer(config.Tokenizer(path=tmp_path, border="<s>"))


def test_f58_the_released_vocabulary_can_be_trained_with(kimi_data):
    tokenizer = read_tokenizer(kimi_data / "kimi.tiktoken")
    assert (tokenizer.vocab_size, tokenizer.opening) == (163_840, (163_584,))
    stream = encode([Document("a", "漢字 text"), Document("b", "")], tokenizer)
    assert stream.tokens.tolist() == [163_584, *tokenizer.encode("漢字 text"), 163_584]
    assert stream.tokens.dtype == np.uint32


def test_f58_a_kimi_tokenizer_without_a_border_encodes_no_documents(kimi):
    with pytest.raises(DataError, match=r"set data.tokenizer.border"):
        encode([Document("a", "text")], kimi)


def test_a_vocabulary_that_the_training_text_does_not_support_is_refused(settings):
    with pytest.raises(DataError, match=r"data.tokenizer.vocab_size `4096` is more than the training text supports"):
        Corpus.read(settings).tokenizer(config.Tokenizer(vocab_size=4096))


def test_learning_reads_at_most_the_bytes_it_may():
    documents = [Document(str(n), "é" * 10) for n in range(9)]
    texts = list(within(documents, 45))
    assert [len(text.encode()) for text in texts] == [20, 20, 4]
    assert "".join(within(documents, 1000)) == "é" * 90
    assert list(within(documents, 20)) == ["é" * 10]


def test_f65_copies_of_held_out_text_in_the_training_text_are_told(tmp_path):
    rows = [{"text": f"row {n % 20}"} for n in range(40)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows) + '{"text": null}\n')
    settings = config.Data(sources=(config.Jsonl(path=tmp_path / "rows.jsonl"),), held_out_share=0.2)
    corpus = Corpus.read(settings)
    learned = {document.text for source in corpus.training for document in source}
    copies = sum(document.text in learned for document in corpus.held_out)
    assert copies
    empty, copied = corpus.notes
    assert empty == "data.sources.0 (jsonl): 1 of 41 documents are empty or null and are left out"
    assert copied.startswith(f"held-out text: {copies} of {len(corpus.held_out)} documents stand in the training text")


def test_f65_text_without_copies_has_no_notes(settings):
    assert [note for note in Corpus.read(settings).notes if "held-out" in note] == []
