"""What goes wrong in one request stays in it; nothing is left behind, and the next request is as in a fresh engine."""

import copy
import json

import pytest
import torch

from triax.config.model import BlockResiduals, Model
from triax.config.serve import Caching, Drafting, Prefixes, Scheduling, Serve
from triax.config.vision import Vision
from triax.data.tokenizer import Tokenizer
from triax.errors import CapacityError, CheckpointError, ConfigError, DataError
from triax.model.decoder import Decoder
from triax.serve.engine import Engine
from triax.serve.request import MediaItem, Request, Sampling, Structure

LONG = tuple(1 + (i * i + 3 * i) % 250 for i in range(40))


@pytest.fixture(scope="module")
def tokenizer():
    return Tokenizer.train(["some words of some text, some more words"] * 3, 270)


def build(settings: Model, seed=5):
    torch.manual_seed(seed)
    model = Decoder(settings).eval()
    with torch.no_grad():
        model.head.weight.mul_(20)
        for name, weight in model.named_parameters():
            if name.endswith("output.weight"):
                weight.mul_(4)
    return model


@pytest.fixture(scope="module")
def small(t0):
    changes = {"num_layers": 2, "mla_layers": (1,), "residuals": BlockResiduals(block_layers=1)}
    return t0.model_copy(update=changes)


@pytest.fixture(scope="module")
def model(small):
    return build(small)


def make(model, tokenizer, **changes):
    cache = {"page_tokens": 8, "pages": 40, "slots": 16, "prefixes": Prefixes(align=8, first=16, gap=4)}
    return Engine(
        model,
        tokenizer,
        Serve(
            is_deterministic=True,
            is_debugging=True,
            scheduling=Scheduling(step_tokens=64, mixed_prefill_tokens=32, max_running=6, max_waiting=4),
            cache=Caching(**cache | changes.pop("cache", {})),
            **changes,
        ),
    )


def ask(name, tokens=LONG, **options):
    return Request(name, tokens, **{"max_tokens": 8, "top_logprobs": 0, **options})


def run(engine, *requests):
    """Return each request's tokens with logprobs and its last update."""
    for request in requests:
        engine.add(request)
    said, last = {}, {}
    while engine.has_work:
        for update in engine.step():
            said.setdefault(update.id, []).extend((info.token, info.logprob) for info in update.tokens)
            last[update.id] = update
    engine.check_invariants()
    return said, last


def assert_empty(engine):
    """Nothing of any request is left but what the prefix cache keeps; without it every page and slot is free."""
    engine.check_invariants()
    assert not engine.scheduler.has_work
    assert not engine.runner.sequences
    engine.manager.reset()
    figures = engine.metrics()
    assert figures["pages_free"] == figures["pages"]
    assert figures["slots_free"] == figures["slots"]


def test_logits_of_nan_end_their_own_request_with_an_error(model, tokenizer):
    expected, _ = run(make(model, tokenizer), ask("b", LONG[::-1]))
    engine = make(model, tokenizer)
    steps = iter(range(99))

    def spoil(logits):
        if next(steps) == 3:
            logits[0] = float("nan")

    engine.runner.poison = spoil
    said, last = run(engine, ask("a"), ask("b", LONG[::-1]))
    assert (last["a"].finish_reason, "no distribution" in last["a"].error) == ("invalid", True)
    assert said["b"] == expected["b"]
    again, _ = run(engine, ask("a again"))
    assert again["a again"] == run(make(model, tokenizer), ask("x"))[0]["x"], "nothing spoilt was kept"
    assert_empty(engine)


@pytest.mark.parametrize("failing", [(2,), (0, 4), (1, 2)])
def test_a_step_that_fails_is_done_again_from_what_is_known(model, tokenizer, failing):
    requests = [ask("a", sampling=Sampling(temperature=1.0), seed=3), ask("b", LONG[::-1])]
    expected, _ = run(make(model, tokenizer), *requests)
    engine = make(model, tokenizer)
    launch, calls = engine.runner.launch, iter(range(99))

    def fault(plan):
        if next(calls) in failing:
            raise RuntimeError("out of memory")
        return launch(plan)

    engine.runner.launch = fault
    said, last = run(engine, *requests)
    assert said == expected
    assert {update.finish_reason for update in last.values()} == {"length"}
    assert_empty(engine)


def test_a_request_whose_steps_always_fail_ends_with_an_error(model, tokenizer):
    engine = make(model, tokenizer)

    def fault(plan):
        raise RuntimeError("out of memory")

    launch, engine.runner.launch = engine.runner.launch, fault
    _, last = run(engine, ask("a"))
    assert last["a"].finish_reason == "error"
    assert "out of memory" in last["a"].error
    engine.runner.launch = launch
    _, last = run(engine, ask("b"))
    assert last["b"].finish_reason == "length"
    assert_empty(engine)


def test_an_abort_at_any_step_leaves_nothing_and_disturbs_nobody(model, tokenizer):
    expected, _ = run(make(model, tokenizer), ask("b", LONG[::-1]))
    for moment in range(9):
        engine = make(model, tokenizer)
        engine.add(ask("a"))
        engine.add(ask("b", LONG[::-1]))
        updates = [update for _ in range(moment) for update in engine.step()]
        engine.abort("a")
        engine.abort("a")
        while engine.has_work:
            updates += engine.step()
        said = [(info.token, info.logprob) for update in updates if update.id == "b" for info in update.tokens]
        assert said == expected["b"]
        assert [u.finish_reason for u in updates if u.id == "a" and u.finish_reason] == [
            "abort" if moment < 9 else None
        ]
        assert_empty(engine)


def test_a_deadline_ends_a_request(model, tokenizer):
    engine = make(model, tokenizer)
    now = [0.0]
    engine.scheduler.clock = lambda: now[0]
    engine.add(ask("a", deadline_s=5.0, max_tokens=30))
    first = engine.step()
    now[0] = 6.0
    last = [update for _ in range(3) for update in engine.step()]
    assert [update.finish_reason for update in first + last if update.finish_reason] == ["deadline"]
    assert_empty(engine)


def test_new_weights_answer_as_a_fresh_engine_with_them_and_bad_ones_change_nothing(small, tokenizer):
    model, other = build(small), build(small, 6)
    engine = make(model, tokenizer)
    before, _ = run(engine, ask("a"))
    good = copy.deepcopy(model.state_dict())
    for fault in ("missing", "shape", "nan"):
        bad = dict(other.state_dict())
        name = "layers.0.attention.query.weight"
        bad[name] = {"shape": bad[name][:1], "nan": bad[name] * float("nan")}.get(fault, bad[name])
        if fault == "missing":
            del bad[name]
        with pytest.raises(CheckpointError, match="weights"):
            engine.update_weights(bad)
        assert all(torch.equal(good[key], value) for key, value in model.state_dict().items())
    assert engine.weight_version == 0
    assert run(engine, ask("b"))[0]["b"] == before["a"]
    assert engine.update_weights(other.state_dict()) == 1
    said, last = run(engine, ask("c"))
    assert said["c"] == run(make(other, tokenizer), ask("x"))[0]["x"]
    assert last["c"].usage.cached_tokens == 0, "what the old weights computed is not reused"
    assert_empty(engine)


def test_pauses_hold_finish_or_end_what_runs(small, tokenizer):
    expected, _ = run(make(build(small), tokenizer), ask("x"))
    engine = make(build(small), tokenizer)
    engine.add(ask("a"))
    engine.step()
    engine.pause("keep")
    assert not engine.has_work
    assert engine.step() == []
    engine.resume()
    said = [(info.token, info.logprob) for _ in range(12) for update in engine.step() for info in update.tokens]
    assert said[-7:] == expected["x"][-7:]
    engine.add(ask("c"))
    engine.step()
    engine.pause("wait")
    engine.add(ask("later"))
    updates = []
    while engine.has_work:
        updates += engine.step()
    assert {update.id for update in updates} == {"c"}, "what came before is worked off, what came later waits"
    assert updates[-1].finish_reason == "length"
    engine.pause("keep")
    engine.resume()
    assert run(engine, ask("last"))[0]["later"] == expected["x"]
    engine.add(ask("b"))
    engine.step()
    engine.pause("abort")
    assert [update.finish_reason for update in engine.step()] == ["abort"]
    engine.resume()
    assert_empty(engine)


def test_a_preempted_or_reset_request_says_what_an_undisturbed_one_says(model, tokenizer):
    expected, _ = run(make(model, tokenizer), ask("x"), ask("y", LONG[::-1]))
    for moment in range(1, 6):
        engine = make(model, tokenizer)
        engine.add(ask("x"))
        engine.add(ask("y", LONG[::-1]))
        updates = [update for _ in range(moment) for update in engine.step()]
        engine.manager.reset()
        engine.scheduler.park_all()
        while engine.has_work:
            updates += engine.step()
        for name in ("x", "y"):
            said = [(info.token, info.logprob) for update in updates if update.id == name for info in update.tokens]
            assert said == expected[name]
        assert_empty(engine)


def test_what_cannot_be_answered_is_refused_and_leaves_nothing(model, tokenizer):
    engine = make(model, tokenizer)
    bad = {
        ask("a", ()): (DataError, "there is no prompt"),
        ask("a", (1, 999)): (DataError, "token `999`"),
        ask("a", max_tokens=-1): (ConfigError, "max_tokens"),
        ask("a", seed=-1): (ConfigError, "seed"),
        ask("a", top_logprobs=21): (ConfigError, "top_logprobs"),
        ask("a", max_tokens=400): (CapacityError, "can never run"),
        ask("a", max_tokens=2**21): (DataError, "too long"),
        ask("a", structure=Structure("json_schema", "{")): (ConfigError, "structure"),
        ask("a", sampling=Sampling(bias=((300, 1.0),))): (DataError, "token `300`"),
        ask("a", (1, 300), score_prompt=True): (DataError, "token `300`"),
        ask("a", stop_ids=(-1,)): (DataError, "token `-1`"),
        ask("a", media=(MediaItem("x", 0, 1),)): (DataError, "reads text only"),
    }
    for request, (kind, words) in bad.items():
        with pytest.raises(kind, match=words):
            engine.add(request)
    engine.add(ask("a"))
    with pytest.raises(ConfigError, match="the id is in use"):
        engine.add(ask("a"))
    for n in range(4):
        engine.add(ask(f"waiting {n}"))
    with pytest.raises(CapacityError, match="too many requests wait"):
        engine.add(ask("one more"))
    for name in ("a", *(f"waiting {n}" for n in range(4))):
        engine.abort(name)
    while engine.has_work:
        engine.step()
    assert_empty(engine)


def test_a_structured_answer_has_its_form_also_with_drafts_and_company(model, tokenizer):
    properties = {"a": {"enum": ["x", "y"]}, "b": {"type": "boolean"}}
    schema = json.dumps({"type": "object", "properties": properties, "required": ["a", "b"]})
    request = ask("a", structure=Structure("json_schema", schema), max_tokens=60, sampling=Sampling(temperature=1.0))
    said = []
    for drafting in (None, Drafting(max_drafts=3, is_adaptive=False)):
        engine = make(model, tokenizer, drafting=drafting)
        tokens, last = run(engine, request, ask("b", LONG[::-1]))
        assert last["a"].finish_reason == "stop"
        said.append(tokens["a"])
        assert_empty(engine)
    assert said[0] == said[1]
    text = tokenizer.decode([token for token, _ in said[0]])
    assert text in {f'{{"a":"{a}","b":{b}}}' for a in "xy" for b in ("true", "false")}


@pytest.fixture(scope="module")
def seeing(small):
    tower = Vision(width=16, num_layers=1, num_heads=2, head_dim=8, mlp_dim=24, patch=4, table_rows=4, table_columns=4,
                   slot_token=300)  # fmt: skip
    return build(small.model_copy(update={"vision": tower}))


def picture(seed, start, digest=None):
    pixels = torch.randn(16, 3, 4, 4, generator=torch.Generator().manual_seed(seed))
    return MediaItem(digest or f"picture {seed}", start, 4, pixels.numpy().tobytes(), (1, 4, 4))


def test_pictures_are_seen_cut_cached_and_told_apart(seeing, tokenizer):
    tokens = (*LONG[:13], *[300] * 4, *LONG[13:20], *[300] * 4, *LONG[20:30])
    how = Sampling(repetition_penalty=1.2)  # slots are no tokens that it could punish
    request = ask("a", tokens, media=(picture(1, 13), picture(2, 24)), sampling=how)
    expected, _ = run(make(seeing, tokenizer), request)
    engine = make(seeing, tokenizer)
    engine.scheduler.settings = engine.scheduler.settings.model_copy(update={"step_tokens": 6})
    said, _ = run(engine, request)
    assert said == expected, "a step may end inside a picture"
    engine = make(seeing, tokenizer)
    run(engine, request)
    said, last = run(engine, request)
    assert said == expected
    assert last["a"].usage.cached_tokens > 24
    other = ask("b", tokens, media=(picture(3, 13), picture(2, 24)))
    said, last = run(engine, other)
    assert last["b"].usage.cached_tokens < 16, "another picture is another prefix"
    assert said["b"] == run(make(seeing, tokenizer), other)[0]["b"]
    assert said["b"] != expected["a"]
    assert_empty(engine)


def test_pictures_that_do_not_fit_are_refused(seeing, tokenizer):
    engine = make(seeing, tokenizer)
    tokens = (*LONG[:5], *[300] * 4, *LONG[5:9])
    item = picture(1, 5)
    with pytest.raises(DataError, match="slots and pictures do not match"):
        engine.add(ask("a", tokens))
    with pytest.raises(DataError, match="bytes of pixels"):
        engine.add(ask("a", tokens, media=(MediaItem("x", 5, 4, item.pixels[:-4], (1, 4, 4)),)))
    with pytest.raises(DataError, match="does not fit its slots"):
        engine.add(ask("a", tokens, media=(MediaItem("x", 5, 4, item.pixels, (1, 2, 4)),)))
    with pytest.raises(DataError, match="share slots"):
        engine.add(ask("a", tokens, media=(item, picture(2, 6))))
    assert_empty(engine)
