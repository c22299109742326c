"""The forms that a GPU runs, on a CPU by the definitions of their kernels: same answers, planned ahead or in turn."""

import copy
import dataclasses

import pytest
import torch

from triax.config.model import BlockResiduals
from triax.config.serve import Caching, Drafting, Prefixes, Scheduling, Serve
from triax.data.tokenizer import Tokenizer
from triax.model import gated_mla
from triax.model.decoder import Decoder
from triax.model.layout import Layout
from triax.model.memory import Arena, Memory, Part
from triax.serve.engine import Engine
from triax.serve.request import Request, Sampling

PROMPTS = [tuple(1 + (i * (7 + n) + n) % 250 for i in range(length)) for n, length in enumerate((5, 70, 1, 33))]
WAYS = {
    "greedy": Sampling(),
    "drawn": Sampling(temperature=0.8, top_p=0.9),
    "penalised": Sampling(presence_penalty=1.5),
}


@pytest.fixture(scope="module")
def tokenizer():
    return Tokenizer.train(["some words of some text, some more words"] * 3, 270)


@pytest.fixture(scope="module")
def model(t0):
    torch.manual_seed(5)
    small = {"num_layers": 2, "mla_layers": (1,), "residuals": BlockResiduals(block_layers=1)}
    model = Decoder(t0.model_copy(update=small)).eval()
    with torch.no_grad():
        model.head.weight.mul_(20)
        for name, weight in model.named_parameters():
            if name.endswith("output.weight"):
                weight.mul_(4)
    return model


def engine_of(model, tokenizer, *, has_kernels, **changes):
    settings = Serve(
        is_debugging=True,
        scheduling=Scheduling(step_tokens=128, mixed_prefill_tokens=48, max_running=8),
        cache=Caching(pages=40, slots=20, prefixes=Prefixes(first=64, gap=16)),
        **changes,
    )
    engine = Engine(model, tokenizer, settings)
    if has_kernels:
        engine.store.device = dataclasses.replace(engine.store.device, has_kernels=True)
        engine._is_ahead = engine.drafter is None
    return engine


def finish(engine, way, count=8):
    said = {}
    for n, prompt in enumerate(PROMPTS):
        engine.add(Request(f"r{n}", prompt, max_tokens=count, sampling=WAYS[way], seed=n, top_logprobs=0))
    while engine.has_work:
        for update in engine.step():
            said.setdefault(update.id, []).extend((info.token, info.logprob) for info in update.tokens)
            assert update.finish_reason in (None, "length", "stop"), update
    engine.check_invariants()
    return said


def assert_same(found, expected):
    assert found.keys() == expected.keys()
    for name, tokens in expected.items():
        assert [token for token, _ in found[name]] == [token for token, _ in tokens]
        one, other = (torch.tensor([logprob for _, logprob in side]) for side in (found[name], tokens))
        torch.testing.assert_close(one, other, rtol=0, atol=1e-3)


@pytest.mark.parametrize("way", WAYS)
def test_steps_launched_ahead_say_what_steps_in_turn_say(model, tokenizer, way):
    expected = finish(engine_of(model, tokenizer, has_kernels=False), way)
    assert_same(finish(engine_of(model, tokenizer, has_kernels=True), way), expected)


@pytest.mark.parametrize("way", ["greedy", "drawn"])
def test_drafts_of_unequal_number_change_no_token(model, tokenizer, way):
    expected = finish(engine_of(model, tokenizer, has_kernels=False), way)
    drafting = Drafting(max_drafts=3, is_adaptive=False)
    assert_same(finish(engine_of(model, tokenizer, has_kernels=True, drafting=drafting), way), expected)


@pytest.mark.parametrize("gate", ["full", "low_rank"])
def test_joined_products_say_what_single_ones_say_also_after_new_weights(model, tokenizer, gate):
    shape = model.settings.model_copy(update={"kda": model.settings.kda.model_copy(update={"output_gate": gate})})
    torch.manual_seed(7)
    single, joined = Decoder(shape).eval(), Decoder(shape).eval()
    joined.load_state_dict(single.state_dict())
    joined.join()
    engine = engine_of(joined, tokenizer, has_kernels=True)
    assert_same(finish(engine, "greedy"), finish(engine_of(single, tokenizer, has_kernels=False), "greedy"))
    torch.manual_seed(9)
    other = Decoder(shape).eval()
    engine.update_weights(other.state_dict())
    assert_same(finish(engine, "greedy"), finish(engine_of(other, tokenizer, has_kernels=False), "greedy"))


def test_a_step_of_tensors_alone_is_the_step_of_lists_and_padding_touches_nobody(model):
    arenas = []
    for _ in range(2):
        torch.manual_seed(1)
        arena = Arena.empty(model.settings, 4, 9, 64)
        for part in (arena.state, arena.window, arena.latent):
            part.copy_(torch.randn(part.shape))
        arenas.append(dataclasses.replace(arena, has_kernels=True))
    parts = [Part(2, (3, 5), 70, 1), Part(1, (4,), 0, 1)]
    tokens = torch.tensor([7, 8, 0, 0])
    with torch.no_grad():
        memory = Memory.of(model.settings, arenas[0], parts, 2)
        expected = model(tokens[:2], memory.layout, memory)
        slots, positions = torch.tensor([2, 1, 0, 0]), torch.tensor([70, 0, 0, 0])
        tables = torch.tensor([[3, 5, 0, 0], [4, 0, 0, 0], [0] * 4, [0] * 4])
        memory = Memory.still(model.settings, arenas[1], slots, positions, tables)
        hidden = model(tokens, memory.layout, memory)
    torch.testing.assert_close(hidden[:2], expected)
    assert hidden.isfinite().all()
    for one, other in ((arenas[0].state, arenas[1].state), (arenas[0].window, arenas[1].window)):
        torch.testing.assert_close(one, other)
    torch.testing.assert_close(arenas[0].latent[:, 1:], arenas[1].latent[:, 1:])


def test_moving_a_model_undoes_what_was_joined(model):
    joined = Decoder(model.settings).eval()
    joined.load_state_dict(model.state_dict())
    joined.join()
    assert joined.layers[0].attention.joined is not None
    joined.double()
    expected = copy.deepcopy(model).double()
    tokens, layout = torch.arange(5), Layout.of([5])
    torch.testing.assert_close(joined(tokens, layout), expected(tokens, layout))


def test_a_short_piece_far_behind_its_beginning_is_absorbed_and_says_the_same(model, monkeypatch):
    said = []
    for far in (10**9, 64):
        monkeypatch.setattr(gated_mla, "FAR", far)
        torch.manual_seed(1)
        arena = Arena.empty(model.settings, 4, 9, 64)
        for part in (arena.state, arena.window, arena.latent):
            part.copy_(torch.randn(part.shape))
        arena = dataclasses.replace(arena, has_kernels=True)
        parts = [Part(1, (4,), 0, 1), Part(2, (3, 5), 70, 3), Part(3, (6,), 2, 5), Part(4, (7, 8), 66, 2)]
        with torch.no_grad():
            memory = Memory.of(model.settings, arena, parts, 1)
            said.append(model(torch.arange(11) + 7, memory.layout, memory))
    torch.testing.assert_close(said[1], said[0], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("has_kernels", [False, True])
def test_a_network_that_only_remembers_is_served_too(model, tokenizer, has_kernels):
    torch.manual_seed(3)
    only = Decoder(model.settings.model_copy(update={"mla_layers": ()})).eval()
    said = finish(engine_of(only, tokenizer, has_kernels=has_kernels), "greedy", count=4)
    whole = [*PROMPTS[1], *(token for token, _ in said["r1"][:-1])]
    with torch.no_grad():
        logits = only.logits(only(torch.tensor(whole), Layout.of([len(whole)])))[len(PROMPTS[1]) - 1 :]
    assert logits[:, : tokenizer.vocab_size].argmax(-1).tolist() == [token for token, _ in said["r1"]]
