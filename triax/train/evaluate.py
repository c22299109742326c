"""How well a model predicts held-out text."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch

from triax.data.pack import TokenStream, held_out_batches
from triax.model.decoder import Decoder
from triax.train.objective import cost, precision


@dataclass(frozen=True)
class Evaluation:
    """What held-out text cost."""

    nats: float
    """Of all tokens together, the end of each document included."""
    num_tokens: int
    """Tokens predicted."""
    num_bytes: int
    """UTF-8 bytes of the text."""

    @property
    def loss(self) -> float:
        """Nats per token."""
        return self.nats / self.num_tokens

    @property
    def bits_per_byte(self) -> float:
        """Bits per byte: what compares models of any vocabulary."""
        return self.nats / math.log(2) / self.num_bytes


@torch.no_grad()
def evaluate(
    model: Decoder,
    stream: TokenStream,
    seq_len: int,
    micro_tokens: int,
    kind: Literal["auto", "fp32", "bf16"],
    progress: Callable[[int, int], None] | None = None,
) -> Evaluation:
    """Predict every token of a stream once, in rows of `seq_len` tokens; routers count nothing and nothing moves.

    Args:
        model: Predicts.
        stream: Held-out text.
        seq_len: Tokens in a row.
        micro_tokens: Tokens in a forward.
        kind: Number format of the products.
        progress: Called after each forward with the tokens done and the tokens in all.
    """
    done = 0
    device = model.head.weight.device
    nats = torch.zeros((), dtype=torch.float64, device=device)
    was_training = model.training
    model.eval()
    try:
        for batch in held_out_batches(stream, seq_len, micro_tokens):
            with precision(kind, device):
                nats += cost(model, batch, device).nats
            done += len(batch.tokens)
            if progress is not None:
                progress(done, stream.num_tokens)
    finally:
        model.train(was_training)
    return Evaluation(nats.item(), stream.num_tokens, stream.num_bytes)
