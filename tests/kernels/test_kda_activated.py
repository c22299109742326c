"""Unit queries and keys, decay and beta in one pass, interpreted, against the layer's own operations."""

import pytest
import torch

from triax.config.model import Kda
from triax.errors import UnsupportedError
from triax.kernels.kda.slots import Projected
from triax.model.kda import KDA

pytest.importorskip("triton")

from triax.kernels.kda.activated import activate


def case(kind, tokens, device="cpu", dtype=torch.float32, dim=32):
    torch.manual_seed(0)
    layer = KDA(64, Kda.model_validate({"num_heads": 2, "head_dim": dim, "decay": {"kind": kind}}), 1e-5, 0.3)
    whole = torch.randn(tokens, 8 * dim + 3) * 3  # slices of one product, begun between multiples of 16 bytes
    mixed, decay, beta = (x.to(device, dtype) for x in whole[:, 1:].split([6 * dim, 2 * dim, 2], -1))
    gate = mixed[:, : 2 * dim].unflatten(-1, (2, dim))
    return layer.to(device, dtype), Projected(mixed, decay.unflatten(-1, (2, dim)), beta, gate)


@pytest.mark.parametrize("kind", ["softplus", "bounded"])
@pytest.mark.parametrize("tokens", [0, 1, 41])
def test_activations_are_those_of_the_layer(kind, tokens):
    layer, inputs = case(kind, tokens)
    with torch.no_grad():
        found, expected = activate(inputs, layer._weights()), layer._activate(inputs.mixed, inputs)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


def test_weak_and_strong_decays_keep_their_digits():
    layer, inputs = case("softplus", 5)
    with torch.no_grad():
        layer.decay_bias.copy_(torch.linspace(-30, 70, 64))
        found = activate(inputs, layer._weights()).log_decay
        expected = layer.double()._log_decay(inputs.decay.double()).float()
    torch.testing.assert_close(found, expected, rtol=2e-5, atol=0)


def test_other_formats_are_refused_by_name():
    _, inputs = case("bounded", 3)
    layer, _ = case("bounded", 3)
    with pytest.raises(UnsupportedError, match="float64"):
        activate(Projected(*(part.double() for part in inputs)), layer._weights())


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["softplus", "bounded"])
def test_activations_on_a_gpu_are_those_of_the_layer(kind):
    layer, inputs = case(kind, 777, "cuda", torch.bfloat16, 128)
    with torch.no_grad():
        found, expected = activate(inputs, layer._weights()), layer._activate(inputs.mixed, inputs)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one.float(), other.float(), rtol=1e-2, atol=1e-2)
