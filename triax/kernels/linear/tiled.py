"""A product whose every row has the same bits whatever stands beside it: always the same number of rows at a time.

A library chooses its way of adding up by the number of rows, so a token alone and the same token in company differ in
their last bits. Here the stream is cut into tiles of one size, the last one filled up, and the library sees one shape
only. That a row's place in its tile does not matter either is the library's doing, which `is_even` checks.
"""

from functools import lru_cache

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

ROWS = 32
"""Rows of a tile; a multiple of every vector width, so that no element of a tile falls to scalar code."""

ALIGNED = 16  # columns: rows of another width begin at addresses that libraries treat differently


def linear(
    hidden: Float[Tensor, "*rows I"], weight: Float[Tensor, "O I"], bias: Float[Tensor, " O"] | None = None
) -> Float[Tensor, "*rows O"]:
    """Return `hidden weight^T`, plus the bias if any, each row by itself; no gradient."""
    flat = hidden.flatten(0, -2)
    if flat.shape[1] % ALIGNED:
        missing = -flat.shape[1] % ALIGNED
        flat, weight = F.pad(flat, (0, missing)), F.pad(weight, (0, missing))
    rows, columns = flat.shape
    if rows % ROWS:
        flat = F.pad(flat, (0, 0, 0, -rows % ROWS))
    tiles = flat.reshape(-1, ROWS, columns)
    if len(tiles) == 0:
        product = flat.new_zeros(0, len(weight))
    else:
        product = torch.bmm(tiles, weight.T.expand(len(tiles), -1, -1)).flatten(0, 1)
    product = product[:rows].view(*hidden.shape[:-1], len(weight))
    return product if bias is None else product + bias


@lru_cache
def is_even(width_in: int, width_out: int, dtype: torch.dtype, device: str) -> bool:
    """Return whether the products of this shape treat all rows of a tile alike on this machine."""
    random = torch.Generator().manual_seed(0)
    rows = torch.randn(ROWS, width_in, generator=random).to(device, dtype)
    weight = torch.randn(width_out, width_in, generator=random).to(device, dtype)
    expected = linear(rows, weight)
    turned = (linear(rows.roll(shift, 0), weight).roll(-shift, 0) for shift in (1, 5, 16, 31))
    return all(torch.equal(one, expected) for one in turned)
