"""The short convolution as a few shifted multiply-adds over the whole stream.

Only the first tokens of each sequence, whose taps reach over its border, are computed apart. On a CPU one fused
convolution replaces the multiply-adds, each of which would pass over the whole stream.
"""

from collections.abc import Sequence
from functools import lru_cache
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import conv2d
from torch.nn.grad import conv2d_weight


def short_conv(
    hidden: Float[Tensor, "T C"],
    weight: Float[Tensor, "C taps"],
    window: Float[Tensor, "N past C"],
    starts: Sequence[int],
) -> tuple[Float[Tensor, "T C"], Float[Tensor, "N past C"]]:
    """Weigh each token and those before it in its sequence, then apply SiLU; see `reference.short_conv`."""
    places = _places(tuple(starts), weight.shape[1], str(hidden.device))
    window = window.to(hidden.dtype)
    output = _ShortConv.apply(hidden, weight, window, places)
    return output, next_window(hidden, window, tuple(starts), weight.shape[1])


def next_window(
    hidden: Float[Tensor, "T C"], window: Float[Tensor, "N past C"], starts: tuple[int, ...], num_taps: int
) -> Float[Tensor, "N past C"]:
    """Return the inputs before the token that will follow each sequence; `window` has those before its first."""
    places = _places(starts, num_taps, str(hidden.device))
    seen = torch.cat([window.flatten(0, 1), hidden.index_select(0, places.last)])
    return seen[places.next_window]


class _Places(NamedTuple):
    """Where the rows near borders are, for one layout."""

    border: Tensor
    """Rows whose taps reach before the first token of their sequence."""
    taps: Tensor
    """For each of them, its taps' rows in windows followed by border rows."""
    last: Tensor
    """Last rows of each sequence, as many as a window holds."""
    next_window: Tensor
    """Rows of each new window in windows followed by last rows."""


@lru_cache(maxsize=8)  # every layer of a forward asks for the same one
@torch.inference_mode(False)  # what is kept here may be needed in training later
def _places(starts: tuple[int, ...], num_taps: int, device: str) -> _Places:
    past = num_taps - 1
    windows = (len(starts) - 1) * past
    border: list[int] = []
    taps: list[list[int]] = []
    last: list[int] = []
    following: list[list[int]] = []
    for row, (first, end) in enumerate(pairwise(starts)):
        near = min(past, end - first)
        own, older = windows + len(border), (row + 1) * past
        for t in range(near):
            places = range(t - past, t + 1)
            taps.append([own + p if p >= 0 else older + p for p in places])
        border += range(first, first + near)
        kept = windows + len(last)
        last += range(end - near, end)
        following.append([kept + p if p >= 0 else older + p for p in range(near - past, near)])

    def index(values: list[Any], *shape: int) -> Tensor:
        return torch.tensor(values, dtype=torch.long, device=device).reshape(shape)

    return _Places(
        index(border, -1), index(taps, -1, num_taps), index(last, -1), index(following, len(following), past)
    )


class _ShortConv(torch.autograd.Function):
    """Keeps its inputs only."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, window: Tensor, places: _Places) -> Tensor:
        ctx.save_for_backward(hidden, weight, window)
        ctx.places = places
        summed, _ = _convolve(hidden, weight, window, places)
        return torch.nn.functional.silu(summed, inplace=True).to(hidden.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor | None, None]:
        hidden, weight, window = ctx.saved_tensors
        places = ctx.places
        summed, taps = _convolve(hidden, weight, window, places)
        grad = torch.ops.aten.silu_backward(grad.to(summed.dtype), summed)
        near = grad[places.border]
        grad[places.border] = 0

        kernel = weight.to(grad.dtype)
        d_hidden, d_weight = _sum_gradients(grad, hidden.to(grad.dtype), kernel)
        d_weight += (near[:, None] * taps).sum(0).T
        d_small = torch.zeros(len(places.border) + window[..., 0].numel(), grad.shape[1]).to(grad)
        d_small.index_add_(0, places.taps.flatten(), (near[:, None] * kernel.T).flatten(0, 1))
        d_window = d_small[: window[..., 0].numel()].view_as(window).to(window.dtype)
        d_hidden.index_add_(0, places.border, d_small[window[..., 0].numel() :])
        return d_hidden.to(hidden.dtype), d_weight.to(weight.dtype), d_window, None


def _convolve(hidden: Tensor, weight: Tensor, window: Tensor, places: _Places) -> tuple[Tensor, Tensor]:
    """Return the weighted sums, and the inputs under the taps of the border rows."""
    wide = torch.promote_types(hidden.dtype, torch.float32)
    kernel = weight.to(wide)
    small = torch.cat([window.flatten(0, 1), hidden.index_select(0, places.border)]).to(wide)
    taps = small[places.taps]
    near = (taps * kernel.T).sum(1)
    if len(near) == len(hidden):  # decoding: every row is at a border
        return near, taps
    return _sums(hidden.to(wide), kernel).index_copy_(0, places.border, near), taps


def _sums(source: Tensor, kernel: Tensor) -> Tensor:
    """Return each row's weighted sum as if the stream were one sequence that begins with zeros."""
    length, num_taps = len(source), kernel.shape[1]
    if _has_fused(source, kernel):
        with torch.autocast("cpu", enabled=False):
            summed = conv2d(_image(source), _image_kernel(kernel), padding=(num_taps - 1, 0), groups=len(kernel))
        return _rows(summed)[:length]
    summed = source * kernel[:, -1]
    for lag in range(1, min(num_taps, length)):
        summed[lag:].addcmul_(source[:-lag], kernel[:, -1 - lag])
    return summed


def _sum_gradients(grad: Tensor, source: Tensor, kernel: Tensor) -> tuple[Tensor, Tensor]:
    """Return the gradients of `_sums` for both arguments; the first `taps - 1` rows of `grad` are zero."""
    length, num_taps = len(source), kernel.shape[1]
    if _has_fused(source, kernel) and length >= num_taps:
        backwards, inner = _image_kernel(kernel.flip(1)), _image(grad[num_taps - 1 :])
        with torch.autocast("cpu", enabled=False):
            d_source = conv2d(_image(grad), backwards, padding=(num_taps - 1, 0), groups=len(kernel))
            d_kernel = conv2d_weight(_image(source), backwards.shape, inner, groups=len(kernel))
        return _rows(d_source)[num_taps - 1 :], d_kernel.view(kernel.shape)
    d_source = grad * kernel[:, -1]
    d_kernel = torch.zeros_like(kernel)
    d_kernel[:, -1] = (grad * source).sum(0)
    for lag in range(1, min(num_taps, length)):
        d_source[:-lag].addcmul_(grad[lag:], kernel[:, -1 - lag])
        d_kernel[:, -1 - lag] = (grad[lag:] * source[:-lag]).sum(0)
    return d_source, d_kernel


def _has_fused(source: Tensor, kernel: Tensor) -> bool:
    """Whether torch hands this convolution to oneDNN; its own fallback goes channel by channel."""
    is_plain = source.device.type == "cpu" and source.dtype is torch.float32
    return bool(
        is_plain and kernel.shape[1] > 3 and torch.backends.mkldnn.is_available() and torch.backends.mkldnn.enabled
    )


def _image(rows: Tensor) -> Tensor:
    """View [T, C] as one picture of T x 1 points with channels last."""
    return rows.view(1, len(rows), 1, -1).permute(0, 3, 1, 2)


def _rows(image: Tensor) -> Tensor:
    return image.permute(0, 2, 3, 1).flatten(0, 2)


def _image_kernel(kernel: Tensor) -> Tensor:
    return kernel[:, None, :, None]
