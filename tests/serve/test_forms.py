"""A grammar is made beside the engine: only the request that asked for it waits, and it can be ended meanwhile."""

import json
import subprocess
import sys
import threading
import time

import pytest
import torch
import zmq

from triax.config.model import BlockResiduals
from triax.config.serve import Caching, Scheduling, Serve
from triax.data.tokenizer import Tokenizer
from triax.model.decoder import Decoder
from triax.serve import wire
from triax.serve.engine import Engine
from triax.serve.process import Host
from triax.serve.request import Request, Structure
from triax.serve.structure import Guides

FORM = Structure("json_schema", json.dumps({"type": "object", "properties": {"a": {"enum": ["x", "y"]}}}))
BAD = Structure("json_schema", '{"type": "object", "properties": {"a": {"$ref": "#/nowhere"}}}')


class Slow(Guides):
    """Makes no grammar before it is let."""

    def __init__(self, tokenizer):
        super().__init__(tokenizer)
        self.may, self.asked = threading.Event(), []

    def prepare(self, structure):
        if not self.knows(structure):
            self.asked.append(structure)
            assert self.may.wait(200)
        super().prepare(structure)


class Talk:
    """A host that runs beside the test, and its socket."""

    def __init__(self, engine, parent):
        self.context = zmq.Context()
        ours, theirs = self.context.socket(zmq.PAIR), self.context.socket(zmq.PAIR)
        ours.bind("inproc://engine")
        theirs.connect("inproc://engine")
        self.socket, self.engine, self.seen = ours, engine, []
        self.host = Host(theirs, engine, parent)
        self.thread = threading.Thread(target=self.host.run, daemon=True)
        self.thread.start()

    def send(self, *messages):
        for message in messages:
            self.socket.send(wire.encode(message))

    def until(self, wanted, timeout_s=120.0):
        """Read messages until one is as wanted."""
        end = time.monotonic() + timeout_s
        while time.monotonic() < end:
            if self.socket.poll(100):
                message = wire.decode_up(self.socket.recv())
                self.seen.append(message)
                if wanted(message):
                    return message
        raise AssertionError(f"it does not come; seen {self.seen}")

    def ended(self, id_):
        """Wait for the end of a request and return its last update."""

        def ends(message):
            return any(one.id == id_ and one.finish_reason for one in getattr(message, "updates", ()))

        return next(one for one in self.until(ends).updates if one.id == id_ and one.finish_reason)

    def close(self):
        self.engine.guides.may.set()
        self.send(wire.Stop())
        self.thread.join(200)
        assert not self.thread.is_alive()
        self.host.forms.close()
        self.context.destroy(linger=0)


@pytest.fixture
def talk(t0):
    import os

    tokenizer = Tokenizer.train(["some words of some text, some more words"] * 3, 270)
    changes = {"num_layers": 2, "mla_layers": (1,), "residuals": BlockResiduals(block_layers=1)}
    model = Decoder(t0.model_copy(update=changes)).eval()
    torch.manual_seed(5)
    settings = Serve(
        scheduling=Scheduling(step_tokens=64, mixed_prefill_tokens=32, max_running=6),
        cache=Caching(page_tokens=8, pages=40, slots=16),
    )
    engine = Engine(model, tokenizer, settings)
    engine.guides = Slow(tokenizer)
    one = Talk(engine, os.getppid())
    yield one
    one.close()


def formed(id_, **changes):
    return Request(id_, (5, 6, 7), 12, **{"structure": FORM, "ignore_ends": False} | changes)


def test_others_go_on_while_a_grammar_is_made(talk):
    talk.send(wire.Add(formed("formed")), wire.Add(Request("free", (1, 2, 3), 8, ignore_ends=True)))
    assert talk.ended("free").finish_reason == "length"
    assert not any(one.id == "formed" for message in talk.seen for one in message.updates)
    talk.engine.guides.may.set()
    assert talk.ended("formed").finish_reason in ("stop", "length")


def test_one_grammar_serves_all_who_wait_for_it(talk):
    talk.send(*(wire.Add(formed(f"r{n}", seed=n)) for n in range(3)))
    talk.send(wire.Add(Request("free", (1, 2, 3), 2, ignore_ends=True)))
    talk.ended("free")
    talk.engine.guides.may.set()
    for n in range(3):
        assert any(one.id == f"r{n}" and one.finish_reason for m in talk.seen for one in m.updates) or talk.ended(
            f"r{n}"
        )
    assert talk.engine.guides.asked == [FORM]


def test_a_form_that_cannot_be_held_to_is_refused_once_that_is_known(talk):
    talk.send(wire.Add(formed("bad", structure=BAD)))
    talk.engine.guides.may.set()
    found = talk.until(lambda message: isinstance(message, wire.Refused))
    assert (found.id, found.kind) == ("bad", "SchemaError")
    assert "nothing is at `#/nowhere`" in found.message


def test_a_request_is_given_up_while_its_grammar_is_made(talk):
    talk.send(wire.Add(formed("left")), wire.Abort("left"), wire.Add(Request("free", (1, 2, 3), 2, ignore_ends=True)))
    talk.ended("free")
    assert not talk.host.forms.is_busy
    talk.engine.guides.may.set()
    talk.send(wire.Add(formed("again")))
    talk.ended("again")
    assert not any(one.id == "left" for message in talk.seen for one in message.updates)


def test_a_deadline_counts_the_making_of_the_grammar(talk):
    talk.send(wire.Add(formed("late", deadline_s=0.05)))
    told = talk.ended("late")
    assert told.finish_reason == "deadline"
    assert told.usage.prompt_tokens == 3
    assert not talk.host.forms.is_busy


def test_a_pause_ends_or_keeps_what_waits_for_a_grammar(talk):
    talk.send(wire.Add(formed("ended")), wire.Ask(1, "pause", {"mode": "abort"}))
    assert talk.ended("ended").finish_reason == "abort"
    talk.send(wire.Ask(2, "pause", {"mode": "keep"}), wire.Add(formed("kept")))
    talk.until(lambda message: isinstance(message, wire.Answer) and message.number == 2)
    talk.engine.guides.may.set()
    for _ in range(200):
        if not talk.host.forms.is_busy:
            break
        time.sleep(0.05)
    talk.send(wire.Ask(3, "metrics"))
    talk.until(lambda message: isinstance(message, wire.Answer) and message.number == 3)
    assert not any(one.id == "kept" for message in talk.seen for one in getattr(message, "updates", ()))
    talk.send(wire.Ask(4, "resume"))
    assert talk.ended("kept").finish_reason in ("stop", "length")


def test_the_servers_own_process_does_without_torch():
    words = "import sys, triax.serve.http.server; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", words], timeout=120).returncode == 0
