"""The short convolution tap by tap over gathered rows: a token's bits do not depend on where its sequence is cut."""

from collections.abc import Sequence
from functools import lru_cache

import torch
from jaxtyping import Float
from torch import Tensor


def short_conv(
    hidden: Float[Tensor, "T C"],
    weight: Float[Tensor, "C taps"],
    window: Float[Tensor, "N past C"],
    starts: Sequence[int],
) -> tuple[Float[Tensor, "T C"], Float[Tensor, "N past C"]]:
    """Weigh each token and those before it in its sequence, then apply SiLU; see `reference.short_conv`; no gradient.

    The stream should have a multiple of 32 tokens: SiLU of what is left over may be computed by other code.
    """
    wide, past = torch.promote_types(hidden.dtype, torch.float32), weight.shape[1] - 1
    token, before, last = _places(tuple(starts), past, str(hidden.device))
    seen = hidden.new_zeros(len(hidden) + len(before), hidden.shape[1])
    seen[token] = hidden
    seen[before] = window.flatten(0, 1).to(hidden.dtype)
    kernel = weight.to(wide)
    summed = seen[token - past].to(wide) * kernel[:, 0]
    for tap in range(1, past + 1):  # a product and a sum apart: fused ones would round otherwise where code is scalar
        summed = summed + seen[token - past + tap].to(wide) * kernel[:, tap]
    return torch.nn.functional.silu(summed).to(hidden.dtype), seen[last].view(window.shape)


@lru_cache(maxsize=8)  # every layer of a forward asks for the same one
@torch.inference_mode(False)
def _places(starts: tuple[int, ...], past: int, device: str) -> tuple[Tensor, Tensor, Tensor]:
    """Return the rows of tokens, of windows and of following windows, each sequence standing behind its window."""
    firsts = torch.tensor(starts[:-1], device=device)
    row = torch.arange(len(firsts), device=device)
    lengths = torch.tensor(starts, device=device).diff()
    token = torch.arange(starts[-1], device=device) + past * (row + 1).repeat_interleave(lengths)
    span = torch.arange(past, device=device)
    before = (firsts + past * row)[:, None] + span
    return token, before.flatten(), (before + lengths[:, None]).flatten()
