"""On a GPU: recorded steps are plain steps, steps planned ahead are steps in turn, and all say what a CPU says."""

import copy

import pytest
import torch

from triax.config.model import BlockResiduals
from triax.config.serve import Caching, Drafting, HostPool, Prefixes, Scheduling, Serve
from triax.data.tokenizer import Tokenizer
from triax.errors import UnsupportedError
from triax.model.decoder import Decoder
from triax.serve.engine import Engine
from triax.serve.request import Request, Sampling

pytestmark = pytest.mark.gpu

PROMPTS = [tuple(1 + (i * (7 + n) + n) % 250 for i in range(length)) for n, length in enumerate((5, 70, 1, 33, 129))]
WAYS = {
    "greedy": Sampling(),
    "drawn": Sampling(temperature=0.8, top_p=0.9),
    "penalised": Sampling(presence_penalty=1.5),
}


@pytest.fixture(scope="module")
def tokenizer():
    return Tokenizer.train(["some words of some text, some more words"] * 3, 270)


@pytest.fixture(scope="module")
def models(t0):
    torch.manual_seed(5)
    model = Decoder(t0.model_copy(update={"residuals": BlockResiduals(block_layers=1)})).eval()
    with torch.no_grad():
        model.head.weight.mul_(20)
        for name, weight in model.named_parameters():
            if name.endswith("output.weight"):
                weight.mul_(4)
    return {"cpu": model, "cuda": copy.deepcopy(model).cuda()}


def settings(pages=40, slots=20, host=None, **changes):
    prefixes = Prefixes(first=64, gap=16, write_back_tokens=16)
    return Serve(
        is_debugging=True,
        scheduling=Scheduling(step_tokens=128, mixed_prefill_tokens=64, max_running=8),
        cache=Caching(page_tokens=64, pages=pages, slots=slots, prefixes=prefixes, host=host),
        **changes,
    )


def finish(engine, requests):
    said = {request.id: [] for request in requests}
    for request in requests:
        engine.add(request)
    while engine.has_work:
        for update in engine.step():
            said[update.id] += [(info.token, info.logprob) for info in update.tokens]
            if update.finish_reason is not None:
                assert update.finish_reason in ("length", "stop"), update
    engine.check_invariants()
    return said


def ask(n, way, count=20, **options):
    return Request(f"r{n}", PROMPTS[n], max_tokens=count, sampling=WAYS[way], seed=n, **options)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("batch", [1, 2, 3, 5])
def test_graphs_and_plain_steps_and_a_cpu_say_the_same(models, tokenizer, way, batch):
    said = []
    for device, has_graphs in (("cpu", False), ("cuda", False), ("cuda", True)):
        engine = Engine(models[device], tokenizer, settings(has_graphs=has_graphs))
        said.append(finish(engine, [ask(n, way, top_logprobs=0) for n in range(batch)]))
    for other in said[1:]:
        for name, expected in said[0].items():
            assert [token for token, _ in other[name]] == [token for token, _ in expected]
            torch.testing.assert_close(
                torch.tensor([x for _, x in other[name]]), torch.tensor([x for _, x in expected]), rtol=0, atol=2e-3
            )


def test_a_new_request_in_a_freed_slot_is_as_in_a_fresh_engine(models, tokenizer):
    engine = Engine(models["cuda"], tokenizer, settings())
    requests = [ask(n, "greedy", 6 + 5 * n) for n in range(4)]
    for request in requests:
        engine.add(request)
    said = {}
    late = ask(4, "greedy")
    while engine.has_work:
        for update in engine.step():
            said[update.id] = said.get(update.id, ()) + tuple(info.token for info in update.tokens)
            if update.id == "r0" and update.finish_reason:
                engine.add(late)
    for request in (*requests, late):
        alone = finish(Engine(models["cuda"], tokenizer, settings()), [request])[request.id]
        assert said[request.id] == tuple(token for token, _ in alone)


@pytest.mark.parametrize("way", ["greedy", "drawn"])
def test_drafts_change_no_token(models, tokenizer, way):
    plain = finish(Engine(models["cuda"], tokenizer, settings()), [ask(n, way) for n in range(4)])
    engine = Engine(models["cuda"], tokenizer, settings(drafting=Drafting(max_drafts=3, is_adaptive=False)))
    assert finish(engine, [ask(n, way) for n in range(4)]) == plain


def test_a_warm_prefix_says_what_a_cold_one_says(models, tokenizer):
    engine = Engine(models["cuda"], tokenizer, settings())
    cold = finish(engine, [ask(4, "greedy")])
    assert finish(engine, [ask(4, "greedy")]) == cold
    assert engine.metrics()["prefix_hit_share"] > 0.4


def test_16_bit_weights_give_a_distribution(models, tokenizer):
    engine = Engine(copy.deepcopy(models["cuda"]).bfloat16(), tokenizer, settings())
    said = finish(engine, [ask(n, "greedy") for n in range(5)])
    assert all(len(tokens) == 20 for tokens in said.values())


def test_a_prefix_that_went_to_host_memory_comes_back_as_it_was(models, tokenizer):
    engine = Engine(models["cuda"], tokenizer, settings(pages=6, slots=3, host=HostPool(memory_bytes=1 << 23)))
    cold = finish(engine, [ask(4, "greedy")])
    for n in (1, 3, 1):
        finish(engine, [ask(n, "greedy", 40)])
    assert engine.cache_report()["pages_on_host"]
    before = engine.metrics()["cached_tokens_count"]
    assert finish(engine, [ask(4, "greedy")]) == cold
    assert engine.metrics()["cached_tokens_count"] > before


def test_deterministic_mode_is_refused_with_what_to_do(models, tokenizer):
    with pytest.raises(UnsupportedError, match="found a GPU"):
        Engine(models["cuda"], tokenizer, settings(is_deterministic=True))
