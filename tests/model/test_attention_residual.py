"""Streams and mixes: what each place reads, in the plain, block and full form."""

import pytest
import torch

from triax.config.model import Model
from triax.model.attention_residual import AttentionMix, Stream
from triax.model.layout import Layout

D = 6


def tensors(count):
    return list(torch.randn(count, 4, D, dtype=torch.float64, generator=torch.Generator().manual_seed(0)))


def test_a_fresh_place_takes_the_plain_mean():
    sources = tensors(3)
    mixed = AttentionMix(D, 1e-5).double()(sources)
    torch.testing.assert_close(mixed, sum(sources) / 3)


def test_a_plain_stream_is_the_residual_sum():
    embedded, *outputs = tensors(4)
    stream = Stream(embedded)
    for output in outputs:
        stream.write(output)
    torch.testing.assert_close(stream.read(None), embedded + sum(outputs))


def test_a_frozen_sum_becomes_a_source_and_the_next_write_starts_anew():
    embedded, first, second, third = tensors(4)
    stream, place = Stream(embedded), AttentionMix(D, 1e-5).double()
    assert stream.read(place) is embedded
    stream.freeze()
    stream.write(first)
    stream.write(second)
    torch.testing.assert_close(stream.read(place), (embedded + first + second) / 2)
    stream.freeze()
    torch.testing.assert_close(stream.read(place), (embedded + first + second) / 2)
    stream.write(third)
    torch.testing.assert_close(stream.read(place), (embedded + first + second + third) / 3)


def test_mean_weights_are_recorded_only_when_asked(t0, awake):
    model, tokens = awake(t0), torch.arange(5)
    model(tokens, Layout.of([5]))
    assert model.mean_mix_weights() == {}
    model.record_mix_weights(True)
    model(tokens, Layout.of([5]))
    weights = model.mean_mix_weights()
    # blocks of two layers freeze before the attention of layers 0 and 2
    assert {name: len(weight) for name, weight in weights.items()} == {
        "layers.0.mlp_mix": 2,
        "layers.1.attention_mix": 2,
        "layers.1.mlp_mix": 2,
        "layers.2.attention_mix": 2,
        "layers.2.mlp_mix": 3,
        "layers.3.attention_mix": 3,
        "layers.3.mlp_mix": 3,
        "output_mix": 3,
    }
    for weight in weights.values():
        torch.testing.assert_close(weight.sum(), torch.tensor(1.0, dtype=torch.float64))
        assert not weight.requires_grad
    model.record_mix_weights(False)
    assert model.mean_mix_weights() == {}


def test_the_full_form_reads_every_earlier_output(t0, awake):
    model = awake(Model.model_validate(t0.model_dump() | {"residuals": {"kind": "full"}}))
    model.record_mix_weights(True)
    model(torch.arange(3), Layout.of([3]))
    assert [len(weight) for weight in model.mean_mix_weights().values()] == [2, 3, 4, 5, 6, 7, 8, 9]


@pytest.mark.parametrize("fresh", [True, False])
def test_only_the_first_attention_mix_stays_without_gradient(fresh, t0, awake):
    model = awake(t0)
    if fresh:
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if name.endswith("mix.query"):
                    parameter.zero_()
    model(torch.arange(9), Layout.of([9])).square().sum().backward()
    for name, parameter in model.named_parameters():
        if name.endswith("mix.query"):
            assert (parameter.grad is None) == name.startswith("layers.0.attention_mix"), name
            assert parameter.grad is None or parameter.grad.abs().max() > 0


def test_under_autocast_all_sources_of_a_mix_have_its_format(t0, awake):
    found = set()
    model = awake(t0).float()
    for module in model.modules():
        if isinstance(module, AttentionMix):
            module.register_forward_pre_hook(lambda _, inputs: found.update(x.dtype for x in inputs[0]))
    with torch.autocast("cpu", torch.bfloat16):
        hidden = model(torch.arange(9), Layout.of((4, 5)))
    assert found == {torch.bfloat16}
    assert hidden.dtype is torch.bfloat16
