"""Matrices rounded once a step give the losses and gradients of matrices rounded in every microbatch."""

import pytest
import torch

from triax.config.load import load_recipe
from triax.data.pack import Batch
from triax.model.decoder import Decoder
from triax.train.narrow import NarrowMatrices
from triax.train.objective import cost, precision

RECIPE = load_recipe("nano", ["model.num_layers=2", "model.mla_layers=[1]"])
BF16 = torch.bfloat16


def batch(lengths, seed):
    generator = torch.Generator().manual_seed(seed)
    tokens, targets = torch.randint(320, (2, sum(lengths)), generator=generator)
    return Batch(tokens, targets, lengths)


BATCHES = [batch((7, 1, 8), 0), batch((16,), 1), batch((3, 30), 2)]


def learnt(device, narrow):
    torch.manual_seed(1)
    model = Decoder(RECIPE.model).to(device).train()
    masters = dict(model.named_parameters())
    costs = []

    def accumulate():
        for one in BATCHES:
            with precision("bf16", torch.device(device)):
                paid = cost(model, one, torch.device(device)).nats
            paid.backward()
            costs.append(paid.item())

    if narrow:
        with NarrowMatrices(model, BF16)():
            assert model.layers[0].attention.query.weight.dtype is BF16
            accumulate()
    else:
        accumulate()
    assert all(left is right for left, right in zip(masters.values(), model.parameters(), strict=True))
    return costs, {name: weight.grad for name, weight in masters.items()}


def test_losses_are_equal_and_gradients_differ_by_their_rounding():
    (costs, gradients), (expected_costs, expected) = learnt("cpu", True), learnt("cpu", False)
    assert costs == expected_costs
    for name, gradient in gradients.items():
        if gradient is None:
            assert expected[name] is None
            continue
        assert gradient.dtype is torch.float32
        assert (gradient - expected[name]).norm() <= 2.0**-8 * expected[name].norm(), name


def test_a_second_step_rounds_the_moved_masters_and_adds_to_what_they_have():
    torch.manual_seed(1)
    model = Decoder(RECIPE.model).train()
    narrow, weight = NarrowMatrices(model, BF16), model.layers[0].attention.output.weight
    for factor in (1.0, 0.5):
        with torch.no_grad():
            weight.mul_(factor)
        with narrow():
            assert torch.equal(model.layers[0].attention.output.weight, weight.to(BF16))
            with precision("bf16", torch.device("cpu")):
                paid = cost(model, BATCHES[0], torch.device("cpu")).nats
            paid.backward()
        if factor == 1.0:
            first = weight.grad.clone()
    assert not torch.equal(weight.grad, first)


def test_masters_come_back_after_a_failure():
    model = Decoder(RECIPE.model)
    before = list(model.parameters())
    with pytest.raises(ValueError, match="inside"), NarrowMatrices(model, BF16)():
        raise ValueError("inside")
    assert all(left is right for left, right in zip(before, model.parameters(), strict=True))


@pytest.mark.gpu
def test_on_a_gpu_losses_and_gradients_have_the_same_bits_but_where_experts_sum_unrounded():
    (costs, gradients), (expected_costs, expected) = learnt("cuda", True), learnt("cuda", False)
    assert costs == expected_costs
    for name, gradient in gradients.items():
        if ".experts." in name:
            assert (gradient - expected[name]).norm() <= 2.0**-8 * expected[name].norm(), name
        else:
            assert gradient is expected[name] is None or torch.equal(gradient, expected[name]), name
