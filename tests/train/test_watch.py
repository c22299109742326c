"""What a run notices about itself."""

import pytest
import torch
from torch import nn

from triax.errors import TrainError
from triax.train import watch


def test_a_spike_is_measured_in_deviations_of_the_last_128_losses():
    spikes = watch.Spikes()
    assert spikes.score(1e9) == 0
    for i in range(200):
        spikes.accept(1.0 + (i % 2))
    assert len(spikes.losses) == 128
    assert spikes.score(1.5 + 6 * 0.5) == pytest.approx(6)


def test_a_saved_window_scores_the_same():
    spikes, resumed = watch.Spikes(), watch.Spikes()
    for i in range(20):
        spikes.accept(i**0.5)
    resumed.load_state_dict(spikes.state_dict())
    assert resumed.score(9.0) == spikes.score(9.0) != 0
    for i in range(200):
        spikes.accept(1.0 + i % 3)
        resumed.accept(1.0 + i % 3)
    assert resumed.score(9.0) == spikes.score(9.0), "the window has its length still"


def net():
    return nn.ModuleDict({name: nn.Linear(3, 3, bias=False) for name in ("learning", "decaying", "frozen", "spare")})


def test_weights_that_only_decay_or_stand_still_are_found():
    model = net()
    movement = watch.Movement(model, lambda name: name.startswith("spare"))
    for _ in range(20):
        movement.note(1e-3, 0.1)
        with torch.no_grad():
            for name in ("learning", "decaying"):
                model[name].weight.mul_(1 - 1e-4)
            model["learning"].weight[1, 1] += 1e-5
    assert movement.unmoved(model) == ["decaying.weight", "frozen.weight"]
    with pytest.raises(TrainError, match=r"after 20 steps 2 trainable tensors.*`decaying.weight`, `frozen.weight`"):
        watch.refuse_unmoved(movement.unmoved(model), 20)


def test_an_expert_that_saw_tokens_and_did_not_move_is_named():
    model = nn.Module()
    model.gate = nn.Parameter(torch.randn(4, 3, 2))
    movement = watch.Movement(model, lambda name: False)
    movement.note(0.1, 0.0)
    with torch.no_grad():
        model.gate[0] += 1
    assert movement.unmoved_experts(model, {"gate": [True, True, False, True]}) == ["gate[1]", "gate[3]"]


def test_samples_of_large_tensors_touch_every_column(monkeypatch):
    monkeypatch.setattr(watch, "SAMPLE", 64)
    columns = watch.sample(torch.arange(16).expand(64, 16)).unique()
    assert columns.tolist() == list(range(16))


def forward_of(model):
    return lambda: model["b"](model["a"](torch.ones(1, 3)))


def chain():
    return nn.ModuleDict({"a": nn.Linear(3, 3), "b": nn.Linear(3, 3)})


def test_blame_names_a_weight_that_is_not_finite():
    model = chain()
    model["b"].weight.data[0, 0] = torch.nan
    assert watch.blame(model, forward_of(model)) == "weight `b.weight`"


def test_blame_names_the_first_output_that_is_not_finite():
    model = chain()
    model["a"].weight.data.fill_(3e38)
    assert watch.blame(model, forward_of(model)) == "output of `a`"


def test_blame_names_the_gradient_nearest_to_the_loss():
    model = chain()
    model["a"].weight.grad = torch.full((3, 3), torch.nan)
    assert watch.blame(model, forward_of(model)) == "gradient of `a.weight`"
    model["b"].weight.grad = torch.full((3, 3), torch.inf)
    assert watch.blame(model, forward_of(model)) == "gradient of `b.weight`"
    model["a"].weight.grad = model["b"].weight.grad = None
    assert watch.blame(model, forward_of(model)) == "the loss alone"
