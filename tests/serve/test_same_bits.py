"""Deterministic mode: a request's tokens and logprobs are the same to the last bit, however the engine got to them."""

import pytest
import torch

from triax.config.model import BlockResiduals
from triax.config.serve import Caching, Drafting, HostPool, Prefixes, Scheduling, Serve
from triax.data.tokenizer import Tokenizer
from triax.model.decoder import Decoder
from triax.model.layout import Layout
from triax.model.logprob import exact_logprobs
from triax.serve.engine import Engine
from triax.serve.request import Request, Sampling

PAGE = 8
LONG = tuple(1 + (i * i + 3 * i) % 250 for i in range(61))
OTHERS = tuple(tuple(1 + (i * (7 + n) + n) % 250 for i in range(13 + 9 * n)) for n in range(4))
WAYS = {"greedy": Sampling(), "drawn": Sampling(temperature=1.0, top_p=0.95, presence_penalty=0.5)}


@pytest.fixture(scope="module")
def tokenizer():
    return Tokenizer.train(["some words of some text, some more words"] * 3, 270)


@pytest.fixture(scope="module")
def model(t0):
    torch.manual_seed(7)
    small = {"num_layers": 2, "mla_layers": (1,), "residuals": BlockResiduals(block_layers=1)}
    model = Decoder(t0.model_copy(update=small)).eval()
    with torch.no_grad():
        model.head.weight.mul_(20)  # fresh logits are nearly flat; these make choices that differ between prompts
        for name, weight in model.named_parameters():
            if name.endswith("output.weight"):
                weight.mul_(4)
    return model


def settings(**changes):
    scheduling = {"step_tokens": 64, "mixed_prefill_tokens": 32, "max_running": 8, **changes.pop("scheduling", {})}
    cache = {
        "page_tokens": PAGE,
        "pages": 60,
        "slots": 24,
        "prefixes": Prefixes(align=PAGE, first=16, gap=4, write_back_tokens=0),
        **changes.pop("cache", {}),
    }
    return Serve(
        is_deterministic=True,
        is_debugging=True,
        scheduling=Scheduling(**scheduling),
        cache=Caching(**cache),
        **changes,
    )


def finish(engine, requests):
    """Run requests to their ends; return what each said: tokens with logprobs, text, reason; and its usage."""
    said, usage = {request.id: [] for request in requests}, {}
    for request in requests:
        engine.add(request)
    for _ in range(2000):
        if not engine.has_work:
            break
        for update in engine.step():
            if update.id in said:
                said[update.id] += [(info.token, info.logprob, info.top) for info in update.tokens]
                if update.finish_reason is not None:
                    assert update.finish_reason in ("length", "stop"), update
                    usage[update.id] = update.usage
    assert not engine.has_work, "every request ends"
    engine.check_invariants()
    return said, usage


def ask(name, tokens=LONG, way="drawn", **options):
    return Request(name, tokens, **{"max_tokens": 12, "sampling": WAYS[way], "seed": 9, "top_logprobs": 2, **options})


@pytest.fixture(scope="module")
def expected(model, tokenizer):
    """What a fresh engine says alone, without a cache."""
    said = {}
    for way in WAYS:
        engine = Engine(model, tokenizer, settings(cache={"prefixes": None}))
        said[way] = finish(engine, [ask("one", way=way)])[0]["one"]
        assert len({token for token, *_ in said[way]}) > 3, "a model that says something"
    return said


@pytest.mark.parametrize("way", WAYS)
def test_warm_is_cold(model, tokenizer, expected, way):
    engine = Engine(model, tokenizer, settings())
    for turn in range(3):
        said, usage = finish(engine, [ask("one", way=way)])
        assert said["one"] == expected[way]
        assert (usage["one"].cached_tokens > 40) == (turn > 0)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("step_tokens", [8, 11, 64])
def test_chunked_is_whole(model, tokenizer, expected, way, step_tokens):
    engine = Engine(model, tokenizer, settings(scheduling={"step_tokens": step_tokens}))
    assert finish(engine, [ask("one", way=way)])[0]["one"] == expected[way]


@pytest.mark.parametrize("way", WAYS)
def test_batched_with_strangers_is_alone(model, tokenizer, expected, way):
    engine = Engine(model, tokenizer, settings())
    strangers = [ask(f"stranger {n}", tokens, way, seed=n) for n, tokens in enumerate(OTHERS)]
    said, _ = finish(engine, [*strangers[:2], ask("one", way=way), *strangers[2:]])
    assert said["one"] == expected[way]
    again, _ = finish(engine, [*strangers[2:], ask("one", way=way)])
    assert again["one"] == expected[way]
    assert again["stranger 3"] == said["stranger 3"]


@pytest.mark.parametrize("host", [None, HostPool(memory_bytes=1 << 22)])
def test_preempted_is_undisturbed(model, tokenizer, expected, host):
    engine = Engine(model, tokenizer, settings(cache={"pages": 15, "slots": 8, "host": host}))
    said, _ = finish(engine, [ask("stranger", OTHERS[3], max_tokens=20), ask("one")])
    assert said["one"] == expected["drawn"]
    assert engine.scheduler.counts["preemptions"] > 0, "memory was short"


def test_restored_from_host_memory_is_cold(model, tokenizer, expected):
    host = HostPool(memory_bytes=1 << 23)
    engine = Engine(model, tokenizer, settings(cache={"pages": 16, "slots": 5, "host": host}))
    finish(engine, [ask("one")])
    for n in range(4):  # push the prefix out of the device
        finish(engine, [ask(f"stranger {n}", tuple(1 + (i * (11 + n)) % 250 for i in range(70)), seed=n)])
    copies = []
    copy = engine.store.copy
    engine.store.copy = lambda moves: (copies.extend(moves), copy(moves))[1]
    said, usage = finish(engine, [ask("one")])
    assert said["one"] == expected["drawn"]
    assert usage["one"].cached_tokens > 40
    assert any(one.source == "host" for one in copies), "the prefix came from host memory"


def test_restored_from_disk_is_cold(model, tokenizer, expected, tmp_path):
    engine = Engine(model, tokenizer, settings())
    finish(engine, [ask("one")])
    assert engine.save_pool(tmp_path) > 0
    other = Engine(model, tokenizer, settings())
    assert other.load_pool(tmp_path) > 0
    said, usage = finish(other, [ask("one")])
    assert said["one"] == expected["drawn"]
    assert usage["one"].cached_tokens > 40


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("drafting", [Drafting(max_drafts=3, is_adaptive=False), Drafting(), Drafting(kind="model")])
def test_speculated_is_plain_also_with_a_prefix_cache(model, tokenizer, expected, way, drafting):
    engine = Engine(model, tokenizer, settings(drafting=drafting), draft=model)
    for _ in range(2):
        said, usage = finish(engine, [ask("one", way=way), ask("stranger", OTHERS[1], way)])
        assert said["one"] == expected[way]
    if drafting.kind == "model" and way == "greedy":
        assert usage["one"].accepted_tokens > 5, "a model that drafts for itself is right"


class Oracle:
    """Drafts the right tokens, but the n-th of every draft is wrong."""

    def __init__(self, tokens, wrong):
        self.tokens, self.wrong = tokens, wrong

    def propose(self, number, tokens, most):
        done = len(tokens) - len(LONG)
        drafts = list(self.tokens[done : done + min(most, 4)])
        if self.wrong < len(drafts):
            drafts[self.wrong] = (drafts[self.wrong] + 1) % 250
        return tuple(drafts)

    def odds(self, number):
        return None

    def learn(self, number, tried, right):
        assert right == min(tried, self.wrong)

    def drop(self, number):
        pass


@pytest.mark.parametrize("wrong", range(5))
def test_drafts_that_are_right_k_of_4_leave_no_trace(model, tokenizer, expected, wrong):
    tokens = [token for token, *_ in expected["drawn"]]
    engine = Engine(model, tokenizer, settings(drafting=Drafting()))
    engine.drafter = Oracle(tokens, wrong)
    assert finish(engine, [ask("one")])[0]["one"] == expected["drawn"]
    plain = Engine(model, tokenizer, settings())
    finish(plain, [ask("one")])
    follow_up = (*LONG, *tokens, 7, 8, 9)
    engine.drafter = None
    said, usage = finish(engine, [ask("two", follow_up)])
    expected_said, expected_usage = finish(plain, [ask("two", follow_up)])
    assert said == expected_said
    assert usage["two"].cached_tokens == expected_usage["two"].cached_tokens > len(LONG), "the answer was kept"


def test_logprobs_are_the_trainer_s_for_the_same_tokens(model, tokenizer, expected):
    tokens = torch.tensor([*LONG, *(token for token, *_ in expected["drawn"])])
    trainer = exact_logprobs(model, tokens, Layout.of([len(tokens)]), tokenizer.vocab_size)
    assert trainer[len(LONG) :].tolist() == [logprob for _, logprob, _ in expected["drawn"]]
    engine = Engine(model, tokenizer, settings())
    engine.add(ask("scored", tuple(tokens.tolist()), max_tokens=0, score_prompt=True))
    prompt = [info for _ in range(9) for update in engine.step() for info in update.prompt]
    assert [info.token for info in prompt] == tokens[1:].tolist()
    assert [info.logprob for info in prompt] == trainer[1:].tolist()
