"""Operands of more than 2^31 numbers on a GPU: what is multiplied and written at both ends and between."""

import pytest
import torch

from triax.kernels.mla import decode, paged
from triax.kernels.mla import reference as attention
from triax.kernels.moe import reference as experts
from triax.kernels.situ_glu import SituGlu

pytestmark = pytest.mark.gpu
FAR = 2**31
DEVICE, DTYPE = "cuda", torch.bfloat16
HEADS, KEYS, PAGE, LATENT, SHARED = 96, 192, 64, 512, 64
INNER, WIDTH = 3072, 3584  # of an expert
TOKENS, SIDE, LONGEST = 1000, 2048, 16384
SITU = SituGlu(4.0, 25.0)


def drawn(*shape, scale=1.0):
    """Return random numbers, so many along the first axis that they are more than 2^31."""
    one = torch.Size(shape).numel()
    return torch.empty(FAR // one + 6, *shape, dtype=DTYPE, device=DEVICE).normal_(std=scale)


def error(found, expected):
    return ((found.double() - expected.double()).norm() / expected.double().norm()).item()


def form_of(operation, name):
    return pytest.importorskip(f"triax.kernels.{operation}.{name}")


@pytest.mark.parametrize("name", ["hopper", "split"])
def test_pages_of_a_large_pool_are_all_read(name):
    latent, form = drawn(PAGE, LATENT + SHARED), form_of("mla", name)
    border, last = len(latent) - 6, len(latent) - 1
    table = torch.tensor([[0, last], [border, 1], [last, border]], device=DEVICE).int()
    seen = torch.tensor([[PAGE + 5], [2 * PAGE], [PAGE + 1]], device=DEVICE).int()
    query = torch.randn(3, 1, HEADS, LATENT + SHARED, device=DEVICE).to(DTYPE)
    if form.unsupported(query, latent, LATENT):
        pytest.skip("this GPU has no such kernel")
    inputs = latent, table, seen, 0.07, LATENT
    assert error(form.decode(query, *inputs), paged.decode(query.float(), *inputs)) < 5e-3


@pytest.mark.parametrize("name", ["hopper", "split"])
def test_queries_of_very_many_rows_are_all_answered(name):
    count, form = FAR // (HEADS * LATENT) + 6, form_of("mla", name)  # results are many numbers too
    query = torch.randn(count, 1, HEADS, LATENT + SHARED, dtype=DTYPE, device=DEVICE)
    latent = torch.randn(3, PAGE, LATENT + SHARED, device=DEVICE).to(DTYPE)
    if form.unsupported(query, latent, LATENT):
        pytest.skip("this GPU has no such kernel")
    table = torch.randint(3, (count, 1), device=DEVICE).int()
    seen = torch.randint(1, PAGE, (count, 1), device=DEVICE).int()
    found = form.decode(query, latent, table, seen, 0.07, LATENT)
    for at in (0, FAR // (HEADS * (LATENT + SHARED)), count - 6, count - 1):
        row = slice(at, at + 1)
        expected = paged.decode(query[row].float(), latent, table[row], seen[row], 0.07, LATENT)
        assert error(found[row], expected) < 5e-3


def test_more_queries_than_a_grid_is_deep_are_answered_without_it():
    query, latent = torch.randn(2**13, 8, 1, 24, device=DEVICE), torch.randn(2, 16, 24, device=DEVICE)
    table = torch.ones(2**13, 1, device=DEVICE).int()
    seen = torch.zeros(2**13, 8, device=DEVICE).int()
    seen[-1] = 9
    with pytest.warns(UserWarning, match="no GPU kernel for `65536` queries at once"):
        found = decode(query, latent, table, seen, 0.3, 16)
    assert error(found[-1:], paged.decode(query[-1:], latent, table[-1:], seen[-1:], 0.3, 16)) < 1e-5


@pytest.mark.parametrize("axis", [0, 1])
def test_the_largest_logits_of_the_last_token_are_found_however_heads_and_tokens_lie(axis):
    from triax.kernels.mla.largest import largest

    length = FAR // ((HEADS - 1) * KEYS) + 300  # the last head alone begins beyond 2^31
    shape = (length, HEADS, KEYS) if axis == 0 else (HEADS, length, KEYS)
    x = torch.empty(shape, dtype=DTYPE, device=DEVICE).normal_().movedim(axis, 0)
    x[-1] *= 30
    starts = (*range(0, length, TOKENS), length)
    found, own = largest(x, x, starts, starts, 0.07), x[starts[-2] :].float()
    _, expected = attention.attend(own, own, own[..., :1], (0, len(own)), (0, len(own)), 0.07)
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-3)


@torch.no_grad()
def test_attention_over_a_stream_of_very_many_numbers_answers_its_last_sequence():
    from triax.kernels.mla import attend

    x = drawn(HEADS, KEYS, scale=0.3)
    starts = (*range(0, len(x), TOKENS), len(x))
    found, _ = attend(x, x, x[..., : KEYS - SHARED], starts, starts, 1.0, with_largest=False)
    for first, end in (starts[:2], starts[-2:]):
        own = x[first:end].float()
        expected, _ = attention.attend(own, own, own[..., : KEYS - SHARED], (0, len(own)), (0, len(own)), 1.0)
        assert error(found[first:end], expected) < 8e-3


@pytest.mark.parametrize("name", ["streamed", "gathered", "cuda", "triton"])
@torch.no_grad()
def test_experts_behind_2_to_the_31_weights_are_used(name):
    weight = drawn(INNER, WIDTH, scale=WIDTH**-0.5)
    down, last = weight.view(-1, WIDTH, INNER), len(weight) - 1
    border = last - 5
    expert = torch.tensor([[0, last], [border, last], [1, border]], device=DEVICE)
    hidden, share = torch.randn(3, WIDTH, device=DEVICE).to(DTYPE), torch.rand(3, 2, device=DEVICE)
    if name in ("cuda", "triton"):
        from triax.kernels.moe import fused, hopper
        from triax.kernels.moe.tiles import PLAN

        if name == "cuda" and not hopper.is_available(weight.device):
            pytest.skip("this GPU has no such kernel")
        plan = None if name == "cuda" else PLAN
        found = fused.experts(hidden, expert, share, weight, weight, down, SITU, DTYPE, plan=plan)
    else:
        found = form_of("moe", name).experts(hidden, expert, share, weight, weight, down, SITU)
    used, place = expert.unique(return_inverse=True)
    some = [x[used].float() for x in (weight, weight, down)]
    assert error(found, experts.experts(hidden.float(), place, share, *some, SITU)) < 1.5e-2


@pytest.mark.parametrize(("inner", "width"), [(64, SIDE), (SIDE, 64)])
@torch.no_grad()
def test_rows_that_are_gathered_are_all_led_through_their_experts(inner, width):
    gathered = form_of("moe", "gathered")
    tokens = FAR // (8 * SIDE) + 300
    hidden = torch.randn(tokens, width, device=DEVICE).to(DTYPE)
    expert, share = torch.arange(8, device=DEVICE).expand(tokens, 8), torch.rand(tokens, 8, device=DEVICE)
    gate, up = torch.randn(2, 8, inner, width, device=DEVICE).mul(width**-0.5).to(DTYPE)
    down = torch.randn(8, width, inner, device=DEVICE).mul(inner**-0.5).to(DTYPE)
    found = gathered.experts(hidden, expert, share, gate, up, down, SITU)
    at = torch.tensor([0, 1, tokens // 2, tokens - 300, tokens - 1], device=DEVICE)
    some = hidden[at].float(), expert[at], share[at], gate.float(), up.float(), down.float()
    assert error(found[at], experts.experts(*some, SITU)) < 1.5e-2


@pytest.mark.parametrize("name", ["streamed", "sliced", "tiled"])
def test_experts_behind_2_to_the_31_codes_are_used(name):
    from triax.kernels.mx.experts import looped
    from triax.kernels.mx.mxfp4 import Mxfp4

    form = form_of("mx", name)
    number = FAR // (INNER * WIDTH // 2) + 6
    code = torch.randint(256, (number, INNER, WIDTH // 2), dtype=torch.uint8, device=DEVICE)
    scales = [code.new_full((number, rows, columns // 32), 120) for rows, columns in ((INNER, WIDTH), (WIDTH, INNER))]
    gate, down = Mxfp4(code, scales[0]), Mxfp4(code.view(number, WIDTH, INNER // 2), scales[1])
    expert = torch.tensor([[0, number - 1], [number - 6, number - 1], [1, number - 6]], device=DEVICE)
    hidden, share = torch.randn(3, WIDTH, device=DEVICE).to(DTYPE), torch.rand(3, 2, device=DEVICE)
    if name != "tiled" and form.planned.unsupported(hidden, gate, gate, down, SITU):
        pytest.skip("this GPU has no such kernel")
    found = form.experts(hidden, expert, share, gate, gate, down, SITU, rounded=False)
    expected = looped.experts(hidden, expert, share, gate, gate, down, SITU, lambda rows: rows)
    assert error(found, expected) < 1.5e-2


def test_products_of_very_many_matrices_with_themselves_are_all_written():
    from triax.kernels.newton_schulz.symmetric import product

    matrices = FAR // SIDE**2 + 6
    x = torch.randn(matrices, SIDE, 64, device=DEVICE).to(DTYPE)
    gram = product(x)
    result = product(x, 2.0, gram, 0.5)
    for at in (0, matrices - 7, matrices - 6, matrices - 1):
        expected = x[at].double() @ x[at].double().T
        assert error(gram[at], expected) < 4e-3
        assert error(result[at], 2.5 * expected) < 4e-3


def test_every_row_of_a_large_matrix_is_multiplied_with_the_only_row():
    from triax.kernels.linear.single import linear

    weight, row = drawn(LONGEST), torch.randn(1, LONGEST, device=DEVICE).to(DTYPE)
    found = linear(row, weight, torch.float32)[0]
    at = torch.tensor([0, 1, len(weight) - 7, len(weight) - 6, len(weight) - 1], device=DEVICE)
    torch.testing.assert_close(found[at].double(), weight[at].double() @ row[0].double(), rtol=1e-4, atol=1e-2)
