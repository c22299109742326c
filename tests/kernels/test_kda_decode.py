import ctypes
import shutil
import subprocess
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from triax.errors import UnsupportedError
from triax.kernels.kda import reference, stepping
from triax.kernels.kda.decode import Projected, Records, Slots, Weights, recur, replay, step, verify
from triax.kernels.short_conv import short_conv
from triax.model.norm import normalize

BOUNDED, SOFTPLUS = -5.0, None


def weights(H=2, K=32, V=32, lowest=BOUNDED, device="cpu"):
    normal = lambda *shape: torch.randn(*shape, device=device)  # noqa: E731
    return Weights(normal((2 * K + V) * H, 4) / 2, normal(H) / 2, normal(H * K), 1 + normal(V) / 4, 1e-5, lowest)


def tokens(*rows, H=2, K=32, V=32, dtype=torch.float32, device="cpu"):
    shapes = [(2 * K + V) * H], [H, K], [H], [H, V]
    return Projected(*(torch.randn(*rows, *shape, device=device).to(dtype) for shape in shapes))


def slots(S, H=2, K=32, V=32, dtype=torch.float32, window=torch.float32, device="cpu"):
    state = torch.randn(S, H, K, V, device=device).to(dtype)
    return Slots(state, torch.randn(S, 3, (2 * K + V) * H, device=device).to(window))


def copy(memory):
    return Slots(memory.state.clone(), memory.window.clone())


def whole_layer(inputs, w, memory, slot):
    """What the training forms of the parts make of a sequence of tokens a row."""
    N, W, H, K = inputs.decay.shape
    starts = tuple(range(0, N * W + 1, W))
    flat = Projected(*(part.flatten(0, 1) for part in inputs))
    mixed, window = short_conv(flat.mixed, w.conv, memory.window[slot], starts)
    query, key, value = mixed.split([H * K, H * K, mixed.shape[1] - 2 * H * K], -1)
    query, key, value = (x.unflatten(-1, (H, -1)) for x in (query, key, value))
    z = flat.decay + w.decay_bias.view(H, K)
    rate = w.decay_rate.exp()[:, None]
    soft = -rate * torch.nn.functional.softplus(z)
    log_decay = soft if w.lowest_log_decay is None else w.lowest_log_decay * (rate * z).sigmoid()
    query, key = normalize(query, 1e-6 / K, 1 / K), normalize(key, 1e-6 / K, K**-0.5)
    result = reference.kda(query, key, value, log_decay, flat.beta.sigmoid(), memory.state[slot], starts)
    read = normalize(result.read, w.norm_eps) * w.norm * flat.gate.sigmoid()
    return read.unflatten(0, (N, W)), result.state, window


@pytest.mark.parametrize("lowest", [BOUNDED, SOFTPLUS])
def test_steps_give_what_the_parts_of_the_layer_give_over_whole_sequences(lowest):
    w, inputs, memory, slot = weights(lowest=lowest), tokens(3, 5), slots(6), torch.tensor([4, 1, 5])
    expected, state, window = whole_layer(inputs, w, memory, slot)
    for t in range(5):
        read = step(Projected(*(part[:, t] for part in inputs)), w, memory, slot)
        torch.testing.assert_close(read, expected[:, t], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(memory.state[slot], state, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(memory.window[slot], window, rtol=0, atol=0)


@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16])
def test_verified_and_replayed_tokens_leave_the_bits_of_single_steps(stored):
    w, inputs, slot = weights(), tokens(4, 4), torch.tensor([3, 0, 1, 6])
    memory, accepted = slots(7, dtype=stored), torch.tensor([0, 4, 4, 2])
    stepped, before = copy(memory), copy(memory)
    read, records = verify(inputs, w, memory, slot)
    assert torch.equal(memory.state, before.state)
    assert torch.equal(memory.window, before.window)
    for t in range(4):
        own = Projected(*(part[:, t] for part in inputs))
        rows = (accepted > t) & (slot > 0)
        tried = copy(stepped)
        step(own, w, stepped, torch.where(rows, slot, 0))
        assert torch.equal(read[rows, t], step(own, w, tried, slot)[rows])
    assert torch.equal(read[1], torch.zeros_like(read[1]))
    replay(records, accepted, memory, slot)
    assert torch.equal(memory.state, stepped.state)
    assert torch.equal(memory.window, stepped.window)


def test_pending_tokens_are_written_before_the_next_ones_are_tried():
    w, slot, accepted = weights(), torch.tensor([2, 1, 0]), torch.tensor([3, 0, 1])
    first, second, memory = tokens(3, 3), tokens(3, 2), slots(3)
    _, records = verify(first, w, memory, slot)
    apart = copy(memory)
    replay(records, accepted, apart, slot)
    expected, _ = verify(second, w, apart, slot)
    read, _ = verify(second, w, memory, slot, pending=records, accepted=accepted)
    assert torch.equal(read, expected)
    assert torch.equal(memory.state, apart.state)
    assert torch.equal(memory.window, apart.window)


def test_a_row_has_the_same_bits_alone_and_in_a_batch():
    w, inputs, slot = weights(), tokens(5), torch.tensor([2, 4, 1, 3, 5])
    memory = slots(6)
    alone = copy(memory)
    together = step(inputs, w, memory, slot)
    for row in range(5):
        read = step(Projected(*(part[row : row + 1] for part in inputs)), w, alone, slot[row : row + 1])
        assert torch.equal(read[0], together[row])
    assert torch.equal(alone.state, memory.state)


def test_padding_rows_return_zeros_and_touch_no_slot():
    w, inputs, memory = weights(), tokens(3), slots(3)
    memory.state[0] = memory.window[0] = torch.nan
    before = copy(memory)
    read = step(inputs, w, memory, torch.tensor([0, 2, 0]))
    assert torch.equal(read[[0, 2]], torch.zeros_like(read[[0, 2]]))
    assert read[1].isfinite().all()
    assert torch.equal(memory.state[1], before.state[1])
    assert memory.state[0].isnan().all()
    assert not torch.equal(memory.state[2], before.state[2])


def test_the_definition_asks_no_tensor_for_its_numbers_so_that_a_graph_can_hold_it():
    with FakeTensorMode():
        w, slot, memory = weights(), torch.tensor([2, 0, 1]), slots(3)
        assert step(tokens(3), w, memory, slot).shape == (3, 2, 32)
        assert recur(tokens(3), w, memory.state, slot).shape == (3, 2, 32)
        read, records = verify(tokens(3, 4), w, memory, slot)
        assert read.shape == (3, 4, 2, 32)
        replay(records, torch.tensor([4, 0, 1]), memory, slot)


def test_the_recurrence_alone_is_a_step_without_convolution_and_norm():
    w, inputs, memory, slot = weights(), tokens(2), slots(3), torch.tensor([2, 1])
    H, K = inputs.decay.shape[1:]
    query, key, value = (x.unflatten(-1, (H, K)) for x in inputs.mixed.chunk(3, -1))
    log_decay = -5.0 * (w.decay_rate.exp()[:, None] * (inputs.decay + w.decay_bias.view(H, K))).sigmoid()
    query, key = normalize(query, 1e-6 / K, 1 / K), normalize(key, 1e-6 / K, K**-0.5)
    expected = reference.kda(query, key, value, log_decay, inputs.beta.sigmoid(), memory.state[slot], (0, 1, 2))
    read = recur(inputs, w, memory.state, slot)
    torch.testing.assert_close(read, expected.read, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(memory.state[slot], expected.state, rtol=1e-4, atol=1e-5)


def test_tensors_that_do_not_fit_are_refused():
    memory = slots(3)
    with pytest.raises(UnsupportedError, match=r"inputs\.mixed"):
        step(tokens(2, K=16), weights(), memory, torch.tensor([1, 2]))
    with pytest.raises(ValueError, match="belong together"):
        verify(tokens(1, 2), weights(), memory, torch.tensor([1]), pending=Records(*[torch.zeros(1)] * 4))


@pytest.fixture
def on_host(monkeypatch, tmp_path_factory):
    """Run the CUDA kernel on this CPU, through the same arguments as on a GPU."""
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("needs g++ to run CUDA C++ on a CPU; found none")
    from triax.kernels.kda import fused

    folder = tmp_path_factory.mktemp("host")

    def load(defines, device):
        library = folder / f"{abs(hash(defines))}.so"
        if not library.exists():
            pointers = [f"({kind} *)p[{i}]" for i, kind in enumerate(ARGUMENTS)]
            source = folder / "kernel.cpp"
            source.write_text(
                f'#include "{Path(__file__).with_name("host.h")}"\n#include "{fused.SOURCE}"\n'
                'extern "C" void run(int blocks, void **p, i64 *s, float *f) { on_host(blocks, THREADS, [=] { walk('
                + ", ".join([*pointers, *(f"s[{i}]" for i in range(17)), "f[0], f[1]); }); }"])
            )
            macros = [f"-D{name}={value}" for name, value in defines]
            options = ["-std=c++20", "-O1", "-ffp-contract=off", "-shared", "-fPIC", "-pthread", "-Wno-unknown-pragmas"]
            subprocess.run([compiler, *options, *macros, source, "-o", library], check=True)
        assert fused.shared_bytes(defines) < 227 * 1024
        return ctypes.CDLL(str(library)).run, 0

    def launch(run, grid, threads, shared, arguments):
        pointers = [0 if x is None else x.data_ptr() for x in arguments[:20]]
        strides, numbers = ([x.value for x in part] for part in (arguments[20:37], arguments[37:]))
        run(
            *grid,
            (ctypes.c_void_p * 20)(*pointers),
            (ctypes.c_longlong * 17)(*strides),
            (ctypes.c_float * 2)(*numbers),
        )

    monkeypatch.setattr(fused, "_function", load)
    monkeypatch.setattr(fused, "resident", lambda *_: 2)
    monkeypatch.setattr(fused, "THREADS", 64)  # of the operating system's, so few
    monkeypatch.setattr(fused.nvrtc, "launch", launch)
    monkeypatch.setattr(fused.nvrtc, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device", lambda _: nullcontext())
    return fused


ARGUMENTS = (
    *["const X"] * 4, *["const float"] * 4, "E", "W", "const int", "X", *["float"] * 3, "const X",
    *["const float"] * 3, "const int",
)  # fmt: skip


@pytest.mark.kernel
def test_what_the_kernel_cannot_take_is_refused_by_name(on_host):
    slot = torch.tensor([1])
    with pytest.raises(UnsupportedError, match="head sizes `48` and `48`"):
        on_host.step(tokens(1, K=48, V=48), weights(K=48, V=48), slots(2, K=48, V=48), slot)
    with pytest.raises(UnsupportedError, match=r"windows of dtype `torch\.float16`"):
        on_host.step(tokens(1), weights(), slots(2, window=torch.float16), slot)
    with pytest.raises(UnsupportedError, match=r"dtypes `torch\.float32`, `torch\.float64`"):
        on_host.step(tokens(1, dtype=torch.float64), weights(), slots(2), slot)
    sizes = {"H": 1, "K": 256, "V": 256}
    with pytest.raises(UnsupportedError, match="head sizes `256` and `256`"):
        on_host.step(tokens(1, **sizes), weights(**sizes), slots(2, **sizes), slot)
    sizes = {"H": 1, "K": 128, "V": 128}
    with pytest.raises(UnsupportedError, match="40 tokens a row with heads of `128` and `128`"):
        on_host.verify(tokens(1, 40, **sizes), weights(**sizes), slots(2, **sizes), slot, None, None)


@pytest.mark.kernel
@pytest.mark.parametrize("rows", [1, 3])
def test_streams_that_begin_anywhere_in_one_projection_reach_the_copy_engine_in_multiples_of_16_bytes(rows):
    from triax.kernels.kda import fused

    wide = torch.randn(rows, 1 + 3 * 64 + 2 * 64 + 2).bfloat16()
    _, mixed, decay, beta, gate = wide.split([1, 3 * 64, 64, 2, 64], -1)
    inputs = Projected(*(x[:, None] for x in (mixed, decay.unflatten(-1, (2, 32)), beta, gate.unflatten(-1, (2, 32)))))
    memory = slots(4, H=2, K=32, V=32)
    tensors, _, _ = fused.arguments(
        inputs, weights(H=2), memory.state, memory.window, torch.arange(rows), None, None, None, None
    )
    for given, taken in zip(inputs, tensors, strict=False):
        torch.testing.assert_close(taken, given)
        assert given is inputs.beta or not any(row.data_ptr() % fused.ALIGNMENT for row in taken)
    odd = torch.zeros(4 * 2 * 32 * 32 + 1)[1:].view(4, 2, 32, 32)
    if fused.nvrtc.is_available():
        assert "slots of `state`" in fused.unsupported(odd, mixed)


@pytest.mark.kernel
@pytest.mark.parametrize(
    ("K", "V", "lowest", "dtype"),
    [(64, 32, SOFTPLUS, torch.float32), (32, 64, BOUNDED, torch.bfloat16)],
)
def test_the_cuda_source_run_on_a_cpu_gives_the_definition(on_host, K, V, lowest, dtype):
    sizes = {"H": 1, "K": K, "V": V, "dtype": dtype}
    w, slot = weights(H=1, K=K, V=V, lowest=lowest), torch.tensor([3, 0, 1])
    memory = slots(4, H=1, K=K, V=V, dtype=dtype, window=dtype)
    exact = {"rtol": 2e-5, "atol": 2e-6} if dtype is torch.float32 else {"rtol": 2e-2, "atol": 2e-2}
    own, expected = copy(memory), copy(memory)
    inputs = tokens(3, **sizes)
    torch.testing.assert_close(on_host.step(inputs, w, own, slot), stepping.step(inputs, w, expected, slot), **exact)
    torch.testing.assert_close(own.state, expected.state, **exact)
    assert torch.equal(own.window, expected.window)
    plain = copy(memory)
    read = on_host.recur(inputs, w, plain.state, slot)
    torch.testing.assert_close(read, stepping.recur(inputs, w, copy(memory).state, slot), **exact)

    first, second, accepted = tokens(3, 3, **sizes), tokens(3, 3, **sizes), torch.tensor([3, 1, 2])
    read, records = on_host.verify(first, w, memory, slot, None, None)
    torch.testing.assert_close(read, stepping.verify(first, w, memory, slot, None, None)[0], **exact)
    stepped = copy(memory)
    for t in range(3):
        got = on_host.step(Projected(*(x[:, t] for x in first)), w, stepped, torch.where(accepted > t, slot, 0))
        assert torch.equal(got[accepted > t], read[accepted > t, t])
    replayed, pending = copy(memory), copy(memory)
    on_host.replay(records, accepted, replayed, slot)
    assert torch.equal(replayed.state, stepped.state)
    assert torch.equal(replayed.window, stepped.window)
    read, _ = on_host.verify(second, w, pending, slot, records, accepted)
    assert torch.equal(pending.state, stepped.state)
    assert torch.equal(pending.window, stepped.window)
    assert torch.equal(read, on_host.verify(second, w, replayed, slot, None, None)[0])


@pytest.mark.kernel
@pytest.mark.parametrize(
    ("count", "before", "writes", "spilled"), [(1, 0, True, 0), (9, 9, False, 16), (9, 0, False, 64)]
)
def test_the_cuda_source_compiles_for_hopper_with_two_blocks_a_multiprocessor(
    assembled, count, before, writes, spilled
):
    from triax.kernels.kda import fused

    kinds = {"stream": torch.bfloat16, "state": torch.float32, "window": torch.bfloat16}
    defines = fused.macros(128, 128, 4, count, before, **kinds, bounded=True, writes=writes)
    code = assembled(fused.SOURCE.read_text(), defines)
    assert code.registers <= 128
    assert code.stack <= spilled  # bytes a thread; what is kept there is read once a row and head
    assert "UBLKCP" in code.sass  # the copy engine brings states
    assert (
        2 * (fused.shared_bytes(fused.macros(128, 128, 4, 9, 0, **kinds, bounded=True, writes=False)) + 1024)
        < 228 * 1024
    )


@pytest.mark.gpu
@pytest.mark.parametrize("lowest", [BOUNDED, SOFTPLUS])
@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("K", "V"), [(128, 128), (64, 64), (128, 64), (32, 128), (128, 256), (256, 64), (256, 128)])
def test_kernels_on_a_gpu_give_the_definition_and_replay_leaves_the_bits_of_single_steps(K, V, stored, lowest):
    sizes = {"H": 5, "K": K, "V": V, "dtype": torch.bfloat16, "device": "cuda"}
    w, slot = weights(H=5, K=K, V=V, lowest=lowest, device="cuda"), torch.tensor([3, 0, 1, 9, 4]).cuda()
    memory = slots(10, H=5, K=K, V=V, dtype=stored, window=torch.bfloat16, device="cuda")
    memory.state[0] = memory.window[0] = torch.nan
    exact = stepping.verify(*_double(first := tokens(5, 6, **sizes), w, memory, slot), None, None)[0]
    read, records = verify(first, w, memory, slot)
    live = slot > 0
    assert ((read.double() - exact)[live].norm() / exact[live].norm()).item() < (4e-3 if stored.itemsize == 4 else 8e-3)
    assert not read[~live].any()
    accepted, stepped = torch.tensor([6, 3, 1, 0, 4]).cuda(), copy(memory)
    for t in range(6):
        got = step(Projected(*(x[:, t] for x in first)), w, stepped, torch.where(accepted > t, slot, 0))
        assert torch.equal(got[(accepted > t) & live], read[(accepted > t) & live, t])
    replayed, pending, second = copy(memory), copy(memory), tokens(5, 3, **sizes)
    replay(records, accepted, replayed, slot)
    after, _ = verify(second, w, replayed, slot)
    found, _ = verify(second, w, pending, slot, pending=records, accepted=accepted)
    assert torch.equal(found, after)
    for got in (replayed, pending):
        torch.testing.assert_close(got.state, stepped.state, rtol=0, atol=0, equal_nan=True)
        torch.testing.assert_close(got.window, stepped.window, rtol=0, atol=0, equal_nan=True)


def _double(inputs, w, memory, slot):
    wide = Weights(*(x.double() for x in w[:4]), *w[4:])
    state = Slots(memory.state.double(), memory.window.double())
    return Projected(*(x.double() for x in inputs)), wide, state, slot


@pytest.mark.gpu
def test_a_graph_of_steps_replays_what_was_run_at_any_batch_and_from_views_of_one_projection():
    w = weights(H=3, K=128, V=128, device="cuda")
    for N in (1, 2, 3, 7):
        memory = slots(N + 1, H=3, K=128, V=128, window=torch.bfloat16, device="cuda")
        wide = torch.randn(N, 3 * 128 * 5 + 3, device="cuda", dtype=torch.bfloat16)
        mixed, decay, gate, beta = wide.split([3 * 128 * 3, 3 * 128, 3 * 128, 3], -1)
        inputs = Projected(mixed, decay.unflatten(-1, (3, 128)), beta, gate.unflatten(-1, (3, 128)))
        slot, captured = torch.arange(N, 0, -1).cuda(), copy(memory)
        plain = copy(memory)
        expected = [step(Projected(*(x.contiguous() for x in inputs)), w, plain, slot) for _ in range(3)]
        step(inputs, w, copy(memory), slot)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            read = step(inputs, w, captured, slot)
        for own, start in zip(captured, memory, strict=True):
            own.copy_(start)
        for one in expected:
            graph.replay()
            assert torch.equal(read, one)


@pytest.mark.gpu
def test_states_beyond_2_31_numbers_are_reached():
    w, inputs = weights(H=96, K=128, V=128, device="cuda"), tokens(2, H=96, K=128, V=128, device="cuda")
    memory = slots(3, H=96, K=128, V=128, device="cuda")
    far = Slots(torch.zeros(1500, 96, 128, 128, device="cuda"), torch.zeros(1500, *memory.window.shape[1:]).cuda())
    far.state[1499], far.window[1499] = memory.state[1], memory.window[1]
    far.state[1], far.window[1] = memory.state[2], memory.window[2]
    read = step(inputs, w, far, torch.tensor([1499, 1]).cuda())
    assert torch.equal(read, step(inputs, w, memory, torch.tensor([1, 2]).cuda()))
    assert torch.equal(far.state[1499], memory.state[1])


@pytest.mark.gpu
@pytest.mark.parametrize("size", [48, 256])
def test_a_head_size_without_a_decode_kernel_falls_back_with_one_warning(size):
    sizes = {"K": size, "V": size, "device": "cuda"}
    w, inputs, memory, slot = weights(**sizes), tokens(1, **sizes), slots(2, **sizes), torch.tensor([1]).cuda()
    expected = stepping.step(inputs, w, copy(memory), slot)
    with pytest.warns(UserWarning, match=f"head sizes `{size}` and `{size}`"):
        found = step(inputs, w, memory, slot)
    torch.testing.assert_close(found, expected)


@pytest.mark.gpu
def test_more_drafts_than_shared_memory_holds_fall_back_with_one_warning():
    sizes = {"H": 1, "K": 128, "V": 128, "device": "cuda"}
    w, inputs, memory, slot = weights(**sizes), tokens(1, 40, **sizes), slots(2, **sizes), torch.tensor([1]).cuda()
    with pytest.warns(UserWarning, match="40 tokens a row"):
        found, _ = verify(inputs, w, memory, slot)
    torch.testing.assert_close(found, stepping.verify(inputs, w, memory, slot, None, None)[0])
