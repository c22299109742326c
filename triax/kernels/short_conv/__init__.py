"""Short causal convolution: each channel sees a few tokens of its own past."""

import os
from collections.abc import Sequence

from jaxtyping import Float
from torch import Tensor

from triax.kernels.short_conv import reference, shifted


def short_conv(
    hidden: Float[Tensor, "T C"],
    weight: Float[Tensor, "C taps"],
    window: Float[Tensor, "N past C"],
    starts: Sequence[int],
) -> tuple[Float[Tensor, "T C"], Float[Tensor, "N past C"]]:
    """Weigh each token and those before it in its sequence, then apply SiLU; see `reference.short_conv`."""
    path = reference if os.environ.get("TRIAX_KERNELS") == "reference" else shifted
    return path.short_conv(hidden, weight, window, starts)
