"""Short causal convolution of each channel, one token at a time: the definition that the fast path is held to.

Source: Kimi Linear (arXiv 2510.26692) section 4.
"""

from collections.abc import Sequence
from itertools import pairwise

import torch
from jaxtyping import Float
from torch import Tensor


def short_conv(
    hidden: Float[Tensor, "T C"],
    weight: Float[Tensor, "C taps"],
    window: Float[Tensor, "N past C"],
    starts: Sequence[int],
) -> tuple[Float[Tensor, "T C"], Float[Tensor, "N past C"]]:
    """Weigh each token and the few before it in its sequence, then apply SiLU.

    Args:
        hidden: Sequences laid end to end.
        weight: One kernel a channel; the last tap meets the current token.
        window: The `taps - 1` inputs before each sequence's first token; zeros for a new sequence.
        starts: First token of each sequence, and one past the last token of all.

    Returns:
        The result in the format of `hidden`, and the window after each sequence's last token.
    """
    wide = torch.promote_types(hidden.dtype, torch.float32)
    outputs, windows = [hidden[:0].to(wide)], []
    for row, (first, end) in enumerate(pairwise(starts)):
        seen = torch.cat([window[row].to(hidden.dtype), hidden[first:end]])
        for t in range(end - first):
            outputs.append((seen[t : t + weight.shape[1]].to(wide) * weight.T.to(wide)).sum(0, keepdim=True))
        windows.append(seen[end - first :])
    return torch.nn.functional.silu(torch.cat(outputs)).to(hidden.dtype), torch.stack(windows)
