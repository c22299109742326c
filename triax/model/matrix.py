"""The products that a layer is made of."""

from torch import nn

Blocks = dict[str, tuple[int, ...]]
"""Parameter names to the row counts of the logical matrices in it, repeated to its end; a layer states its own."""


def matrix(width_in: int, width_out: int, init_std: float) -> nn.Linear:
    """Return a product without bias whose weight is drawn from N(0, init_std^2)."""
    product = nn.Linear(width_in, width_out, bias=False)
    nn.init.normal_(product.weight, std=init_std)
    return product
