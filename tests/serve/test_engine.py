from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from triax.config.model import BlockResiduals
from triax.data.tokenizer import Tokenizer
from triax.errors import CheckpointError, ConfigError, DataError
from triax.model.decoder import Decoder
from triax.model.layout import Layout
from triax.serve.engine import Engine

PROMPTS = ["def f(x):", "", "a longer prompt, of more than sixteen tokens", "é🙂"]
WAYS = [{}, {"temperature": 1.0}, {"temperature": 0.8, "top_k": 50, "top_p": 0.9, "min_p": 0.01}]


@pytest.fixture(scope="module")
def small(t0):
    """One KDA layer with a dense MLP, one MLA layer with experts."""
    return t0.model_copy(update={"num_layers": 2, "mla_layers": (1,), "residuals": BlockResiduals(block_layers=1)})


@pytest.fixture(scope="module")
def tokenizer():
    return Tokenizer.train(["some words of some text, some more words"] * 3, 270)


@pytest.fixture(scope="module")
def engine(small, tokenizer):
    torch.manual_seed(3)
    model = Decoder(small)
    with torch.no_grad():
        model.head.weight.mul_(20)  # fresh logits are nearly flat; these make choices that differ between prompts
    return Engine(model, tokenizer)


def recites(small, tokenizer, words):
    """An engine whose model continues any part of `words`, and then ends: its layers write nothing to the stream."""
    model = Decoder(small)
    path = [tokenizer.border, *tokenizer.encode(words), tokenizer.border]
    assert len(set(path)) == len(path) - 1, "a token has one successor"
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith(("output.weight", "down.weight", "experts.down", "latent_up.weight")):
                weight.zero_()
        model.head.weight.zero_()
        for token, successor in pairwise(path):
            model.head.weight[successor] += model.embed.weight[token] / model.embed.weight[token].norm() ** 2
    return Engine(model, tokenizer)


@pytest.mark.parametrize("way", WAYS)
def test_a_prompt_s_text_is_the_same_alone_in_company_and_streamed(engine, way):
    together = engine.generate(PROMPTS, 5, seed=[5, 6, 7, 8], **way)
    for prompt, seed, completion in zip(PROMPTS, [5, 6, 7, 8], together, strict=True):
        (alone,) = engine.generate([prompt], 5, seed=seed, **way)
        assert (alone.tokens, alone.text, alone.finish_reason) == (
            completion.tokens,
            completion.text,
            completion.finish_reason,
        )
        torch.testing.assert_close(torch.tensor(alone.logprobs), torch.tensor(completion.logprobs))
        assert "".join(engine.stream(prompt, 5, seed=seed, **way)) == alone.text
    assert len({completion.tokens for completion in together}) > 1


@settings(max_examples=3)
@given(data=st.data())
def test_the_order_and_the_leaving_of_others_change_nothing(engine, data):
    order = data.draw(st.permutations(range(len(PROMPTS))))
    stops = data.draw(st.lists(st.integers(0, 255), max_size=60, unique=True))
    first = engine.generate(PROMPTS, 5, temperature=1.0, seed=list(range(4)), stop_ids=stops)
    again = engine.generate([PROMPTS[i] for i in order], 5, temperature=1.0, seed=order, stop_ids=stops)
    assert [first[i].tokens for i in order] == [completion.tokens for completion in again]


def test_tokens_are_those_that_the_whole_model_finds_likeliest(engine):
    (completion,) = engine.generate(["some"], 5)
    tokens = [engine.tokenizer.border, *engine.tokenizer.encode("some")]
    for token, logprob in zip(completion.tokens, completion.logprobs, strict=True):
        with torch.no_grad():
            hidden = engine.model(torch.tensor(tokens), Layout.of([len(tokens)]))
            scores = engine.model.logits(hidden[-1:])[0, : engine.tokenizer.vocab_size].log_softmax(-1)
        assert int(scores.argmax()) == token
        assert float(scores[token]) == pytest.approx(logprob, abs=1e-4)
        tokens.append(token)
    assert completion.text == engine.tokenizer.decode(completion.tokens)


def test_seeds_make_texts_differ_and_repeat(engine):
    completions = engine.generate(["x"] * 3, 6, temperature=1.0, seed=[1, 2, 1])
    assert completions[0].tokens == completions[2].tokens
    assert completions[0].tokens != completions[1].tokens


def test_tokens_without_text_are_never_written(engine):
    unused = range(engine.tokenizer.vocab_size, engine.model.settings.vocab_size)
    assert len(unused) > 0
    completions = engine.generate(["x"] * 40, 4, temperature=100.0, seed=list(range(40)))
    assert not any(token in unused for completion in completions for token in completion.tokens)


def test_a_border_ends_the_text_and_is_no_part_of_it(small, tokenizer):
    engine = recites(small, tokenizer, "abc🙂.")
    for prompt, rest in {"": "abc🙂.", "a": "bc🙂.", "🙂": "."}.items():
        (completion,) = engine.generate([prompt], 20)
        assert (completion.text, completion.finish_reason) == (rest, "stop")
        assert completion.tokens == tuple(tokenizer.encode(rest))


def test_an_empty_prompt_starts_from_a_border_in_either_form(engine):
    results = engine.generate(["", [], [engine.tokenizer.border]], 5)
    assert results[0].tokens == results[1].tokens == results[2].tokens
    assert results[0].tokens == engine.generate([""], 5)[0].tokens


def test_a_streamed_character_comes_whole(small, tokenizer):
    engine = recites(small, tokenizer, "a🙂c")
    assert list(engine.stream("", 20)) == ["a", "🙂", "c"]
    assert "".join(engine.stream("", 3)) == engine.generate([""], 3)[0].text == "a\ufffd"


def test_the_limit_a_stop_token_and_a_stop_string_end_the_text(small, tokenizer):
    engine = recites(small, tokenizer, "abcdefg")

    def end(max_tokens=20, **options):
        (completion,) = engine.generate([""], max_tokens, **options)
        assert "".join(engine.stream("", max_tokens, **options)) == completion.text
        return completion.text, len(completion.tokens), completion.finish_reason

    assert end(3) == ("abc", 3, "length")
    assert end(0) == ("", 0, "length")
    assert end(stop_ids=tokenizer.encode("d")) == ("abc", 3, "stop")
    assert end(stop=["xyz", "de"]) == ("abc", 5, "stop")
    assert end(4, stop=["de"]) == ("abcd", 4, "length")


def test_logits_that_are_no_distribution_end_the_sequence_and_say_so(small, tokenizer):
    engine = recites(small, tokenizer, "abc")
    with torch.no_grad():
        engine.model.embed.weight[tokenizer.encode("b")] = float("nan")
    broken, fine = engine.generate(["", [tokenizer.border, *tokenizer.encode("c")]], 9)
    assert (broken.text, broken.finish_reason) == ("ab", "invalid")
    assert (fine.text, fine.finish_reason) == ("", "stop")


def test_the_model_is_left_as_it_was(engine):
    for training in (True, False):
        engine.model.train(training)
        text = engine.generate(["x"], 3)
        assert engine.model.training is training
        assert text == engine.generate(["x"], 3)
        assert not engine.model.largest_logits()
        assert all(weight.grad is None for weight in engine.model.parameters())


def test_no_prompts_give_no_texts(engine):
    assert engine.generate([]) == []


def test_bad_requests_are_refused_by_name(engine, tokenizer, small):
    with pytest.raises(DataError, match="token `512` is not in the vocabulary"):
        engine.generate([[1, 512]])
    with pytest.raises(DataError, match="token `-1`"):
        engine.generate([[-1]])
    with pytest.raises(ConfigError, match="max_tokens is out of range; found `-1`"):
        engine.generate(["x"], -1)
    with pytest.raises(ConfigError, match="one seed a prompt is needed; found 1 for 2"):
        engine.generate(["x", "y"], seed=[1])
    with pytest.raises(ConfigError, match="top_p is out of range"):
        engine.generate(["x"], top_p=0.0)
    with pytest.raises(CheckpointError, match="found 270 tokens for 269 rows"):
        Engine(Decoder(small.model_copy(update={"vocab_size": 269})), tokenizer)
