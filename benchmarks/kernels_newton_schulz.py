"""Newton-Schulz over 64 matrices of 3,072 x 3,584, beside the same steps in batched bf16 products."""

from collections.abc import Iterator

import torch

from benchmarks.replay import MATRIX_CEILING, Error, Time, milliseconds, relative
from triax.kernels.newton_schulz import orthogonalize, reference, symmetric

BATCH, ROWS, COLUMNS, STEPS = 64, 3072, 3584, 5


def measure() -> Iterator[Time | Error]:
    """Yield every figure of the operation."""
    x = torch.randn(BATCH, ROWS, COLUMNS, device="cuda", dtype=torch.bfloat16) / COLUMNS**0.5
    plain = milliseconds(lambda: _batched_products(x), replays=5)
    ours = milliseconds(lambda: orthogonalize(x), replays=5)
    products = STEPS * BATCH * 2 * ROWS * (2 * ROWS * COLUMNS + ROWS * ROWS)
    halved = STEPS * BATCH * ROWS * (ROWS * COLUMNS + ROWS * ROWS + 2 * ROWS * COLUMNS)
    peer = f"batched bf16 products {plain:.2f} ms, {products / plain / 1e9:.0f} TFLOP/s; ours {plain / ours:.2f}x"
    yield Time("Newton-Schulz 64 x [3072 x 3584]", ours, plain / 1.25, halved / MATRIX_CEILING * 1e3, peer)
    flops = BATCH * 2 * ROWS * ROWS * COLUMNS
    full = milliseconds(lambda: x @ x.mT, replays=5)
    yield Time("  x x^T, both triangles by the library", full, peer=f"{flops / full / 1e9:.0f} TFLOP/s")
    half = milliseconds(lambda: symmetric.product(x), replays=5)
    yield Time("  x x^T, one triangle", half, peer=f"{flops / half / 1e9:.0f} TFLOP/s counted as whole")
    few = torch.randn(2, 1024, 1500, device="cuda")
    found, expected = orthogonalize(few), torch.stack([reference.orthogonalize(m.double(), STEPS) for m in few])
    yield Error("Newton-Schulz, against float64", relative(found, expected), 5e-2)


def _batched_products(x: torch.Tensor) -> torch.Tensor:
    a, b, c = reference.COEFFICIENTS
    x = x / torch.linalg.vector_norm(x, dim=(1, 2), keepdim=True)
    for _ in range(STEPS):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x
