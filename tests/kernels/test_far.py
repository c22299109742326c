"""Offsets beyond 2^31 numbers: interpreted kernels on rows that lie far apart, in memory of which little is touched."""

import math
import mmap

import pytest
import torch

from triax.kernels.situ_glu import SituGlu

pytest.importorskip("triton", reason="Triton is installed on x86 Linux only")

from triax.kernels.device import launch

pytestmark = [
    pytest.mark.kernel,
    pytest.mark.skipif(torch.cuda.is_available(), reason="what is interpreted here runs in full in the gpu tests"),
]
APART = 2**30 + 64  # numbers between neighbouring rows: it has 32 bits, and the third row lies beyond 2^31
UNRESERVED = 0x4000  # Linux: memory that counts only once it is touched


def far(shape, strides=None, dtype=torch.float32):
    """Zeros, with as many on both sides that an offset which has lost its upper half meets them and not a fault."""
    strides = strides or [math.prod(shape[axis + 1 :]) for axis in range(len(shape))]
    own = 1 + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | UNRESERVED
    room = torch.frombuffer(mmap.mmap(-1, (own + 2**32) * dtype.itemsize, flags=flags), dtype=dtype)
    return room.as_strided(shape, strides, 2**31)


def together(x, axis=0):
    return x


def apart(x, axis=0):
    """Place the rows along an axis far from each other, and all else side by side."""
    order = [axis, *(other for other in range(x.dim()) if other != axis)]
    moved = x.permute(order)
    view = far(moved.shape, (APART, *moved[0].contiguous().stride()), x.dtype)
    return view.copy_(moved).permute([order.index(place) for place in range(x.dim())])


def glu(place):
    from triax.kernels.situ_glu import fused

    gate, up = place(torch.randn(3, 40)), place(torch.randn(3, 40))
    return fused.glu(gate, up, 4.0, 25.0), *fused.gradient(torch.randn(3, 40), gate, up, 4.0, 25.0)


def rms_norm(place):
    from triax.kernels.rms_norm import fused

    x, gate, weight = place(torch.randn(3, 24)), place(torch.randn(3, 24)), torch.randn(24)
    leaves = [x.requires_grad_(), gate.requires_grad_()]
    plain = fused.rms_norm(x, weight, 1e-5, 1.5, torch.float32)
    gated = fused.gated(x, gate, weight, 1e-5, torch.float32)
    total = fused.of_sum(x.detach(), torch.randn(3, 24), weight, 1e-5)
    return plain, gated, *total, *torch.autograd.grad(plain * gated, leaves, torch.randn(3, 24))


def short_conv(place):
    from triax.kernels.short_conv import fused

    hidden, weight = place(torch.randn(3, 24)).requires_grad_(), torch.randn(24, 4).requires_grad_()
    output, window = fused.short_conv(hidden, weight, torch.randn(2, 3, 24), (0, 1, 3))
    return output, window, *torch.autograd.grad(output, [hidden, weight], torch.randn(3, 24))


def attention_residual(place):
    from triax.kernels.attention_residual import fused

    stack, norms, queries = place(torch.randn(3, 3, 24)), torch.randn(2, 24), torch.randn(2, 24)
    sources = [source.requires_grad_() for source in stack.unbind()]
    mixed, weight = fused.mix(sources, norms[0], queries[0], 1e-5)
    to_sources = torch.autograd.grad(mixed, sources, torch.randn(3, 24))
    sources = [source.detach() for source in sources]
    added = fused.add_mix_norm(sources[:2], sources[2], norms[0], queries[0], 1e-5, norms[1], 1e-5)
    return mixed, weight, *to_sources, *added, *fused.finished(sources, norms, queries, 1e-5)


def cross_entropy(place):
    from triax.kernels.cross_entropy import fused

    return fused.nats(place(torch.randn(3, 100)), torch.tensor([3, -1, 99]), -1, wants_slope=True)


def draw(place):
    from triax.kernels.draw import Ways, bisected

    settings = [[0.0, 1.0, 2.0], [0, 0, 0], [1.0, 1.0, 1.0], [0.1, 0.0, 0.0]]
    temperature, top_k, top_p, min_p = map(torch.tensor, settings)
    ways = Ways(temperature, top_k, top_p, min_p, torch.rand(3, dtype=torch.float64))
    return bisected.draw(place(torch.randn(3, 100) * 4), None, ways)


def choice(place):
    from triax.kernels.moe import router_fused

    logit = place(torch.randn(3, 10)).requires_grad_()
    expert, share, _ = router_fused.choose(logit, torch.randn(10), 3, 2.0, renormalize=True)
    return expert, share, *torch.autograd.grad(share, logit, torch.randn(3, 3))


def decode(place):
    from triax.kernels.mla import split

    table, seen = torch.tensor([[2, 0], [1, 2], [0, 1]]).int(), torch.tensor([[20], [1], [32]]).int()
    return (split.decode(torch.randn(3, 1, 3, 24), place(torch.randn(3, 16, 24)), place(table), place(seen), 0.3, 16),)


def queries(place, axis):
    from triax.kernels.mla import split

    query, counts = torch.randn([3 if other == axis else 1 for other in range(3)] + [24]), torch.tensor([20, 9, 32])
    table, seen = torch.tensor([[2, 1]]).expand(len(query), -1), counts.view(-1, 1) if axis == 0 else counts[None]
    seen = seen if axis < 2 else seen[:, :1]
    return (split.decode(place(query, axis), torch.randn(3, 16, 24), table.contiguous(), seen, 0.3, 16),)


def largest_logits(place, axis):
    from triax.kernels.mla.largest import largest

    query, key = place(torch.randn(4, 3, 16), axis), place(torch.randn(4, 3, 16), axis)
    return (largest(query, key, (0, 3, 4), (0, 3, 4), 0.7),)


CASES = {
    "situ_glu": glu,
    "rms_norm": rms_norm,
    "short_conv": short_conv,
    "attention_residual": attention_residual,
    "cross_entropy": cross_entropy,
    "draw": draw,
    "choice of experts": choice,
    "pages": decode,
    "queries of rows": lambda place: queries(place, 0),
    "queries of drafts": lambda place: queries(place, 1),
    "queries of heads": lambda place: queries(place, 2),
    "largest logits by token": lambda place: largest_logits(place, 0),
    "largest logits by head": lambda place: largest_logits(place, 1),
}


@pytest.mark.parametrize("name", CASES)
def test_rows_far_apart_are_used_as_if_they_lay_together(name):
    found, expected = [], []
    for results, place in ((found, apart), (expected, together)):
        torch.manual_seed(1)
        results += CASES[name](place)
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


def glu_of_long_rows(wide, make):
    from triax.kernels.situ_glu import fused

    gate, up = torch.randn(3, 16), torch.randn(3, 16)
    value, to_gate, to_up = (make((3, wide)) for _ in range(3))
    constants = {"ROWS": 1, "COLUMNS": 16, "GATE_CAP": 4.0, "UP_CAP": 25.0, "FAST": False}
    launch(fused.forward, (3, 1), gate, up, value, 16, 16, 3, wide, **constants)
    launch(fused.backward, (3, 1), value, gate, up, to_gate, to_up, 16, 16, 3, wide, **constants)
    return value, to_gate, to_up


def convolution_of_long_rows(wide, make):
    from triax.kernels.short_conv import fused

    x, weight, window = torch.randn(3, 16), torch.randn(16, 2), make((3, 1, wide))
    rows, ages, lefts = torch.tensor([[0, 1, 2], [0, 0, 0], [0, 0, 0]], dtype=torch.int32)
    window[..., :16] = torch.randn(3, 1, 16)
    y, to_sum, to_x, to_weight = make((3, wide)), make((3, wide)), make((3, wide)), make((3, 2, wide))
    constants = {"BT": 1, "BC": 16, "TAPS": 2}
    launch(fused.forward, (3, 1), x, window, weight, rows, ages, y, 3, wide, 16, **constants)
    given = y, x, window, weight, rows, ages, to_sum, to_weight
    launch(fused.backward_sums, (3, 1), *given, 3, wide, 16, SPAN=1, **constants)
    launch(fused.backward_inputs, (3, 1), to_sum, weight, lefts, to_x, 3, wide, **constants)
    return y, to_sum, to_weight, to_x


def rows_of_experts(wide, make):
    from triax.kernels.moe import gathered, rows, streamed

    x, spread, summed, gathered_sum, streamed_sum = (make((size, wide)) for size in (3, 8, 3, 3, 3))
    x[:, :16], spread[:, :16] = torch.randn(3, 16), 7
    row, count, first = torch.tensor([[4, 0], [2, 6], [5, 1]]).int(), torch.tensor([3, 3]).int(), [0, 4]
    launch(rows._spread, (5, 1), x, row, torch.tensor(first).int(), count, spread, 2, wide, K=2, TILE=4, BLOCK=16)
    launch(rows._sum, (3, 1), spread, row, summed, wide, K=2, BLOCK=16)
    launch(gathered._behind, (3, 1), spread, row.long(), x, gathered_sum, L=wide, K=2, BLOCK=16)
    launch(streamed._sum, (3, 1), spread, x, streamed_sum, L=wide, K=2, BLOCK=16)
    parts, shares = make((3, wide)), torch.empty(3, 2)
    parts[:, :8] = torch.randn(3, 8)
    launch(rows._collect, (1,), parts, row, shares, 6, wide, 3, BLOCK=8)
    return spread, summed, gathered_sum, streamed_sum, shares


@pytest.mark.parametrize("work", [glu_of_long_rows, convolution_of_long_rows, rows_of_experts])
def test_the_beginnings_of_rows_that_are_far_too_long_are_written_like_those_of_short_rows(work):
    torch.manual_seed(1)
    expected = work(16, torch.zeros)
    torch.manual_seed(1)
    assert all(torch.equal(x[..., :16], other) for x, other in zip(work(APART, far), expected, strict=True))


def test_products_of_large_matrices_with_themselves_reach_every_matrix():
    from triton.tools.tensor_descriptor import TensorDescriptor

    from triax.kernels.newton_schulz.symmetric import triangle

    x, size = torch.randn(3, 40000, 16), 40000
    gram, result = far((3, size, size)), far((3, size, size))
    for add, to in ((None, gram), (gram, result)):
        described = TensorDescriptor.from_tensor(x, [1, 16, 16])
        launch(triangle, (3, 3), described, add, to, size, 16, 2.0, 0.5, 16, 16, "ieee")
    expected = 2 * x[:, :32] @ x[:, :32].mT
    torch.testing.assert_close(gram[:, :32, :32], expected)
    torch.testing.assert_close(result[:, :32, :32], 1.5 * expected)


def stacks(numbers, make, dtype, *shapes):
    """Weights of experts with these numbers; those between have none."""
    drawn = [
        torch.randn(3, *shape) / 9 if dtype.is_floating_point else torch.randint(256, (3, *shape)) for shape in shapes
    ]
    whole = [make((numbers[-1] + 1, *shape), dtype=dtype) for shape in shapes]
    for stack, own in zip(whole, drawn, strict=True):
        stack[torch.tensor(numbers)] = own.to(dtype)
    return whole


def weights_in_fp32(numbers, make):
    from triax.kernels.moe.streamed import experts

    weights = stacks(numbers, make, torch.float32, (64, 128), (64, 128), (128, 64))
    chosen = torch.tensor(numbers)[torch.tensor([[0, 1], [2, 0], [1, 2]])]
    return experts(torch.randn(3, 128), chosen, torch.rand(3, 2), *weights, SituGlu(4.0, 25.0))


def weights_in_mxfp4(numbers, make):
    from triax.kernels.mx.experts.tiled import experts
    from triax.kernels.mx.mxfp4 import Mxfp4

    codes = stacks(numbers, make, torch.uint8, (64, 32), (64, 32), (64, 32))
    scales = [make((len(code), code.shape[1], code.shape[2] // 16), dtype=torch.uint8) for code in codes]
    for scale in scales:
        scale[torch.tensor(numbers)] = 123
    chosen = torch.tensor(numbers)[torch.tensor([[1], [2], [0]])]
    weights = map(Mxfp4, codes, scales)
    return experts(torch.randn(3, 64), chosen, torch.rand(3, 1), *weights, SituGlu(4.0, 25.0), rounded=False)


@pytest.mark.parametrize(("work", "last"), [(weights_in_fp32, 2**18 + 3), (weights_in_mxfp4, 2**20 + 3)])
def test_experts_whose_weights_lie_far_behind_the_first_are_used(work, last):
    torch.manual_seed(1)
    expected = work((0, 1, 2), torch.zeros)
    torch.manual_seed(1)
    assert torch.equal(work((2, last // 2, last), far), expected)


def test_more_queries_than_a_grid_is_deep_are_left_to_another_form():
    from triax.kernels.mla import split

    query, pages = torch.zeros(1).expand(2**13, 8, 1, 24), torch.zeros(1, 16, 24)
    assert split.unsupported(query, pages, 16) == "`65536` queries at once"
    assert split.unsupported(query[1:], pages, 16) is None
