"""KDA's CUDA C++ kernels: compiled for sm_90a without a GPU, and run where a Hopper GPU is."""

import re
import subprocess
from contextlib import nullcontext
from ctypes import c_float, c_int, c_longlong
from importlib import import_module
from itertools import accumulate, pairwise
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from triax.config.model import Kda
from triax.kernels import nvrtc
from triax.kernels.kda import kda, kda_from_raw, reference, segment_map
from triax.kernels.kda.hopper import compile, launch, passes
from triax.kernels.kda.hopper.compile import binary, sources
from triax.kernels.kda.hopper.segments import segments
from triax.kernels.kda.raw import activate
from triax.model.kda import KDA

NAMES = ("query", "key", "value", "log_decay", "beta", "state")
RAW_NAMES = ("query", "key", "value", "gate", "beta", "rates", "biases", "state")
BARS = {"repeated": (1.5e-2, 2e-2)}
TYPES = (("GATE", "float"), ("BETAS", "float"), ("RAW", 0))
RAW_TYPES = (("GATE", "bf16"), ("BETAS", "bf16"), ("RAW", 1))


def anchored(types, rows, causal):
    return (*types, ("ANCHORED", rows), ("CAUSAL", causal))


def compiler_installed():
    if not nvrtc.is_available():
        return False
    try:
        return bool(import_module("cuda.bindings.nvrtc").nvrtcVersion())
    except RuntimeError:  # the bindings are here, the library they bind is not
        return False


def walk(name, tiles, keep, maps):
    return launch.walk(name, tiles, keep=keep, maps=maps).defines


# Bytes of registers that may spill; the gradients' kernel holds as much as it can.
VARIANTS = [
    ("prepare", anchored(TYPES, 32, 0), 0),
    ("prepare", anchored(RAW_TYPES, 32, 0), 128),
    ("scan", walk("scan", 2, False, False), 16),
    ("scan", walk("scan", 1, True, False), 0),
    ("scan", walk("scan", 2, False, True), 0),
    ("join", (), 0),
    ("scan_back", walk("scan_back", 2, True, None), 0),
    ("gradients", anchored(TYPES, 32, 0), 512),
    ("gradients", anchored(RAW_TYPES, 32, 0), 512),
    ("prepare", anchored(TYPES, 16, 0), 32),
    ("prepare", anchored(RAW_TYPES, 16, 0), 128),
    ("gradients", anchored(TYPES, 16, 0), 704),
    ("gradients", anchored(RAW_TYPES, 16, 0), 512),
    ("prepare", anchored(TYPES, 16, 1), 32),
    ("prepare", anchored(RAW_TYPES, 16, 1), 128),
    ("gradients", anchored(TYPES, 16, 1), 704),
    ("gradients", anchored(RAW_TYPES, 16, 1), 512),
    ("prepare", anchored(TYPES, 8, 1), 96),
    ("prepare", anchored(RAW_TYPES, 8, 1), 128),
    ("gradients", anchored(TYPES, 8, 1), 1152),
    ("gradients", anchored(RAW_TYPES, 8, 1), 512),
]


@pytest.mark.kernel
@pytest.mark.skipif(not compiler_installed(), reason="needs cuda-bindings and nvidia-cuda-nvrtc")
@pytest.mark.parametrize(("name", "defines", "spilled"), VARIANTS)
def test_sources_compile_for_hopper_to_its_matrix_instructions(tmp_path, name, defines, spilled):
    triton = pytest.importorskip("triton", reason="its wheel has the disassembler")
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    file = tmp_path / "kernel.cubin"
    file.write_bytes(binary(name, defines))
    usage = subprocess.run([tool, "--dump-resource-usage", file], capture_output=True, text=True, check=True).stdout
    registers, stack = map(int, re.search(r"REG:(\d+) STACK:(\d+)", usage).groups())
    assert registers <= 255
    assert stack <= spilled
    code = subprocess.run([tool, "--dump-sass", file], capture_output=True, text=True, check=True).stdout
    products = code.count("HGMMA")
    if name != "join":
        assert products >= 16
        # Where the assembler cannot follow which products are over, it waits after each.
        assert code.count("WARPGROUP.DEPBAR") <= products / 4


def parameters(name):
    text = "\n".join(path.read_text() for path in sources(name))
    declared = re.search(rf'extern "C" __global__.*?\b{name}\(([^)]*)\)\s*\{{', text, re.DOTALL)[1]
    return [re.sub(r"\s+", " ", parameter.strip()) for parameter in declared.split(",")]


DTYPES = {"bf16": torch.bfloat16, "float": torch.float32, "int": torch.int32, "unsigned char": None}


@pytest.mark.parametrize("lowest", [-5.0, float("-inf")])
@pytest.mark.parametrize("from_raw", [False, True])
@pytest.mark.parametrize("starts", [(0, 3000), (0, 0, 150)])
def test_every_start_passes_what_its_kernel_declares(monkeypatch, lowest, from_raw, starts):
    pytest.importorskip("triton", reason="run tables stand beside Triton's kernels")
    from triax.kernels.kda.flash import anchors, run_table

    started = []
    # A GPU that only writes down what it is asked to start.
    monkeypatch.setattr(compile, "_function", lambda kernel, device: kernel)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "device", lambda index: nullcontext())
    monkeypatch.setattr(nvrtc, "launch", lambda kernel, blocks, threads, shared, given: started.append((kernel, given)))
    tokens, sequences = starts[-1], len(starts) - 1
    gate_dtype = torch.bfloat16 if from_raw else torch.float32
    query, key, value = (torch.zeros(tokens, heads, 128, dtype=torch.bfloat16) for heads in (2, 2, 4))
    gate, beta = (torch.zeros(*shape, dtype=gate_dtype) for shape in ((tokens, 4, 128), (tokens, 4)))
    raw = launch.Raw(torch.zeros(4), torch.zeros(4, 128), lowest) if from_raw else None
    shared = anchors(lowest, torch.bfloat16)
    table = run_table(starts, (100,), torch.device("cpu"))
    streams = (query, key, value, gate, beta)
    state = torch.zeros(sequences, 4, 128, 128)
    read, _, interior, states, written = passes.forward(*streams, state, table, True, shared, raw)
    of, d_state = passes.backward(*streams, states, written, read, state, table, shared, raw)
    assert (interior.shape, d_state.shape, read.shape) == ((1, 4, 128, 128), state.shape, value.shape)
    assert [x.shape for x in of[:5]] == [x.shape for x in streams]
    names = [kernel.name for kernel, _ in started]
    assert names == [
        "prepare",
        *(["scan", "join"] if tokens == 3000 else []),
        "scan",
        "prepare",
        "scan_back",
        "gradients",
    ]
    for kernel, given in started:
        if kernel.name in ("prepare", "gradients"):
            assert {("ANCHORED", 32 if lowest == -5.0 else 16), ("CAUSAL", 0)} <= set(kernel.defines)
        types = {**DTYPES, "GATE": gate_dtype, "BETAS": gate_dtype}
        for parameter, argument in zip(parameters(kernel.name), given, strict=True):
            kind = parameter.removeprefix("const ").rsplit(" ", 1)[0]
            if "*" not in kind:
                assert type(argument) is {"int": c_int, "i64": c_longlong, "float": c_float}[kind], parameter
            elif argument is not None and types[kind.rstrip("*")] is not None:
                assert argument.dtype == types[kind.rstrip("*")], parameter


def cut(lengths, heads, states_at=()):
    starts = tuple(accumulate(lengths, initial=0))
    return starts, segments(starts, states_at, heads, launch.MULTIPROCESSORS, torch.device("cpu"))


@pytest.mark.parametrize(
    ("lengths", "heads", "states_at"), [((65536,), 4, ()), ((3000, 2000), 2, (100, 2999)), ((5000, 64, 1), 3, (4999,))]
)
def test_segments_hold_every_token_once_and_end_where_a_state_is_wanted(lengths, heads, states_at):
    starts, found = cut(lengths, heads, states_at)
    begins, tokens = found.run_first.tolist(), found.run_tokens.tolist()
    spans = [(begin, begin + count) for begin, count in zip(begins, tokens, strict=True)]
    assert [end for _, end in spans][:-1] == [begin for begin, _ in spans][1:]
    assert spans[0][0] == 0
    assert spans[-1][1] == starts[-1]
    chunks = [0, *accumulate(-(-count // 64) for count in tokens)]
    assert found.run_chunk.tolist() == chunks[:-1]
    ends = {end: slot for (_, end), slot in zip(spans, found.run_slot.tolist(), strict=True)}
    assert [ends[end] for end in starts[1:]] == list(range(len(lengths)))
    assert {ends[p] for p in states_at} == set(range(len(lengths), found.num_slots - 1))
    assert all(slot == found.num_slots - 1 for end, slot in ends.items() if end not in {*starts, *states_at})
    runs = found.runs.tolist()
    assert found.run_segment.tolist() == [n for n, (a, b) in enumerate(pairwise(runs)) for _ in range(a, b)]
    firsts = [begins[runs[n]] for n in found.of_sequence.tolist()[:-1]]
    assert firsts == list(starts[:-1])


@pytest.mark.parametrize(("lengths", "heads"), [((8192,), 96), ((8192, 0), 4), ((100,), 1), ((), 4)])
def test_what_segments_would_not_speed_up_is_left_whole(lengths, heads):
    assert cut(lengths, heads)[1] is None


def draw_activated(tokens, heads, sequences, kind, device):
    draw = torch.Generator().manual_seed(3)
    normal = lambda *shape: torch.randn(*shape, generator=draw)  # noqa: E731
    key, beta = normal(tokens, heads, 128), torch.sigmoid(normal(tokens, heads))
    gate = -5 * torch.sigmoid(2 * normal(tokens, heads, 128) - 1)
    if kind in ("slow", "repeated"):
        slowness = torch.exp(torch.rand(heads, 128, generator=draw) * 11.5)
        gate = (-(0.5 + torch.rand(tokens, heads, 128, generator=draw)) / slowness).clamp(min=-5)
    if kind == "repeated":
        key = key[::64].repeat_interleave(64, 0)[:tokens] + 0.2 * key
        beta = 0.9 + 0.1 * beta
    if kind == "fastest":
        gate = torch.full_like(gate, -5.0)
    streams = (F.normalize(normal(tokens, heads, 128), dim=-1) * 128**-0.5, F.normalize(key, dim=-1))
    streams = [x.bfloat16() for x in (*streams, normal(tokens, heads, 128))]
    return [x.to(device) for x in (*streams, gate, beta, 0.1 * normal(sequences, heads, 128, 128))]


def draw_raw(tokens, heads, sequences, device):
    draw = torch.Generator().manual_seed(4)
    normal = lambda *shape: torch.randn(*shape, generator=draw)  # noqa: E731
    streams = [normal(tokens, heads, 128).bfloat16() for _ in range(4)]
    numbers = (normal(tokens, heads).bfloat16(), 0.3 * normal(heads), normal(heads, 128) - 2)
    return [x.to(device) for x in (*streams, *numbers, 0.1 * normal(sequences, heads, 128, 128))]


def relative(found, expected):
    assert torch.isfinite(found).all()
    return ((found.double() - expected).norm() / expected.norm().clamp_min(1e-12)).item()


def outcome(operation, x, starts, states_at, read_only, **options):
    leaves = [tensor.detach().requires_grad_() for tensor in x]
    result = operation(*leaves, starts, states_at=states_at, **options)
    outputs = [y for y in (result[:1] if read_only else result) if y.numel()]
    draw = torch.Generator().manual_seed(1)
    weights = [torch.randn(y.shape, generator=draw).bfloat16().to(y.device, y.dtype) for y in outputs]
    return [y for y in result if y.numel()], torch.autograd.grad(outputs, leaves, weights)


def exact_raw(*x, states_at, lowest=-5.0):
    *raw, state, starts = x
    query, key, value, gate, beta, rates, biases = raw
    query, key, log_decay, beta = activate(query, key, gate, beta, rates, biases, lowest)
    return reference.kda(query, key, value, log_decay, beta, state, starts, states_at=states_at)


@pytest.mark.parametrize("lowest", [-5.0, float("-inf")])
def test_raw_inputs_on_a_cpu_give_what_activated_ones_do(lowest):
    x = [t.double() for t in draw_raw(12, 2, 2, "cpu")]
    x = [t[..., :32] if t.dim() == 3 else t[:, :32] if t.shape == (2, 128) else t for t in x]
    x[7] = x[7][..., :32, :32]
    starts = (0, 5, 12)
    found = outcome(kda_from_raw, x, starts, (3,), False, lowest_log_decay=lowest)
    expected = outcome(exact_raw, x, starts, (3,), False, lowest=lowest)
    for pair in zip(found, expected, strict=True):
        torch.testing.assert_close(*(list(map(torch.nan_to_num, y)) for y in pair), rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("decay", [{"kind": "bounded"}, {"kind": "softplus"}])
def test_a_layer_activates_its_inputs_as_its_raw_inputs_are_activated(decay):
    torch.manual_seed(5)
    layer = KDA(24, Kda(num_heads=2, head_dim=16, decay=decay), 1e-5, 0.5).double()
    inputs = layer._project(torch.randn(7, 24, dtype=torch.float64))
    query, key, value = inputs.mixed.unflatten(-1, (3, 2, 16)).unbind(1)
    numbers = (layer.decay_rate, layer.decay_bias.view(2, 16), layer._lowest())
    found = activate(query, key, inputs.decay, inputs.beta, *numbers)
    expected = layer._activate(inputs.mixed, inputs)
    torch.testing.assert_close(found[:2], expected[:2], rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(found[2:], expected[3:], rtol=1e-9, atol=1e-12)
    assert torch.equal(value, expected[2])


@pytest.fixture
def hopper():
    if not passes.available(torch.device("cuda")):
        pytest.skip("needs a Hopper GPU and cuda-bindings")


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["random", "slow", "repeated", "fastest"])
@pytest.mark.parametrize(
    ("lengths", "heads", "states_at", "read_only"),
    [
        ((512,), 2, (), True),  # without gradients of states, which would hide errors of others
        ((300, 0, 1, 211), 3, (150, 300, 301), False),
        ((200,), 70, (100,), False),
        ((3000, 100), 2, (2999,), False),
    ],
)
def test_errors_on_hopper_stay_below_the_bars(hopper, kind, lengths, heads, states_at, read_only):
    x = draw_activated(sum(lengths), heads, len(lengths), kind, "cuda")
    starts = tuple(accumulate(lengths, initial=0))
    assert passes.takes(*x[:3])
    found = outcome(kda, x, starts, states_at, read_only, lowest_log_decay=-5.0)
    expected = outcome(reference.kda, [t.double() for t in x], starts, states_at, read_only)
    of_outputs, of_gradients = BARS.get(kind, (6e-3, 8e-3))
    assert max(map(relative, found[0], expected[0])) < of_outputs
    errors = dict(zip(NAMES, map(relative, found[1], expected[1]), strict=True))
    assert max(errors.values()) < of_gradients, errors


@pytest.mark.gpu
@pytest.mark.parametrize(("lengths", "heads"), [((512,), 2), ((130, 0, 1, 200), 5), ((200,), 70)])
def test_raw_inputs_on_hopper_stay_below_the_bars(hopper, lengths, heads):
    x = draw_raw(sum(lengths), heads, len(lengths), "cuda")
    starts = tuple(accumulate(lengths, initial=0))
    found = outcome(kda_from_raw, x, starts, (), True, lowest_log_decay=-5.0)
    expected = outcome(exact_raw, [t.double() for t in x], starts, (), True)
    assert max(map(relative, found[0], expected[0])) < 6e-3
    errors = dict(zip(RAW_NAMES, map(relative, found[1], expected[1]), strict=True))
    # Sums over all tokens of terms of either sign, rounded once each: a head's one number cancels most.
    assert errors.pop("rates") < 2e-2
    assert max(errors.values()) < 8e-3, errors


@pytest.mark.gpu
def test_slices_of_one_projection_are_read_in_place(hopper):
    x = draw_activated(200, 2, 1, "slow", "cuda")
    fused = torch.cat(x[:3], dim=-1)
    query, key, value = fused.split(128, dim=-1)
    assert launch.aligned(query) is query
    found = kda(query, key, value, *x[3:], (0, 200), lowest_log_decay=-5.0)
    assert torch.equal(found.read, kda(*x, (0, 200), lowest_log_decay=-5.0).read)
    odd = torch.cat([x[0][..., :1], *x[:3]], dim=-1)[..., 1:].split(128, dim=-1)
    found = kda(*odd, *x[3:], (0, 200), lowest_log_decay=-5.0)
    assert torch.equal(found.read, kda(*x, (0, 200), lowest_log_decay=-5.0).read)


@pytest.mark.gpu
@pytest.mark.parametrize("from_raw", [False, True])
def test_value_heads_on_hopper_may_share_a_query_and_a_key(hopper, from_raw):
    x = (draw_raw if from_raw else lambda *y: draw_activated(*y[:3], "slow", y[3]))(200, 6, 1, "cuda")
    x = [x[0][:, ::3], x[1][:, ::3], *x[2:]]
    operation = kda_from_raw if from_raw else kda
    exact = exact_raw if from_raw else reference.kda
    found = outcome(operation, x, (0, 200), (), True, lowest_log_decay=-5.0)
    expected = outcome(exact, [t.double() for t in x], (0, 200), (), True)
    assert relative(found[0][0], expected[0][0]) < 6e-3
    errors = dict(zip(RAW_NAMES if from_raw else NAMES, map(relative, found[1], expected[1]), strict=True))
    errors.pop("rates", None)
    assert max(errors.values()) < 8e-3, errors


@pytest.mark.gpu
@pytest.mark.parametrize("lengths", [(500, 3), (3000,)])
def test_a_graph_on_hopper_replays_what_was_run_every_time(hopper, lengths):
    x = draw_activated(sum(lengths), 2, len(lengths), "random", "cuda")
    starts = tuple(accumulate(lengths, initial=0))
    trained = kda(*(t.requires_grad_() for t in x), starts, lowest_log_decay=-5.0)
    x = [t.detach() for t in x]
    eager = kda(*x, starts, lowest_log_decay=-5.0)
    assert torch.equal(trained.read, eager.read)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = kda(*x, starts, lowest_log_decay=-5.0)
    for _ in range(3):
        captured.read.fill_(float("nan"))
        captured.state.fill_(float("nan"))
        graph.replay()
        assert torch.equal(captured.read, eager.read)
        assert torch.equal(captured.state, eager.state)


@pytest.mark.gpu
def test_maps_of_pieces_on_hopper_join_to_the_whole(hopper):
    x = draw_activated(300, 2, 1, "slow", "cuda")
    whole = kda(*x, (0, 300), lowest_log_decay=-5.0).state
    maps = segment_map(*x[1:5], (0, 130, 300), lowest_log_decay=-5.0)
    joined = maps.keep[1] @ (maps.keep[0] @ x[5][0] + maps.add[0]) + maps.add[1]
    assert relative(joined, whole[0].double()) < 6e-3


@pytest.mark.gpu
def test_gradients_on_hopper_are_the_same_every_time(hopper):
    x = draw_activated(400, 3, 2, "slow", "cuda")
    first, second = (outcome(kda, x, (0, 150, 400), (), False, lowest_log_decay=-5.0)[1] for _ in range(2))
    assert all(map(torch.equal, first, second))


@pytest.mark.gpu
def test_a_stream_beyond_2_to_the_31_numbers_ends_as_its_last_sequence_alone(hopper):
    far = 2**31 // (96 * 128) + 1
    last = draw_activated(150, 96, 2, "random", "cuda")
    streams = [torch.cat((0.05 * torch.randn(far, 96, 128, device="cuda").bfloat16(), x)) for x in last[:3]]
    gate = torch.cat((-torch.rand(far, 96, 128, device="cuda").bfloat16(), last[3].bfloat16()))
    beta = torch.cat((torch.rand(far, 96, device="cuda"), last[4]))
    found = kda(*streams, gate, beta, last[5], (0, far, far + 150), lowest_log_decay=-5.0)
    alone = kda(*last[:3], last[3].bfloat16(), last[4], last[5][1:], (0, 150), lowest_log_decay=-5.0)
    assert torch.equal(found.read[far:], alone.read)
    assert torch.equal(found.state[1:], alone.state)
