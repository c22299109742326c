"""Attention of all sequences in one launch of torch's flash kernel, however long each is and has been; no gradient."""

from collections.abc import Sequence
from functools import lru_cache
from itertools import pairwise

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from triax.errors import UnsupportedError

DTYPES = (torch.bfloat16, torch.float16)
WIDEST = 256
OLDEST = (8, 0)  # compute capability


def unsupported(query: Tensor, key: Tensor, value: Tensor) -> str | None:
    """Say what of these inputs the kernel cannot take, if anything."""
    if query.dtype not in DTYPES or key.dtype is not query.dtype or value.dtype is not query.dtype:
        return f"dtypes `{query.dtype}`, `{key.dtype}` and `{value.dtype}`"
    if query.shape[2] > WIDEST or query.shape[2] % 8 or value.shape[2] > query.shape[2]:
        return f"keys of `{query.shape[2]}` and values of `{value.shape[2]}` channels"
    if not query.is_cuda or torch.cuda.get_device_capability(query.device) < OLDEST:
        return "this device"
    return None


def attend(
    query: Float[Tensor, "T H K"],
    key: Float[Tensor, "S H K"],
    value: Float[Tensor, "S H V"],
    query_starts: Sequence[int],
    key_starts: Sequence[int],
    scale: float,
) -> Float[Tensor, "T H V"]:
    """Attend within each sequence; see `reference.attend`. The result has the format of the query.

    Values that are narrower than keys are copied into as wide ones.

    Raises:
        UnsupportedError: The kernel has no form for these dtypes, widths or this device.
    """
    reason = unsupported(query, key, value)
    if reason is not None:
        raise UnsupportedError(f"kernels.mla.ragged: no kernel for {reason}; `triax.kernels.mla.attend` falls back")
    width = value.shape[2]
    if not len(query):
        return query.new_empty(0, query.shape[1], width)
    spare = query.shape[2] - width
    value = F.pad(value, (0, spare)) if spare else value
    query, key, value = (x if x.stride(-1) == 1 else x.contiguous() for x in (query, key, value))
    borders = [_borders(tuple(starts), query.device) for starts in (query_starts, key_starts)]
    longest = [max(b - a for a, b in pairwise(starts)) for starts in (query_starts, key_starts)]
    # aligned at the end: a sequence's last query sees all of its keys
    found = torch.ops.aten._flash_attention_forward(
        query, key, value, *borders, *longest, 0.0, True, False, scale=scale
    )
    return found[0][..., :width]


@lru_cache(maxsize=16)  # every layer of a forward asks for the same ones
@torch.inference_mode(False)
def _borders(starts: tuple[int, ...], device: torch.device) -> Tensor:
    return torch.tensor(starts, dtype=torch.int32).pin_memory().to(device, non_blocking=True)
