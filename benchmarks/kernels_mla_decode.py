"""Absorbed attention over paged latents: one token a sequence, and several to verify drafts."""

from collections.abc import Iterator

import torch

from benchmarks.replay import CEILING, MATRIX_CEILING, Time, milliseconds
from triax.kernels.mla import decode

HEADS, LATENT, WIDTH, PAGE = 96, 512, 576, 64
BARS = {(64, 8192, 1): 0.21, (1, 131072, 1): None, (256, 2048, 1): None, (64, 8192, 4): None}


def measure() -> Iterator[Time]:
    """Yield a figure for each batch, length and number of tokens."""
    for (batch, length, tokens), bar in BARS.items():
        query = torch.randn(batch, tokens, HEADS, WIDTH, device="cuda", dtype=torch.bfloat16)
        pages = batch * length // PAGE
        latent = torch.randn(pages + 1, PAGE, WIDTH, device="cuda", dtype=torch.bfloat16)
        table = (1 + torch.randperm(pages, device="cuda")).int().view(batch, -1)
        seen = torch.full((batch, tokens), length, device="cuda", dtype=torch.int32)
        floor = 1e3 * max(
            pages * PAGE * WIDTH * 2 / CEILING,
            2 * batch * tokens * length * HEADS * (WIDTH + LATENT) / MATRIX_CEILING,
        )
        time = milliseconds(lambda x=(query, latent, table, seen): decode(*x, WIDTH**-0.5, LATENT))
        yield Time(f"MLA decode, {HEADS} heads, B={batch}, {length} tokens, {tokens} queries", time, bar, floor)
