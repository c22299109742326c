"""Experts of one whole K3 layer with MXFP4 weights: 896 of 3584 to 3072 and back, 15.7 GB, 16 for each token."""

from collections.abc import Iterator
from functools import partial

import torch

from benchmarks.replay import CEILING, MATRIX_CEILING, Error, Time, milliseconds, relative
from triax.kernels.mx.experts import experts, looped
from triax.kernels.mx.mxfp4 import Mxfp4
from triax.kernels.routed import ExpertWeights, Routing
from triax.kernels.situ_glu import SituGlu, reference

NUM_EXPERTS, WIDTH, INNER, TOP_K = 896, 3584, 3072, 16
ACTIVATION = SituGlu(4.0, 25.0)
EXPERT_BYTES = 3 * WIDTH * INNER * (4 + 8 / 32) / 8
PEAK = 4.8e12
"""Bytes a second that an H200's memory has on paper."""
BARS = {1: None, 16: None, 64: 3.6, 128: None, 256: None, 512: None}
PREFILL = (2048, 8192)


def measure() -> Iterator[Time | Error]:
    """Yield the figure for each number of tokens, routed evenly, and the error of a few experts."""
    copied = _copied()
    weights = ExpertWeights(_weights(INNER, WIDTH), _weights(INNER, WIDTH), _weights(WIDTH, INNER))
    with torch.no_grad():
        for tokens, bar in BARS.items():
            inputs = _inputs(tokens)
            distinct = inputs[1].expert.unique().numel()
            read = distinct * EXPERT_BYTES
            ms = milliseconds(lambda x=inputs: experts(*x, weights, ACTIVATION))
            note = (
                f"{distinct} distinct experts, {read / 1e9:.2f} GB at {read / ms / 1e9:.2f} TB/s; floor "
                f"{read / PEAK * 1e3:.3f} at 4.8 TB/s, {read / copied * 1e3:.3f} at {copied / 1e12:.2f} of this run"
            )
            yield Time(f"MXFP4 experts, {tokens} tokens", ms, bar, read / CEILING * 1e3, note)
        inputs = _inputs(64)
        ms = milliseconds(lambda: experts(*inputs, weights, ACTIVATION, rounded=True))
        yield Time("MXFP4 experts, 64 tokens rounded to MXFP8", ms, 3.6)
        for tokens in PREFILL:
            inputs = _inputs(tokens)
            work = 6 * tokens * TOP_K * WIDTH * INNER
            ms = milliseconds(lambda x=inputs: experts(*x, weights, ACTIVATION), 5)
            note = f"{work / ms / 1e9:.0f} TFLOP/s"
            yield Time(f"MXFP4 experts, {tokens} tokens", ms, None, work / MATRIX_CEILING * 1e3, note)
        for tokens in (4, 500, 3000):
            hidden, (_, share) = _inputs(tokens)
            chosen = torch.rand(tokens, 20, device="cuda").topk(TOP_K).indices
            found = experts(hidden, Routing(chosen, share), weights, ACTIVATION)
            right = _definition(hidden.double(), chosen, share, *weights)
            yield Error(f"MXFP4 experts, {tokens} tokens of 20 experts", relative(found, right), 6e-3)


def _inputs(tokens: int) -> tuple[torch.Tensor, Routing]:
    hidden = torch.randn(tokens, WIDTH, device="cuda", dtype=torch.bfloat16)
    chosen = torch.rand(tokens, NUM_EXPERTS, device="cuda").topk(TOP_K).indices
    return hidden, Routing(chosen, torch.rand(tokens, TOP_K, device="cuda").softmax(-1))


def _definition(
    hidden: torch.Tensor, chosen: torch.Tensor, share: torch.Tensor, gate: Mxfp4, up: Mxfp4, down: Mxfp4
) -> torch.Tensor:
    activation = partial(reference.glu, gate_cap=ACTIVATION.gate_cap, up_cap=ACTIVATION.up_cap)
    return looped.experts(hidden, chosen, share, gate, up, down, activation, lambda rows: rows)


def _weights(rows: int, columns: int) -> Mxfp4:
    code = torch.randint(0, 256, (NUM_EXPERTS, rows, columns // 2), dtype=torch.uint8, device="cuda")
    scale = torch.randint(114, 120, (NUM_EXPERTS, rows, columns // 32), dtype=torch.uint8, device="cuda")
    return Mxfp4(code, scale)


def _copied() -> float:
    """Return the bytes a second, read and written, at which a kernel of this run turns over every bit of 2 GiB."""
    source = torch.empty(1 << 28, dtype=torch.int64, device="cuda")
    target = torch.empty_like(source)
    return 2 * source.nbytes / milliseconds(lambda: torch.bitwise_not(source, out=target)) * 1e3
