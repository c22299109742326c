"""AdamW for the parameters that are not matrices, with its state held by name from the start."""

from collections.abc import Mapping

import torch
from torch import Tensor, nn


class AdamW:
    """AdamW over named fp32 parameters; those without a gradient are left alone, decay included.

    Source: Loshchilov and Hutter, arXiv 1711.05101; the arithmetic is torch's own.
    """

    MOMENTS = ("step", "exp_avg", "exp_avg_sq")

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        decayed: frozenset[str],
        lr: float,
        betas: tuple[float, float],
        eps: float,
        weight_decay: float,
    ) -> None:
        self.parameters, self.lr, self.betas, self.eps = dict(parameters), lr, betas, eps
        groups = [
            {"params": [self.parameters[name] for name in self.parameters if (name in decayed) == is_decayed]}
            | {"weight_decay": weight_decay if is_decayed else 0.0}
            for is_decayed in (True, False)
        ]
        self.rule = torch.optim.AdamW(groups, lr=lr, betas=betas, eps=eps, fused=True)
        for weight in self.parameters.values():
            # Made now and not at the first gradient, so that every saved state names every parameter.
            self.rule.state[weight] = {
                "step": torch.zeros((), dtype=torch.float32, device=weight.device),
                "exp_avg": torch.zeros_like(weight),
                "exp_avg_sq": torch.zeros_like(weight),
            }

    @torch.no_grad()
    def step(self, rate: float) -> None:
        """Move the parameters by one step at `rate` times the peak learning rate."""
        for group in self.rule.param_groups:
            group["lr"] = self.lr * rate
        self.rule.step()

    def tensors(self) -> dict[str, Tensor]:
        """Return the live tensors of the state, by parameter and moment."""
        return {
            f"{name}.{moment}": self.rule.state[weight][moment]
            for name, weight in self.parameters.items()
            for moment in self.MOMENTS
        }

    @torch.no_grad()
    def update_rms(self) -> dict[str, float]:
        """Return the root mean square of each parameter's last update, before the learning rate and without decay."""
        found = {}
        for name, weight in self.parameters.items():
            step, mean, square = (self.rule.state[weight][moment] for moment in self.MOMENTS)
            if step > 0:
                mean = mean / (1 - self.betas[0] ** step)
                update = mean / ((square / (1 - self.betas[1] ** step)).sqrt() + self.eps)
                found[name] = float(update.square().mean().sqrt())
        return found
