"""A step is one gradient of one batch, however the batch is cut, and it moves nothing when something is wrong."""

import copy
import math

import pytest
import torch

from triax.config.load import load_recipe
from triax.data.pack import Batch
from triax.model.decoder import Decoder
from triax.model.router import Router
from triax.optim.build import build
from triax.train.step import Step

RECIPE = load_recipe("nano", ["optim.qk_clip.threshold=0.05", "model.num_layers=2", "model.mla_layers=[1]"])
WITH_EXTRA = load_recipe("nano", ["model.num_layers=2", "model.mla_layers=[1]", "model.multi_token.loss_weight=0.3"])


def stream(lengths, seed=0):
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(320, (sum(lengths),), generator=generator)
    targets = torch.randint(320, (sum(lengths),), generator=generator)
    return Batch(tokens, targets, tuple(lengths))


def joined(batches):
    return Batch(
        torch.cat([batch.tokens for batch in batches]),
        torch.cat([batch.targets for batch in batches]),
        tuple(length for batch in batches for length in batch.lengths),
    )


def fresh(recipe=RECIPE):
    torch.manual_seed(1)
    model = Decoder(recipe.model).double()
    return Step(model, build(model, recipe.optim), recipe)


def taken(batches_of_steps, recipe=RECIPE):
    step = fresh(recipe)
    outcomes = [step(batches, 0.5) for batches in batches_of_steps]
    return outcomes, step.model.state_dict()


def assert_same(left, right):
    for a, b in zip(left[0], right[0], strict=True):
        assert a.loss == pytest.approx(b.loss, rel=1e-12)
        assert a.further_loss == (None if b.further_loss is None else pytest.approx(b.further_loss, rel=1e-12))
        assert a.grad_norms == pytest.approx(b.grad_norms, rel=1e-9)
        assert a.moved.query_key.num_clipped == b.moved.query_key.num_clipped
    for name, tensor in left[1].items():
        torch.testing.assert_close(tensor, right[1][name], rtol=1e-5, atol=1e-7, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize("recipe", [RECIPE, WITH_EXTRA], ids=["next", "and-after-next"])
def test_one_batch_equals_many_microbatches_in_loss_gradient_weights_and_balance(recipe):
    steps = [[stream([7, 1, 8], seed), stream([16], seed + 1), stream([3], seed + 2)] for seed in (0, 10, 20)]
    whole = taken([[joined(batches)] for batches in steps], recipe)
    assert_same(taken(steps, recipe), whole)
    assert_same(taken([[joined(batches[:2]), batches[2]] for batches in steps], recipe), whole)


def test_tokens_weigh_the_same_wherever_the_untrained_ones_are():
    short, long, silent = stream([3]), stream([17], 1), stream([9], 2)
    short.targets[0] = -100
    silent.targets[:] = -100
    apart, together = [[short, long, silent]], [[joined([short, long, silent])]]
    assert_same(taken(apart), taken(together))
    assert taken(apart)[0][0].num_trained == 19


def test_the_loss_is_the_mean_over_trained_tokens():
    step, batch = fresh(), stream([5, 6])
    batch.targets[3] = -100
    with torch.no_grad():
        logits = step.model.eval().logits(step.model(batch.tokens, _layout(batch)))
    expected = torch.nn.functional.cross_entropy(logits, batch.targets).item()
    assert step([batch], 0.0).loss == pytest.approx(expected, rel=1e-9)


def _layout(batch):
    from triax.model.layout import Layout

    return Layout.of(batch.lengths)


def everything(step):
    buffers = {name: value.clone() for name, value in step.model.named_buffers()}
    return (
        {name: p.detach().clone() for name, p in step.model.named_parameters()} | buffers | step.optimizer.state_dict()
    )


def assert_nothing_moved(step, before):
    after = everything(step)
    assert after.keys() == before.keys()
    for name, tensor in before.items():
        assert torch.equal(after[name], tensor), name
    assert all(p.grad is None for p in step.model.parameters())
    assert step.model.largest_logits() == {}


def test_the_gradient_is_that_of_two_means_each_over_its_own_tokens():
    step, batches = fresh(WITH_EXTRA), [stream([1, 2, 9]), stream([1, 1, 4], 1)]
    step._accumulate(batches, num_trained=18)
    given = {name: p.grad for name, p in step.model.named_parameters()}
    step.model.zero_grad(set_to_none=True)
    together = joined(batches)
    output = step.model.forward_training(together.tokens, together.targets, _layout(together))
    ends = torch.tensor(together.lengths).cumsum(0) - 1
    has_second = torch.ones(len(together.tokens), dtype=torch.bool).index_fill(0, ends, False)
    entropy = torch.nn.functional.cross_entropy
    main = entropy(step.model.logits(output.hidden), together.targets)
    second = entropy(step.model.logits(output.second)[has_second], together.targets.roll(-1)[has_second])
    (main + 0.3 * second).backward()
    for name, parameter in step.model.named_parameters():
        torch.testing.assert_close(given[name], parameter.grad, rtol=1e-8, atol=1e-12, msg=name)


def test_a_batch_without_targets_is_skipped_not_divided_by_zero():
    step, batch = fresh(), stream([5])
    batch.targets[:] = -100
    before = everything(step)
    outcome = step([batch], 0.5)
    assert outcome.skipped == "no token of the batch has a target"
    assert_nothing_moved(step, before)


def test_f03_a_loss_that_is_not_finite_moves_nothing_and_names_the_layer():
    step = fresh()
    step([stream([9])], 0.5)
    step.model.layers[1].attention.gate.register_forward_hook(lambda module, inputs, output: output * math.nan)
    before = everything(step)
    outcome = step([stream([4], 1), stream([6], 2)], 0.5)
    assert outcome.skipped == "not finite: output of `layers.1.attention.gate`"
    assert outcome.moved is None
    assert_nothing_moved(step, before)


def test_a_gradient_that_is_not_finite_moves_nothing_and_names_the_parameter():
    step = fresh()
    step.model.layers[0].mlp.down.weight.register_hook(lambda grad: grad * math.nan)
    before = everything(step)
    outcome = step([stream([6])], 0.5)
    assert math.isfinite(outcome.loss)
    assert outcome.skipped == "not finite: gradient of `layers.0.mlp.down.weight`"
    assert_nothing_moved(step, before)


def test_a_refused_loss_moves_nothing_and_the_next_step_is_as_if_it_never_was():
    step = fresh()
    outcome = step([stream([9])], 0.5, lambda loss: f"too high: {loss > 0}")
    assert outcome.skipped == "too high: True"
    other = fresh()
    for each in (step, other):
        each([stream([11], 5)], 0.5)
    after = everything(other)
    for name, tensor in everything(step).items():
        assert torch.equal(after[name], tensor), name


def test_evaluation_between_steps_changes_nothing():
    import numpy as np

    from triax.data.pack import TokenStream
    from triax.train.evaluate import evaluate

    step, other = fresh(), fresh()
    held_out = TokenStream(
        np.array([319, 1, 2, 3, 319, 4, 5], np.uint16), np.array([0, 4, 7]), np.array([6, 4]), border=319
    )
    found = evaluate(step.model, held_out, 4, 8, "fp32")
    assert (found.num_tokens, found.num_bytes) == (7, 10)
    assert found.loss == pytest.approx(math.log(320), rel=0.05)
    assert found.bits_per_byte == pytest.approx(found.loss * 7 / 10 / math.log(2))
    assert step.model.training
    for each in (step, other):
        each([stream([11], 5)], 0.5)
    after = everything(other)
    for name, tensor in everything(step).items():
        assert torch.equal(after[name], tensor), name


def test_balancing_happens_once_a_step_on_the_counts_of_all_microbatches():
    batches = [stream([12], seed) for seed in range(4)]
    biases = []
    for cut in ([joined(batches)], batches):
        step = fresh()
        before = copy.deepcopy([m.balance_bias for m in step.model.modules() if isinstance(m, Router)])
        step(cut, 0.0)
        biases.append([m.balance_bias for m in step.model.modules() if isinstance(m, Router)])
        assert all(not torch.equal(a, b) for a, b in zip(before, biases[-1], strict=True))
    for a, b in zip(*biases, strict=True):
        torch.testing.assert_close(a, b)


def test_bf16_products_leave_every_weight_and_state_in_fp32():
    narrow = load_recipe("nano", ["model.num_layers=2", "model.mla_layers=[1]", "train.precision=bf16"])
    torch.manual_seed(1)
    model = Decoder(narrow.model)
    step = Step(model, build(model, narrow.optim), narrow)
    before = everything(step)
    outcome = step([stream([30, 34])], 1e-3)
    assert outcome.loss == pytest.approx(math.log(320), rel=0.05)
    assert (
        outcome.loss
        != fresh(load_recipe("nano", ["model.num_layers=2", "model.mla_layers=[1]"]))([stream([30, 34])], 1e-3).loss
    )
    after = everything(step)
    assert all(tensor.dtype == torch.float32 for tensor in after.values() if tensor.is_floating_point())
    matrix = "layers.1.attention.query_up.weight"
    assert 0 < (after[matrix] - before[matrix]).abs().max() < 1e-4


class OwnMlp(torch.nn.Module):
    """A layer that this package does not know."""

    def __init__(self, width):
        super().__init__()
        self.inside = torch.nn.Linear(width, 24)
        self.outside = torch.nn.Linear(24, width)

    def matrices(self):
        return {"inside.weight": (24,), "outside.weight": (self.outside.out_features,)}

    def forward(self, hidden):
        return self.outside(self.inside(hidden).relu())


def test_f67_a_layer_of_one_s_own_is_trained_by_muon_like_ours():
    step = fresh()
    model, recipe = step.model, RECIPE
    model.layers[1].mlp = OwnMlp(recipe.model.width)
    step = Step(model.double(), build(model, recipe.optim), recipe)
    before = copy.deepcopy(model.layers[1].mlp.state_dict())
    outcome = step([stream([9])], 0.5)
    assert not outcome.skipped
    assert outcome.moved.num_orthogonalized == sum(role.num_matrices for role in step.optimizer.roles.values())
    assert step.optimizer.roles["layers.1.mlp.inside.weight"].rule == "muon"
    for name, tensor in model.layers[1].mlp.state_dict().items():
        assert not torch.equal(tensor, before[name]), name
