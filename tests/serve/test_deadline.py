"""Deadlines hold while an engine is paused, too."""

import pytest
import torch

from triax.config.model import BlockResiduals
from triax.config.serve import Caching, Serve
from triax.data.tokenizer import Tokenizer
from triax.model.decoder import Decoder
from triax.serve.engine import Engine
from triax.serve.request import Request


@pytest.fixture
def engine(t0):
    torch.manual_seed(5)
    changes = {"num_layers": 2, "mla_layers": (1,), "residuals": BlockResiduals(block_layers=1)}
    tokenizer = Tokenizer.train(["some words of some text, some more words"] * 3, 270)
    model = Decoder(t0.model_copy(update=changes)).eval()
    return Engine(model, tokenizer, Serve(cache=Caching(page_tokens=8, pages=40, slots=16)))


@pytest.mark.parametrize("runs", [True, False])
def test_a_deadline_passes_in_a_paused_engine(engine, runs):
    clock = [100.0]
    engine.scheduler.clock = lambda: clock[0]
    if not runs:
        engine.pause("keep")
    engine.add(Request("late", (1, 2, 3), 50, ignore_ends=True, deadline_s=30.0))
    engine.add(Request("kept", (4, 5, 6), 4, ignore_ends=True))
    if runs:
        engine.step()
        engine.pause("keep")
    assert not engine.has_work
    clock[0] += 31
    assert engine.has_work, "else nobody asks it to step"
    assert [(one.id, one.finish_reason) for one in engine.step()] == [("late", "deadline")]
    assert not engine.has_work
    engine.resume()
    told = []
    while engine.has_work:
        told += engine.step()
    assert [one.id for one in told if one.finish_reason] == ["kept"]
    engine.check_invariants()
