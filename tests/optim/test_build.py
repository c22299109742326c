import copy
import logging

import pytest
import torch
from torch import nn

from triax.config.optim import AdamW, MuonClip, QkClip
from triax.errors import CheckpointError, TrainError, UnsupportedError
from triax.optim import build

RULES = [MuonClip(lr=0.01), AdamW(lr=0.01)]


class Toy(nn.Module):
    """An embedding, two heads that measure logits, a norm, and a weight that no gradient reaches."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        self.query = nn.Linear(8, 8, bias=False)
        self.norm = nn.RMSNorm(8)
        self.unused = nn.Parameter(torch.ones(8))
        self.head = nn.Linear(8, 11, bias=False)
        self.largest_logit = None

    def matrices(self):
        return {"query.weight": (4,)}

    def shrink_query_key(self, factor, alpha):
        self.query.weight.data.view(2, 4, 8).mul_(factor[:, None, None])

    def reset_largest_logit(self):
        self.largest_logit = None

    def loss(self, tokens):
        hidden = self.norm(self.query(self.embed(tokens)).float())
        self.largest_logit = hidden.detach().float().view(-1, 2, 4).amax((0, 2))
        return nn.functional.cross_entropy(self.head(hidden).float(), tokens)


def train(model, optimizer, steps, first=0, scale=1.0):
    losses = []
    for step in range(first, first + steps):
        tokens = torch.randint(11, (16,), generator=torch.Generator().manual_seed(step))
        loss = model.loss(tokens) * scale
        loss.backward()
        optimizer.step(rate=1 / (1 + step))
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("settings", RULES)
def test_a_resumed_run_equals_the_uninterrupted_one_bit_for_bit(settings, tmp_path):
    model = Toy()
    optimizer = build(model, settings)
    train(model, optimizer, 4)
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "saved.pt")
    expected = train(model, optimizer, 4, first=4)

    saved = torch.load(tmp_path / "saved.pt")
    resumed = Toy()
    resumed.load_state_dict(saved["model"])
    again = build(resumed, settings)
    again.load_state_dict(saved["optimizer"])
    assert train(resumed, again, 4, first=4) == expected
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, resumed.state_dict()[name]), name
    for name, tensor in optimizer.state_dict().items():
        assert torch.equal(tensor, again.state_dict()[name]), name


@pytest.mark.parametrize("settings", RULES)
def test_a_saved_state_does_not_change_afterwards(settings):
    model = Toy()
    optimizer = build(model, settings)
    train(model, optimizer, 2)
    saved = optimizer.state_dict()
    kept = copy.deepcopy(saved)
    train(model, optimizer, 2)
    assert all(torch.equal(saved[name], kept[name]) for name in saved)


def test_a_state_of_another_model_or_rule_is_refused_and_changes_nothing():
    optimizer = build(Toy(), MuonClip())
    state = optimizer.state_dict()
    wrong = {
        "`query.weight.momentum` is missing": {n: t for n, t in state.items() if n != "query.weight.momentum"},
        "`other.momentum` is unknown": state | {"other.momentum": torch.zeros(1)},
        "should be .* found torch.bfloat16": {name: tensor.bfloat16() for name, tensor in state.items()},
        r"found torch.float32 \[3\]": state | {"norm.weight.exp_avg": torch.full((3,), 7.0)},
        "`query.weight.momentum` is missing; 1 such": build(Toy(), AdamW()).state_dict(),
    }
    for message, saved in wrong.items():
        with pytest.raises(CheckpointError, match=message):
            optimizer.load_state_dict(saved)
    assert all(torch.equal(tensor, optimizer.state_dict()[name]) for name, tensor in state.items())


def test_the_rest_moves_as_torch_s_adamw_and_only_tables_are_decayed():
    settings = MuonClip(lr=0.01, weight_decay=0.5, clip_norm=0, betas=(0.8, 0.9), eps=0.3)
    ours, theirs = Toy(), Toy()
    theirs.load_state_dict(ours.state_dict())
    optimizer = build(ours, settings)
    adamw = torch.optim.AdamW(
        [
            {"params": [theirs.embed.weight, theirs.head.weight], "weight_decay": 0.5},
            {"params": [theirs.norm.weight], "weight_decay": 0.0},
        ],
        lr=0.01,
        betas=(0.8, 0.9),
        eps=0.3,  # large enough to be seen
    )
    for seed in range(3):
        for name, weight in ours.named_parameters():
            random = torch.Generator().manual_seed(seed)
            weight.grad = None if name == "unused" else torch.randn(weight.shape, generator=random)
            dict(theirs.named_parameters())[name].grad = None if weight.grad is None else weight.grad.clone()
        optimizer.step()
        adamw.step()
    for name in ("embed.weight", "head.weight", "norm.weight", "unused"):
        torch.testing.assert_close(dict(ours.named_parameters())[name], dict(theirs.named_parameters())[name])


@pytest.mark.parametrize("settings", RULES)
def test_the_gradient_is_clipped_before_the_moments_see_it(settings):
    states = []
    for scale in (1e3, 1e6):  # both are far above the norm that is kept, so the moments must come out equal
        torch.manual_seed(0)
        model = Toy()
        optimizer = build(model, settings)
        train(model, optimizer, 1, scale=scale)
        states.append(optimizer.state_dict())
    for name in states[0]:
        torch.testing.assert_close(states[0][name], states[1][name], rtol=1e-4, atol=1e-7)
    squares = [t.square().sum() for name, t in states[0].items() if name.endswith(("exp_avg", "momentum"))]
    shares = {"muonclip": (0.05, 0.1), "adamw": (0.1, 0.1)}[settings.kind]
    assert min(shares) - 1e-6 < float(torch.stack(squares).sum().sqrt()) < max(shares) + 1e-6


def test_a_small_gradient_is_not_touched():
    model = Toy()
    optimizer = build(model, MuonClip())
    (model.loss(torch.arange(11)) * 1e-3).backward()
    before = model.query.weight.grad.clone()
    assert optimizer.step().grad_norm < 1
    assert torch.equal(model.query.weight.grad, before)


def test_a_gradient_that_is_not_finite_stops_the_step_names_the_weight_and_changes_nothing():
    model = Toy()
    optimizer = build(model, MuonClip())
    train(model, optimizer, 1)
    before = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    model.loss(torch.arange(11)).backward()
    model.norm.weight.grad[3] = float("nan")
    assert optimizer.nonfinite_gradients() == ["norm.weight"]
    with pytest.raises(TrainError, match=r"first in `norm.weight`, 1 parameters"):
        optimizer.step()
    for state, old in zip((model.state_dict(), optimizer.state_dict()), before, strict=True):
        assert all(torch.equal(state[name], old[name]) for name in old)


def test_a_weight_without_gradient_is_named_once_and_not_decayed(caplog):
    model = Toy()
    optimizer = build(model, MuonClip())
    with caplog.at_level(logging.INFO, "triax.optim"):
        train(model, optimizer, 3)
    assert [record.message for record in caplog.records] == ["no gradient reaches unused; left as it is"]
    assert torch.equal(model.unused, torch.ones(8))


def test_the_state_is_fp32_also_when_the_forward_runs_in_bf16():
    model = Toy()
    optimizer = build(model, MuonClip(qk_clip=QkClip(threshold=1.0)))
    with torch.autocast("cpu", torch.bfloat16):
        train(model, optimizer, 3)
    assert {tensor.dtype for tensor in optimizer.state_dict().values()} == {torch.float32}
    assert {weight.dtype for weight in model.parameters()} == {torch.float32}


@pytest.mark.parametrize("settings", RULES)
def test_low_precision_weights_are_refused(settings):
    with pytest.raises(UnsupportedError, match=r"`unused` is torch.bfloat16.*fp32"):
        build(Toy().bfloat16(), settings)


@pytest.mark.parametrize("settings", [MuonClip(lr=1e-5), AdamW(lr=1e-5)])
def test_small_steps_add_up(settings):
    model = Toy()
    before = copy.deepcopy(model.state_dict())
    train(model, build(model, settings), 20)
    still = [name for name, tensor in model.state_dict().items() if torch.equal(tensor, before[name])]
    assert still == ["unused"]


@pytest.mark.parametrize("settings", RULES)
def test_learning_works_and_updates_have_a_size_per_weight(settings):
    model = Toy()
    optimizer = build(model, settings.model_copy(update={"lr": 0.05}))
    losses = train(model, optimizer, 30)
    assert losses[-1] < losses[0] - 0.5
    updates = optimizer.update_rms()
    assert updates.keys() == {"embed.weight", "query.weight", "norm.weight", "head.weight"}
    assert all(0 < rms < 3 for rms in updates.values())
    assert optimizer.weight_rms()["unused"] == 1.0


def test_heads_are_clipped_after_the_step_and_reported():
    model = Toy()
    optimizer = build(model, MuonClip(qk_clip=QkClip(threshold=1e-3)))
    model.loss(torch.arange(11)).backward()
    seen = model.largest_logit.clone()
    moved = optimizer.step()
    assert torch.equal(moved.query_key.largest_logit[""], seen)
    assert moved.query_key.num_clipped == 2
    assert moved.query_key.smallest_factor == pytest.approx(float(1e-3 / seen.max()))
    assert model.largest_logit is None


@pytest.mark.parametrize("settings", [AdamW(), MuonClip(qk_clip=None)])
def test_logits_are_reported_also_without_clipping(settings):
    model = Toy()
    optimizer = build(model, settings)
    (model.loss(torch.arange(11)) * 0).backward()
    model.largest_logit *= 1e6
    before = model.query.weight.detach().clone()
    moved = optimizer.step()
    assert moved.query_key.num_clipped == 0
    torch.testing.assert_close(model.query.weight, before * (1 - settings.lr * 0.1))


def test_the_first_update_of_adamw_has_size_one_before_the_learning_rate():
    model = Toy()
    optimizer = build(model, AdamW(lr=0.01))
    train(model, optimizer, 1)
    assert optimizer.update_rms()["norm.weight"] == pytest.approx(1, rel=1e-3)
