"""The Attention Residuals mix at K3's size: 9 sources, 8,192 tokens, width 7,168."""

from collections.abc import Iterator

import torch

from benchmarks.replay import CEILING, Error, Time, milliseconds, relative
from triax.kernels.attention_residual import fused, reference

SOURCES, TOKENS, WIDTH = 9, 8192, 7168
PASS_MS = TOKENS * WIDTH * 2 / CEILING * 1e3
"""One read or write of one source."""
PEER = "fla 0.6.0 {}, quoted from one H200"


def measure() -> Iterator[Time | Error]:
    """Yield every figure of the operation."""
    sources = [torch.randn(TOKENS, WIDTH, device="cuda", dtype=torch.bfloat16) * (1 + j / 4) for j in range(SOURCES)]
    norm, query = torch.rand(WIDTH, device="cuda") + 0.5, torch.randn(WIDTH, device="cuda") * 0.02
    gain, upstream = torch.rand(WIDTH, device="cuda"), torch.randn_like(sources[0])
    with torch.no_grad():
        ms = milliseconds(lambda: fused.mix(sources, norm, query, 1e-6))
        yield Time("AttnRes mix forward", ms, 0.33, (SOURCES + 1) * PASS_MS, PEER.format("0.359"))
        ms = milliseconds(lambda: fused.add_mix_norm(sources, upstream, norm, query, 1e-6, gain, 1e-6))
        yield Time("AttnRes with residual add and RMSNorm forward", ms, 0.40, (SOURCES + 3) * PASS_MS)
        norms, queries = norm.expand(8, -1).contiguous(), torch.randn(8, WIDTH, device="cuda") * 0.02
        ms = milliseconds(lambda: fused.finished([s[:256] for s in sources], norms, queries, 1e-6))
        yield Time("AttnRes finished sources, 8 places, 256 tokens", ms)
    leaves = [x.requires_grad_() for x in (*sources, norm, query)]
    ms = milliseconds(lambda: torch.autograd.grad(fused.mix(sources, norm, query, 1e-6)[0], leaves, upstream))
    yield Time("AttnRes mix forward+backward", ms, 1.15, (3 * SOURCES + 2) * PASS_MS, PEER.format("1.382"))
    few = [x[:64].detach() for x in sources]
    outcomes = []
    for path, dtype in ((fused.mix, None), (reference.mix, torch.float64)):
        x = [t.detach().to(dtype or t.dtype).requires_grad_() for t in (*few, norm, query)]
        mixed, _ = path(x[:-2], x[-2], x[-1], 1e-6)
        outcomes.append((mixed, *torch.autograd.grad(mixed, x, upstream[:64].to(mixed.dtype))))
    errors = list(map(relative, *outcomes))
    yield Error("AttnRes mix, result", errors[0], 6e-3)
    yield Error("AttnRes mix, gradients", max(errors[1:]), 8e-3)
