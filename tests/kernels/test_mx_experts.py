"""Routed experts whose weights stay MXFP4: every form against the definition, and that against dequantised experts."""

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from triax.errors import UnsupportedError
from triax.kernels import moe
from triax.kernels.mx import mxfp4, mxfp8, reference
from triax.kernels.mx.experts import experts, looped, sliced, streamed, work_plan
from triax.kernels.mx.mxfp4 import Mxfp4
from triax.kernels.routed import ExpertWeights, Routing
from triax.kernels.situ_glu import SituGlu

ON_GPU = torch.cuda.is_available()
SITU = SituGlu(4.0, 25.0)
interpreted = pytest.mark.skipif(ON_GPU, reason="the kernels are compiled here; the gpu tests run them")
on_gpu = pytest.mark.skipif(not ON_GPU, reason="needs a GPU")


def as_it_is(rows):
    return rows


def weights(E, F, L, device="cpu"):
    """Codes of all kinds under scales that keep sums near one."""
    shapes = [(F, L), (F, L), (L, F)]

    def drawn(rows, columns):
        code = torch.randint(0, 256, (E, rows, columns // 2), dtype=torch.uint8, device=device)
        middle = 126 - columns.bit_length() // 2
        scale = torch.randint(middle - 2, middle + 2, (E, rows, columns // 32), dtype=torch.uint8, device=device)
        return Mxfp4(code, scale)

    return ExpertWeights(*(drawn(*shape) for shape in shapes))


def inputs(T, E, k, L, dtype=torch.float32, device="cpu"):
    chosen = torch.rand(T, E, device=device).topk(k).indices
    return torch.randn(T, L, device=device).to(dtype), chosen, torch.rand(T, k, device=device)


@pytest.mark.parametrize("activation", [SITU, SituGlu()])
def test_the_definition_is_that_of_experts_over_dequantised_weights(activation):
    packed, values = weights(5, 32, 64), inputs(11, 5, 2, 64)
    whole = [mxfp4.dequantize(*weight, torch.float32) for weight in packed]
    torch.testing.assert_close(
        experts(values[0], Routing(*values[1:]), packed, activation), moe.reference.experts(*values, *whole, activation)
    )


def test_rounded_inputs_are_rounded_before_both_products():
    packed, (hidden, chosen, share) = weights(5, 32, 64), inputs(11, 5, 2, 64)
    whole = [mxfp4.dequantize(*weight, torch.float32) for weight in packed]
    expected = torch.zeros_like(hidden)
    for t in range(len(hidden)):
        for one, part in zip(chosen[t], share[t], strict=True):
            row = mxfp8.rounded(hidden[t])
            inner = mxfp8.rounded(SITU(row @ whole[0][one].T, row @ whole[1][one].T))
            expected[t] += part * (inner @ whole[2][one].T)
    torch.testing.assert_close(experts(hidden, Routing(chosen, share), packed, SITU, rounded=True), expected)


def test_gradients_reach_tokens_and_shares():
    packed, (hidden, chosen, share) = weights(3, 32, 32), inputs(4, 3, 2, 32)
    hidden, share = hidden.double().requires_grad_(), share.double().requires_grad_()
    assert torch.autograd.gradcheck(lambda x, s: experts(x, Routing(chosen, s), packed, SITU), (hidden, share))


def test_no_tokens_give_no_tokens():
    hidden, chosen, share = inputs(0, 3, 2, 32)
    assert experts(hidden, Routing(chosen, share), weights(3, 32, 32), SITU).shape == (0, 32)


@given(exponent=st.integers(-140, 119), spread=st.integers(0, 20), seed=st.integers(0, 2**16))
def test_mxfp8_is_what_its_definition_says_at_every_size(exponent, spread, seed):
    random = torch.Generator().manual_seed(seed)
    rows = torch.randn(3, 64, generator=random).double() * 2.0**exponent
    rows = (rows * torch.exp2(torch.randint(-spread, 1, (3, 64), generator=random))).float()
    assert torch.equal(mxfp8.rounded(rows).double(), reference.round_mxfp8(rows))
    narrow = rows.bfloat16()
    assert torch.equal(mxfp8.rounded(narrow).double(), reference.round_mxfp8(narrow).bfloat16().double())


def test_mxfp8_keeps_zeros_and_cuts_what_is_above_its_largest_code():
    rows = torch.zeros(1, 64)
    rows[0, 32], rows[0, 33] = 1.99, 2.0**-20
    kept = mxfp8.rounded(rows)
    assert not kept[0, :32].any()
    assert kept[0, 32].item() == 448 / 256
    assert mxfp8.rounded(kept).equal(kept)


@pytest.mark.kernel
@interpreted
@given(
    tokens=st.integers(0, 40),
    E=st.integers(1, 6),
    F=st.sampled_from([32, 96]),
    L=st.sampled_from([64, 160]),
    rounded=st.booleans(),
    activation=st.sampled_from([SITU, SituGlu(), SituGlu(4.0, None)]),
)
@settings(max_examples=6, phases=[Phase.explicit, Phase.generate])
def test_interpreted_kernels_of_any_gpu_give_the_definition(tokens, E, F, L, rounded, activation):
    tiled = pytest.importorskip("triax.kernels.mx.experts.tiled")
    packed, values = weights(E, F, L), inputs(tokens, E, min(2, E), L)
    found = tiled.experts(*values, *packed, activation, rounded=rounded)
    expected = looped.experts(*values, *packed, activation, mxfp8.rounded if rounded else as_it_is)
    torch.testing.assert_close(found, expected, rtol=1e-2 if rounded else 1e-4, atol=1e-3 if rounded else 1e-5)


def test_tiles_hold_every_pair_once_under_its_own_expert():
    tiled = pytest.importorskip("triax.kernels.mx.experts.tiled")
    expert = torch.randint(0, 7, (50, 3))
    expert[expert == 4] = 5  # nobody's expert
    pair, tile = tiled.tiles(expert, 7, 8)
    seen = []
    for owner, first, count in tile.tolist():
        own = pair[first : first + count]
        assert (expert.flatten()[own] == owner).all()
        seen += own.tolist()
    assert sorted(seen) == list(range(150))


@pytest.mark.parametrize("form", [streamed, sliced])
def test_what_a_kernel_for_hopper_cannot_take_is_named(form):
    values, packed = inputs(3, 4, 2, 128, torch.bfloat16), weights(4, 128, 128)
    with pytest.raises(UnsupportedError, match=r"kernels\.mx\.experts\.\w+: no kernel for this device"):
        form.experts(*values, *packed, SITU, rounded=False)


def k3_shapes(*, rounded):
    return work_plan.shapes(3584, 3072, SITU, rounded=rounded)


@pytest.mark.parametrize("back", [0, 1])
def test_the_kernel_for_few_tokens_compiles_for_hopper(assembled, back):
    defines = streamed.macros(k3_shapes(rounded=True)[back])
    code = assembled(work_plan.WEIGHTS.read_text() + streamed.STREAM.read_text(), defines)
    assert code.stack == 0
    assert code.registers * streamed.WARPS <= 2048
    assert "HMMA.16816.F32.BF16" in code.sass
    assert "LDGSTS.E.BYPASS.LTC128B.128" in code.sass, "weights come 16 bytes at a time and past the first cache"
    assert streamed.shared_bytes(3584, dict(defines)["RING"]) <= work_plan.ROOM


@pytest.mark.parametrize("form", sliced.FORMS, ids=lambda form: str(form.columns))
def test_the_kernel_for_many_tokens_compiles_for_hopper(assembled, form):
    shape, _ = k3_shapes(rounded=True)
    code = assembled(work_plan.WEIGHTS.read_text() + sliced.SLICES.read_text(), sliced.macros(shape, form))
    assert code.stack <= 16  # bytes of registers spilled, a thread
    assert "HMMA.16816.F32.BF16" in code.sass
    assert "UBLKCP" in code.sass, "the copy engine brings tokens"
    assert form.shared_bytes() <= work_plan.ROOM


def test_wide_tokens_leave_room_for_fewer_weights_on_their_way():
    assert streamed.ring_of(3584) == 4
    assert streamed.ring_of(2304) == 3
    assert streamed.ring_of(7168) == 2
    assert streamed.ring_of(7168 * 2) is None
    assert sliced.form_of(1.0) is sliced.FORMS[0]
    assert sliced.form_of(1000.0) is sliced.FORMS[-1]


def test_kernels_of_any_gpu_compile_for_hopper(hopper):
    tiled = pytest.importorskip("triax.kernels.mx.experts.tiled")
    form, module = tiled.LARGE, "triax.kernels.mx.experts.tiled"
    codes = ("gate", "gate_scale", "up", "up_scale", "down", "down_scale")
    types = dict.fromkeys(codes, "*u8") | {"parted": "*bf16", "inner": "*bf16", "pair": "*i64", "tile": "*i32"}
    types |= {"share": "*fp32", "returned": "*fp32"}
    sizes = {"L": 3584, "F": 3072, "ROWS": form.rows, "BLOCKS": form.blocks, "FAST": True}
    caps = {"K": 16, "BF": form.features, "GATE_CAP": 4.0, "UP_CAP": 25.0}
    wanted = [
        {"module": module, "kernel": "_open", "types": types, "constants": sizes | caps},
        {"module": module, "kernel": "_close", "types": types, "constants": sizes | {"BD": form.channels}},
    ]
    how = {"num_warps": form.warps, "num_stages": form.stages}
    for kernel in hopper([one | {"options": how} for one in wanted]):
        assert kernel.stack == 0
        assert kernel.shared <= 227 * 1024
        assert "HGMMA" in kernel.sass


def relative(found, expected):
    return ((found.double() - expected.double()).norm() / expected.double().norm()).item()


def forms():
    from triax.kernels.mx.experts import tiled

    return streamed, sliced, tiled


@pytest.mark.gpu
@on_gpu
@pytest.mark.parametrize("rounded", [False, True])
@pytest.mark.parametrize(("F", "L"), [(3072, 3584), (128, 128), (384, 1152), (1024, 2304)])
@pytest.mark.parametrize(("T", "E", "k"), [(1, 12, 4), (5, 12, 1), (40, 12, 4), (100, 12, 2), (300, 9, 3), (0, 2, 2)])
def test_on_a_gpu_all_kernels_give_the_definition(T, E, k, F, L, rounded):
    packed, values = weights(E, F, L, "cuda"), inputs(T, E, k, L, torch.bfloat16, "cuda")
    expected = looped.experts(*values, *packed, SITU, mxfp8.rounded if rounded else as_it_is)
    for form in forms():
        if form is streamed and form.unsupported(*values[:2], *packed, SITU) is not None:
            continue
        found = form.experts(*values, *packed, SITU, rounded=rounded)
        assert torch.equal(found, form.experts(*values, *packed, SITU, rounded=rounded)), "sums have one order"
        if T:
            assert relative(found, expected) < (1e-2 if rounded else 5e-3), form.__name__


@pytest.mark.gpu
@on_gpu
@pytest.mark.parametrize("columns", [32, 64])
def test_on_a_gpu_items_of_every_size_are_filled_to_any_degree(columns, monkeypatch):
    form = next(form for form in sliced.FORMS if form.columns == columns)
    monkeypatch.setattr(sliced, "FORMS", (form._replace(fullest=float("inf")),))
    for T in (1, 7, columns - 1, columns, columns + 1, 3 * columns + 9):
        packed, values = weights(3, 256, 384, "cuda"), inputs(T, 3, 1, 384, torch.bfloat16, "cuda")
        found = sliced.experts(*values, *packed, SituGlu(), rounded=False)
        assert relative(found, looped.experts(*values, *packed, SituGlu(), as_it_is)) < 5e-3


@pytest.mark.gpu
@on_gpu
@pytest.mark.parametrize("form", [streamed, sliced])
def test_on_a_gpu_all_tokens_may_want_one_expert_and_a_row_of_the_batch_changes_no_other(form):
    packed, (hidden, chosen, share) = weights(40, 128, 256, "cuda"), inputs(70, 40, 1, 256, torch.bfloat16, "cuda")
    chosen = torch.full_like(chosen, 7)
    found = form.experts(hidden, chosen, share, *packed, SITU, rounded=False)
    assert relative(found, looped.experts(hidden, chosen, share, *packed, SITU, as_it_is)) < 5e-3
    hidden[3] = float("nan")
    again = form.experts(hidden, chosen, share, *packed, SITU, rounded=False)
    assert again[3].isnan().all()
    assert torch.equal(again[4:], found[4:])


@pytest.mark.gpu
@on_gpu
@pytest.mark.parametrize("code", [0, 1, 100, 144])
def test_on_a_gpu_scales_at_both_ends_are_right_and_larger_ones_are_no_numbers(code):
    E, F, L = 3, 128, 128
    codes, values = weights(E, F, L, "cuda"), inputs(6, E, 2, L, torch.bfloat16, "cuda")
    packed = [codes[0], Mxfp4(codes[1].packed, torch.full_like(codes[1].scale, code)), codes[2]]
    expected = looped.experts(*values, *packed, SituGlu(), as_it_is)
    broken = [codes[0], Mxfp4(codes[1].packed, torch.full_like(codes[1].scale, 145)), codes[2]]
    for form in forms():
        found = form.experts(*values, *packed, SituGlu(), rounded=False)
        if code > 10:
            assert relative(found, expected) < 5e-3
        else:
            assert found.abs().max() < 1e-30
        assert not form.experts(*values, *broken, SituGlu(), rounded=False).isfinite().any()


@pytest.mark.gpu
@on_gpu
def test_on_a_gpu_a_graph_gives_the_bits_of_the_launches_for_other_routings_too():
    packed = weights(64, 256, 512, "cuda")
    hidden, chosen, share = inputs(20, 64, 4, 512, torch.bfloat16, "cuda")
    for _ in range(2):
        experts(hidden, Routing(chosen, share), packed, SITU)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output = experts(hidden, Routing(chosen, share), packed, SITU)
    for fresh in (inputs(20, 64, 4, 512, torch.bfloat16, "cuda") for _ in range(3)):
        for kept, new in zip((hidden, chosen, share), fresh, strict=True):
            kept.copy_(new)
        graph.replay()
        assert torch.equal(output, experts(fresh[0], Routing(*fresh[1:]), packed, SITU))


@pytest.mark.gpu
@on_gpu
def test_on_a_gpu_weights_beyond_two_billion_bytes_are_found():
    E, F, L = 896, 3072, 3584
    packed, (hidden, _, share) = weights(E, F, L, "cuda"), inputs(4, E, 2, L, torch.bfloat16, "cuda")
    chosen = torch.tensor([[895, 0], [894, 895], [400, 895], [700, 1]], device="cuda")
    expected = looped.experts(hidden, chosen, share, *packed, SITU, as_it_is)
    for form in forms():
        assert relative(form.experts(hidden, chosen, share, *packed, SITU, rounded=False), expected) < 5e-3
