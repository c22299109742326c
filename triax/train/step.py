"""One optimiser step: forwards and backwards over the microbatches, a look at the gradient, then the move."""

import math
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field

import torch

from triax.config.train import Recipe
from triax.data.pack import Batch
from triax.model.balance import forget, prepare, rebalance
from triax.model.decoder import Decoder
from triax.model.router import Router
from triax.optim.build import Moved, Optimizer
from triax.train.groups import group_of
from triax.train.loss import IGNORED
from triax.train.narrow import NarrowMatrices
from triax.train.objective import cost, is_bf16, precision, targets_after_next
from triax.train.watch import blame


@dataclass(frozen=True)
class Outcome:
    """What a step saw and did."""

    loss: float
    """Nats per trained token."""
    further_loss: float | None
    """The same for the extra prediction layer, if there is one."""
    num_trained: int
    """Tokens that had a target."""
    grad_norm: float
    """Norm of all gradients together, before clipping."""
    grad_norms: dict[str, float] = field(default_factory=dict)
    """The same by group of parameters."""
    moved: Moved | None = None
    """What the optimiser did; none if the step was skipped."""
    skipped: str = ""
    """Why nothing was moved."""


class Step:
    """Takes the microbatches of one step; the gradient is that of the whole batch, however it is cut.

    A step whose loss or gradient norm is not finite moves nothing and names the first layer or parameter at fault. An
    infinite activation that a saturating function turns into a finite loss and a finite gradient passes: such a step
    is right as it stands.

    Every sum is divided by the trained tokens of the whole step, so a mean of means never arises and microbatches with
    few targets, or none, weigh what they should.
    """

    def __init__(self, model: Decoder, optimizer: Optimizer, recipe: Recipe) -> None:
        self.model, self.optimizer = model, optimizer
        self.kind, self.balance = recipe.train.precision, recipe.balance
        self.further_weight = recipe.model.multi_token.loss_weight if recipe.model.multi_token else 0.0
        self.device = model.head.weight.device
        # a CPU that emulates bf16 multiplies in fp32 and so gives the masters better gradients than rounded ones
        narrows = self.device.type == "cuda" and is_bf16(self.kind, self.device)
        self.narrow = NarrowMatrices(model, torch.bfloat16) if narrows else None
        self.routers = [module for module in model.modules() if isinstance(module, Router)]
        prepare(self.routers, recipe.balance)
        names = [name for name, _ in model.named_parameters()]
        groups = {name: group_of(name, recipe.model) for name in names}
        self.groups = sorted(set(groups.values()))
        self.group_index = {name: self.groups.index(group) for name, group in groups.items()}

    def __call__(self, batches: Sequence[Batch], rate: float, refuse: Callable[[float], str] | None = None) -> Outcome:
        """Learn from a batch.

        Args:
            batches: Microbatches.
            rate: Learning rate as a share of its peak.
            refuse: Given the loss, says why the step is to be skipped, or nothing.
        """
        num_trained = sum(int((batch.targets != IGNORED).sum()) for batch in batches)
        if num_trained == 0:
            return Outcome(math.nan, None, 0, 0.0, skipped="no token of the batch has a target")
        loss, further = self._accumulate(batches, num_trained)
        grad_norm, grad_norms = self._norms()
        skipped = ""
        if not (math.isfinite(loss) and math.isfinite(grad_norm)):
            skipped = f"not finite: {blame(self.model, lambda: self._repeat(batches))}"
        elif refuse is not None:
            skipped = refuse(loss)
        moved = None
        if skipped:
            self._forget()
        else:
            moved = self.optimizer.step(rate, grad_norm)
            rebalance(self.routers, self.balance)
        self.optimizer.zero_grad()
        return Outcome(loss, further, num_trained, grad_norm, grad_norms, moved, skipped)

    def _forget(self) -> None:
        """Drop what a skipped step measured, so that it decides neither a bias nor a clip."""
        forget(self.routers)
        for layer in self.model.mla_layers().values():
            layer.reset_largest_logit()

    def _accumulate(self, batches: Sequence[Batch], num_trained: int) -> tuple[float, float | None]:
        """Run all microbatches forward and backward and return the losses of the whole step."""
        self.model.train()
        self.optimizer.zero_grad()
        num_further = 1
        if self.further_weight:
            num_further = sum(int((targets_after_next(b.targets, b.lengths) != IGNORED).sum()) for b in batches)
        nats, further_nats = [], []
        with nullcontext() if self.narrow is None else self.narrow():
            for batch in batches:
                with precision(self.kind, self.device):
                    paid = cost(self.model, batch, self.device)
                total = paid.nats / num_trained
                nats.append(paid.nats.detach())
                if paid.further_nats is not None:
                    total = total + self.further_weight * paid.further_nats / max(1, num_further)
                    further_nats.append(paid.further_nats.detach())
                total.backward()
        loss = torch.stack(nats).double().sum().item() / num_trained
        further = torch.stack(further_nats).double().sum().item() / max(1, num_further) if further_nats else None
        return loss, further

    @torch.no_grad()
    def _norms(self) -> tuple[float, dict[str, float]]:
        """Return the gradient norm of everything and of each group, with one wait for the device."""
        found = [(name, p.grad) for name, p in self.model.named_parameters() if p.grad is not None]
        norms = torch.stack(torch._foreach_norm([grad for _, grad in found])).double()
        index = torch.tensor([self.group_index[name] for name, _ in found], device=norms.device)
        squares = norms.new_zeros(len(self.groups)).index_add_(0, index, norms.square()).tolist()
        return math.sqrt(sum(squares)), {group: math.sqrt(s) for group, s in zip(self.groups, squares, strict=True)}

    def _repeat(self, batches: Sequence[Batch]) -> None:
        for batch in batches:
            with precision(self.kind, self.device):
                cost(self.model, batch, self.device)
