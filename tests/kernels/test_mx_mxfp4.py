import math
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from triax.errors import CheckpointError
from triax.kernels.mx import mxfp4, mxfp4_encode, reference
from triax.kernels.mx.parallel_chunks import PIECE

E2M1 = reference.E2M1
DTYPES = [torch.bfloat16, torch.float32]


def block(*values, dtype=torch.bfloat16):
    return torch.tensor([*values, *[0.0] * (32 - len(values))], dtype=dtype)[None]


def codes(packed):
    return torch.stack((packed & 15, packed >> 4), dim=-1).flatten(-2)


def random(*shape, seed=0, dtype=torch.bfloat16, scale=1.0):
    return (torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * scale).to(dtype)


def assert_as_defined(weight):
    """Hold pair and numbers to the definition, and what comes back to the same bytes."""
    packed, scale = mxfp4.quantize(weight)
    expected_packed, expected_scale = reference.quantize_mxfp4(weight)
    assert torch.equal(scale, expected_scale)
    assert torch.equal(packed, expected_packed)
    for dtype in DTYPES:
        found = mxfp4.dequantize(packed, scale, dtype)
        assert found.dtype == dtype
        assert torch.equal(found.double(), reference.dequantize_mxfp4(packed, scale))
        assert torch.equal(found.signbit(), (codes(packed) >= 8))
        again = mxfp4.quantize(found)
        assert torch.equal(again.packed, packed)
        assert torch.equal(again.scale, scale)
    return packed, scale


@pytest.mark.parametrize("dtype", DTYPES)
@given(exponent=st.integers(-149, 120), spread=st.integers(0, 20), seed=st.integers(0, 2**16))
def test_pair_and_numbers_equal_the_definition_at_every_size_of_weight(dtype, exponent, spread, seed):
    weight = random(3, 64, seed=seed, dtype=torch.float64, scale=2.0**exponent)
    weight *= torch.exp2(torch.randint(-spread, 1, (3, 64), generator=torch.Generator().manual_seed(seed)))
    assert_as_defined(weight.clamp(-3e38, 3e38).to(dtype))


@given(bits=st.lists(st.integers(0, 0xFFFF).filter(lambda b: b & 0x7F80 != 0x7F80), min_size=32, max_size=32))
def test_any_finite_bits_equal_the_definition(bits):
    weight = torch.tensor(bits, dtype=torch.int32).to(torch.uint16).view(torch.bfloat16)[None]
    assert_as_defined(weight)
    assert_as_defined(torch.nextafter(weight.float(), torch.zeros(()))) if weight.any() else None


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("exponent", [-120, -1, 0, 100])
def test_every_border_between_codes_and_its_neighbours_round_to_even(dtype, exponent):
    borders = [(low + high) / 2 for low, high in pairwise(E2M1)]
    exact = torch.tensor(borders, dtype=dtype)
    up, down = (torch.nextafter(exact, torch.full_like(exact, side)) for side in (9.0, 0.0))
    values = torch.cat([exact, up, down, torch.tensor([6.0], dtype=dtype)])
    weight = torch.zeros(1, 32, dtype=dtype)
    weight[0, : len(values)] = values * 2.0**exponent
    packed, scale = assert_as_defined(weight)
    found = codes(packed)[0].tolist()
    assert found[:7] == [0, 2, 2, 4, 4, 6, 6]
    assert found[7:14] == [1, 2, 3, 4, 5, 6, 7]
    assert found[14:21] == [0, 1, 2, 3, 4, 5, 6]
    assert scale.item() == 127 + exponent


@given(seed=st.integers(0, 2**16), scale=st.sampled_from([1e-3, 0.02, 1.0, 1e4]))
def test_fresh_bf16_to_mxfp4_and_back_and_again_is_stable_to_the_byte(seed, scale):
    first = mxfp4.quantize(random(4, 96, seed=seed, scale=scale))
    weight = mxfp4.dequantize(*first)
    second = mxfp4.quantize(weight)
    assert torch.equal(first.packed, second.packed)
    assert torch.equal(first.scale, second.scale)
    assert torch.equal(mxfp4.dequantize(*second).view(torch.int16), weight.view(torch.int16))


@pytest.mark.parametrize("values", [(3.0, 0.5), (4.0, -3.0, 1.5), (6.0, -0.5), (-6.0,)])
def test_blocks_of_maximum_code_3_4_and_6_keep_their_values(values):
    weight = block(*values)
    packed, scale = assert_as_defined(weight)
    assert torch.equal(mxfp4.dequantize(packed, scale), weight)
    largest = max(abs(value) for value in values)
    # 3 is in [2, 4) and scaled up to [4, 8): code 3.0 becomes code 6.0 under half the scale.
    assert scale.item() == 127 + math.floor(math.log2(largest)) - 2


@pytest.mark.parametrize("value", [2.0**-120, 0.3, -1.0, 5.0, -7.9, 2.0**127])
@pytest.mark.parametrize("place", [0, 13, 31])
def test_a_single_number_that_is_not_zero_takes_the_scale_and_leaves_the_zeros(value, place):
    weight = torch.zeros(1, 32, dtype=torch.bfloat16)
    weight[0, place] = value
    packed, _ = assert_as_defined(weight)
    found = codes(packed)[0]
    assert found[place] & 7 >= 6
    assert found.count_nonzero() == 1


@pytest.mark.parametrize("zero", [0.0, -0.0])
def test_a_block_of_zeros_has_scale_one_and_keeps_the_signs(zero):
    packed, scale = assert_as_defined(torch.full((2, 64), zero, dtype=torch.bfloat16))
    assert (scale == mxfp4.UNIT_SCALE).all()
    assert (packed == (0x88 if math.copysign(1, zero) < 0 else 0)).all()


def test_minus_zero_and_what_rounds_to_it_keep_their_sign():
    packed, scale = assert_as_defined(block(4.0, -0.0, 0.0, -1e-6, 1e-6))
    assert codes(packed)[0, :5].tolist() == [6, 8, 0, 8, 0]
    assert mxfp4.dequantize(packed, scale)[0, 1:5].signbit().tolist() == [True, False, True, False]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("exponent", range(-149, -117))
def test_subnormal_scales_end_at_code_0_and_denormal_blocks_use_small_codes(dtype, exponent):
    weight = block(*(k * 2.0**exponent for k in (1.0, 1.5, -0.75, 0.25, 1.875)), dtype=dtype)
    _, scale = assert_as_defined(weight)
    largest = weight.abs().max().item()
    if largest > 2.0**-129:
        assert scale.item() == max(math.frexp(largest)[1] - 1 + 125, 0)
    else:
        assert scale.item() == mxfp4.UNIT_SCALE  # all of it rounds to zero


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("exponent", [-100, -7, 0, 90])
def test_an_amax_of_exactly_6_is_kept_and_what_is_just_above_saturates(dtype, exponent):
    six = torch.tensor(6.0 * 2.0**exponent, dtype=dtype)
    above = torch.nextafter(six, torch.tensor(math.inf, dtype=dtype))
    for amax, value in ((six, six), (above, six), (six * 1.3, six), (six * 1.34, torch.tensor(8.0 * 2.0**exponent))):
        packed, scale = assert_as_defined(block(float(amax), dtype=dtype))
        assert mxfp4.dequantize(packed, scale)[0, 0] == value
        assert scale.item() == 127 + exponent + (value > six)


def test_scale_254_holds_codes_up_to_one_and_a_half_and_refuses_larger_ones_by_their_place():
    scale = torch.tensor([[127, 254]], dtype=torch.uint8)
    packed = torch.full((1, 32), 0x3B, dtype=torch.uint8)
    for dtype in DTYPES:
        assert mxfp4.dequantize(packed, scale, dtype)[0, 32:34].tolist() == [-1.5 * 2.0**127, 1.5 * 2.0**127]
    packed[0, 20] = 0xC0
    with pytest.raises(CheckpointError, match=r"layer\.w1: a weight is too large for bf16; .* 254 .* block \[0, 1\]"):
        mxfp4.dequantize(packed, scale, name="layer.w1")
    scale[0, 1] = 253
    packed[0, 20] = 0xE0
    with pytest.raises(CheckpointError, match=r"found scale code 253 with code 6 at block \[0, 1\]"):
        mxfp4.dequantize(packed, scale)
    packed[0, 20] = 0x50
    assert mxfp4.dequantize(packed, scale)[0, 41] == 3.0 * 2.0**126
    packed[0, 0] = 0x77  # large codes elsewhere are no fault
    assert mxfp4.dequantize(packed, scale).isfinite().all()


def test_scale_255_is_refused_by_its_place():
    scale = torch.full((5, 3), 120, dtype=torch.uint8)
    scale[2, 1] = 255
    with pytest.raises(CheckpointError, match=r"w2: scale code 255 is not a number; found at block \[2, 1\]"):
        mxfp4.dequantize(torch.zeros(5, 48, dtype=torch.uint8), scale, name="w2")


@given(seed=st.integers(0, 2**16), shift=st.integers(1, 3))
def test_codes_of_another_scale_rule_keep_their_values_and_their_bytes_in_the_pair(seed, shift):
    # Scales larger than ours, as rules that never saturate choose: the largest code of a block is small.
    generator = torch.Generator().manual_seed(seed)
    magnitude = torch.randint(0, 8 - 2 * shift, (4, 64), generator=generator)
    code = (magnitude + 8 * torch.randint(0, 2, (4, 64), generator=generator)).to(torch.uint8)
    released = mxfp4.Mxfp4(
        code[:, ::2] | code[:, 1::2] << 4, torch.randint(90, 140, (4, 2), generator=generator).to(torch.uint8)
    )
    before = [tensor.clone() for tensor in released]
    weight = mxfp4.dequantize(*released)
    assert all(torch.equal(*pair) for pair in zip(released, before, strict=True))  # reading changes no byte
    ours = mxfp4.quantize(weight)
    assert torch.equal(mxfp4.dequantize(*ours).view(torch.int16), weight.view(torch.int16))
    used = (magnitude.unflatten(1, (2, 32)) > 0).any(-1)
    assert (ours.scale[used] < released.scale[used]).all()


def test_every_code_under_every_scale_is_exact():
    packed = torch.arange(256, dtype=torch.uint8).view(1, 16, 16).expand(253, 16, 16).reshape(253, 256)
    scale = torch.arange(253, dtype=torch.uint8)[:, None].expand(253, 16)
    expected = reference.dequantize_mxfp4(packed, scale)
    for dtype in DTYPES:
        assert torch.equal(mxfp4.dequantize(packed, scale, dtype).double(), expected)


def test_the_first_of_a_pair_is_in_the_low_four_bits():
    packed, scale = mxfp4.quantize(block(0.5, 4.0, -1.0))
    assert packed[0, :2].tolist() == [0x61, 0x0A]
    assert mxfp4.dequantize(packed, scale)[0, :3].tolist() == [0.5, 4.0, -1.0]


@pytest.mark.parametrize("dtype", DTYPES)
def test_strides_stacks_of_experts_and_pieces_of_threads_change_nothing(dtype):
    length = 3 * PIECE + 64  # several pieces a thread, and a short last one
    weight = random(1, length * 2, dtype=dtype)
    plain = mxfp4.quantize(weight, threads=1)
    for shape in ((length // 32, 64), (2, length // 64, 64)):
        view = weight.view(shape)
        gaps = torch.stack((view, view), dim=-1)[..., 0]
        turned = view.mT.contiguous().mT
        for same in (view, gaps, turned):
            for threads in (1, 2, 3):
                packed, scale = mxfp4.quantize(same, threads=threads)
                assert torch.equal(packed.flatten(), plain.packed[0])
                assert torch.equal(scale.flatten(), plain.scale[0])
    packed, scale = (tensor.view(length // 32, -1) for tensor in plain)
    expected = mxfp4.dequantize(packed, scale, threads=1)
    turned = mxfp4.dequantize(packed.T.contiguous().T, scale.T.contiguous().T, threads=2)
    assert torch.equal(turned, expected)
    rows = slice(0, 4)
    assert torch.equal(expected[rows].double(), reference.dequantize_mxfp4(packed[rows], scale[rows]))
    assert torch.equal(mxfp4.quantize(expected).packed, packed)


def test_a_given_place_is_written_whole():
    packed, scale = mxfp4.quantize(random(5, 64))
    out = torch.full((5, 64), math.nan, dtype=torch.bfloat16)
    assert mxfp4.dequantize(packed, scale, out=out) is out
    assert torch.equal(out, mxfp4.dequantize(packed, scale))
    for wrong in (out.float(), out[:4], torch.empty(64, 5, dtype=torch.bfloat16).T):
        with pytest.raises(CheckpointError, match="`out`"):
            mxfp4.dequantize(packed, scale, out=wrong)


def test_fp16_parameters_and_empty_weights_are_taken():
    weight = random(2, 32, dtype=torch.float16)
    assert torch.equal(mxfp4.quantize(weight).packed, mxfp4.quantize(weight.float()).packed)
    parameter = torch.nn.Parameter(random(2, 32))
    assert torch.equal(mxfp4.quantize(parameter).packed, mxfp4.quantize(parameter.detach()).packed)
    packed, scale = mxfp4.quantize(torch.empty(0, 64))
    assert (packed.shape, scale.shape) == ((0, 32), (0, 2))
    assert mxfp4.dequantize(packed, scale).shape == (0, 64)


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float16])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_weights_that_are_not_finite_are_refused_by_their_place(dtype, value):
    weight = random(3, 64, dtype=dtype)
    weight[2, 40] = value
    with pytest.raises(CheckpointError, match=rf"w1: a weight is not finite; found `{value}` at \[2, 40\]"):
        mxfp4.quantize(weight, name="w1")


def test_one_bad_weight_of_many_stops_every_thread():
    weight = random(9, PIECE)
    weight[8, -1] = math.nan
    with pytest.raises(CheckpointError, match=rf"\[8, {PIECE - 1}\]"):
        mxfp4.quantize(weight, threads=2)


def test_shapes_and_types_that_do_not_fit_are_refused():
    for weight in (torch.zeros(4, 48), torch.tensor(1.0), torch.zeros(32, 8)):
        with pytest.raises(CheckpointError, match="does not split into blocks of 32"):
            mxfp4.quantize(weight)
    for dtype in (torch.float64, torch.uint8, torch.float8_e4m3fn):  # U091: what is packed is no plain weight
        with pytest.raises(CheckpointError, match="is made from bf16, fp16 or fp32"):
            mxfp4.quantize(torch.zeros(4, 32).to(dtype))
    packed, scale = mxfp4.quantize(torch.ones(4, 64))
    for wrong in (packed.int(), packed[:, :24], packed[0, 0]):
        with pytest.raises(CheckpointError, match="packed weights are"):
            mxfp4.dequantize(wrong, scale)
    for wrong in (scale[:3], scale[:, :1], scale.T, scale.float(), scale.flatten()):
        with pytest.raises(CheckpointError, match="the scale must be"):
            mxfp4.dequantize(packed, wrong)
    with pytest.raises(CheckpointError, match="bf16 or fp32"):
        mxfp4.dequantize(packed, scale, torch.float16)


def test_scales_of_zero_under_used_codes_are_seen_as_lost():  # U086
    packed, scale = mxfp4.quantize(random(4, 64))
    assert not mxfp4.is_blank(packed, scale)
    assert mxfp4.is_blank(packed, torch.zeros_like(scale))
    assert not mxfp4.is_blank(*mxfp4.quantize(torch.full((4, 64), -0.0)))


def test_a_scale_stored_as_e8m0_means_the_same():
    packed, scale = mxfp4.quantize(random(4, 64))
    assert torch.equal(mxfp4.dequantize(packed, scale.view(torch.float8_e8m0fnu)), mxfp4.dequantize(packed, scale))


def test_the_form_for_other_devices_equals_the_one_for_this():
    for dtype, exponent in ((torch.bfloat16, -129), (torch.float32, -140), (torch.bfloat16, 0)):
        weight = random(4, 64, dtype=torch.float64, scale=2.0**exponent).to(dtype)
        packed, scale = mxfp4_encode.pack_anywhere(weight.flatten())
        assert torch.equal(packed, mxfp4.quantize(weight).packed.flatten())
        assert torch.equal(scale, mxfp4.quantize(weight).scale.flatten())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_what_is_given_is_never_changed(dtype):
    weight = random(4, 64, dtype=dtype)
    before = weight.clone()
    parts = mxfp4.quantize(weight)
    assert torch.equal(weight, before)
    kept = [part.clone() for part in parts]
    mxfp4.dequantize(*parts)
    assert all(
        torch.equal(part.view(torch.uint8), same.view(torch.uint8)) for part, same in zip(parts, kept, strict=True)
    )


def test_the_definition_can_be_forced_everywhere(monkeypatch):
    weight = random(3, 2, 64)
    pair = mxfp4.quantize(weight)
    numbers = mxfp4.dequantize(*pair)
    monkeypatch.setenv("TRIAX_KERNELS", "reference")
    monkeypatch.setattr("triax.kernels.mx.mxfp4_encode.pack", None)
    monkeypatch.setattr("triax.kernels.mx.mxfp4_decode.unpack", None)
    forced = mxfp4.quantize(weight)
    assert torch.equal(forced.packed, pair.packed)
    assert torch.equal(forced.scale, pair.scale)
    assert torch.equal(mxfp4.dequantize(*pair), numbers)
