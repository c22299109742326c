"""Random operations on whole engines: whatever happens, each answer is to the last bit the one of a fresh engine."""

import functools

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from triax.config.model import BlockResiduals
from triax.config.serve import Caching, Drafting, HostPool, Prefixes, Scheduling, Serve
from triax.data.tokenizer import Tokenizer
from triax.errors import CapacityError
from triax.model.decoder import Decoder
from triax.serve.engine import Engine
from triax.serve.request import Request, Sampling

PAGE = 8
STEM = tuple(1 + (i * i + 3 * i) % 250 for i in range(50))
PROMPTS = [
    *(STEM[:n] for n in (1, 7, 8, 9, 16, 24, 33, 50)),
    (*STEM[:24], 7, 8, 9),
    (*STEM[:16], *STEM[:16], 5),
    STEM[::-1][:20],
    (*STEM[:33], 1),
]
WAYS = [Sampling(), Sampling(temperature=1.0), Sampling(temperature=0.7, top_p=0.9, frequency_penalty=0.5)]
OPERATIONS = st.lists(
    st.one_of(
        st.tuples(st.just("add"), st.integers(0, len(PROMPTS) - 1), st.integers(0, len(WAYS) - 1)),
        st.tuples(st.just("step"), st.integers(1, 6)),
        st.tuples(st.sampled_from(["abort", "reset", "park", "fault"])),
    ),
    min_size=4,
    max_size=24,
)
ENGINES = st.fixed_dictionaries(
    {
        "step_tokens": st.sampled_from([8, 13, 64]),
        "pages": st.sampled_from([13, 20, 60]),
        "slots": st.sampled_from([4, 7, 20]),
        "host": st.booleans(),
        "drafts": st.booleans(),
    }
)


@pytest.fixture(scope="module")
def world(t0):
    """A model, its tokenizer, and what a fresh engine answers to each request, found once."""
    tokenizer = Tokenizer.train(["some words of some text, some more words"] * 3, 270)
    torch.manual_seed(7)
    small = {"num_layers": 2, "mla_layers": (1,), "residuals": BlockResiduals(block_layers=1)}
    model = Decoder(t0.model_copy(update=small)).eval()
    with torch.no_grad():
        model.head.weight.mul_(20)
        for name, weight in model.named_parameters():
            if name.endswith("output.weight"):
                weight.mul_(4)

    @functools.cache
    def expected(prompt, way):
        engine = Engine(model, tokenizer, serve({"step_tokens": 64, "pages": 60, "slots": 20}, Prefixes=None))
        engine.add(request("x", prompt, way))
        return [found for _ in range(20) for update in engine.step() for found in told(update)]

    return model, tokenizer, expected


def serve(shape, **changes):
    host = HostPool(memory_bytes=1 << 20) if shape.get("host") else None
    prefixes = changes.get("Prefixes", Prefixes(align=PAGE, first=16, gap=4, write_back_tokens=0))
    drafting = Drafting(max_drafts=3, is_adaptive=False, ngram=2) if shape.get("drafts") else None
    most = min(5, shape["step_tokens"])
    return Serve(
        is_deterministic=True,
        is_debugging=True,
        scheduling=Scheduling(step_tokens=shape["step_tokens"], mixed_prefill_tokens=8, max_running=most),
        cache=Caching(page_tokens=PAGE, pages=shape["pages"], slots=shape["slots"], prefixes=prefixes, host=host),
        drafting=drafting,
    )


def request(name, prompt, way):
    return Request(name, PROMPTS[prompt], max_tokens=6, sampling=WAYS[way], seed=prompt, top_logprobs=1)


def told(update):
    return [(info.token, info.logprob, info.top) for info in update.tokens]


def play(world, shape, operations):
    model, tokenizer, expected = world
    engine = Engine(model, tokenizer, serve(shape))
    asked, said, reasons = {}, {}, {}

    def step(count):
        for _ in range(count):
            for update in engine.step():
                said[update.id] += told(update)
                if update.finish_reason is not None:
                    assert update.id not in reasons, "a request ends once"
                    reasons[update.id] = update.finish_reason

    launch = engine.runner.launch
    for number, (kind, *details) in enumerate(operations):
        if kind == "add":
            name = f"r{number}"
            try:
                engine.add(request(name, *details))
            except CapacityError:
                continue
            asked[name], said[name] = details, []
        elif kind == "step":
            step(*details)
        elif kind == "abort" and engine._numbers:
            engine.abort(sorted(engine._numbers)[0])
        elif kind == "reset":
            engine.manager.reset()
        elif kind == "park":
            engine.scheduler.park_all()
        elif kind == "fault":
            engine.runner.launch = lambda plan: (_ for _ in ()).throw(RuntimeError("planted"))
            step(1)
            engine.runner.launch = launch
    for _ in range(3000):
        if not engine.has_work:
            break
        step(1)
    assert reasons.keys() == asked.keys(), "every request ends"
    for name, details in asked.items():
        answer = expected(*details)
        if reasons[name] == "length":
            assert said[name] == answer
        else:
            assert reasons[name] in ("abort", "error")
            assert said[name] == answer[: len(said[name])]
    engine.check_invariants()
    engine.manager.reset()
    figures = engine.metrics()
    assert (figures["pages_free"], figures["slots_free"]) == (figures["pages"], figures["slots"])


PHASES = [Phase.explicit, Phase.generate]  # shrinking such a case takes minutes; the operations are short as they are


@given(shape=ENGINES, operations=OPERATIONS)
@settings(max_examples=25, phases=PHASES)
def test_answers_do_not_depend_on_what_happens_around_them(world, shape, operations):
    play(world, shape, operations)


@pytest.mark.soak
@given(shape=ENGINES, operations=OPERATIONS)
@settings(max_examples=2000, phases=PHASES)
def test_answers_do_not_depend_on_what_happens_around_them_at_length(world, shape, operations):
    play(world, shape, operations)
