import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from triax.errors import CheckpointError
from triax.kernels.mx import int4, reference


def random(*shape, seed=0, dtype=torch.bfloat16, scale=1.0):
    return (torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * scale).to(dtype)


@given(
    rows=st.integers(1, 4),
    groups=st.integers(1, 4),
    exponent=st.integers(-140, 125),
    seed=st.integers(0, 2**16),
    dtype=st.sampled_from([torch.bfloat16, torch.float32]),
)
def test_words_scales_and_numbers_equal_the_definition(rows, groups, exponent, seed, dtype):
    weight = random(rows, 32 * groups, seed=seed, dtype=torch.float64, scale=2.0**exponent)
    weight = weight.clamp(-3e38, 3e38).to(dtype)
    found = int4.quantize(weight)
    packed, scale = reference.quantize_int4(weight)
    assert torch.equal(found.scale, scale)
    assert torch.equal(found.packed, packed)
    assert found.shape.tolist() == [rows, 32 * groups]
    exact = reference.dequantize_int4(packed, scale)
    for kind in (torch.float32, torch.bfloat16):
        assert torch.equal(int4.dequantize(*found, kind), exact.float().to(kind))


def test_integer_k_of_a_word_is_in_bits_4k_and_stored_plus_eight():
    word = sum((k - 3 + 8) << 4 * k for k in range(8)) - (1 << 32)
    packed = torch.full((1, 4), word, dtype=torch.int32)
    found = int4.dequantize(packed, torch.tensor([[0.5]], dtype=torch.bfloat16))
    assert found[0, :8].tolist() == [0.5 * (k - 3) for k in range(8)]
    weight = torch.tensor([[-7.0, 1.0, 2.0, 0.0, 0.0, 0.0, 0.0, 7.0] * 4])
    packed, scale, _ = int4.quantize(weight)
    assert scale.tolist() == [[1.0]]
    assert packed[0, 0].item() & 0xFFFFFFFF == 0xF8888A91


def test_all_sixteen_integers_of_a_release_are_read():
    code = torch.arange(16).repeat(2)
    words = [sum(int(code[8 * w + k]) << 4 * k for k in range(8)) for w in range(4)]
    packed = torch.tensor([[word - (word >> 31 << 32) for word in words]], dtype=torch.int32)
    found = int4.dequantize(packed, torch.ones(1, 1, dtype=torch.bfloat16), dtype=torch.float32)
    assert found[0].tolist() == (code - 8.0).tolist()


def test_ties_go_to_the_even_integer_and_zero_groups_have_scale_one():
    weight = torch.zeros(1, 64)
    weight[0, :6] = torch.tensor([7.0, 0.5, 1.5, 2.5, -0.5, -3.5])
    packed, scale, shape = int4.quantize(weight)
    assert scale.tolist() == [[1.0, 1.0]]
    assert int4.dequantize(packed, scale, shape)[0, :6].tolist() == [7.0, 0.0, 2.0, 2.0, 0.0, -4.0]


def test_errors_stay_within_half_a_step():
    weight = random(8, 96, dtype=torch.float32)
    packed, scale, shape = int4.quantize(weight)
    error = (int4.dequantize(packed, scale, shape, torch.float32) - weight).abs().unflatten(1, (-1, 32))
    # bf16 may round the scale down by 2^-9 of 7 steps.
    assert (error <= scale.float()[..., None] * (0.5 + 7 * 2.0**-8)).all()


def test_integers_are_stable_when_a_fresh_weight_goes_through_fp32():
    first = int4.quantize(random(9, 96))
    second = int4.quantize(int4.dequantize(*first, torch.float32))
    assert torch.equal(first.packed, second.packed)
    assert torch.equal(first.scale, second.scale)


def test_strides_and_threads_change_nothing():
    weight = random(1100, 960)
    plain = int4.quantize(weight, threads=1)
    expected = int4.dequantize(*plain, threads=1)
    assert torch.equal(expected[:3], int4.dequantize(plain.packed[:3], plain.scale[:3]))
    for same in (weight.T.contiguous().T, torch.stack((weight, weight), -1)[..., 0]):
        packed, scale, _ = int4.quantize(same, threads=2)
        assert torch.equal(packed, plain.packed)
        assert torch.equal(scale, plain.scale)
        assert torch.equal(int4.dequantize(packed.T.contiguous().T, scale.T.contiguous().T, threads=2), expected)


@pytest.mark.parametrize("value", [math.nan, math.inf, -1.0, 0.0])
def test_scales_that_are_lost_or_no_numbers_are_refused(value):
    packed, scale, _ = int4.quantize(random(3, 64))
    scale[2, 1] = value
    with pytest.raises(CheckpointError, match=r"down: a scale is no positive number; found `.*` at \[2, 1\]"):
        int4.dequantize(packed, scale, name="down")


def test_a_scale_of_zero_over_zeros_is_no_fault():
    packed, scale, _ = int4.quantize(torch.zeros(2, 32))
    assert not int4.dequantize(packed, torch.zeros_like(scale)).any()


@pytest.mark.parametrize("size", [1e-44, 1e-40, 1e-38])
def test_groups_too_small_for_a_scale_of_their_own_get_the_smallest(size):
    weight = torch.full((1, int4.GROUP), size) * torch.tensor([1.0, -1.0]).repeat(int4.GROUP // 2)
    found = int4.quantize(weight)
    assert found.scale.item() == torch.finfo(torch.bfloat16).tiny
    step = found.scale.float().item()
    assert (int4.dequantize(*found, torch.float32) - weight).abs().max() <= 0.5 * step


def test_a_product_too_large_for_the_result_is_refused():
    packed, scale, _ = int4.quantize(random(3, 64))
    scale[1, 0] = 2.0**127
    with pytest.raises(CheckpointError, match=r"not finite; found `-?inf` at \[1, \d+\]"):
        int4.dequantize(packed, scale)


def test_weights_that_cannot_be_held_are_refused():
    for value in (math.nan, math.inf):
        weight = random(3, 32)
        weight[1, 2] = value
        with pytest.raises(CheckpointError, match=r"not finite; found `.*` at \[1, 2\]"):
            int4.quantize(weight)
    for weight in (torch.zeros(2, 48), torch.zeros(32), torch.zeros(2, 2, 32)):
        with pytest.raises(CheckpointError, match="groups of 32"):
            int4.quantize(weight)
    with pytest.raises(CheckpointError, match="is made from"):
        int4.quantize(torch.zeros(2, 32, dtype=torch.int32))


def test_tensors_that_do_not_fit_are_refused():
    packed, scale, shape = int4.quantize(random(3, 64))
    for wrong in (packed.long(), packed[:, :3], packed[0]):
        with pytest.raises(CheckpointError, match="packed weights are"):
            int4.dequantize(wrong, scale)
    for wrong in (scale.T, scale[:1], scale.float(), scale.flatten()):
        with pytest.raises(CheckpointError, match="the scale must be"):
            int4.dequantize(packed, wrong)
    with pytest.raises(CheckpointError, match=r"weight_shape says \[64, 3\]"):
        int4.dequantize(packed, scale, shape.flip(0))
    with pytest.raises(CheckpointError, match="bf16 or fp32"):
        int4.dequantize(packed, scale, dtype=torch.float16)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_what_is_given_is_never_changed(dtype):
    weight = random(4, 64, dtype=dtype)
    before = weight.clone()
    parts = int4.quantize(weight)
    assert torch.equal(weight, before)
    kept = [part.clone() for part in parts]
    int4.dequantize(*parts)
    assert all(
        torch.equal(part.view(torch.uint8), same.view(torch.uint8)) for part, same in zip(parts, kept, strict=True)
    )


def test_the_definition_can_be_forced_everywhere(monkeypatch):
    weight = random(3, 64)
    parts = int4.quantize(weight)
    numbers = int4.dequantize(*parts)
    monkeypatch.setenv("TRIAX_KERNELS", "reference")
    monkeypatch.setattr("triax.kernels.mx.int4.run_chunks", None)
    forced = int4.quantize(weight)
    assert torch.equal(forced.packed, parts.packed)
    assert torch.equal(forced.scale, parts.scale)
    assert torch.equal(int4.dequantize(*parts), numbers)
