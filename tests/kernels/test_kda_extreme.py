"""KDA's GPU kernels under gates without a bound: nothing forgotten, everything forgotten, and all between."""

from itertools import accumulate

import pytest
import torch
import torch.nn.functional as F

from triax.kernels.kda import kda, kda_from_raw, reference
from triax.kernels.kda.raw import activate

pytest.importorskip("triton", reason="Triton is installed on x86 Linux only")
ON_GPU = torch.cuda.is_available()
NAMES = ("read", "state", "d_query", "d_key", "d_value", "d_log_decay", "d_beta", "d_state")
RAW_NAMES = ("read", "state", "d_query", "d_key", "d_value", "d_gate", "d_beta", "d_rates", "d_biases", "d_state")
GATES = (0.0, -0.001, -5.0, -9.0, -12.0, -20.0, -100.0, -1e4)
KINDS = (*GATES, "mixed", "by channel", "walls", "repeated")
LEAST = 1e-2
"""Share of the keys' gradient below which others count as nothing: at -20 log decays and states have almost none."""


def inputs(lengths, heads, channels, width, kind, dtype=torch.float32, device="cpu"):
    """Inputs as a layer makes them, all gates alike or drawn among the extremes."""
    draw = torch.Generator().manual_seed(7)
    tokens, sequences = sum(lengths), len(lengths)
    normal = lambda *shape: torch.randn(*shape, generator=draw)  # noqa: E731
    among = torch.tensor(GATES)
    key, beta = normal(tokens, heads, channels), torch.sigmoid(normal(tokens, heads))
    gate = among[torch.randint(len(among), (tokens, heads, channels), generator=draw)]
    if kind == "by channel":
        gate = gate[:1].expand(tokens, heads, channels)
    if kind == "walls":  # every few tokens all is forgotten, else almost nothing is
        gate = torch.where(torch.rand(tokens, heads, 1, generator=draw) < 0.1, -1e4, -0.01).expand_as(gate)
    if kind == "repeated":
        gate = torch.where(torch.rand(gate.shape, generator=draw) < 0.02, -30.0, -0.001)
        key = key[::64].repeat_interleave(64, 0)[:tokens] + 0.2 * key
        beta = 0.9 + 0.1 * beta
    if isinstance(kind, float):
        gate = torch.full_like(gate, kind)
    streams = (F.normalize(normal(tokens, heads, channels), dim=-1) * channels**-0.5, F.normalize(key, dim=-1))
    streams = [x.to(dtype) for x in (*streams, normal(tokens, heads, width))]
    return [x.to(device) for x in (*streams, gate, beta, 0.1 * normal(sequences, heads, channels, width))]


def raw_inputs(lengths, heads, kind, device):
    """What projections give; rates up to Kimi Linear's 16, and z from -20 to 20 or around 0."""
    draw = torch.Generator().manual_seed(8)
    tokens = sum(lengths)
    normal = lambda *shape: torch.randn(*shape, generator=draw)  # noqa: E731
    streams = [normal(tokens, heads, 128).bfloat16() for _ in range(4)]
    if kind == "wide":
        streams[3] *= 7
    rates = (torch.rand(heads, generator=draw) * 15 + 1).log()
    biases = {"fresh": -4.0, "around 0": 0.0, "wide": -3.0}[kind] + normal(heads, 128)
    numbers = (normal(tokens, heads).bfloat16(), rates, biases, 0.1 * normal(len(lengths), heads, 128, 128))
    return [x.to(device) for x in (*streams, *numbers)]


def outcome(operation, x, lengths, names):
    leaves = [tensor.detach().clone().requires_grad_() for tensor in x]
    result = operation(*leaves, tuple(accumulate(lengths, initial=0)))[:2]
    draw = torch.Generator().manual_seed(1)
    weights = [torch.randn(y.shape, generator=draw).bfloat16().to(y.device, y.dtype) for y in result]
    return dict(zip(names, (*result, *torch.autograd.grad(result, leaves, weights)), strict=True))


def errors(found, expected):
    """Relative errors (L2); gradients that may vanish beside at least a share of the keys'."""
    assert all(torch.isfinite(y).all() for y in found.values())
    least = dict.fromkeys(expected, 1e-9)
    if "d_log_decay" in expected:
        least["d_log_decay"] = least["d_state"] = LEAST * expected["d_key"].norm().item()
    return {n: ((found[n].double() - y).norm() / y.norm().clamp_min(least[n])).item() for n, y in expected.items()}


def by_kernels(*x):
    return kda(*x[:6], x[6])


def exactly(*x):
    return reference.kda(*x)


def exactly_from_raw(*x):
    query, key, value, gate, beta, rates, biases, state, starts = x
    query, key, log_decay, beta = activate(query, key, gate, beta, rates, biases, float("-inf"))
    return reference.kda(query, key, value, log_decay, beta, state, starts)


@pytest.mark.kernel
@pytest.mark.skipif(ON_GPU, reason="the kernels are compiled here; the gpu tests run them")
# Above the diagonal products may be infinite, and are selected away.
@pytest.mark.filterwarnings("ignore:(overflow|invalid value) encountered:RuntimeWarning")
@pytest.mark.parametrize(
    ("kind", "lengths", "channels", "anchored"),
    [
        *(
            (kind, lengths, 32, anchored)
            for kind, lengths in (
                (-9.0, (1, 0, 66)),
                (-12.0, (66,)),
                (-100.0, (66,)),
                ("mixed", (1, 0, 66)),
                ("walls", (1, 0, 66)),
            )
            for anchored in ((1, True), (8, True), (16, False))
        ),
        ("mixed", (9,), 256, (1, True)),
    ],
)
def test_interpreted_kernels_hold_unbounded_gates_in_tiles_of_any_kind(kind, lengths, channels, anchored):
    from triax.kernels.kda import flash

    x = inputs(lengths, 1, channels, 32, kind)

    def operation(*y):
        return flash.kda_flash(*y[:6], list(y[6]), [], *anchored, True)

    is_held = anchored[0] > 1
    held = [*x[:3], x[3].clamp_min(-14.4375 * 0.6931471805599453) if is_held else x[3], *x[4:]]
    of_held = outcome(exactly, [t.double() for t in held], lengths, NAMES)
    if is_held:
        of_held["d_log_decay"] *= (x[3] - held[3]).double().exp()
    found = outcome(operation, x, lengths, NAMES)
    assert max(errors(found, of_held).values()) < 1e-4
    of_asked = outcome(exactly, [t.double() for t in x], lengths, NAMES)
    assert max(errors(found, of_asked).values()) < 1e-3


def assert_below_the_bars(found, expected, kind):
    of_outputs, of_gradients = (1.5e-2, 2e-2) if kind == "repeated" else (6e-3, 8e-3)
    wrong = errors(found, expected)
    # Sums over all tokens of terms of either sign, rounded once each: a head's one number cancels most.
    assert wrong.pop("d_rates", 0.0) < 2e-2
    assert not {n: e for n, e in wrong.items() if not e < (of_gradients if n.startswith("d_") else of_outputs)}


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("channels", "width"), [(128, 128), (64, 64), (256, 128)])
@pytest.mark.parametrize(("lengths", "heads"), [((1, 0, 200, 65), 3), ((512,), 2)])
def test_errors_under_extreme_gates_stay_below_the_bars(kind, channels, width, lengths, heads):
    x = inputs(lengths, heads, channels, width, kind, torch.bfloat16, "cuda")
    found = outcome(by_kernels, x, lengths, NAMES)
    assert_below_the_bars(found, outcome(exactly, [t.double() for t in x], lengths, NAMES), kind)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["fresh", "around 0", "wide"])
@pytest.mark.parametrize(("lengths", "heads"), [((1, 0, 200, 65), 3), ((512,), 2), ((200,), 70)])
def test_raw_inputs_of_an_unbounded_gate_stay_below_the_bars(kind, lengths, heads):
    x = raw_inputs(lengths, heads, kind, "cuda")
    found = outcome(lambda *y: kda_from_raw(*y, lowest_log_decay=float("-inf")), x, lengths, RAW_NAMES)
    assert_below_the_bars(found, outcome(exactly_from_raw, [t.double() for t in x], lengths, RAW_NAMES), kind)
