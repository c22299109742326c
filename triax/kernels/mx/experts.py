"""Routed experts whose weights stay MXFP4 in memory: which of the forms computes them."""

import warnings
from collections.abc import Callable
from importlib.util import find_spec

import torch
from jaxtyping import Float, Int
from torch import Tensor

from triax.kernels.dispatch import mode
from triax.kernels.mx import looped, mxfp8
from triax.kernels.mx.mxfp4 import Mxfp4


def experts(
    hidden: Float[Tensor, "T L"],
    expert: Int[Tensor, "T k"],
    share: Float[Tensor, "T k"],
    gate: Mxfp4,
    up: Mxfp4,
    down: Mxfp4,
    activation: Callable[[Tensor, Tensor], Tensor],
) -> Float[Tensor, "T L"]:
    """Send each token through its experts and add what they return by their shares, in the order of its choice.

    Weights are those of a released checkpoint, each stacked over the experts. Products add up in fp32. On a GPU few
    tokens take one pass over the weights that are needed, and many tokens products of many rows; with gradients, which
    reach tokens and shares, one expert runs after the other.

    Args:
        hidden: What the experts read.
        expert: The experts of each token, each at most once.
        share: How much each of them counts.
        gate: Matrix [F, L] of every expert that decides what passes.
        up: Matrix [F, L] of every expert that makes what may pass.
        down: Matrix [L, F] of every expert that leads back.
        activation: How gate and up are joined.
    """
    return _experts(hidden, expert, share, gate, up, down, activation, rounded=False)


def experts_of_rounded(
    hidden: Float[Tensor, "T L"],
    expert: Int[Tensor, "T k"],
    share: Float[Tensor, "T k"],
    gate: Mxfp4,
    up: Mxfp4,
    down: Mxfp4,
    activation: Callable[[Tensor, Tensor], Tensor],
) -> Float[Tensor, "T L"]:
    """Do as `experts`, with the inputs of all products rounded to MXFP8, see `mxfp8.rounded`: as training rounds them.

    Args:
        hidden: What the experts read.
        expert: The experts of each token, each at most once.
        share: How much each of them counts.
        gate: Matrix [F, L] of every expert that decides what passes.
        up: Matrix [F, L] of every expert that makes what may pass.
        down: Matrix [L, F] of every expert that leads back.
        activation: How gate and up are joined.
    """
    return _experts(hidden, expert, share, gate, up, down, activation, rounded=True)


def _experts(
    hidden: Tensor,
    expert: Tensor,
    share: Tensor,
    gate: Mxfp4,
    up: Mxfp4,
    down: Mxfp4,
    activation: Callable[[Tensor, Tensor], Tensor],
    *,
    rounded: bool,
) -> Tensor:
    is_learning = torch.is_grad_enabled() and (hidden.requires_grad or share.requires_grad)
    if hidden.is_cuda and mode() != "reference" and not is_learning:
        from triax.kernels.mx import planned, sliced, streamed

        if streamed.unsupported(hidden, expert, gate, up, down, activation) is None:
            return streamed.experts(hidden, expert, share, gate, up, down, activation, rounded=rounded)
        reason = planned.unsupported(hidden, gate, up, down, activation)
        if reason is None:
            return sliced.experts(hidden, expert, share, gate, up, down, activation, rounded=rounded)
        if find_spec("triton") is not None:
            from triax.kernels.mx import tiled

            reason = tiled.unsupported(hidden, gate, up, down, activation)
            if reason is None:
                return tiled.experts(hidden, expert, share, gate, up, down, activation, rounded=rounded)
        warnings.warn(f"kernels.mx.experts: no GPU kernel for {reason}; one expert runs after the other", stacklevel=3)
    prepare = mxfp8.rounded if rounded else _as_it_is
    return looped.experts(hidden, expert, share, gate, up, down, activation, prepare)


def _as_it_is(rows: Tensor) -> Tensor:
    return rows
