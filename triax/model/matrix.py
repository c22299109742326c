"""The products that a layer is made of."""

from collections.abc import Callable, Sequence

import torch
from jaxtyping import Float
from torch import Tensor, nn

from triax.kernels.dispatch import mode
from triax.kernels.linear import linear

Blocks = dict[str, tuple[int, ...]]
"""Parameter names to the row counts of the logical matrices in it, repeated to its end; a layer states its own."""


class Linear(nn.Linear):
    """torch's product, by way of our own where a processor is slow at the number format."""

    def forward(self, input: Float[Tensor, "*rows I"]) -> Float[Tensor, "*rows O"]:
        """Transform each row."""
        return linear(input, self.weight, self.bias)


def matrix(width_in: int, width_out: int, init_std: float) -> Linear:
    """Return a product without bias whose weight is drawn from N(0, init_std^2)."""
    product = Linear(width_in, width_out, bias=False)
    draw_normal(product.weight, init_std)
    return product


class Joins(nn.Module):
    """A module some of whose weights may be laid end to end; moving or casting it undoes that."""

    joined: Tensor | None = None
    """The weights that lie end to end."""

    def joinable(self) -> list[Linear]:
        """Return the products that read the same input, in the order in which their weights are laid end to end."""
        return []

    def join(self) -> None:
        """Lay these weights end to end in memory, so that they run as one product: for answering."""
        self.joined = join([product.weight for product in self.joinable()])

    def whole(self) -> Tensor | None:
        """Return the joined weights where they serve: a gradient would end in them, unless they are a leaf for it.

        Neither do they in batch-invariant mode, whose bits are those of the separate products.
        """
        serves = (
            self.joined is not None
            and mode() != "batch_invariant"
            and (self.joined.requires_grad or not torch.is_grad_enabled())
        )
        return self.joined if serves else None

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
        self.joined = None
        return super()._apply(fn, recurse)


@torch.no_grad()
def join(weights: Sequence[Tensor]) -> Tensor:
    """Lay weights end to end in one piece of memory, of which each keeps its part; return the whole."""
    whole = torch.cat([weight.detach() for weight in weights])
    for weight, part in zip(weights, whole.split([len(weight) for weight in weights]), strict=True):
        weight.data = part
    return whole


def draw_normal(weight: Tensor, std: float) -> None:
    """Fill a weight from N(0, std^2); on the meta device there is nothing to fill, and trying takes seconds for K3."""
    if not weight.is_meta:
        nn.init.normal_(weight, std=std)
