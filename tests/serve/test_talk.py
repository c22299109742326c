import pytest
import torch

from triax.data.tokenizer import Tokenizer
from triax.model.decoder import Decoder
from triax.serve.engine import Engine
from triax.serve.talk import Manner, talk


@pytest.fixture(scope="module")
def engine(t0):
    torch.manual_seed(0)
    tokenizer = Tokenizer.train(["def f(x):\n    return x\n" * 20], 270)
    return Engine(Decoder(t0), tokenizer)


@pytest.fixture
def conversation(engine):
    def hold(*lines, **manner):
        written, said = [], []
        talk(engine, lines, written.append, said.append, Manner(**{"tokens": 4, "temperature": 0.0} | manner))
        return "".join(written), said

    return hold


def test_a_line_is_continued_as_the_engine_continues_it(engine, conversation):
    text = engine.generate(["def f"], 4)[0].text
    assert conversation("def f")[0] == f"def f{text}\n"


def test_an_empty_line_goes_on_from_where_the_text_stopped(engine, conversation):
    first = engine.generate(["def f"], 4)[0].text
    second = engine.generate([f"def f{first}"], 4)[0].text
    assert conversation("def f", "")[0] == f"def f{first}\n{second}\n"


def test_escapes_become_line_breaks_and_tabs(engine, conversation):
    assert conversation("a:\\n\\tb")[0].startswith("a:\n\tb")


def test_each_text_draws_with_the_next_seed(conversation):
    texts = conversation("x", "x", temperature=1.0, tokens=12)[0].split("\n")
    assert texts[0] != texts[1]


def test_commands_are_not_continued(conversation):
    written, said = conversation("/help", "/set tokens=2", "/set", "/nonsense", "", "/quit", "def f")
    assert written == ""
    assert "base model" in said[0]
    assert "tokens=2 " in said[1]
    assert "`/nonsense` is no command" in said[2]
    assert "nothing to go on from" in said[3]


@pytest.mark.parametrize(
    ("word", "message"), [("tokens=x", "whole number"), ("temperature=", "number"), ("heat=1", "NAME=VALUE")]
)
def test_a_wrong_setting_is_refused_and_the_conversation_goes_on(conversation, word, message):
    written, said = conversation(f"/set {word}", "def f")
    assert message in said[0]
    assert written.startswith("def f")


def test_an_option_out_of_range_is_said_and_the_conversation_goes_on(conversation):
    written, said = conversation("/set top_p=0", "def f", "/set top_p=1", "def f")
    assert "top_p is out of range" in said[0]
    assert written.startswith("def f\ndef f")


def test_stopping_a_text_keeps_the_conversation(engine, monkeypatch):
    def interrupted(*words, **options):
        yield "some"
        raise KeyboardInterrupt

    stopping = Engine(engine.model, engine.tokenizer)
    monkeypatch.setattr(stopping, "stream", interrupted)
    written, said = [], []
    talk(stopping, ["a", "b"], written.append, said.append, Manner())
    assert "".join(written) == "asome\nbsome\n"
    assert said == ["stopped"] * 2


@pytest.mark.parametrize(("word", "message"), [(f"seed={2**64}", "seed is out of range"), ("tokens=-1", "max_tokens")])
def test_a_setting_out_of_range_is_said_and_the_conversation_goes_on(conversation, word, message):
    written, said = conversation(f"/set {word}", "def f", "/set seed=0", "/set tokens=2", "x")
    assert message in said[0]
    assert not any("ended the text" in text for text in said[:1])
    assert written.startswith("def f\nx")
