"""Recomputed activations (`torch.utils.checkpoint`) give the gradients of kept ones, routing included."""

import re
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

import triax
from triax.kernels import attention_residual, kda, mla, moe, rms_norm, short_conv
from triax.kernels.linear import rounded
from triax.kernels.routed import ExpertWeights, Routing
from triax.kernels.situ_glu import SituGlu
from triax.model.layout import Layout
from triax.model.replay import record, replay
from triax.model.router import Router
from triax.train import loss

KINDS = [False, True]
LAYOUT = Layout.of([9, 1, 0, 14])


def gradients(function, inputs, parameters=(), reentrant=None):
    """Gradients for a fixed weight on each output; the function runs under recomputation where a kind is named."""
    leaves = [x.detach().clone().requires_grad_() for x in inputs]
    for parameter in parameters:
        parameter.grad = None
    outputs = function(*leaves) if reentrant is None else checkpoint(function, *leaves, use_reentrant=reentrant)
    outputs = [outputs] if isinstance(outputs, torch.Tensor) else [x for x in outputs if x.requires_grad]
    noise = torch.Generator().manual_seed(3)
    sum((x * torch.randn(x.shape, generator=noise).to(x)).sum() for x in outputs).backward()
    return [x.grad for x in leaves] + [None if p.grad is None else p.grad.clone() for p in parameters]


def assert_same(function, inputs, parameters=(), reentrant=False):
    expected = gradients(function, inputs, parameters)
    found = gradients(function, inputs, parameters, reentrant)
    assert any(x is not None and x.any() for x in expected)
    for one, other in zip(found, expected, strict=True):
        assert (one is None) == (other is None)
        assert one is None or torch.equal(one, other)


def randn(*shape):
    return torch.randn(*shape, dtype=torch.float64)


EXPERT = torch.stack([torch.randperm(4)[:2] for _ in range(24)])
OPERATIONS = {
    "kda": (
        lambda q, k, v, decay, beta, state: kda.kda(
            q, F.normalize(k, dim=-1), v, -F.softplus(decay), beta.sigmoid(), state, LAYOUT.starts
        )[:2],
        [*(randn(24, 2, 32) for _ in range(4)), randn(24, 2), randn(4, 2, 32, 32)],
    ),
    "short_conv": (
        lambda x, w: short_conv.short_conv(x, w, x.new_zeros(4, 3, 16), LAYOUT.starts)[0],
        [randn(24, 16), randn(16, 4)],
    ),
    "mla": (
        lambda q, k, v: mla.attend(q, k, v, LAYOUT.starts, LAYOUT.starts, 0.3, with_largest=True)[0],
        [randn(24, 2, 8), randn(24, 2, 8), randn(24, 2, 6)],
    ),
    "moe": (
        lambda x, share, *w: moe.experts(x, Routing(EXPERT, share), ExpertWeights(*w), SituGlu(4.0, 25.0)),
        [randn(24, 16), torch.rand(24, 2).double(), randn(4, 32, 16), randn(4, 32, 16), randn(4, 16, 32)],
    ),
    "attention_residual": (
        lambda a, b, c, norm, query: attention_residual.mix([a, b, c], norm, query, 1e-5)[0],
        [randn(24, 8), randn(24, 8), randn(24, 8), randn(8), randn(8)],
    ),
    "rms_norm": (lambda x, w: rms_norm.rms_norm(x, w, 1e-5), [randn(24, 8), randn(8)]),
    "rms_norm.gated": (lambda x, g, w: rms_norm.gated(x, g, w, 1e-5), [randn(24, 8), randn(24, 8), randn(8)]),
    "situ_glu": (SituGlu(4.0, 25.0), [randn(24, 8), randn(24, 8)]),
    "linear.rounded": (lambda x, w: rounded.linear(x, w, None), [randn(24, 8).float(), randn(6, 8).float()]),
    "loss": (
        lambda x, w: loss.cross_entropy(x, w, torch.arange(24, device=x.device) % 11),
        [randn(24, 8), randn(11, 8)],
    ),
}


@pytest.mark.parametrize("reentrant", KINDS)
@pytest.mark.parametrize("name", OPERATIONS)
def test_f22_operations_may_be_recomputed(name, reentrant):
    function, inputs = OPERATIONS[name]
    assert_same(function, inputs, reentrant=reentrant)


@pytest.mark.gpu
@pytest.mark.parametrize("reentrant", KINDS)
@pytest.mark.parametrize("name", [name for name in OPERATIONS if name != "linear.rounded"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_f22_operations_may_be_recomputed_on_a_gpu(name, reentrant, dtype, monkeypatch):
    function, inputs = OPERATIONS[name]
    monkeypatch.setitem(globals(), "EXPERT", EXPERT.cuda())
    assert_same(function, [x.to("cuda", dtype) for x in inputs], reentrant=reentrant)


GRADIENTS = {
    "kernels/attention_residual/lean.py", "kernels/kda/chunk.py", "kernels/linear/rounded.py", "kernels/mla/blocked.py",
    "kernels/moe/grouped.py", "kernels/moe/weights.py", "kernels/rms_norm/lean.py", "kernels/short_conv/shifted.py",
    "kernels/situ_glu/lean.py", "train/loss.py",
}  # fmt: skip
ON_A_GPU = {
    "kernels/attention_residual/fused.py", "kernels/kda/direct.py", "kernels/moe/fused.py",
    "kernels/moe/router_fused.py", "kernels/rms_norm/fused.py", "kernels/short_conv/fused.py",
    "kernels/situ_glu/fused.py",
}  # fmt: skip


def test_f22_every_gradient_of_ours_is_tried_here_and_reads_what_it_saved_once():
    package = Path(triax.__file__).parent
    sources = {str(path.relative_to(package)): path.read_text() for path in package.rglob("*.py")}
    ours = {
        path for path, source in sources.items() if re.search(r"autograd\.Function\)|\.register_autograd\(", source)
    }
    assert ours == GRADIENTS | ON_A_GPU
    for path in ours:  # a second look at saved tensors finds nothing under recomputation without re-entrance
        for body in re.split(r"\n(?=\s*(?:def|class) )", sources[path]):
            assert body.count("ctx.saved_tensors") <= 1, path


@pytest.mark.parametrize("reentrant", KINDS)
@pytest.mark.parametrize("kind", ["k3", "kimi_linear", "k2", "full_residuals"])
def test_f22_every_layer_may_be_recomputed(family, awake, kind, reentrant):
    model = awake(family[kind]).train()
    hidden = randn(24, model.settings.width)
    for layer in model.layers:
        attention, mlp = layer.attention, layer.mlp
        assert_same(lambda x, m=attention: m(x, LAYOUT, None), [hidden], [*attention.parameters()], reentrant)
        assert_same(mlp, [hidden], [*mlp.parameters()], reentrant)
        if layer.attention_mix is not None:
            sources = [hidden, randn(*hidden.shape)]
            parameters = [*layer.attention_mix.parameters()]
            assert_same(lambda *x, m=layer.attention_mix: m(list(x)), sources, parameters, reentrant)


@pytest.mark.parametrize("reentrant", KINDS)
@pytest.mark.parametrize("kind", ["k3", "k2"])
def test_f22_a_whole_decoder_may_be_recomputed(family, awake, kind, reentrant):
    model = awake(family[kind]).train()
    tokens = torch.randint(0, 512, (24,))

    def run(scale):
        return model.logits(model(tokens, LAYOUT) * scale)

    assert_same(run, [torch.ones((), dtype=torch.float64)], [*model.parameters()], reentrant)


@pytest.mark.parametrize("read_the_same", [False, True])
@pytest.mark.parametrize("reentrant", KINDS)
def test_f23_a_replayed_routing_is_that_of_the_forward_that_is_recomputed(t0, awake, reentrant, read_the_same):
    model = awake(t0).train()
    routers = [module for module in model.modules() if isinstance(module, Router)]
    batches = [torch.randint(0, 512, (24,), generator=torch.Generator().manual_seed(n)) for n in range(3)]
    others = list(reversed(batches))  # other experts than the router's own choice
    if read_the_same:
        batches = batches[:1] * 3
    with record(routers) as kept, torch.no_grad():
        for tokens in others:
            model(tokens, LAYOUT)

    def run(scale, tokens):
        return model.logits(model(tokens, LAYOUT) * scale).square().sum()

    found = []
    for recomputes in (False, True):
        model.zero_grad()
        scale = torch.ones((), dtype=torch.float64, requires_grad=True)
        with replay(routers, kept) as agreed:
            losses = [
                checkpoint(run, scale, tokens, use_reentrant=reentrant) if recomputes else run(scale, tokens)
                for tokens in batches
            ]
            (losses[0] + 2 * losses[1] + 3 * losses[2]).backward()
        assert all(len(shares) == 3 for shares in agreed)
        assert any(share < 1 for shares in agreed for share in shares)
        found.append({name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None})
    for name, gradient in found[0].items():
        assert torch.equal(found[1][name], gradient), name


def test_f23_a_recording_holds_each_forward_once_though_it_is_recomputed(t0, awake):
    model = awake(t0).train()
    routers = [module for module in model.modules() if isinstance(module, Router)]
    with record(routers) as kept:
        scale = torch.ones((), dtype=torch.float64, requires_grad=True)
        tokens = torch.randint(0, 512, (24,))
        checkpoint(lambda s: (model(tokens, LAYOUT) * s).sum(), scale, use_reentrant=False).backward()
    assert [len(routings) for routings in kept] == [1] * len(routers)
