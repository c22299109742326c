"""Routed experts: each token goes through a few of many small gated MLPs."""

import os
from importlib.util import find_spec

import torch
from jaxtyping import Float, Int
from torch import Tensor

from triax.kernels.moe import grouped, reference
from triax.kernels.moe.activation import Activation


def experts(
    hidden: Float[Tensor, "T L"],
    expert: Int[Tensor, "T k"],
    share: Float[Tensor, "T k"],
    gate: Float[Tensor, "E F L"],
    up: Float[Tensor, "E F L"],
    down: Float[Tensor, "E L F"],
    activation: Activation,
) -> Float[Tensor, "T L"]:
    """Send each token through its experts and add what they return by their shares; see `reference.experts`."""
    if os.environ.get("TRIAX_KERNELS") == "reference":
        return reference.experts(hidden, expert, share, gate, up, down, activation)
    tensors = (hidden, share, gate, up, down)
    is_learning = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)
    if hidden.is_cuda and not is_learning and find_spec("triton") is not None:
        from triax.kernels.moe import streamed

        if streamed.unsupported(hidden, expert, gate, activation) is None:
            return streamed.experts(hidden, expert, share, gate, up, down, activation)
    return grouped.experts(hidden, expert, share, gate, up, down, activation)


def choose(
    logit: Float[Tensor, "T E"], bias: Float[Tensor, " E"], top_k: int, scale: float, *, renormalize: bool
) -> tuple[Int[Tensor, "T k"], Float[Tensor, "T k"]] | None:
    """Return each token's experts and shares in one pass, where there is a kernel for that; no gradient.

    Args:
        logit: Scores before the sigmoid, in fp32.
        bias: Added to the scores for the choice alone.
        top_k: Experts a token.
        scale: Factor on the shares.
        renormalize: Let the shares sum to one before that factor.
    """
    if not logit.is_cuda or os.environ.get("TRIAX_KERNELS") == "reference" or find_spec("triton") is None:
        return None
    from triax.kernels.moe import best

    return best.choose(logit, bias, top_k, scale, renormalize=renormalize)
