"""How likely tokens are, as server and trainer report it: the same arithmetic on both sides."""

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn import functional as F

from triax.kernels.dispatch import batch_invariant
from triax.kernels.linear import tiled
from triax.model.decoder import Decoder
from triax.model.layout import Layout
from triax.model.memory import Arena, Memory, Part

PAGE_TOKENS = 64


def logprobs(logits: Float[Tensor, "T V"]) -> Float[Tensor, "T V"]:
    """Return natural log-probabilities in fp64, so that sums over the vocabulary add no rounding of their own."""
    return logits.double().log_softmax(-1)


def exact_logprobs(
    model: Decoder, tokens: Int[Tensor, " T"], layout: Layout, vocab_size: int | None = None
) -> Float[Tensor, " T"]:
    """Return the natural log-probability of each token after those before it in its sequence; no gradient.

    On a CPU these are to the last bit what an engine in deterministic mode reports for the same tokens, however it
    batched, cut, cached or drafted them. To train on them, add the gradient of an ordinary forward's:
    `ordinary + (exact - ordinary).detach()`.

    Args:
        model: A decoder; text only.
        tokens: Sequences laid end to end.
        layout: Where each begins; a sequence's first token gets 0.
        vocab_size: Tokens that the tokenizer has, as an engine counts no others; none is all rows of the head.
    """
    weight = model.embed.weight
    parts, first = [], 1
    for row, length in enumerate(layout.lengths):
        count = -(-length // PAGE_TOKENS)
        parts.append(Part(row + 1, tuple(range(first, first + count)), 0, length))
        first += count
    arena = Arena.empty(model.settings, len(parts), first - 1, PAGE_TOKENS, weight.device, weight.dtype)
    was_training = model.training
    model.eval()
    try:
        with batch_invariant():
            memory = Memory.of(model.settings, arena, parts, 0, -layout.num_tokens % tiled.ROWS)
            logits = model.logits(model(F.pad(tokens, (0, memory.num_pads)), memory.layout, memory))
    finally:
        model.train(was_training)
    result = torch.zeros(layout.num_tokens, device=weight.device)
    follows = [
        t
        for start, length in zip(layout.starts, layout.lengths, strict=False)
        for t in range(start, start + length - 1)
    ]
    if follows:
        before = torch.tensor(follows, device=weight.device)
        result[before + 1] = (
            logprobs(logits[before, :vocab_size]).gather(-1, tokens[before + 1, None]).squeeze(-1).float()
        )
    return result
