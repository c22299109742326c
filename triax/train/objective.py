"""What a batch costs: nats of the next token and, with the extra layer, of the one after it."""

from typing import Literal, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from triax.data.pack import Batch
from triax.model.decoder import Decoder
from triax.model.device import sent
from triax.model.layout import Layout
from triax.train.loss import IGNORED, cross_entropy


class Cost(NamedTuple):
    """Sums over the tokens of a batch; the step divides them by its own counts."""

    nats: Float[Tensor, ""]
    """Of the next tokens."""
    further_nats: Float[Tensor, ""] | None
    """Of the tokens after the next; none without the extra prediction layer."""


def cost(model: Decoder, batch: Batch, device: torch.device) -> Cost:
    """Run the network on a batch and sum its losses; with the extra layer only while training."""
    tokens, targets = sent(batch.tokens, device), sent(batch.targets, device)
    layout = Layout.of(batch.lengths)
    if not (model.training and model.settings.multi_token and model.settings.multi_token.loss_weight):
        return Cost(cross_entropy(model(tokens, layout), model.head.weight, targets), None)
    # a token without a target has no next token to embed either: its second target is left out, so any id serves
    output = model.forward_training(tokens, targets.clamp(min=0), layout)
    assert output.second is not None
    return Cost(
        cross_entropy(output.hidden, model.head.weight, targets),
        cross_entropy(output.second, model.head.weight, targets_after_next(targets, batch.lengths)),
    )


def targets_after_next(targets: Int[Tensor, " T"], lengths: tuple[int, ...]) -> Int[Tensor, " T"]:
    """Return the token two after each position; -100 where it lies beyond the position's sequence."""
    later = torch.cat([targets[1:], targets.new_full((1,), IGNORED)])[: len(targets)]
    last = torch.tensor([n for n in lengths if n], dtype=torch.long, device=targets.device).cumsum(0) - 1
    later[last] = IGNORED
    later[targets == IGNORED] = IGNORED
    return later


def precision(kind: Literal["auto", "fp32", "bf16"], device: torch.device) -> torch.autocast:
    """Return the context in which forwards run: bf16 products over fp32 weights, or fp32 throughout."""
    return torch.autocast(device.type, torch.bfloat16, enabled=is_bf16(kind, device))


def is_bf16(kind: Literal["auto", "fp32", "bf16"], device: torch.device) -> bool:
    """Return whether the products of forwards are bf16; left to the device, they are on a GPU."""
    return kind == "bf16" or (kind == "auto" and device.type == "cuda")
