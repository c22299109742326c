"""The router's choice in one pass on a GPU: scores, the best of them with a bias, and their shares."""

from typing import no_type_check

import torch
import triton
import triton.language as tl
from jaxtyping import Float, Int
from torch import Tensor

from triax.kernels.device import launch

MOST_EXPERTS = 4096


@triton.jit
@no_type_check
def _choose(logit, bias, expert, share, scale, E: tl.constexpr, EE: tl.constexpr, K: tl.constexpr, KK: tl.constexpr,
            RENORMALIZE: tl.constexpr):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    column, choice = tl.arange(0, EE), tl.arange(0, KK)
    value = tl.load(logit + token * E + column, mask=column < E, other=0.0).to(tl.float32)
    score = 1.0 / (1.0 + tl.exp(-value))
    biased = score + tl.load(bias + column, mask=column < E, other=0.0)
    biased = tl.where(column < E, biased, float("-inf"))
    chosen = tl.zeros((KK,), tl.int32)
    kept = tl.zeros((KK,), tl.float32)
    for turn in range(K):
        best = tl.argmax(biased, 0, tie_break_left=True)
        chosen = tl.where(choice == turn, best, chosen)
        kept = tl.where(choice == turn, tl.sum(tl.where(column == best, score, 0.0), 0), kept)
        biased = tl.where(column == best, float("-inf"), biased)
    if RENORMALIZE:
        kept = kept / (tl.sum(kept, 0) + 1e-20)
    tl.store(expert + token * K + choice, chosen.to(tl.int64), mask=choice < K)
    tl.store(share + token * K + choice, kept * scale, mask=choice < K)


def choose(
    logit: Float[Tensor, "T E"], bias: Float[Tensor, " E"], top_k: int, scale: float, *, renormalize: bool
) -> tuple[Int[Tensor, "T k"], Float[Tensor, "T k"]]:
    """Return each token's experts, best first, and their shares; no gradient.

    Args:
        logit: Scores before the sigmoid.
        bias: Added to the scores for the choice alone.
        top_k: Experts a token, at most `MOST_EXPERTS` to choose from.
        scale: Factor on the shares.
        renormalize: Let the shares sum to one before that factor.
    """
    tokens, experts = logit.shape
    expert = torch.empty(tokens, top_k, dtype=torch.long, device=logit.device)
    share = torch.empty(tokens, top_k, dtype=torch.float32, device=logit.device)
    launch(
        _choose, (tokens,), logit.contiguous(), bias, expert, share, scale, E=experts,
        EE=triton.next_power_of_2(experts),
        K=top_k, KK=triton.next_power_of_2(top_k), RENORMALIZE=renormalize, num_warps=2,
    )  # fmt: skip
    return expert, share
