"""What each target costs and how the cost slopes, with torch's own operations, in the memory of the logits."""

import torch
from jaxtyping import Float, Int
from torch import Tensor


def nats(
    logit: Float[Tensor, "T V"], targets: Int[Tensor, " T"], ignored: int, *, wants_slope: bool
) -> tuple[Float[Tensor, " T"], Float[Tensor, "T V"] | None]:
    """See `cross_entropy.nats`; computed and returned in fp32, or fp64 for such logits."""
    logit = logit.to(torch.promote_types(logit.dtype, torch.float32))
    trained = targets != ignored
    target = torch.where(trained, targets, 0)[:, None]
    logit.sub_(logit.amax(-1, keepdim=True))
    picked = logit.gather(-1, target)
    total = logit.exp_().sum(-1, keepdim=True)
    cost = torch.where(trained, (total.log() - picked)[:, 0], 0)
    if not wants_slope:
        return cost, None
    slope = logit.div_(total).scatter_add_(-1, target, -torch.ones_like(total))
    return cost, slope.mul_(trained[:, None])
