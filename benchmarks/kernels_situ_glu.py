"""SiTU-GLU alone: 131,072 rows of 3,072."""

from collections.abc import Iterator

import torch

from benchmarks.replay import CEILING, Error, Time, milliseconds, relative
from triax.kernels.situ_glu import fused, reference

ROWS, WIDTH = 131_072, 3072
CAPS = (4.0, 25.0)
PASS_MS = ROWS * WIDTH * 2 / CEILING * 1e3


def measure() -> Iterator[Time | Error]:
    """Yield every figure of the operation."""
    gate, up, upstream = (torch.randn(ROWS, WIDTH, device="cuda", dtype=torch.bfloat16) * 3 for _ in range(3))
    with torch.no_grad():
        yield Time("SiTU-GLU forward", milliseconds(lambda: fused.glu(gate, up, *CAPS)), 0.66, 3 * PASS_MS)
        ms = milliseconds(lambda: fused.gradient(upstream, gate, up, *CAPS))
        yield Time("SiTU-GLU backward", ms, 1.1, 5 * PASS_MS)
    outcomes = []
    for path, dtype in ((fused.glu, None), (reference.glu, torch.float64)):
        x = [t[:256].detach().to(dtype or t.dtype).requires_grad_() for t in (gate, up)]
        result = path(x[0], x[1], *CAPS)
        outcomes.append((result, *torch.autograd.grad(result, x, upstream[:256].to(result.dtype))))
    yield Error("SiTU-GLU value and gradients", max(map(relative, *outcomes)), 6e-3)
