"""Routed experts: each token goes through a few of many small gated MLPs."""

import warnings
from importlib.util import find_spec

import torch
from jaxtyping import Float
from torch import Tensor

from triax.kernels.dispatch import mode
from triax.kernels.moe import grouped, reference, tiled
from triax.kernels.moe.activation import Activation
from triax.kernels.moe.weights import with_gradients
from triax.kernels.routed import ExpertWeights, Routing


def experts(
    hidden: Float[Tensor, "T L"],
    routing: Routing,
    weights: ExpertWeights,
    activation: Activation,
    *,
    beside: Float[Tensor, "T L"] | None = None,
    rounded: ExpertWeights | None = None,
    sums: ExpertWeights | None = None,
) -> Float[Tensor, "T L"]:
    """Send each token through its experts and add what they return by their shares; see `reference.experts`.

    Args:
        hidden: What the experts read.
        routing: The experts of each token, and how much each of them counts.
        weights: The matrices of every expert.
        activation: How gate and up are joined.
        beside: Added to the result.
        rounded: The three weights rounded to the products' format already, for instance once a step; gradients go to
            the weights all the same, in the weights' own format.
        sums: Buffers to which the gradients of the weights are added, in the format of each; the weights then receive
            none. Spares writing and reading them once more for every microbatch.
    """
    given = (hidden, routing, weights, activation, beside, rounded, sums)
    if torch.compiler.is_compiling():  # a compiled graph does not know the sizes that follow from the routing
        return torch.compiler.disable(_experts)(*given)
    return _experts(*given)


def _experts(
    hidden: Tensor,
    routing: Routing,
    weights: ExpertWeights,
    activation: Activation,
    beside: Tensor | None,
    rounded: ExpertWeights | None,
    sums: ExpertWeights | None,
) -> Tensor:
    expert, share = routing
    if mode() != "fast":
        form = tiled if mode() == "batch_invariant" else reference
        output = form.experts(hidden, expert, share, *with_gradients(weights, rounded, sums), activation)
        return output if beside is None else output + beside
    is_learning = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in (hidden, share, *weights))
    output = None
    if hidden.is_cuda and expert.numel() and find_spec("triton") is not None:
        if not is_learning:
            from triax.kernels.moe import gathered, streamed

            multiplied = rounded or weights
            if streamed.unsupported(hidden, expert, multiplied.gate, activation) is None:
                return streamed.experts(hidden, expert, share, *multiplied, activation, beside)
            if gathered.unsupported(hidden, multiplied.gate, activation) is None:
                return gathered.experts(hidden, expert, share, *multiplied, activation, beside)
        from triax.kernels.moe import fused

        dtype = grouped.format_of_products(hidden)
        reason = fused.unsupported(hidden, expert, weights.gate, activation, dtype)
        if reason is None:
            output = fused.experts(hidden, expert, share, *weights, activation, dtype, rounded, sums)
        elif dtype is torch.bfloat16:  # other formats are what `grouped` is for
            warnings.warn(f"kernels.moe: no GPU kernel for {reason}; torch's grouped products run", stacklevel=3)
    if output is None:
        output = grouped.experts(hidden, expert, share, *with_gradients(weights, rounded, sums), activation)
    return output if beside is None else output + beside
