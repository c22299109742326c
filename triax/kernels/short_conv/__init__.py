"""Short causal convolution: each channel sees a few tokens of its own past."""

import warnings
from collections.abc import Sequence
from importlib.util import find_spec

from jaxtyping import Float
from torch import Tensor

from triax.kernels.dispatch import mode
from triax.kernels.short_conv import gathered, reference, shifted


def short_conv(
    hidden: Float[Tensor, "T C"],
    weight: Float[Tensor, "C taps"],
    window: Float[Tensor, "N past C"],
    starts: Sequence[int],
    *,
    wants_window: bool = True,
) -> tuple[Float[Tensor, "T C"], Float[Tensor, "N past C"]]:
    """Weigh each token and those before it in its sequence, then apply SiLU; see `reference.short_conv`.

    Args:
        hidden: The stream.
        weight: Kernel of each channel, the latest token's tap last.
        window: Inputs before the first token of each sequence.
        starts: First token of each sequence, and the number of tokens at the end.
        wants_window: Whether the next window is needed; otherwise the given one may come back.
    """
    if mode() == "batch_invariant":
        return gathered.short_conv(hidden, weight, window, starts)
    if mode() == "reference":
        return reference.short_conv(hidden, weight, window, starts)
    if hidden.is_cuda:
        reason = "an installation without Triton"
        if find_spec("triton") is not None:
            from triax.kernels.short_conv import fused

            reason = fused.unsupported(hidden, weight, window)
            if reason is None:
                return fused.short_conv(hidden, weight, window, starts, wants_window=wants_window)
        warnings.warn(f"kernels.short_conv: no GPU kernel for {reason}; torch's operations run", stacklevel=2)
    return shifted.short_conv(hidden, weight, window, starts)
