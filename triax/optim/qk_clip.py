"""QK-Clip: keep attention logits bounded by shrinking the weights that make them, head by head.

Source: Kimi K2 (arXiv 2507.20534) section 2.1 and algorithm 1.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol, cast, runtime_checkable

import torch
from jaxtyping import Float
from torch import Tensor, nn

Reduce = Callable[[Tensor], Tensor]


@runtime_checkable
class Attention(Protocol):
    """A layer that measures its logits and can shrink them."""

    largest_logit: Tensor | None
    """Per head, the largest causal logit since the last reset; none before the first training forward."""

    def shrink_query_key(self, factor: Tensor, alpha: float) -> None:
        """Multiply each head's logits by its factor, the query taking the share `alpha` of it."""

    def reset_largest_logit(self) -> None:
        """Forget the measurement; a new one starts with the next forward."""


@dataclass(frozen=True)
class Clipped:
    """What one clip saw and did."""

    largest_logit: dict[str, Tensor]
    """Per layer, the largest logit of each head since the last clip."""
    num_clipped: int
    """Heads that were shrunk."""
    smallest_factor: float
    """Strongest shrinking; 1 where no head was shrunk."""


def attention_layers(model: nn.Module) -> dict[str, Attention]:
    """Return the layers that measure logits, by name; layers without logits, such as KDA's, are passed over."""
    return {
        name: cast(Attention, module)
        for name, module in model.named_modules()
        if hasattr(module, "largest_logit") and hasattr(module, "shrink_query_key")
    }


def factor(largest_logit: Float[Tensor, " H"], threshold: float) -> Float[Tensor, " H"]:
    """Return threshold / largest where a head's largest logit passes the threshold, else exactly 1.

    A logit that is not finite says that the forward failed, not how far to shrink: its head is left alone.
    """
    over = (largest_logit > threshold) & largest_logit.isfinite()
    return torch.where(over, threshold / largest_logit, torch.ones_like(largest_logit))


@torch.no_grad()
def clip_query_key(
    layers: Mapping[str, Attention], threshold: float, alpha: float = 0.5, reduce_max: Reduce | None = None
) -> Clipped:
    """Shrink the heads whose largest logit passed the threshold, then forget all measurements.

    Args:
        layers: Layers that measure logits; the numbers of their heads may differ.
        threshold: Largest logit that is left alone; infinity only reads.
        alpha: Share of the shrinking that the query takes.
        reduce_max: Maximum over ranks, called once on the logits of all layers; every rank must have run every layer.
    """
    read = {name: layer.largest_logit for name, layer in layers.items()}
    logits = {name: largest.detach().float() for name, largest in read.items() if largest is not None}
    if not logits:
        return Clipped({}, 0, 1.0)
    heads = torch.cat(list(logits.values()))
    heads = reduce_max(heads) if reduce_max else heads
    factors = factor(heads, threshold)
    num_clipped = int((factors < 1).sum())
    sizes = [largest.numel() for largest in logits.values()]
    for name, of_layer in zip(logits, factors.split(sizes), strict=True):
        if num_clipped and bool((of_layer < 1).any()):
            layers[name].shrink_query_key(of_layer, alpha)
        layers[name].reset_largest_logit()
    smallest = float(factors.min()) if num_clipped else 1.0
    return Clipped(dict(zip(logits, heads.split(sizes), strict=True)), num_clipped, smallest)
