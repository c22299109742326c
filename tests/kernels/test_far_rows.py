"""Tensors of more than 2^31 numbers on a GPU: rows at the beginning, at the border and at the end, by definition."""

import pytest
import torch

from triax.kernels import attention_residual, rms_norm, short_conv
from triax.kernels.situ_glu import SituGlu
from triax.kernels.situ_glu import reference as glu_reference

pytestmark = pytest.mark.gpu
FAR = 2**31
DEVICE, DTYPE = "cuda", torch.bfloat16
WIDTH, CHANNELS, INNER, VOCABULARY, EXPERTS = 7168, 12288, 3072, 163_840, 896
SPREAD = 65536  # tokens of which several tensors together are large


def drawn(width, dtype=DTYPE, joined=0):
    """More than 2^31 random numbers in rows of this width, and numbers of others before each row."""
    return torch.empty(FAR // width + 300, joined + width, dtype=dtype, device=DEVICE).normal_()[:, joined:]


def chosen(x):
    """Numbers of the first rows, those around the 2^31st number, and the last."""
    border = FAR // x.shape[-1]
    return torch.tensor([0, 1, border - 1, border, border + 1, len(x) - 2, len(x) - 1], device=x.device)


def exact(*tensors):
    return [x.detach().double().requires_grad_() for x in tensors]


def assert_near(found, expected, bar=8e-3):
    for one, other in zip(found, expected, strict=True):
        errors = (one.double() - other).flatten(1).norm(dim=1) / other.flatten(1).norm(dim=1)
        assert errors.max().item() < bar, errors.tolist()


def vectors(count, width):
    return torch.randn(count, width, device=DEVICE).unbind()


def normed(x, gain):
    return rms_norm.reference.rms_norm(x, gain.double(), 1e-5, 1.0, torch.float64)


def test_a_mix_with_its_add_and_norm_writes_every_row():
    from triax.kernels.attention_residual import fused

    x, (norm, query, gain) = drawn(WIDTH), vectors(3, WIDTH)
    found = fused.add_mix_norm([x, x], x, norm, query, 1e-5, gain, 1e-5)
    rows = x[(at := chosen(x))].double()
    mixed, _ = attention_residual.reference.mix([rows, 2 * rows], norm.double(), query.double(), 1e-5)
    assert_near((found.total[at], found.normed[at]), (2 * rows, normed(mixed, gain)))


def test_a_merge_into_a_mix_reads_and_writes_every_row():
    from triax.kernels.attention_residual import fused

    x, (norm, query, gain) = drawn(WIDTH), vectors(3, WIDTH)
    mass_log, at = torch.full((len(x),), -1e30, device=DEVICE), chosen(x)
    mass_log[at[::2]] = 1e30  # here the mix is all, elsewhere the sum that is merged in
    found = fused.add_merge_norm(x, mass_log, -x, None, norm, query, 1e-5, gain, 1e-5)
    expected = normed(x[at].double(), gain)
    expected[1::2] *= -1
    assert_near([found.normed[at]], [expected])


def test_the_gradient_of_a_mix_reaches_every_row_of_a_large_source():
    x, (norm, query) = drawn(WIDTH), vectors(2, WIDTH)
    at = chosen(x)
    mixed, _ = attention_residual.mix([x.requires_grad_()], norm, query, 1e-5)
    assert torch.equal(mixed[at], x[at])
    (gradient,) = torch.autograd.grad(mixed, x, x.detach())
    assert_near([gradient[at]], [x[at].detach().double()])


def test_the_gradients_of_many_sources_are_written_behind_each_other():
    stack, (norm, query) = torch.randn(5, SPREAD, WIDTH, device=DEVICE, dtype=DTYPE), vectors(2, WIDTH)
    assert stack.numel() > FAR
    sources, at = [x.requires_grad_() for x in stack.unbind()], torch.tensor([0, SPREAD // 2, SPREAD - 1])
    # scores of about 1: with larger ones a token's other sources get gradients below all numbers, which prove nothing
    query = query * WIDTH**-0.5
    upstream = torch.randn(SPREAD, WIDTH, device=DEVICE, dtype=DTYPE)
    mixed, _ = attention_residual.mix(sources, norm, query, 1e-5)
    gradients = torch.autograd.grad(mixed, sources, upstream)
    leaves = exact(*(x[at] for x in sources))
    expected, _ = attention_residual.reference.mix(leaves, norm.double(), query.double(), 1e-5)
    assert_near([mixed[at]], [expected])
    assert_near([x[at] for x in gradients], torch.autograd.grad(expected, leaves, upstream[at].double()))


def test_mixes_for_many_places_are_written_behind_each_other():
    from triax.kernels.attention_residual import fused

    sources = list(torch.randn(2, SPREAD, WIDTH, device=DEVICE, dtype=DTYPE).unbind())
    norms, queries, at = *torch.randn(2, 5, WIDTH, device=DEVICE), torch.tensor([0, SPREAD // 2, SPREAD - 1])
    found = fused.finished(sources, norms, queries, 1e-5).mixed
    assert found.numel() > FAR
    rows = [x[at].double() for x in sources]
    pairs = zip(norms.double(), queries.double(), strict=True)
    expected = [attention_residual.reference.mix(rows, norm, query, 1e-5)[0] for norm, query in pairs]
    assert_near([x[at] for x in found], expected)


def test_a_gated_activation_and_both_gradients_reach_every_row():
    x = drawn(INNER)
    at, leaves = chosen(x), [x.detach().requires_grad_() for _ in range(2)]
    value = SituGlu(4.0, 25.0)(*leaves)
    gradients = torch.autograd.grad(value, leaves, x)
    alone = exact(x[at], x[at])
    expected = glu_reference.glu(*alone, 4.0, 25.0)
    found = [value[at], *(gradient[at] for gradient in gradients)]
    assert_near(found, [expected, *torch.autograd.grad(expected, alone, x[at].double())])


def test_a_gated_activation_reads_both_halves_of_a_large_product():
    both = drawn(2 * INNER)
    at = chosen(both)
    value = SituGlu(4.0, 25.0)(*both.chunk(2, -1))
    assert_near([value[at]], [glu_reference.glu(*both[at].double().chunk(2, -1), 4.0, 25.0)])


def test_a_norm_with_a_gate_and_its_gradients_reach_every_row():
    x, (weight,) = drawn(WIDTH), vectors(1, WIDTH)
    at, leaves = chosen(x), [x.detach().requires_grad_() for _ in range(2)]
    y = rms_norm.gated(*leaves, weight, 1e-5)
    gradients = torch.autograd.grad(y, leaves, x)
    alone = exact(x[at], x[at])
    expected = rms_norm.reference.gated(*alone, weight.double(), 1e-5, torch.float64)
    found = [y[at], *(gradient[at] for gradient in gradients)]
    assert_near(found, [expected, *torch.autograd.grad(expected, alone, x[at].double())])


@torch.no_grad()
def test_the_norm_of_a_sum_writes_every_row():
    x, (weight,) = drawn(WIDTH), vectors(1, WIDTH)
    total, y = rms_norm.of_sum(x, x, weight, 1e-5)
    rows = 2 * x[(at := chosen(x))].double()
    assert_near((total[at], y[at]), (rows, normed(rows, weight)))


def test_a_short_convolution_and_its_gradient_reach_every_row_of_a_joined_projection():
    hidden, weight = drawn(CHANNELS, joined=64).requires_grad_(), torch.randn(CHANNELS, 4, device=DEVICE)
    window = torch.randn(2, 3, CHANNELS, device=DEVICE).to(DTYPE)
    length, border = len(hidden), FAR // CHANNELS
    output, _ = short_conv.short_conv(hidden, weight, window, (0, length - 20, length), wants_window=False)
    (gradient,) = torch.autograd.grad(output, hidden, output.detach())
    # what is cut off at a side that is no border of a sequence, three tokens feel
    for first, end, before, left, right in (
        (0, 20, window[:1], 0, 3),
        (border - 10, border + 10, torch.zeros_like(window[:1]), 3, 3),
        (length - 20, length, window[1:], 0, 0),
    ):
        (rows,) = exact(hidden[first:end])
        own, inner = (0, end - first), slice(left, end - first - right)
        expected, _ = short_conv.reference.short_conv(rows, weight.double(), before.double(), own)
        upstream = torch.autograd.grad(expected, rows, output[first:end].detach().double())[0]
        assert_near((output[first:end][inner], gradient[first:end][inner]), (expected[inner], upstream[inner]))


def test_losses_and_slopes_of_a_large_vocabulary_are_those_of_every_row():
    from triax.kernels.cross_entropy import nats, reference

    logit = drawn(VOCABULARY)
    targets = torch.randint(VOCABULARY, (len(logit),), device=DEVICE)
    rows = logit[(at := chosen(logit))].double()
    cost, slope = nats(logit, targets, -1, wants_slope=True)
    expected = reference.nats(rows, targets[at], -1, wants_slope=True)
    torch.testing.assert_close(cost[at].double(), expected[0], rtol=1e-3, atol=1e-3)
    assert_near([slope[at]], [expected[1]])


def test_tokens_are_drawn_from_every_row():
    from triax.kernels.draw import Ways, draw, reference

    logits = drawn(VOCABULARY, torch.float32)
    nothing, at = torch.zeros(len(logits), device=DEVICE), chosen(logits)
    ways = Ways(nothing, nothing.int(), nothing + 1, nothing, nothing.double())
    found = draw(logits, None, ways)
    expected = reference.draw(logits[at], None, Ways(*(way[at] for way in ways)))
    assert torch.equal(found.token[at], expected.token)
    torch.testing.assert_close(found.logprob[at], expected.logprob, rtol=1e-5, atol=1e-5)


def test_experts_are_chosen_for_every_token_and_the_shares_gradient_reaches_its_scores():
    from triax.kernels.moe import router_fused

    logit, (bias,) = drawn(EXPERTS, torch.float32), vectors(1, EXPERTS)
    at, upstream = chosen(logit), torch.randn(len(logit), 8, device=DEVICE)
    expert, share, _ = router_fused.choose(logit.requires_grad_(), bias, 8, 2.0, renormalize=True)
    (gradient,) = torch.autograd.grad(share, logit, upstream)
    (rows,) = exact(logit[at])
    score = rows.sigmoid()
    best_expert = (score + bias).topk(8).indices
    kept = score.gather(1, best_expert)
    expected = 2 * kept / kept.sum(1, keepdim=True)
    assert torch.equal(expert[at], best_expert)
    assert_near(
        (share[at], gradient[at]), (expected, torch.autograd.grad(expected, rows, upstream[at].double())[0]), 1e-4
    )
