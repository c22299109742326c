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
            assert model.layers[0].attention.joined.dtype is BF16
            assert model.layers[0].attention.output.weight.dtype is BF16
            accumulate()
    else:
        accumulate()
    assert all(left is right for left, right in zip(masters.values(), model.parameters(), strict=True))
    return costs, {name: weight.grad for name, weight in masters.items()}


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_losses_and_gradients_differ_by_their_rounding(device):
    (costs, gradients), (expected_costs, expected) = learnt(device, True), learnt(device, False)
    assert costs == pytest.approx(expected_costs, rel=1e-3)
    for name, gradient in gradients.items():
        if gradient is None:
            assert expected[name] is None
            continue
        assert gradient.dtype is torch.float32
        assert (gradient - expected[name]).norm() <= 2.0**-6 * expected[name].norm(), name


def joined(layer):
    return torch.cat([product.weight for product in layer.joinable()]).to(BF16)


def test_a_second_step_rounds_the_moved_masters_and_adds_to_what_they_have():
    torch.manual_seed(1)
    model = Decoder(RECIPE.model).train()
    narrow, weight = NarrowMatrices(model, BF16), model.layers[0].attention.output.weight
    for factor in (1.0, 0.5):
        with torch.no_grad():
            weight.mul_(factor)
        with narrow():
            assert torch.equal(model.layers[0].attention.output.weight, weight.to(BF16))
            assert torch.equal(joined(model.layers[0].attention), model.layers[0].attention.joined)
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
