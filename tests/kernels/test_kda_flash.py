"""The GPU kernels of KDA: interpreted in fp32 on a CPU, compiled for sm_90 without a GPU, and run where one is."""

import re
import warnings
from itertools import accumulate

import pytest
import torch
import torch.nn.functional as F

from triax.errors import UnsupportedError
from triax.kernels.kda import kda, reference, segment_map

pytest.importorskip("triton", reason="Triton is installed on x86 Linux only")
ON_GPU = torch.cuda.is_available()
NAMES = ("read", "state", "interior", "d_query", "d_key", "d_value", "d_log_decay", "d_beta", "d_state")


@pytest.fixture(scope="module")
def flash():
    """Import the kernels only where a test wants them; without a GPU Triton's interpreter runs them (conftest.py)."""
    from triax.kernels.kda import flash

    return flash


def inputs(lengths, heads, channels, width, kind, dtype=torch.float32, device="cpu", seed=0):
    """Inputs as a layer makes them, rounded to what the kernels get."""
    draw = torch.Generator().manual_seed(seed)
    tokens, sequences = sum(lengths), len(lengths)

    def normal(*shape):
        return torch.randn(*shape, generator=draw)

    key, beta = normal(tokens, heads, channels), torch.sigmoid(normal(tokens, heads))
    gate = -5 * torch.sigmoid(2 * normal(tokens, heads, channels) - 1)
    if kind in ("slow", "repeated"):
        # Time constants from 1 to 1e5 tokens, as in trained models.
        slowness = torch.exp(torch.rand(heads, channels, generator=draw) * 11.5)
        gate = (-(0.5 + torch.rand(tokens, heads, channels, generator=draw)) / slowness).clamp(min=-5)
    if kind == "repeated":
        key = key[::64].repeat_interleave(64, 0)[:tokens] + 0.2 * key
        beta = 0.9 + 0.1 * beta
    if kind == "fastest":
        gate = torch.full_like(gate, -5.0)
    if kind == "unbounded":
        gate = -60 * torch.rand(tokens, heads, channels, generator=draw) ** 8
    streams = [F.normalize(normal(tokens, heads, channels), dim=-1) * channels**-0.5, F.normalize(key, dim=-1)]
    streams = [x.to(dtype) for x in (*streams, normal(tokens, heads, width))]
    return [x.to(device) for x in (*streams, gate, beta, normal(sequences, heads, channels, width) * 0.1)]


def outcome(operation, x, lengths, states_at, **options):
    leaves = [tensor.detach().requires_grad_() for tensor in x]
    result = operation(*leaves, tuple(accumulate(lengths, initial=0)), states_at=states_at, **options)
    draw = torch.Generator().manual_seed(1)
    weights = [torch.randn(y.shape, generator=draw).bfloat16().to(y.device, y.dtype) for y in result]
    return dict(zip(NAMES, (*result, *torch.autograd.grad(result, leaves, weights)), strict=True))


def errors(flash, x, lengths, states_at, lowest):
    found = outcome(flash.kda, x, lengths, states_at, lowest_log_decay=lowest)
    expected = outcome(reference.kda, [t.double() for t in x], lengths, states_at)
    return {name: ((found[name].double() - y).norm() / y.norm().clamp_min(1e-6)).item() for name, y in expected.items()}


@pytest.mark.kernel
@pytest.mark.skipif(ON_GPU, reason="the kernels are compiled here; the gpu tests run them")
# Above the diagonal products may be infinite, and are selected away.
@pytest.mark.filterwarnings("ignore:(overflow|invalid value) encountered:RuntimeWarning")
@pytest.mark.parametrize(
    ("kind", "lengths", "channels", "width", "states_at"),
    [
        ("random", (70, 0, 1, 60), 32, 32, (33, 70, 70, 71)),
        ("repeated", (130,), 32, 32, (64,)),
        ("fastest", (65,), 32, 64, (64,)),
        ("unbounded", (40, 66), 64, 32, (106,)),
        ("repeated", (66, 0, 1), 256, 32, (64, 67)),
        ("random", (5,), 256, 256, (5,)),
    ],
)
def test_interpreted_kernels_match_the_recurrence(flash, kind, lengths, channels, width, states_at):
    x = inputs(lengths, 1 if channels != width else 2, channels, width, kind)
    found = errors(flash, x, lengths, states_at, -5.0 if kind != "unbounded" else float("-inf"))
    assert max(found.values()) < 1e-4, found


@pytest.mark.kernel
@pytest.mark.skipif(ON_GPU, reason="the kernels are compiled here; the gpu tests run them")
@pytest.mark.parametrize("kind", ["random", "repeated", "fastest"])
def test_interpreted_kernels_with_tiles_anchored_at_their_start_match_the_recurrence(flash, kind):
    x, lengths = inputs((70, 0, 1, 20), 1, 32, 32, kind), (70, 0, 1, 20)

    def operation(*y, states_at):
        return flash.kda_flash(*y[:6], list(y[6]), list(states_at), 16, True, True)[:3]

    found = outcome(operation, x, lengths, (33, 70))
    expected = outcome(reference.kda, [t.double() for t in x], lengths, (33, 70))
    wrong = {n: ((found[n].double() - y).norm() / y.norm().clamp_min(1e-6)).item() for n, y in expected.items()}
    assert max(wrong.values()) < 1e-4, wrong


@pytest.mark.kernel
@pytest.mark.skipif(ON_GPU, reason="the kernels are compiled here; the gpu tests run them")
@pytest.mark.parametrize("channels", [32, 256])
def test_interpreted_kernels_take_slices_shared_keys_and_no_state(flash, channels):
    wide = inputs((20,), 2, 3 * channels, 32, "random")
    query, key = wide[0][:, :1, :channels], wide[1][:, :1, channels : 2 * channels]
    x = [query, key, wide[2], wide[3][..., 2 * channels :], wide[4]]
    found = flash.kda(*x, None, (0, 20), lowest_log_decay=-5.0)
    expected = reference.kda(*x, None, (0, 20))
    torch.testing.assert_close(found.read, expected.read, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(found.state, expected.state, rtol=1e-4, atol=1e-5)


@pytest.mark.kernel
@pytest.mark.skipif(ON_GPU, reason="the kernels are compiled here; the gpu tests run them")
def test_values_of_256_are_worked_on_in_halves(flash):
    x = inputs((10, 11), 1, 32, 256, "random")
    found = flash.kda(*x, (0, 10, 21), lowest_log_decay=-5.0, states_at=(4,))
    expected = reference.kda(*x, (0, 10, 21), states_at=(4,))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.kernel
def test_a_head_size_without_a_kernel_is_refused_by_name(flash):
    x = inputs((3,), 1, 48, 32, "random")
    with pytest.raises(UnsupportedError, match="head sizes `48` and `32`"):
        flash.kda(*x, (0, 3))


def undefined_uniform_registers(sass):
    """Find uniform registers that are read before any instruction above has written them."""
    written, found = set(), []
    for line in re.findall(r"/\*[0-9a-f]{4,5}\*/\s+(?:@!?U?P\w+\s+)?([A-Z].*?);", sass):
        name, *operands = re.split(r"[\s,]+", line.strip(), maxsplit=1)
        operands = [x.strip() for x in (operands[0] if operands else "").split(",")]
        pair = 2 if ".64" in name else 1
        target = re.fullmatch(r"UR(\d+)", operands[0]) if name.startswith(("U", "R2UR", "S2UR", "REDUX")) else None
        for kind, number in re.findall(r"(gdesc\[|desc\[)?\bUR(\d+)\b", ",".join(operands[bool(target) :])):
            first, count = int(number), 2 if kind or (pair == 2 and name.startswith("U")) else 1
            # A matrix product whose left operand is in registers reads the second pair of its four.
            first += 2 * (kind == "gdesc[")
            found += [f"{line}: UR{n}" for n in range(first, first + count) if n not in written]
        if target:
            written.update(range(int(target[1]), int(target[1]) + (2 if "WIDE" in name else pair)))
    return found


NUMBERS = ("H", "T", "qt", "qh", "kt", "kh", "vt", "vh", "gt", "gh", "bt", "rt", "rh")
TABLES = ("first", "count", "runs", "run_first", "run_tokens", "run_chunk", "run_slot")
EXACT = ("decay", "ends", "state", "dends", "dstate", "db", "g", "dg", "beta")


def to_compile(flash, kernel, dtype, channels, anchored=(32, False)):
    """What the `hopper` fixture takes, of a kernel as it is launched for many heads with values of 128."""
    cut = flash._launch(*inputs((1,), 1, channels, 128, "random", dtype)[:5], 100, wide=True)
    walks = kernel.__name__.startswith("scan")
    numbers = {
        "K": channels, "BK": cut.state_piece if walks else cut.channel_tile, "V": 128, "BV": cut.value_tile,
        "ANCHORED": anchored[0], "CAUSAL": anchored[1], "KEEP": True, "PRECISION": cut.precision, "bh": 1,
    }  # fmt: skip
    kinds = dict.fromkeys(kernel.arg_names, "*bf16" if dtype == torch.bfloat16 else "*fp32")
    kinds |= dict.fromkeys(NUMBERS, "i32") | dict.fromkeys(TABLES, "*i32") | dict.fromkeys(EXACT, "*fp32")
    warps, stages = (cut.scan_warps, cut.stages) if walks else (4, 1)
    return {
        "module": kernel.fn.__module__, "kernel": kernel.__name__, "types": kinds,
        "constants": {name: n for name, n in numbers.items() if name in kernel.arg_names},
        "options": {"num_warps": warps, "num_stages": stages},
    }  # fmt: skip


@pytest.fixture(scope="module")
def compiled(hopper, flash):
    """Compile the bf16 kernels for sm_90: all for keys of 128, and the walks for keys of 256."""
    wanted = {
        f"{kernel.__name__} {channels} {anchored}": to_compile(
            flash, kernel, torch.bfloat16, channels, (anchored, anchored == 8)
        )
        for kernel, channels, anchored in (
            (flash.prepare, 128, 32), (flash.prepare, 128, 16), (flash.prepare, 128, 8),
            (flash.gradients, 128, 32), (flash.gradients, 128, 16), (flash.gradients, 128, 8),
            (flash.scan, 128, 32), (flash.scan_back, 128, 32), (flash.scan, 256, 32), (flash.scan_back, 256, 32),
        )
    }  # fmt: skip
    return dict(zip(wanted, hopper(list(wanted.values())), strict=True))


@pytest.mark.kernel
def test_kernels_compile_for_hopper_to_its_own_matrix_instructions(compiled):
    ours = {name: kernel for name, kernel in compiled.items() if " 128 " in name}
    assert len(ours) == 8
    for name, kernel in ours.items():
        assert kernel.sass.count("HGMMA") >= 20, name
        assert " HMMA" not in kernel.sass, name
        assert kernel.registers <= 255, name
        assert kernel.shared <= 227 * 1024, name
    assert compiled["prepare 128 32"].stack == 0  # bytes of registers spilled; the others spill some, see the record


@pytest.mark.kernel
@pytest.mark.parametrize("kernel", ["scan", "scan_back"])
def test_walks_of_keys_of_256_compile_for_hopper_without_spilling(compiled, kernel):
    walk = compiled[f"{kernel} 256 32"]
    assert walk.stack == 0
    assert walk.shared <= 227 * 1024
    assert walk.sass.count("HMMA") >= 100  # 32 rows are too few for Hopper's own


@pytest.mark.soak
def test_walks_of_keys_of_256_compile_in_fp32_with_few_registers_spilled(hopper, flash):
    kernels = [to_compile(flash, kernel, torch.float32, 256) for kernel in (flash.scan, flash.scan_back)]
    for walk in hopper(kernels):
        assert walk.stack <= 160
        assert walk.shared <= 227 * 1024
        assert undefined_uniform_registers(walk.sass) == []


@pytest.mark.kernel
def test_the_assembler_reads_no_register_that_nobody_wrote(compiled):
    for name, kernel in compiled.items():
        assert undefined_uniform_registers(kernel.sass) == [], name


def test_an_unwritten_uniform_register_would_be_found():
    good = "/*0010*/ UMOV UR4, 0x1 ;\n/*0020*/ UIADD3 UR5, UP0, UR4, 0x2, URZ ;\n"
    assert undefined_uniform_registers(good) == []
    assert undefined_uniform_registers(good + "/*0030*/ UIADD3 UR7, UP0, UR6, 0x2, URZ ;\n") != []


BARS = {"repeated": (1.5e-2, 2e-2)}


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["random", "slow", "repeated", "fastest", "unbounded"])
@pytest.mark.parametrize(
    ("heads", "channels", "width"),
    [(3, 128, 128), (70, 128, 128), (3, 64, 128), (3, 128, 32), (3, 256, 32), (70, 256, 64), (2, 256, 256)],
)
def test_errors_on_a_gpu_stay_below_the_bars(flash, kind, heads, channels, width):
    lengths, states_at = ((300, 0, 1, 211), (150, 300, 301)) if heads < 70 else ((200,), (100,))
    x = inputs(lengths, heads, channels, width, kind, torch.bfloat16, "cuda")
    found = errors(flash, x, lengths, states_at, -5.0 if kind != "unbounded" else float("-inf"))
    of_outputs, of_gradients = BARS.get(kind, (6e-3, 8e-3))
    for name, error in found.items():
        assert error < (of_gradients if name.startswith("d_") else of_outputs), found


@pytest.mark.gpu
@pytest.mark.parametrize(("kind", "size"), [("slow", 128), ("repeated", 64), ("unbounded", 32), ("repeated", 256)])
def test_fp32_inputs_on_a_gpu_get_fp32_results(flash, kind, size):
    x = inputs((150, 1, 90), 2, size, size, kind, torch.float32, "cuda")
    found = errors(flash, x, (150, 1, 90), (100,), -5.0 if kind != "unbounded" else float("-inf"))
    assert max(found.values()) < 3e-4, found


@pytest.mark.gpu
def test_autocast_on_a_gpu_chooses_bf16_products(flash):
    x = inputs((80,), 2, 64, 64, "slow", torch.float32, "cuda")
    rounded = [t.bfloat16() if n < 3 else t for n, t in enumerate(x)]
    with torch.autocast("cuda", torch.bfloat16):
        found = flash.kda(*x, (0, 80), lowest_log_decay=-5.0)
    assert torch.equal(found.read, flash.kda(*rounded, (0, 80), lowest_log_decay=-5.0).read)


@pytest.mark.gpu
@pytest.mark.parametrize(("heads", "channels"), [(3, 128), (70, 128), (3, 32), (3, 256)])
def test_inference_on_a_gpu_is_the_training_forward_bit_for_bit_every_time(flash, heads, channels):
    x = inputs((500, 3), heads, channels, channels, "slow", torch.bfloat16, "cuda")
    trained = flash.kda(*(t.requires_grad_() for t in x), (0, 500, 503), lowest_log_decay=-5.0)
    with torch.no_grad():
        for _ in range(3):
            found = flash.kda(*x, (0, 500, 503), lowest_log_decay=-5.0)
            # Narrow and wide walks add the same products in the same order.
            assert torch.equal(found.read, trained.read)
            assert torch.equal(found.state, trained.state)


@pytest.mark.gpu
def test_a_graph_replays_what_was_run(flash):
    x = inputs((300,), 4, 64, 64, "random", torch.bfloat16, "cuda")
    eager = flash.kda(*x, (0, 300), lowest_log_decay=-5.0)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = flash.kda(*x, (0, 300), lowest_log_decay=-5.0)
    captured.read.fill_(float("nan"))
    graph.replay()
    torch.testing.assert_close(captured.read, eager.read, rtol=0, atol=0)


@pytest.mark.gpu
def test_maps_of_segments_with_keys_of_256_join_on_a_gpu_to_the_whole():
    query, key, value, *gates, state = inputs((300,), 4, 256, 64, "slow", torch.bfloat16, "cuda")
    query, key = query[:, :2], key[:, :2]
    whole = kda(query, key, value, *gates, state, (0, 300), lowest_log_decay=-5.0).state
    maps = segment_map(key, value, *gates, (0, 130, 300), lowest_log_decay=-5.0)
    after = maps.keep[:1] @ state + maps.add[:1]
    joined = maps.keep[1:] @ after + maps.add[1:]
    # Rounded bf16 products err in proportion to the whole memory, not to each of its numbers.
    exact = reference.kda(query.double(), key.double(), value.double(), *gates, state, (0, 300)).state
    for found in (whole, joined):
        assert (found.double() - exact).norm() < 6e-3 * exact.norm()


@pytest.mark.gpu
def test_a_head_size_without_a_kernel_falls_back_with_one_warning():
    x = inputs((20,), 2, 48, 48, "random", torch.bfloat16, "cuda")
    with pytest.warns(UserWarning, match="head sizes `48` and `48`"):
        found = kda(*x, (0, 20), lowest_log_decay=-5.0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.testing.assert_close(found.read, reference.kda(*x, (0, 20)).read, rtol=2e-2, atol=2e-3)
