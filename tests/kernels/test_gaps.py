"""Interpreted kernels on views whose numbers do not lie side by side: copied where a kernel assumes that they do."""

import pytest
import torch

from triax.kernels.situ_glu import SituGlu

pytest.importorskip("triton", reason="Triton is installed on x86 Linux only")

pytestmark = [
    pytest.mark.kernel,
    pytest.mark.skipif(torch.cuda.is_available(), reason="the kernels are compiled here, for tensors on a GPU"),
]


def whole(x):
    return x


def gapped(x):
    """Return the same numbers as a view of every second one."""
    return torch.stack((x, x.new_zeros(x.shape)), -1)[..., 0]


def rms_norm(view):
    from triax.kernels.rms_norm import fused

    x, weight = view(torch.randn(3, 24)), view(torch.randn(24)).requires_grad_()
    gate, added = view(torch.randn(3, 24)), view(torch.randn(3, 24))
    result = fused.rms_norm(x, weight, 1e-5, 1.0, x.dtype) + fused.gated(x, gate, weight, 1e-5, x.dtype)
    (gradient,) = torch.autograd.grad(result, weight, view(torch.randn(3, 24)))
    return result, gradient, *fused.of_sum(x, added, weight.detach(), 1e-5)


def attention_residual(view):
    from triax.kernels.attention_residual import fused

    sources, addend = [view(torch.randn(3, 24)) for _ in range(2)], view(torch.randn(3, 24))
    norms, queries, gain = view(torch.randn(2, 24)), view(torch.randn(2, 24)), view(torch.randn(24))
    added = fused.add_mix_norm(sources, addend, norms[0], queries[0], 1e-5, gain, 1e-5)
    done = fused.finished(sources, norms, queries, 1e-5)
    mixed, mass_log = view(done.mixed[1]), view(done.mass_log[1])
    merged = fused.add_merge_norm(mixed, mass_log, sources[0], addend, norms[1], queries[1], 1e-5, gain, 1e-5)
    return *fused.mix(sources, norms[0], queries[0], 1e-5), *added, *done, *merged


def short_conv(view):
    from triax.kernels.short_conv import fused

    weight, window = view(torch.randn(24, 4)), view(torch.randn(2, 3, 24))
    return fused.short_conv(view(torch.randn(3, 24)), weight, window, (0, 1, 3))


def draw(view):
    from triax.kernels.draw import Ways, bisected

    settings = [[0.0, 1.0, 2.0], [0, 5, 0], [1.0, 1.0, 0.9], [0.0, 0.01, 0.0]]
    ways = Ways(*(view(torch.tensor(way)) for way in settings), view(torch.rand(3, dtype=torch.float64)))
    return bisected.draw(view(torch.randn(3, 40)), view(torch.rand(40) < 0.3), ways)


def cross_entropy(view):
    from triax.kernels.cross_entropy import fused

    return fused.nats(view(torch.randn(3, 40)), view(torch.tensor([3, -1, 39])), -1, wants_slope=True)


def choice(view):
    from triax.kernels.moe import router_fused

    return router_fused.choose(view(torch.randn(3, 10)), view(torch.randn(10)), 3, 2.0, renormalize=True)[:2]


def decode(view):
    from triax.kernels.mla import split

    table, seen = torch.tensor([[2, 0], [1, 2]]).int(), torch.tensor([[20, 21], [1, 2]]).int()
    return (
        split.decode(view(torch.randn(2, 2, 3, 24)), view(torch.randn(3, 16, 24)), view(table), view(seen), 0.3, 16),
    )


def experts(view):
    from triax.kernels.moe import gathered, streamed

    gate, up, down = (torch.randn(4, *sides) for sides in ((16, 24), (16, 24), (48, 8)))
    gate, up, down = (x[:, : len(x[0]) // 2] for x in (gate, up, down))  # halves of larger stacks
    if view is whole:
        gate, up, down = (x.contiguous() for x in (gate, up, down))
    chosen, share = view(torch.rand(5, 4).topk(2).indices), view(torch.rand(5, 2))
    inputs = view(torch.randn(5, 24)), chosen, share, gate, up, down, SituGlu(4.0, 25.0), view(torch.randn(5, 24))
    return gathered.experts(*inputs), streamed.experts(*inputs)


@pytest.mark.parametrize(
    "work", [rms_norm, attention_residual, short_conv, draw, cross_entropy, choice, decode, experts]
)
def test_views_with_gaps_are_used_as_if_they_had_none(work):
    results = []
    for view in (whole, gapped):
        torch.manual_seed(1)
        results.append(work(view))
    assert all(torch.equal(one, other) for one, other in zip(*results, strict=True))


def test_what_gathered_experts_return_lies_in_rows_also_where_tokens_lie_in_columns():
    from triax.kernels.moe import gathered, reference

    weights = [torch.randn(4, *sides) for sides in ((8, 24), (8, 24), (24, 8))]
    hidden, chosen, share = torch.randn(24, 5).T, torch.rand(5, 4).topk(2).indices, torch.rand(5, 2)
    inputs = hidden, chosen, share, *weights, SituGlu(4.0, 25.0)
    torch.testing.assert_close(gathered.experts(*inputs), reference.experts(*inputs), rtol=1e-4, atol=1e-4)
