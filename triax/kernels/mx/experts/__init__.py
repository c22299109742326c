"""Routed experts whose weights stay MXFP4 in memory: which of the forms computes them."""

import warnings
from collections.abc import Callable
from importlib.util import find_spec

import torch
from jaxtyping import Float
from torch import Tensor

from triax.kernels.dispatch import mode
from triax.kernels.mx import mxfp8
from triax.kernels.mx.experts import looped
from triax.kernels.routed import ExpertWeights, Routing


def experts(
    hidden: Float[Tensor, "T L"],
    routing: Routing,
    weights: ExpertWeights,
    activation: Callable[[Tensor, Tensor], Tensor],
    *,
    rounded: bool = False,
) -> Float[Tensor, "T L"]:
    """Send each token through its experts and add what they return by their shares, in the order of its choice.

    Products add up in fp32. On a GPU few tokens take one pass over the weights that are needed, and many tokens
    products of many rows; with gradients, which reach tokens and shares, one expert runs after the other.

    Args:
        hidden: What the experts read.
        routing: The experts of each token, and how much each of them counts.
        weights: MXFP4 (`Mxfp4`) as in a released checkpoint, each stacked over the experts.
        activation: How gate and up are joined.
        rounded: Whether the inputs of all products are rounded to MXFP8 first, see `mxfp8.rounded`: as
            quantisation-aware training rounds them.
    """
    (expert, share), (gate, up, down) = routing, weights
    is_learning = torch.is_grad_enabled() and (hidden.requires_grad or share.requires_grad)
    if hidden.is_cuda and mode() != "reference" and not is_learning:
        from triax.kernels.mx.experts import sliced, streamed, work_plan

        if streamed.unsupported(hidden, expert, gate, up, down, activation) is None:
            return streamed.experts(hidden, expert, share, gate, up, down, activation, rounded=rounded)
        reason = work_plan.unsupported(hidden, gate, up, down, activation)
        if reason is None:
            return sliced.experts(hidden, expert, share, gate, up, down, activation, rounded=rounded)
        if find_spec("triton") is not None:
            from triax.kernels.mx.experts import tiled

            reason = tiled.unsupported(hidden, gate, up, down, activation)
            if reason is None:
                return tiled.experts(hidden, expert, share, gate, up, down, activation, rounded=rounded)
        warnings.warn(f"kernels.mx.experts: no GPU kernel for {reason}; one expert runs after the other", stacklevel=2)
    prepare = mxfp8.rounded if rounded else _as_it_is
    return looped.experts(hidden, expert, share, gate, up, down, activation, prepare)


def _as_it_is(rows: Tensor) -> Tensor:
    return rows
