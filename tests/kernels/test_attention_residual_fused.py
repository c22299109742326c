"""The mix's GPU kernels: interpreted in fp32 on a CPU, compiled for sm_90 without a GPU, and run where one is."""

import pytest
import torch

from triax.errors import UnsupportedError
from triax.kernels.attention_residual import mix, reference

ON_GPU = torch.cuda.is_available()


@pytest.fixture(scope="module")
def fused():
    pytest.importorskip("triton", reason="Triton is installed on x86 Linux only")
    from triax.kernels.attention_residual import fused

    return fused


def place(length, width, num_sources, dtype=torch.float32, device="cpu"):
    """Sources of different sizes and a query that gives some nearly all the weight."""
    sources = [(torch.randn(length, width) * (1 + j)).to(device, dtype) for j in range(num_sources)]
    return sources, (torch.rand(width) + 0.5).to(device), (torch.randn(width) * 0.3).to(device)


def outcome(path, sources, norm, query, wide):
    leaves = [x.detach().to(wide if wide else x.dtype).requires_grad_() for x in (*sources, norm, query)]
    mixed, weight = path(leaves[:-2], *leaves[-2:], 1e-6)
    upstream = torch.randn(mixed.shape, generator=torch.Generator().manual_seed(3)).to(sources[0].dtype)
    grads = torch.autograd.grad(mixed, leaves, upstream.to(mixed.device, mixed.dtype))
    return [mixed, weight, *grads]


def largest_error(fused, sources, norm, query):
    found = outcome(fused.mix, sources, norm, query, None)
    expected = outcome(reference.mix, sources, norm, query, torch.float64)
    return max(
        ((a.double() - b).norm() / b.norm().clamp_min(1e-3)).item() for a, b in zip(found, expected, strict=True)
    )


def normalised(mixed, gain, eps):
    return mixed * (mixed.square().mean(-1, keepdim=True) + eps).rsqrt() * gain


@pytest.mark.kernel
@pytest.mark.skipif(ON_GPU, reason="the gpu tests run the compiled kernels")
@pytest.mark.parametrize(("length", "width", "num_sources"), [(5, 32, 3), (1, 48, 1), (0, 16, 2), (7, 100, 9)])
def test_interpreted_kernels_give_the_mix_and_every_gradient(fused, length, width, num_sources):
    assert largest_error(fused, *place(length, width, num_sources)) < 2e-6


@pytest.mark.kernel
@pytest.mark.skipif(ON_GPU, reason="the gpu tests run the compiled kernels")
def test_residual_add_and_norm_in_the_kernel_are_those_outside(fused):
    sources, norm, query = place(6, 40, 3)
    addend, gain = torch.randn(6, 40), torch.rand(40)
    found = fused.add_mix_norm(sources, addend, norm, query, 1e-6, gain, 1e-5)
    total = sources[-1] + addend
    mixed, _ = reference.mix([*sources[:-1], total], norm, query, 1e-6)
    torch.testing.assert_close(found.total, total)
    torch.testing.assert_close(found.normed, normalised(mixed, gain, 1e-5))


@pytest.mark.kernel
@pytest.mark.skipif(ON_GPU, reason="the gpu tests run the compiled kernels")
@pytest.mark.parametrize("adds", [True, False])
def test_two_phases_are_one(fused, adds):
    sources, _, _ = place(5, 24, 4)
    norms, queries, gain = torch.rand(3, 24) + 0.5, torch.randn(3, 24), torch.rand(24)
    finished = fused.finished(sources, norms, queries, 1e-6)
    for s in range(3):
        current, addend = torch.randn(5, 24), torch.randn(5, 24) if adds else None
        total = current if addend is None else current + addend
        found = fused.add_merge_norm(
            finished.mixed[s], finished.mass_log[s], current, addend, norms[s], queries[s], 1e-6, gain, 1e-5
        )
        mixed, _ = reference.mix([*sources, total], norms[s], queries[s], 1e-6)
        torch.testing.assert_close(found.total, total)
        torch.testing.assert_close(found.normed, normalised(mixed, gain, 1e-5))


def test_what_has_no_kernel_is_refused_by_name(fused):
    with pytest.raises(UnsupportedError, match=r"dtypes `torch.float64`"):
        fused.mix([torch.zeros(2, 4, dtype=torch.float64)], torch.ones(4), torch.ones(4), 1e-6)
    with pytest.raises(UnsupportedError, match="width `20000`"):
        fused.mix([torch.zeros(1, 20000)], torch.ones(20000), torch.ones(20000), 1e-6)


@pytest.mark.kernel
def test_kernels_compile_for_hopper_without_spills(hopper):
    arrays = {name: "*fp32" for name in ("probe", "weight", "score", "scale", "mass_log", "to_probe", "gain")}
    types = arrays | {name: "*bf16" for name in ("rows", "mixed", "rest", "to_sources", "total", "normed")}
    types |= {"T": "i32u", "eps": "fp32", "gain_eps": "fp32"}
    constants = {"D": 7168, "BD": 8192, "J": 9, "STAGES": 4}
    mixes = constants | dict.fromkeys(("total", "gain", "normed", "mass_log")) | {"BJ": 16, "ADDS": 0}
    adds = mixes | dict.fromkeys(("mixed", "rest", "weight", "score", "scale")) | {"ADDS": 1}
    for given in ("total", "gain", "normed"):
        del adds[given]
    module, options = "triax.kernels.attention_residual.fused", {"num_warps": 8}
    wanted = [
        {"module": module, "kernel": "forward", "types": types | {"away": ["i64"] * 9},
         "constants": mixes, "options": {"num_warps": 4}},
        {"module": module, "kernel": "forward", "types": types | {"away": ["i64"] * 10},
         "constants": adds, "options": {"num_warps": 4}},
        {"module": module, "kernel": "backward", "types": types | {"away": ["i64"] * 12},
         "constants": constants, "options": options},
    ]  # fmt: skip
    for compiled in hopper(wanted):
        assert compiled.stack == 0
        assert compiled.registers <= 255


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("length", "width", "num_sources"), [(300, 7168, 9), (1, 100, 1), (70, 2304, 4), (1025, 64, 12)]
)
def test_errors_on_a_gpu_stay_near_the_rounding_of_bf16(fused, length, width, num_sources):
    assert largest_error(fused, *place(length, width, num_sources, torch.bfloat16, "cuda")) < 6e-3
    assert largest_error(fused, *place(length, width, num_sources, torch.float32, "cuda")) < 1e-5


@pytest.mark.gpu
def test_a_gpu_adds_as_torch_rounds_and_mixes_and_normalises_the_sum(fused):
    sources, norm, query = place(300, 7168, 9, torch.bfloat16, "cuda")
    addend, gain = torch.randn(300, 7168).to("cuda", torch.bfloat16), torch.rand(7168).cuda()
    found = fused.add_mix_norm(sources, addend, norm, query, 1e-6, gain, 1e-5)
    total = sources[-1] + addend
    assert torch.equal(found.total, total)
    mixed, _ = reference.mix([x.double() for x in (*sources[:-1], total)], norm.double(), query.double(), 1e-6)
    right = normalised(mixed, gain.double(), 1e-5)
    assert ((found.normed.double() - right).norm() / right.norm()).item() < 6e-3


@pytest.mark.gpu
def test_a_gpu_mixes_the_same_bits_every_time_and_in_a_graph(fused):
    sources, norm, query = place(500, 512, 5, torch.bfloat16, "cuda")
    first, _ = mix(sources, norm, query, 1e-6)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        again, _ = mix(sources, norm, query, 1e-6)
    again.fill_(float("nan"))
    graph.replay()
    assert torch.equal(first, again)


@pytest.mark.gpu
def test_a_gpu_refuses_nothing_silently():
    sources, norm, query = place(4, 16, 2, torch.float64, "cuda")
    with pytest.warns(UserWarning, match="no GPU kernel for dtypes"):
        found, _ = mix(sources, norm.double(), query.double(), 1e-6)
    torch.testing.assert_close(found, reference.mix(sources, norm.double(), query.double(), 1e-6)[0])
