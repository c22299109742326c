"""F26: what comes after a token moves no bit of what it read, nor of the gradients of what was read up to it."""

from itertools import accumulate

import pytest
import torch
import torch.nn.functional as F

from triax.kernels.kda import kda, kda_from_raw

ON_GPU = torch.cuda.is_available()
LOWEST = {"bounded": -5.0, "unbounded": float("-inf")}
LENGTHS = [(2,), (17,), (22,), (65,), (200,), (22, 1, 0, 65, 2, 17)]


@pytest.fixture
def deterministic():
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(before)


def inputs(tokens, heads, channels, kind, dtype, device="cpu"):
    draw = torch.Generator().manual_seed(tokens)
    normal = lambda *shape: torch.randn(*shape, generator=draw)  # noqa: E731
    gate = -5 * torch.sigmoid(2 * normal(tokens, heads, channels) - 1)
    if kind == "unbounded":
        gate = -60 * torch.rand(tokens, heads, channels, generator=draw) ** 8
    query, key = (F.normalize(normal(tokens, heads, channels), dim=-1) for _ in range(2))
    streams = [x.to(device, dtype) for x in (query * channels**-0.5, key, normal(tokens, heads, channels))]
    return [*streams, gate.to(device), torch.sigmoid(normal(tokens, heads)).to(device)]


def raw_inputs(tokens, heads, device):
    draw = torch.Generator().manual_seed(tokens)
    normal = lambda *shape: torch.randn(*shape, generator=draw)  # noqa: E731
    streams = [normal(tokens, heads, 128).bfloat16() for _ in range(4)]
    return [x.to(device) for x in (*streams, normal(tokens, heads).bfloat16())]


def assert_later_tokens_move_nothing(operation, x, lengths):
    """Change every input of each sequence's last token; `operation` takes streams and borders."""
    starts = tuple(accumulate(lengths, initial=0))
    last = [end - 1 for end, length in zip(starts[1:], lengths, strict=True) if length]
    earlier = torch.ones(starts[-1], dtype=torch.bool, device=x[0].device)
    earlier[last] = False
    upstream = torch.randn(x[2].shape, generator=torch.Generator().manual_seed(1)).to(x[2])
    upstream[last] = 0
    outcomes = []
    for other in (1.0, 0.5, 0.1):
        leaves = [stream.detach().clone() for stream in x]
        for stream in leaves:  # gates stay inside their bound
            stream[last] = (stream[last].roll(1, -1) * other).to(stream)
        leaves = [stream.requires_grad_() for stream in leaves]
        read = operation(*leaves, starts)
        outcomes.append([read, *torch.autograd.grad(read, leaves, upstream)])
    names = ("read", "query", "key", "value", "gate", "beta")
    for others in outcomes[1:]:
        for name, one, other in zip(names, outcomes[0], others, strict=True):
            assert torch.isfinite(one).all(), name
            assert torch.equal(one[earlier], other[earlier]), name
        # What was changed is felt by the tokens themselves, or nothing was tried.
        assert not torch.equal(outcomes[0][0], others[0])


@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize("kind", LOWEST)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("chunk", [None, 64])
def test_f26_the_chunk_form_is_causal_to_the_bit(lengths, kind, dtype, chunk):
    def operation(*x):
        return kda(*x[:5], None, x[5], lowest_log_decay=LOWEST[kind], chunk=chunk).read

    assert_later_tokens_move_nothing(operation, inputs(sum(lengths), 2, 16, kind, dtype), lengths)


@pytest.mark.kernel
@pytest.mark.skipif(ON_GPU, reason="the kernels are compiled here; the gpu tests run them")
@pytest.mark.parametrize(
    ("kind", "anchored", "lengths"),
    [
        *(("bounded", 16, lengths) for lengths in ((2,), (17,), (22, 1, 0, 65))),
        *(("unbounded", 8, lengths) for lengths in ((2,), (17,), (22, 1, 0, 65))),
        ("unbounded", 1, (22,)),
    ],
)
def test_f26_interpreted_kernels_with_tiles_anchored_at_their_start_are_causal_to_the_bit(kind, anchored, lengths):
    pytest.importorskip("triton", reason="Triton is installed on x86 Linux only")
    from triax.kernels.kda import flash

    def operation(*x):
        return flash.kda_flash(*x[:5], None, list(x[5]), [], anchored, True, True)[0]

    assert_later_tokens_move_nothing(operation, inputs(sum(lengths), 1, 32, kind, torch.float32), lengths)


def test_f26_tiles_are_causal_where_torch_is_deterministic(deterministic):
    pytest.importorskip("triton", reason="Triton is installed on x86 Linux only")
    from triax.kernels.kda.flash import anchors

    kinds = [(lowest, dtype) for lowest in LOWEST.values() for dtype in (torch.float32, torch.bfloat16)]
    assert [anchors(*kind) for kind in kinds] == [(16, True), (16, True), (1, True), (8, True)]
    torch.use_deterministic_algorithms(False)
    assert [anchors(*kind) for kind in kinds] == [(32, False), (32, False), (1, True), (16, False)]


@pytest.mark.gpu
@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize("kind", LOWEST)
@pytest.mark.parametrize(
    ("channels", "dtype"),
    [(32, torch.float32), (64, torch.bfloat16), (128, torch.bfloat16), (128, torch.float32), (256, torch.bfloat16)],
)
def test_f26_kernels_on_a_gpu_are_causal_to_the_bit(deterministic, lengths, kind, channels, dtype):
    def operation(*x):
        return kda(*x[:5], None, x[5], lowest_log_decay=LOWEST[kind]).read

    assert_later_tokens_move_nothing(operation, inputs(sum(lengths), 2, channels, kind, dtype, "cuda"), lengths)


@pytest.mark.gpu
@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize("kind", LOWEST)
def test_f26_raw_inputs_on_a_gpu_are_causal_to_the_bit(deterministic, lengths, kind):
    rates, biases = torch.tensor([0.3, 1.5], device="cuda"), torch.linspace(-4, 1, 256, device="cuda").view(2, 128)

    def operation(*x):
        return kda_from_raw(*x[:5], rates, biases, None, x[5], lowest_log_decay=LOWEST[kind]).read

    assert_later_tokens_move_nothing(operation, raw_inputs(sum(lengths), 2, "cuda"), lengths)
