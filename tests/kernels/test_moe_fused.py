"""The training kernels of routed experts: interpreted in fp32 on a CPU, compiled for sm_90, and run on a GPU."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from triax.errors import UnsupportedError
from triax.kernels import moe
from triax.kernels.moe import reference
from triax.kernels.routed import ExpertWeights, Routing
from triax.kernels.situ_glu import SituGlu

pytest.importorskip("triton", reason="Triton is installed on x86 Linux only")
ON_GPU = torch.cuda.is_available()
SITU, SWIGLU = SituGlu(4.0, 25.0), SituGlu()
NAMES = ["hidden", "share", "gate", "up", "down"]
interpreted = pytest.mark.skipif(ON_GPU, reason="the gpu tests run the compiled kernels")


@pytest.fixture(scope="module")
def fused():
    from triax.kernels.moe import fused

    return fused


@pytest.fixture(scope="module")
def small():
    from triax.kernels.moe.tiles import TilePlan, Tiles

    tiles = Tiles(columns=32, depth=16, warps=4, stages=2, programs=1, flatten=False)
    return TilePlan(16, *(tiles,) * 5)


def inputs(T, k, E, L, F, among=None, zipf=False, seed=0):
    """Random leaves, and a choice among the first `among` experts."""
    random = torch.Generator().manual_seed(seed)
    leaves = {
        "hidden": torch.randn(T, L, generator=random),
        "share": torch.rand(T, k, generator=random),
        "gate": torch.randn(E, F, L, generator=random) / L**0.5,
        "up": torch.randn(E, F, L, generator=random) / L**0.5,
        "down": torch.randn(E, L, F, generator=random) / F**0.5,
    }
    odds = 1 / torch.arange(1, (among or E) + 1) ** float(zipf)
    expert = torch.multinomial(odds.expand(T, -1), k, generator=random)
    return {name: leaf.requires_grad_() for name, leaf in leaves.items()}, expert


def weight_like(output):
    """A fixed random weight for each number of the output, the same in every format."""
    return torch.randn(output.shape, generator=torch.Generator().manual_seed(1)).bfloat16().to(output)


def applied(path, leaves, expert, activation=SITU, **options):
    if path is moe.experts:
        hidden, share, *weights = leaves.values()
        return path(hidden, Routing(expert, share), ExpertWeights(*weights), activation, **options)
    return path(expert=expert, activation=activation, **leaves, **options)


def outcome(path, leaves, expert, activation=SITU, **options):
    """Output and gradients for a fixed random weight on the output."""
    output = applied(path, leaves, expert, activation, **options)
    weight = weight_like(output)
    gradients = torch.autograd.grad(output, list(leaves.values()), weight)
    return {"output": output.detach(), **dict(zip(leaves, gradients, strict=True))}


def exact_outcome(monkeypatch, leaves, expert, activation=SITU):
    """The definition's, activation included, in fp64."""
    with monkeypatch.context() as patch:
        patch.setenv("TRIAX_KERNELS", "reference")
        return {name: x.cpu() for name, x in outcome(reference.experts, leaves, expert, activation).items()}


def largest_errors(found, expected):
    """Relative errors (L2) of the output and of the worst gradient."""
    errors = {
        name: ((found[name].double().cpu() - right).norm() / right.norm().clamp_min(1e-30)).item()
        for name, right in expected.items()
    }
    return errors["output"], max(errors[name] for name in NAMES)


@pytest.mark.kernel
@interpreted
@pytest.mark.parametrize(
    ("shape", "activation"),
    [
        ({"T": 13, "k": 2, "E": 4, "L": 24, "F": 40}, SITU),
        ({"T": 13, "k": 2, "E": 4, "L": 24, "F": 40}, SWIGLU),
        ({"T": 40, "k": 1, "E": 3, "L": 40, "F": 16, "among": 1}, SITU),
        ({"T": 1, "k": 2, "E": 3, "L": 8, "F": 8}, SituGlu(2.0, None)),
        ({"T": 30, "k": 2, "E": 9, "L": 16, "F": 12, "zipf": True}, SITU),
    ],
    ids=["several", "swiglu", "one expert", "one token", "zipf"],
)
@pytest.mark.filterwarnings("ignore:overflow encountered in exp:RuntimeWarning")  # 1 / (1 + inf) is the 0 that is meant
def test_interpreted_kernels_give_the_output_and_every_gradient(fused, small, shape, activation):
    leaves, expert = inputs(**shape)
    found = outcome(fused.experts, leaves, expert, activation, dtype=torch.float32, plan=small)
    expected = outcome(reference.experts, leaves, expert, activation)
    assert {name: x.dtype for name, x in found.items()} == {name: torch.float32 for name in found}
    for name, right in expected.items():
        torch.testing.assert_close(found[name], right, rtol=2e-5, atol=2e-5, msg=lambda m, n=name: f"{n}: {m}")
    used = expert.unique()
    for name in NAMES[2:]:
        unused = [e for e in range(len(leaves[name])) if e not in used]
        assert not found[name][unused].any(), name


@pytest.mark.kernel
@interpreted
def test_two_interpreted_runs_agree_bit_for_bit_and_frozen_weights_get_nothing(fused, small):
    leaves, expert = inputs(9, 2, 3, 16, 16)
    first, second = (outcome(fused.experts, leaves, expert, dtype=torch.float32, plan=small) for _ in range(2))
    assert all(torch.equal(first[name], second[name]) for name in first)
    for frozen in NAMES:
        some = {name: leaf.detach().requires_grad_(name != frozen) for name, leaf in leaves.items()}
        output = fused.experts(expert=expert, activation=SITU, dtype=torch.float32, plan=small, **some)
        output.backward(weight_like(output))
        assert some[frozen].grad is None
        assert all(torch.equal(some[name].grad, first[name]) for name in NAMES if name != frozen)


@pytest.mark.kernel
@interpreted
@pytest.mark.parametrize("path", ["kernels", "chosen", "definition"])
def test_rounded_weights_are_multiplied_and_gradients_are_added_where_asked(fused, small, monkeypatch, path):
    leaves, expert = inputs(9, 2, 4, 16, 16, among=3)
    rounded = {name: leaves[name].detach().bfloat16().float() for name in NAMES[2:]}
    expected = outcome(reference.experts, leaves | {n: x.clone().requires_grad_() for n, x in rounded.items()}, expert)
    sums = ExpertWeights(*(torch.ones_like(leaves[name]) for name in NAMES[2:]))
    options = {"rounded": ExpertWeights(**rounded), "sums": sums}
    call = moe.experts
    if path == "kernels":
        call, options = fused.experts, options | {"dtype": torch.float32, "plan": small}
    elif path == "definition":
        monkeypatch.setenv("TRIAX_KERNELS", "reference")
    output = applied(call, leaves, expert, **options)
    torch.testing.assert_close(output, expected["output"])
    output.backward(weight_like(output))
    for name, total in zip(NAMES[2:], sums, strict=True):
        assert leaves[name].grad is None
        torch.testing.assert_close(total, 1 + expected[name], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(leaves["hidden"].grad, expected["hidden"], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("forced", [False, True])
def test_gradients_of_rounded_weights_come_back_in_the_format_of_the_weights(monkeypatch, forced):
    if forced:
        monkeypatch.setenv("TRIAX_KERNELS", "reference")
    leaves, expert = inputs(9, 2, 4, 16, 16)
    rounded = ExpertWeights(*(leaves[name].detach().bfloat16() for name in NAMES[2:]))
    exact = {name: x.detach().float().requires_grad_() for name, x in zip(NAMES[2:], rounded, strict=True)}
    expected = outcome(reference.experts, leaves | exact, expert)
    half = {"hidden": leaves["hidden"].detach().bfloat16().requires_grad_(), "share": leaves["share"]}
    found = outcome(moe.experts, leaves | half, expert, rounded=rounded)
    assert all(found[name].dtype is torch.float32 for name in NAMES[1:])
    assert max(largest_errors(found, expected)) < 2e-2


@pytest.mark.kernel
@interpreted
@given(T=st.integers(1, 40), k=st.integers(1, 3), E=st.integers(3, 70), tile=st.sampled_from([4, 16]), data=st.data())
@settings(max_examples=10)
def test_every_pair_has_its_own_row_in_a_tile_of_its_expert(T, k, E, tile, data):
    from triax.kernels.moe.rows import arrange

    among = data.draw(st.integers(k, E))
    _, expert = inputs(T, k, E, 1, 1, among=among, seed=T)
    share = torch.rand(T, k)
    rows = arrange(expert, share, E, tile)
    assert rows.row.unique().numel() == T * k
    assert torch.equal(rows.expert[rows.row // tile].long(), expert)
    assert torch.equal(rows.share[rows.row.long()], share)
    assert torch.equal(rows.count.long(), expert.flatten().bincount(minlength=E))
    assert rows.used.item() == (-(-rows.count // tile)).sum()
    assert (rows.expert[rows.used.item() :] == E).all()
    for one in range(E):  # by token inside an expert
        own = rows.row.flatten()[expert.flatten() == one]
        assert torch.equal(own, rows.first[one] + torch.arange(len(own), dtype=own.dtype))


def test_what_the_kernels_cannot_take_is_named(fused):
    leaves, expert = inputs(4, 1, 2, 6, 8)
    with pytest.raises(UnsupportedError, match="matrices of 8 by 6"):
        fused.experts(expert=expert, activation=SITU, dtype=torch.float32, **leaves)
    leaves, expert = inputs(4, 1, 2, 8, 8)
    with pytest.raises(UnsupportedError, match=r"products in `torch\.float16`"):
        fused.experts(expert=expert, activation=SITU, dtype=torch.float16, **leaves)
    with pytest.raises(UnsupportedError, match="no tokens"):
        fused.experts(
            expert=expert[:0], activation=SITU, dtype=torch.float32,
            **leaves | {"hidden": leaves["hidden"][:0], "share": leaves["share"][:0]},
        )  # fmt: skip


def _described(*block, kind="bf16"):
    return f"tensordesc<{kind}[{', '.join(map(str, block))}]>"


def _wanted(name, rows, tiles):
    high, wide, deep = rows, tiles.columns, tiles.depth
    lying = name in ("down_proj_backward", "gate_up_proj_backward")
    weight = _described(1, deep, wide) if lying else _described(1, wide, deep)
    out, kept = _described(high, wide // 2), _described(1, high, wide // 2)
    types = {"x": _described(high, deep), "above": _described(high, deep), "gate": weight, "up": weight}
    types |= {"matrix": weight, "down": weight, "both": kept, "to_both": kept, "inner": out, "weighted": out}
    types |= {"result": out, "expert": "*i32", "used": "*i32", "row_share": "*fp32", "share_part": "*fp32"}
    types |= {"first": "*i32", "count": "*i32", "left": _described(1, deep, high), "right": _described(deep, wide)}
    types |= {size: "i32" for size in "RLFMN"} | {"E": "i32u", "part": "i32u"}
    if name == "gate_up_proj_backward":
        types["to_both"] = _described(1, high, deep)
    if name == "weight_gradient":
        types["result"] = _described(1, high, wide // 2, kind="fp32")
    constants = {"BM": high, "BN": wide, "BK": deep, "GATE_CAP": 4.0, "UP_CAP": 25.0, "KEEPS": True, "FAST": True}
    constants |= {"ADDS": False, "FLATTEN": tiles.flatten, "PRECISION": "tf32"}
    return {"module": "triax.kernels.moe.products", "kernel": name, "types": types, "constants": constants,
            "options": {"num_warps": tiles.warps, "num_stages": tiles.stages}}  # fmt: skip


@pytest.mark.kernel
@pytest.mark.slow
def test_products_compile_for_hopper_to_its_matrix_instructions_without_spills(hopper):
    from triax.kernels.moe import products
    from triax.kernels.moe.tiles import PLAN

    wanted = [_wanted(name, PLAN.rows, tiles) for name, tiles in PLAN._asdict().items() if name != "rows"]
    for want in wanted:
        names = getattr(products, want["kernel"]).arg_names
        want["types"] = {name: kind for name, kind in want["types"].items() if name in names}
        want["constants"] = {name: value for name, value in want["constants"].items() if name in names}
    for want, compiled in zip(wanted, hopper(wanted), strict=True):
        assert compiled.stack == 0, want["kernel"]
        assert compiled.shared <= 227 * 1024, want["kernel"]
        assert "HGMMA" in compiled.sass, want["kernel"]
        assert " HMMA" not in compiled.sass, want["kernel"]


@pytest.mark.kernel
@pytest.mark.parametrize("kind", range(5))
def test_the_cuda_products_compile_to_full_width_matrix_instructions(assembled, kind):
    from triax.kernels.moe.hopper import DOWN_PROJ_BACKWARD, GATE_UP_PROJ, SOURCES, macros

    caps = (4.0, 25.0) if kind in (GATE_UP_PROJ, DOWN_PROJ_BACKWARD) else (None, None)
    compiled = assembled(
        "\n".join(path.read_text() for path in SOURCES), macros(kind, caps, keeps=True, wide=True, adds=True)
    )
    assert "HGMMA.64x256x16.F32.BF16" in compiled.sass
    assert compiled.registers == 168  # 384 threads, which then share the register file unevenly
    assert compiled.stack == 0


def _on_gpu(leaves, expert):
    leaves = {
        name: leaf.detach().to("cuda", torch.float32 if name == "share" else torch.bfloat16).requires_grad_()
        for name, leaf in leaves.items()
    }
    exact = {name: leaf.detach().double().requires_grad_() for name, leaf in leaves.items()}
    return leaves, exact, expert.cuda()


@pytest.mark.gpu
@pytest.mark.parametrize("form", ["cuda", "triton"])
@pytest.mark.parametrize("activation", [SITU, SWIGLU])
@pytest.mark.parametrize(
    "shape",
    [
        {"T": 1500, "k": 4, "E": 16, "L": 512, "F": 384, "among": 12, "zipf": True},
        {"T": 700, "k": 2, "E": 8, "L": 200, "F": 136},
        {"T": 1, "k": 8, "E": 64, "L": 2048, "F": 1024},
        {"T": 3000, "k": 1, "E": 4, "L": 256, "F": 512, "among": 1},
    ],
    ids=["zipf", "odd sizes", "one token", "one expert"],
)
def test_errors_on_a_gpu_stay_near_the_rounding_of_bf16_whatever_memory_held(
    fused, monkeypatch, form, activation, shape
):
    from triax.kernels.moe.tiles import PLAN

    leaves, exact, expert = _on_gpu(*inputs(**shape))
    options = {"dtype": torch.bfloat16, "plan": None if form == "cuda" else PLAN}
    expected = exact_outcome(monkeypatch, exact, expert, activation)
    torch.full((2**28,), float("nan"), device="cuda")  # freed at once: what the kernels are handed is not zero
    found, again = (outcome(fused.experts, leaves, expert, activation, **options) for _ in range(2))
    output, gradient = largest_errors(found, expected)
    assert output < 6e-3
    assert gradient < 8e-3
    assert all(torch.equal(found[name], again[name]) for name in found)
    unused = torch.ones(shape["E"], dtype=torch.bool, device="cuda")
    unused[expert.flatten()] = False
    assert not any(found[name][unused].any() for name in NAMES[2:])


@pytest.mark.gpu
@pytest.mark.parametrize("form", ["cuda", "triton"])
def test_master_weights_receive_fp32_gradients_and_sums_grow(fused, form):
    from triax.kernels.moe.tiles import PLAN

    leaves, expert = inputs(900, 4, 8, 256, 192, among=6)
    leaves, expert = {name: leaf.detach().cuda().requires_grad_() for name, leaf in leaves.items()}, expert.cuda()
    rounded = ExpertWeights(*(leaves[name].detach().bfloat16() for name in NAMES[2:]))
    options = {"dtype": torch.bfloat16, "plan": None if form == "cuda" else PLAN, "rounded": rounded}
    expected = outcome(fused.experts, leaves, expert, **options)
    assert all(expected[name].dtype is torch.float32 for name in NAMES)
    sums = ExpertWeights(*(torch.ones_like(leaves[name]) for name in NAMES[2:]))
    output = fused.experts(expert=expert, activation=SITU, sums=sums, **leaves, **options)
    output.backward(weight_like(output))
    for name, total in zip(NAMES[2:], sums, strict=True):
        assert leaves[name].grad is None
        torch.testing.assert_close(total, 1 + expected[name], rtol=1e-5, atol=1e-5)


@pytest.mark.gpu
def test_a_recorded_graph_gives_what_was_recorded_for_any_later_routing(fused):
    leaves, _, expert = _on_gpu(*inputs(600, 4, 16, 256, 256))
    weight = torch.randn(600, 256, device="cuda").bfloat16()

    def work():
        output = fused.experts(expert=expert, activation=SITU, dtype=torch.bfloat16, **leaves)
        return output, *torch.autograd.grad(output, list(leaves.values()), weight)

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        work()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        # kept with its autograd graph, the recording's stream would be told against the next one's
        recorded = [x.detach() for x in work()]
    for among in (16, 5, 4):
        expert.copy_(inputs(600, 4, 16, 1, 1, among=among, seed=among)[1])
        graph.replay()
        assert all(torch.equal(one, other) for one, other in zip(recorded, work(), strict=True))


@pytest.mark.gpu
def test_training_in_bf16_takes_the_kernels_and_odd_sizes_warn_by_name(monkeypatch):
    leaves, exact, expert = _on_gpu(*inputs(300, 2, 8, 64, 64))
    found = outcome(moe.experts, leaves, expert)
    assert max(largest_errors(found, exact_outcome(monkeypatch, exact, expert))) < 8e-3
    leaves, _, expert = _on_gpu(*inputs(30, 2, 8, 60, 64))
    with pytest.warns(UserWarning, match="no GPU kernel for matrices of 64 by 60"):
        outcome(moe.experts, leaves, expert)


@pytest.mark.gpu
@pytest.mark.parametrize("form", ["cuda", "triton"])
def test_rows_of_more_than_two_thousand_million_numbers_are_all_reached(fused, form):
    from triax.kernels.moe.tiles import PLAN

    T, last = 2**17 + 5000, 700
    options = {"dtype": torch.bfloat16, "plan": None if form == "cuda" else PLAN}
    assert T * 8 * 2048 > 2**31
    leaves, _, _ = _on_gpu(*inputs(last, 8, 8, 2048, 64))
    expert = torch.arange(8, device="cuda").expand(T, 8)
    tail = outcome(fused.experts, leaves, expert[:last], **options)
    hidden, share = torch.randn(T, 2048, device="cuda").bfloat16(), torch.rand(T, 8, device="cuda")
    hidden[-last:], share[-last:] = leaves["hidden"].detach(), leaves["share"].detach()
    many = leaves | {"hidden": hidden.requires_grad_(), "share": share}
    output = fused.experts(expert=expert, activation=SITU, **many, **options)
    weight = torch.zeros_like(output)
    weight[-last:] = weight_like(tail["output"])
    gradient = torch.autograd.grad(output, hidden, weight)[0]
    assert torch.equal(output[-last:], tail["output"])
    assert torch.equal(gradient[-last:], tail["hidden"])
    assert not gradient[:-last].any()
