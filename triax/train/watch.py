"""What a run watches itself for: spikes, numbers that are not finite, and weights that never move."""

import math
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from triax.errors import TrainError

WINDOW = 128
FEWEST = 16  # losses before a deviation means anything
SAMPLE = 2**20


class Spikes:
    """How far a loss stands above the last 128 accepted ones, in their standard deviations."""

    def __init__(self) -> None:
        self.losses: deque[float] = deque(maxlen=WINDOW)

    def score(self, loss: float) -> float:
        """Return the distance in standard deviations; 0 while fewer than 16 losses are known."""
        if len(self.losses) < FEWEST:
            return 0.0
        mean = math.fsum(self.losses) / len(self.losses)
        deviation = math.sqrt(math.fsum((x - mean) ** 2 for x in self.losses) / len(self.losses))
        return (loss - mean) / max(deviation, 1e-9)

    def accept(self, loss: float) -> None:
        """Remember a loss whose step was taken."""
        self.losses.append(loss)

    def state_dict(self) -> dict[str, Any]:
        """Return what a resumed run needs."""
        return {"losses": list(self.losses)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over the saved window."""
        self.losses = deque(state["losses"], maxlen=WINDOW)


def sample(tensor: Tensor) -> Tensor:
    """Return a view of at most about a million entries, spread evenly; all of them if there are no more."""
    return tensor.detach().reshape(-1)[:: max(1, tensor.numel() // SAMPLE) | 1]  # odd, so that no column is left out


class Movement:
    """Whether every trainable tensor, and every expert that saw tokens, moved by more than weight decay.

    A kernel without a backward, a master weight too coarse for its update, a parameter left out of the optimiser: in
    all of these the loss still falls, because the other weights learn.
    """

    def __init__(self, model: nn.Module, exempt: Callable[[str], bool]) -> None:
        self.before = {
            name: sample(p).clone() for name, p in model.named_parameters() if p.requires_grad and not exempt(name)
        }
        self.kept = 1.0
        self.steps = 0

    def note(self, lr: float, weight_decay: float) -> None:
        """Record a step that was taken."""
        self.kept *= 1 - lr * weight_decay
        self.steps += 1

    def unmoved(self, model: nn.Module) -> list[str]:
        """Return the names of tensors that are what they were, or what decay alone would have made of them."""
        parameters = dict(model.named_parameters())
        return [name for name, before in self.before.items() if not self._moved(before, sample(parameters[name])).any()]

    def unmoved_experts(self, model: nn.Module, used: Mapping[str, Iterable[bool]]) -> list[str]:
        """Return `name[expert]` for the slices of stacked experts that saw tokens and did not move.

        Args:
            model: The network.
            used: For each stacked parameter, whether each expert saw a token since the start.
        """
        parameters = dict(model.named_parameters())
        found = []
        for name, saw in used.items():
            now = sample(parameters[name])
            size = parameters[name].numel()
            place = torch.arange(0, size, max(1, size // SAMPLE) | 1, device=now.device)
            saw = torch.as_tensor(list(saw), device=now.device)
            owner = place // (size // saw.numel())
            moved = torch.zeros(saw.numel(), dtype=torch.bool, device=now.device)
            moved[owner[self._moved(self.before[name], now)]] = True
            found += [f"{name}[{expert}]" for expert in torch.nonzero(saw & ~moved).flatten().tolist()]
        return found

    def _moved(self, before: Tensor, now: Tensor) -> Tensor:
        decayed = before * self.kept
        rounding = (self.steps + 2) * torch.finfo(before.dtype).eps * before.abs()
        return (now != before) & ((now - decayed).abs() > rounding)


def refuse_unmoved(unmoved: Collection[str], steps: int) -> None:
    """Stop a run in which some weights cannot learn.

    Raises:
        TrainError: Names them.
    """
    if unmoved:
        shown = ", ".join(f"`{name}`" for name in sorted(unmoved)[:8]) + (", …" if len(unmoved) > 8 else "")
        raise TrainError(
            f"after {steps} steps {len(unmoved)} trainable tensors have not moved beyond weight decay; found {shown}; "
            "their gradient is cut off or their update is lost: check the kernel that reads them"
        )


def blame(model: nn.Module, forward: Callable[[], Any]) -> str:
    """Return where numbers that are not finite first arise: a weight, a module of the forward, or a gradient.

    Args:
        model: The network, with the gradients of the step at fault.
        forward: Repeats the forward of a microbatch.
    """
    for name, parameter in model.named_parameters():
        if not parameter.detach().isfinite().all():
            return f"weight `{name}`"
    if first := _first_output(model, forward):
        return f"output of `{first}`"
    # In the backward, what is nearest to the loss comes first and spoils all below it: the last in model order.
    spoilt = [name for name, p in model.named_parameters() if p.grad is not None and not p.grad.isfinite().all()]
    return f"gradient of `{spoilt[-1]}`" if spoilt else "the loss alone"


def _first_output(model: nn.Module, forward: Callable[[], Any]) -> str:
    found: list[str] = []

    def look(name: str) -> Callable[..., None]:
        def hook(module: nn.Module, inputs: Any, output: Any) -> None:
            tensors = output if isinstance(output, tuple | list) else (output,)
            if not found and any(isinstance(t, Tensor) and not t.isfinite().all() for t in tensors):
                found.append(name)

        return hook

    hooks = [module.register_forward_hook(look(name)) for name, module in model.named_modules() if name]
    try:
        with torch.no_grad():
            forward()
    finally:
        for hook in hooks:
            hook.remove()
    return found[0] if found else ""
