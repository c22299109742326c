"""Blocked attention against its definition: packed sequences, earlier tokens, largest logits, gradients."""

from itertools import accumulate

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from triax.kernels.mla import attend, blocked, reference


def inputs(new, past, dtype=torch.float64, seed=0):
    noise = torch.Generator().manual_seed(seed)
    query_starts = tuple(accumulate(new, initial=0))
    key_starts = tuple(accumulate([n + p for n, p in zip(new, past, strict=True)], initial=0))

    def draw(*shape):
        return torch.randn(*shape, generator=noise, dtype=torch.float64).to(dtype).requires_grad_()

    return (
        draw(query_starts[-1], 2, 5),
        draw(key_starts[-1], 2, 5),
        draw(key_starts[-1], 2, 3),
        query_starts,
        key_starts,
    )


@given(
    rows=st.lists(st.tuples(st.integers(0, 9), st.integers(0, 5)), min_size=1, max_size=4),
    block=st.sampled_from([1, 3, 128]),
    seed=st.integers(0, 2**16),
)
@settings(max_examples=25)
def test_values_logits_and_gradients_equal_the_definition(rows, block, seed):
    query, key, value, *starts = inputs([n for n, _ in rows], [p for _, p in rows], seed=seed)
    before, blocked.BLOCK = blocked.BLOCK, block
    blocked._plan.cache_clear()
    results = []
    try:
        for path in (reference, blocked):
            read, largest = path.attend(query, key, value, *starts, 0.7)
            total = (read * torch.arange(read.numel()).view_as(read)).sum()
            gradients = torch.autograd.grad(total, (query, key, value), materialize_grads=True, allow_unused=True)
            results.append((read, largest, *gradients))
    finally:
        blocked.BLOCK = before
        blocked._plan.cache_clear()
    torch.testing.assert_close(results[1], results[0], rtol=1e-10, atol=1e-10)


def test_gradients_equal_finite_differences():
    query, key, value, *starts = inputs([3, 2], [1, 0])
    assert torch.autograd.gradcheck(lambda *x: blocked.attend(*x, *starts, 0.7)[0], (query, key, value))


def test_the_largest_logit_counts_the_causal_part_only_and_may_be_negative():
    query = torch.ones(3, 1, 2)
    key = torch.tensor([[-4.0, -4.0], [-1.0, -1.0], [-2.0, -2.0]])[:, None]
    _, largest = attend(query[:2], key[:2], key[:2], (0, 2), (0, 2), 0.5, with_largest=True)
    assert largest.tolist() == [-1.0]
    _, largest = attend(query[:1], key[:1], key[:1], (0, 1), (0, 1), 0.5, with_largest=True)
    assert largest.tolist() == [-4.0]
    _, apart = attend(query, key, key, (0, 1, 3), (0, 1, 3), 0.5, with_largest=True)
    assert apart.tolist() == [-1.0]


def test_bf16_inputs_are_attended_in_fp32_even_under_autocast():
    query, key, value, *starts = inputs([40], [0], torch.bfloat16)
    exact, top = reference.attend(query.double(), key.double(), value.double(), *starts, 0.7)
    with torch.autocast("cpu", torch.bfloat16):
        read, largest = attend(query, key, value, *starts, 0.7, with_largest=True)
    assert read.dtype is torch.float32
    torch.testing.assert_close(read.double(), exact, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(largest.double(), top, rtol=1e-5, atol=1e-5)
    read.sum().backward()
    assert query.grad.isfinite().all()


def test_many_keys_that_are_equally_likely_share_the_weight():
    query, key, value, *starts = inputs([3], [300])
    read, _ = attend(0 * query, key, value, *starts, 0.7, with_largest=True)
    means = torch.stack([value[: 301 + t].mean(0) for t in range(3)])
    torch.testing.assert_close(read, means, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(*(torch.autograd.grad(x.sum(), value)[0] for x in (read, means)), rtol=1e-10, atol=1e-10)


def test_nothing_of_the_size_of_the_logits_is_kept_for_the_backward():
    query, key, value, *starts = inputs([300], [0], torch.float32)
    saved = []

    def note(tensor):
        saved.append(tensor.numel())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        blocked.attend(query, key, value, *starts, 0.7)
    assert sum(saved) < 300 * 2 * 20
