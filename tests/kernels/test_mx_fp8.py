import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from triax.errors import CheckpointError
from triax.kernels.mx import fp8, reference


def random(*shape, seed=0, dtype=torch.bfloat16, scale=1.0):
    return (torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * scale).to(dtype)


def bytes_of(weight):
    return weight.view(torch.uint8)


@settings(max_examples=10)
@given(
    shape=st.sampled_from([(1, 1), (3, 40), (5, 130), (129, 3)]),
    exponent=st.integers(-145, 125),
    seed=st.integers(0, 2**16),
    dtype=st.sampled_from([torch.bfloat16, torch.float32]),
)
def test_codes_scales_and_numbers_equal_the_definition(shape, exponent, seed, dtype):
    weight = random(*shape, seed=seed, dtype=torch.float64, scale=2.0**exponent).clamp(-3e38, 3e38).to(dtype)
    found = fp8.quantize(weight)
    code, scale = reference.quantize_fp8(weight)
    assert torch.equal(found.scale, scale)
    assert torch.equal(bytes_of(found.weight), code)
    exact = reference.dequantize_fp8(code, scale).view(shape)
    for kind in (torch.float32, torch.bfloat16):
        assert torch.equal(fp8.dequantize(*found, kind), exact.float().to(kind))


def test_every_code_reads_as_torch_reads_it():
    code = torch.tensor([c for c in range(256) if c & 127 != 127], dtype=torch.uint8).view(torch.float8_e4m3fn)
    found = fp8.dequantize(code[None], torch.ones(1, 2), torch.float32)
    assert torch.equal(found[0].view(torch.int32), code.float().view(torch.int32))


def test_each_block_has_its_own_scale_also_where_the_edge_cuts_it():
    weight = torch.ones(200, 300)
    weight[128:, 256:] = 448.0 * 4
    weight[:128, 128:256] = 0.0
    code, scale = fp8.quantize(weight)
    assert torch.equal(scale, torch.tensor([[1 / 448, 1.0, 1 / 448], [1 / 448, 1 / 448, 4.0]]))
    assert torch.equal(fp8.dequantize(code, scale, torch.float32)[128:, 256:], weight[128:, 256:])
    assert not fp8.dequantize(code, scale)[:128, 128:256].any()


def test_the_largest_of_a_block_becomes_the_largest_code_and_errors_stay_within_half_a_step():
    weight = random(256, 256, dtype=torch.float32)
    code, scale = fp8.quantize(weight)
    blocks = code.float().abs().unflatten(1, (2, 128)).unflatten(0, (2, 128))
    assert (blocks.amax((1, 3)) == 448).all()
    error = (fp8.dequantize(code, scale, torch.float32) - weight).abs()
    step = scale.repeat_interleave(128, 0).repeat_interleave(128, 1) * 2.0**-6
    assert (error <= torch.maximum(weight.abs() * 2.0**-4, step / 2) * (1 + 1e-6)).all()


def test_bytes_are_stable_when_a_fresh_weight_goes_through_fp32():
    first = fp8.quantize(random(150, 140))
    second = fp8.quantize(fp8.dequantize(*first, torch.float32))
    assert torch.equal(bytes_of(first.weight), bytes_of(second.weight))


def test_an_empty_weight_stays_empty():
    code, scale = fp8.quantize(torch.zeros(0, 7))
    assert (code.shape, scale.shape) == ((0, 7), (0, 1))
    assert fp8.dequantize(code, scale).shape == (0, 7)


def test_minus_zero_keeps_its_sign():
    code, scale = fp8.quantize(torch.tensor([[-0.0, 1.0, 0.0]]))
    assert bytes_of(code)[0].tolist() == [128, 126, 0]
    assert fp8.dequantize(code, scale).signbit().tolist() == [[True, False, False]]


def test_strides_and_threads_change_nothing():
    weight = random(1100, 1000)
    plain = fp8.quantize(weight, threads=1)
    expected = fp8.dequantize(*plain, threads=1)
    assert (expected.float() - weight.float()).abs().max() < 0.2
    for same in (weight.T.contiguous().T, torch.stack((weight, weight), -1)[..., 0]):
        code, scale = fp8.quantize(same, threads=2)
        assert torch.equal(bytes_of(code), bytes_of(plain.weight))
        assert torch.equal(scale, plain.scale)
        assert torch.equal(fp8.dequantize(code.T.contiguous().T, scale.T.contiguous().T, threads=2), expected)


@pytest.mark.parametrize("code", [127, 255])
def test_a_code_that_is_not_a_number_is_refused_by_its_place(code):
    weight = torch.zeros(300, 5, dtype=torch.uint8)
    weight[131, 3] = code
    with pytest.raises(CheckpointError, match=r"q_proj: a weight is not finite; found `nan` at \[131, 3\]"):
        fp8.dequantize(weight.view(torch.float8_e4m3fn), torch.ones(3, 1), name="q_proj")


@pytest.mark.parametrize("value", [math.nan, math.inf, -1.0, 0.0])
def test_scales_that_are_lost_or_no_numbers_are_refused(value):
    code, scale = fp8.quantize(random(130, 5))
    scale[1, 0] = value
    with pytest.raises(CheckpointError, match=r"a scale is no positive number; found `.*` at \[1, 0\]"):
        fp8.dequantize(code, scale)


def test_a_scale_of_zero_over_zeros_is_no_fault():
    assert not fp8.dequantize(torch.zeros(2, 2).to(torch.float8_e4m3fn), torch.zeros(1, 1)).any()


def test_a_product_too_large_for_the_result_is_refused():
    code = torch.tensor([[448.0, 1.0]]).to(torch.float8_e4m3fn)
    with pytest.raises(CheckpointError, match=r"found `inf` at \[0, 0\]"):
        fp8.dequantize(code, torch.tensor([[1e36]]))
    just_above_bf16 = torch.tensor([[3.4e38 / 448]])
    assert fp8.dequantize(code, just_above_bf16, torch.float32).isfinite().all()
    with pytest.raises(CheckpointError, match="inf"):
        fp8.dequantize(code, just_above_bf16)


def test_weights_that_cannot_be_held_are_refused():
    for value in (math.nan, math.inf):
        weight = random(3, 4)
        weight[1, 2] = value
        with pytest.raises(CheckpointError, match=r"not finite; found `.*` at \[1, 2\]"):
            fp8.quantize(weight)
    with pytest.raises(CheckpointError, match="parts of a matrix"):
        fp8.quantize(torch.zeros(2, 3, 4))
    with pytest.raises(CheckpointError, match="is made from"):
        fp8.quantize(torch.zeros(2, 3).to(torch.float8_e4m3fn))


def test_pairs_that_do_not_fit_are_refused():
    code, scale = fp8.quantize(random(130, 5))
    for wrong in (scale.T, scale[:1], scale.bfloat16(), scale.flatten()):
        with pytest.raises(CheckpointError, match="the scale must be"):
            fp8.dequantize(code, wrong)
    with pytest.raises(CheckpointError, match="the weight must be"):
        fp8.dequantize(code.float(), scale)
    with pytest.raises(CheckpointError, match="bf16 or fp32"):
        fp8.dequantize(code, scale, torch.float16)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_what_is_given_is_never_changed(dtype):
    weight = random(4, 64, dtype=dtype)
    before = weight.clone()
    parts = fp8.quantize(weight)
    assert torch.equal(weight, before)
    kept = [part.clone() for part in parts]
    fp8.dequantize(*parts)
    assert all(
        torch.equal(part.view(torch.uint8), same.view(torch.uint8)) for part, same in zip(parts, kept, strict=True)
    )


def test_the_definition_can_be_forced_everywhere(monkeypatch):
    weight = random(3, 130)
    pair = fp8.quantize(weight)
    numbers = fp8.dequantize(*pair)
    monkeypatch.setenv("TRIAX_KERNELS", "reference")
    monkeypatch.setattr("triax.kernels.mx.fp8.run_chunks", None)
    forced = fp8.quantize(weight)
    assert torch.equal(bytes_of(forced.weight), bytes_of(pair.weight))
    assert torch.equal(forced.scale, pair.scale)
    assert torch.equal(fp8.dequantize(*pair), numbers)
