"""Random operations on whole engines: whatever happens, each answer is to the last bit the one of a fresh engine."""

import functools
import random
from collections import Counter

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from triax.config.model import BlockResiduals
from triax.config.serve import Caching, DiskPool, Drafting, HostPool, Prefixes, Scheduling, Serve
from triax.data.tokenizer import Tokenizer
from triax.errors import CapacityError, TriaxError
from triax.model.decoder import Decoder
from triax.serve.engine import Engine
from triax.serve.request import Request, Sampling

pytestmark = pytest.mark.usefixtures("no_shape_checks")

PAGE = 8
LENGTH = 4  # tokens of an answer
STEM = tuple(1 + (i * i + 3 * i) % 250 for i in range(50))
PROMPTS = [*(STEM[:n] for n in (1, 8, 9, 24, 40)), (*STEM[:24], 7, 8, 9), STEM[::-1][:20]]
WAYS = [Sampling(), Sampling(temperature=0.9, top_p=0.95, frequency_penalty=0.5)]
SALTS = ("", "of another tenant")
OPERATIONS = st.lists(
    st.one_of(
        st.tuples(
            st.sampled_from(["ask", "ask", "ask", "go on"]),
            st.integers(0, len(PROMPTS) - 1),
            st.integers(0, len(WAYS) - 1),
            st.sampled_from([0, 0, 0, -1]),
            st.sampled_from([SALTS[0], SALTS[0], SALTS[1]]),
            st.sampled_from([0, 1, 2, 9]),
        ),
        st.tuples(st.sampled_from(["step", "abort", "park", "fail", "keep"]), st.integers(1, 6)),
        st.tuples(st.sampled_from(["step", "step", "forget", "new weights", "restart"]), st.integers(1, 6)),
    ),
    min_size=5,
    max_size=10,
)
ENGINES = st.fixed_dictionaries(
    {
        "step_tokens": st.sampled_from([9, 16, 64]),
        "pages": st.sampled_from([8, 13, 40]),
        "slots": st.sampled_from([3, 5, 20]),
        "has_host": st.sampled_from([True, True, False]),
        "has_disk": st.booleans(),
        "drafts": st.sampled_from(["none", "none", "ngram", "half right"]),
        "is_ahead": st.booleans(),
    }
)


def build(t0, seed):
    torch.manual_seed(seed)
    small = {"num_layers": 2, "mla_layers": (1,), "residuals": BlockResiduals(block_layers=1)}
    model = Decoder(t0.model_copy(update=small)).eval()
    with torch.no_grad():
        model.head.weight.mul_(20)
        for name, weight in model.named_parameters():
            if name.endswith("output.weight"):
                weight.mul_(4)
    return model


class World:
    """Two sets of weights, and what a fresh engine says alone, without a cache, under each; found once."""

    def __init__(self, t0):
        self.tokenizer = Tokenizer.train(["some words of some text, some more words"] * 3, 270)
        self.weights = [build(t0, seed) for seed in (7, 8)]
        self.model = build(t0, 7)
        self.seen = Counter()
        self.expected = functools.cache(self._expected)

    def _expected(self, tokens, way, version):
        plain = Serve(is_deterministic=True, cache=Caching(page_tokens=PAGE, pages=20, slots=2, prefixes=None))
        engine = Engine(self.weights[version], self.tokenizer, plain)
        engine.add(request("x", tokens, way))
        return [found for _ in range(LENGTH) for update in engine.step() for found in told(update)]


@pytest.fixture(scope="module")
def world(t0):
    return World(t0)


def request(name, tokens, way, priority=0, salt=""):
    how = {"sampling": WAYS[way], "seed": 40 + len(tokens), "top_logprobs": 1, "ignore_ends": True}
    borders = (len(tokens) // 2,)
    return Request(name, tokens, LENGTH, priority=priority, cache_salt=salt, borders=borders, **how)


def told(update):
    return [(info.token, info.logprob, info.top) for info in update.tokens]


class HalfRight:
    """Drafts the right tokens, up to one that may be wrong."""

    def __init__(self, life):
        self.life, self.noise = life, random.Random(0)

    def propose(self, number, tokens, most):
        sequence = self.life.engine.scheduler.sequences[number]
        answer = self.life.world.expected(*self.life.asked[sequence.request.id])
        drafts = [token for token, *_ in answer[sequence.num_generated :]][: min(most, 3)]
        if drafts and self.noise.random() < 0.5:
            drafts[self.noise.randrange(len(drafts))] = 3
        return tuple(drafts)

    def odds(self, number):
        return None

    def learn(self, number, tried, right):
        pass

    def drop(self, number):
        pass


class Life:
    """Engines one after another over one folder, and all that they were asked and said."""

    def __init__(self, world, shape, folder, spoil):
        self.world, self.shape, self.folder, self.spoil, self.version = world, shape, folder, spoil, 0
        self.asked, self.said, self.reasons, self.trusted = {}, {}, {}, {}
        self.start()

    def start(self):
        self.model = self.world.model
        self.model.load_state_dict(self.world.weights[self.version].state_dict())
        shape = self.shape
        prefixes = Prefixes(align=PAGE, first=16, gap=4, write_back_tokens=0)
        most = min(5, shape["step_tokens"])
        settings = Serve(
            is_deterministic=True,
            is_debugging=True,
            scheduling=Scheduling(step_tokens=shape["step_tokens"], mixed_prefill_tokens=8, max_running=most),
            cache=Caching(
                page_tokens=PAGE,
                pages=shape["pages"],
                slots=shape["slots"],
                prefixes=prefixes,
                host=HostPool(memory_bytes=1 << 20) if shape["has_host"] else None,
                disk=DiskPool(path=str(self.folder)) if shape["has_disk"] else None,
            ),
            drafting=Drafting(max_drafts=3, is_adaptive=False, ngram=2) if shape["drafts"] == "ngram" else None,
        )
        self.engine = Engine(self.model, self.world.tokenizer, settings)
        copy = self.engine.store.copy
        self.engine.store.copy = lambda copies: copy(self.noted(copies))
        self.engine._is_ahead = shape["is_ahead"] and shape["drafts"] == "none"
        if shape["drafts"] == "half right":
            self.engine.drafter = self.engine.runner.drafter = HalfRight(self)
        self.spoil(self.engine)

    def noted(self, copies):
        self.world.seen.update(f"{one.source} to {one.target}" for one in copies)
        return copies

    def ask(self, name, tokens, way, priority, salt):
        self.asked[name], self.said[name] = (tokens, way, self.version), []
        try:
            self.engine.add(request(name, tokens, way, priority, salt))
        except CapacityError:
            del self.asked[name], self.said[name]

    def step(self, count):
        for _ in range(count):
            for update in self.engine.step():
                self.said[update.id] += told(update)
                if update.finish_reason is not None:
                    assert update.id not in self.reasons, "a request ends once"
                    self.reasons[update.id] = update.finish_reason
                    if update.usage is not None:
                        self.world.seen["restored tokens"] += update.usage.cached_tokens
                        self.world.seen["accepted drafts"] += update.usage.accepted_tokens

    def land(self):
        while self.engine._flights:
            self.engine._land(*self.engine._flights.popleft())

    def do(self, number, kind, details):
        engine = self.engine
        if kind == "ask":
            self.ask(f"r{number}", PROMPTS[details[0]], *details[1:-1])
            self.step(details[-1])
        elif kind == "go on":
            answer = self.world.expected(PROMPTS[details[0]], details[1], self.version)
            self.ask(f"r{number}", (*PROMPTS[details[0]], *(token for token, *_ in answer), 4), *details[1:-1])
            self.step(details[-1])
        elif kind == "step":
            self.step(*details)
        elif kind == "abort" and engine._numbers:
            engine.abort(sorted(engine._numbers)[details[0] % len(engine._numbers)])
        elif kind == "forget":
            self.land()
            engine.manager.reset()
        elif kind == "park":
            self.land()
            engine.scheduler.park_all()
        elif kind == "fail":
            launch = engine.runner.launch
            engine.runner.launch = lambda plan: (_ for _ in ()).throw(RuntimeError("planted"))
            self.step(1)
            engine.runner.launch = launch
        elif kind == "keep":
            engine.pause("keep")
            self.step(2)
            engine.resume()
        elif kind == "new weights":
            self.land()
            self.version = 1 - self.version
            engine.update_weights(self.world.weights[self.version].state_dict())
            self.world.seen["updates under way"] += bool(engine._numbers)
            for name in engine._numbers:  # their next tokens are by both weights
                waits = sum(len(update.tokens) for update in engine._told if update.id == name)
                self.trusted.setdefault(name, len(self.said[name]) + waits)
        elif kind == "restart":
            engine.pause("abort")
            self.finish()
            engine.close()
            self.start()
            self.world.seen["snapshots from disk"] += self.engine.cache_report()["snapshots"]
        self.engine.check_invariants()

    def finish(self):
        for _ in range(3000):
            if not self.engine.has_work and not self.engine.scheduler.has_work:
                break
            self.step(1)
            if self.engine._pause:
                self.engine.resume()
        assert self.reasons.keys() == self.asked.keys(), "every request ends"
        counts = self.engine.metrics()
        self.world.seen["preemptions"] += counts["preemptions_count"]

    def judge(self):
        for name, asked in self.asked.items():
            answer, said = self.world.expected(*asked), self.said[name]
            if name in self.trusted:
                assert said[: self.trusted[name]] == answer[: self.trusted[name]]
            elif self.reasons[name] == "length":
                assert said == answer
            else:
                assert self.reasons[name] in ("abort", "error")
                assert said == answer[: len(said)]
        self.engine.check_invariants()
        self.engine.manager.reset()
        figures = self.engine.metrics()
        assert (figures["pages_free"], figures["slots_free"]) == (figures["pages"], figures["slots"])
        self.engine.close()


PHASES = [Phase.explicit, Phase.generate]  # shrinking such a case takes minutes; the operations are short as they are
WAYS_OF_ANSWERING = (
    "restored tokens",
    "accepted drafts",
    "preemptions",
    "device to host",
    "host to device",
    "snapshots from disk",
    "updates under way",
)


def live(world, tmp_path_factory, examples, spoil=lambda engine: None):
    """Lead so many lives; each is judged at its end, and the books are compared after each operation."""

    @given(shape=ENGINES, operations=OPERATIONS)
    @settings(max_examples=examples, phases=PHASES, suppress_health_check=list(HealthCheck))
    def lived(shape, operations):
        life = Life(world, shape, tmp_path_factory.mktemp("pool"), spoil)
        for number, (kind, *details) in enumerate(operations):
            life.do(number, kind, details)
        life.finish()
        life.judge()

    lived()


@pytest.mark.timeout(900)
def test_answers_do_not_depend_on_what_happens_around_them(world, tmp_path_factory):
    live(world, tmp_path_factory, 200)
    assert all(world.seen[way] > 3 for way in WAYS_OF_ANSWERING), f"some way was hardly gone: {world.seen}"


@pytest.mark.soak
@pytest.mark.timeout(7200)
def test_answers_do_not_depend_on_what_happens_around_them_at_length(world, tmp_path_factory):
    live(world, tmp_path_factory, 2000)


def restores_nothing(engine):
    copy = engine.store.copy
    engine.store.copy = lambda copies: copy([one for one in copies if one.kind == "page" or one.target == "host"])


def clears_nothing(engine):
    engine.store.clear = lambda slots: None


def remembers_old_weights(engine):
    reset, update = engine.manager.reset, engine.update_weights

    def spoilt(source):
        engine.manager.reset = lambda: None
        update(source)
        engine.manager.reset = reset

    engine.update_weights = spoilt


@pytest.mark.parametrize("fault", [restores_nothing, clears_nothing, remembers_old_weights])
def test_a_planted_fault_is_found(world, tmp_path_factory, fault):
    with pytest.raises((AssertionError, TriaxError)):
        live(world, tmp_path_factory, 100, fault)
