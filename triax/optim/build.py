"""The optimiser of a model: clip, move every parameter by its rule, bound the attention logits."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor, nn

from triax.config.optim import AdamW as AdamWSettings
from triax.config.optim import MuonClip as MuonClipSettings
from triax.errors import CheckpointError, TrainError, UnsupportedError
from triax.log import logger
from triax.optim.adamw import AdamW
from triax.optim.groups import Role, roles, unstated
from triax.optim.muon import Muon
from triax.optim.qk_clip import Clipped, Reduce, attention_layers, clip_query_key


@dataclass(frozen=True)
class Moved:
    """What one step saw and did."""

    grad_norm: float
    """Global gradient norm before clipping."""
    num_orthogonalized: int
    """Logical matrices that were orthogonalised."""
    query_key: Clipped
    """Largest logits, and the heads that were shrunk."""


class Optimizer:
    """MuonClip or AdamW over a whole model, behind one interface.

    Weights and states are fp32; low precision belongs to the forward pass (autocast). It sees accumulated gradients
    only. A parameter without a gradient (none, not zero) is left alone, decay included, and named once in the log.

    Args:
        model: Its layers state their matrices by `matrices()` and their logits by `largest_logit`.
        settings: Rule and numbers.
        reduce_max: Maximum of a tensor over ranks, for the logits.
        newton_schulz_dtype: Format of the orthogonalisation; none chooses by device.

    Raises:
        UnsupportedError: A weight is in low precision.
        ConfigError: A layer states matrices that it does not have.
    """

    def __init__(
        self,
        model: nn.Module,
        settings: MuonClipSettings | AdamWSettings,
        *,
        reduce_max: Reduce | None = None,
        newton_schulz_dtype: torch.dtype | None = None,
    ) -> None:
        self.settings, self.reduce_max = settings, reduce_max
        self.parameters = {name: weight for name, weight in model.named_parameters() if weight.requires_grad}
        for name, weight in self.parameters.items():
            if weight.dtype not in (torch.float32, torch.float64):
                raise UnsupportedError(
                    f"optim: `{name}` is {weight.dtype}, in which small updates vanish; "
                    "keep weights in fp32 (`model.float()`) and run the forward pass under torch.autocast"
                )
        self.attention = attention_layers(model)
        self.roles: dict[str, Role] = roles(model, muon=settings.kind == "muonclip")
        by_rule = {
            rule: {name: self.parameters[name] for name, role in self.roles.items() if role.rule == rule}
            for rule in ("muon", "adamw")
        }
        decayed = frozenset(name for name, role in self.roles.items() if role.is_decayed)
        self.adamw = AdamW(by_rule["adamw"], decayed, settings.lr, settings.betas, settings.eps, settings.weight_decay)
        self.muon: Muon | None = None
        self.query_key = None
        if isinstance(settings, MuonClipSettings):
            if left := unstated(model):
                shown = ", ".join(f"`{name}`" for name in left[:8]) + (", …" if len(left) > 8 else "")
                logger("optim").warning(
                    "no layer states %s as matrices: AdamW moves them, without decay; give the layer a method "
                    "`matrices()` for Muon to take them, an empty one if AdamW should",
                    shown,
                )
            self.query_key = settings.qk_clip
            self.muon = Muon(
                by_rule["muon"],
                {name: self.roles[name].pattern for name in by_rule["muon"]},
                lr=settings.lr,
                weight_decay=settings.weight_decay,
                momentum=settings.momentum,
                nesterov=settings.nesterov,
                rms=settings.update_rms,
                num_steps=settings.newton_schulz_steps,
                dtype=newton_schulz_dtype,
            )
        self._named_as_still: set[str] = set()

    def _parts(self) -> list[Muon | AdamW]:
        return [self.muon, self.adamw] if self.muon else [self.adamw]

    @torch.no_grad()
    def grad_norm(self) -> Float[Tensor, ""]:
        """Return the norm of all gradients together."""
        gradients = [weight.grad for weight in self.parameters.values() if weight.grad is not None]
        return torch.nn.utils.get_total_norm(gradients) if gradients else torch.zeros(())

    def nonfinite_gradients(self) -> list[str]:
        """Return the parameters whose gradient holds a NaN or an infinity, in the model's order."""
        return [
            name
            for name, weight in self.parameters.items()
            if weight.grad is not None and not bool(weight.grad.isfinite().all())
        ]

    @torch.no_grad()
    def step(self, rate: float = 1.0, grad_norm: Float[Tensor, ""] | float | None = None) -> Moved:
        """Clip the gradients, move all parameters, then shrink the heads whose logits grew too large.

        Args:
            rate: Learning rate as a share of the peak, from `triax.optim.schedule.rate`.
            grad_norm: Result of `grad_norm()` if the caller has it already.

        Raises:
            TrainError: The gradient is not finite; nothing was changed.
        """
        norm = float(self.grad_norm() if grad_norm is None else grad_norm)
        gradients = [weight.grad for weight in self.parameters.values() if weight.grad is not None]
        if not norm < float("inf"):
            bad = self.nonfinite_gradients()
            found = f"first in `{bad[0]}`, {len(bad)} parameters in all" if bad else "the norm overflows"
            raise TrainError(f"optim: the gradient is not finite; {found}; skip this step or lower the learning rate")
        if 0 < self.settings.clip_norm < norm:
            torch._foreach_mul_(gradients, self.settings.clip_norm / norm)
        self._name_still_parameters()
        before = self.num_orthogonalized
        for part in self._parts():
            part.step(rate)
        threshold = self.query_key.threshold if self.query_key else float("inf")
        alpha = self.query_key.alpha if self.query_key else 0.5
        clipped = clip_query_key(self.attention, threshold, alpha, self.reduce_max)
        return Moved(norm, self.num_orthogonalized - before, clipped)

    def _name_still_parameters(self) -> None:
        still = {name for name, weight in self.parameters.items() if weight.grad is None} - self._named_as_still
        if still:
            self._named_as_still |= still
            logger("optim").info("no gradient reaches %s; left as it is", ", ".join(sorted(still)))

    def zero_grad(self) -> None:
        """Drop all gradients."""
        for weight in self.parameters.values():
            weight.grad = None

    @property
    def num_orthogonalized(self) -> int:
        """Logical matrices orthogonalised in this process: steps times matrices, or something was left out."""
        return self.muon.num_orthogonalized if self.muon else 0

    def update_rms(self) -> dict[str, float]:
        """Return the root mean square of each parameter's last update, before the learning rate and without decay."""
        return {name: rms for part in self._parts() for name, rms in part.update_rms().items()}

    @torch.no_grad()
    def weight_rms(self) -> dict[str, float]:
        """Return the root mean square of each parameter."""
        return {name: float(weight.square().mean().sqrt()) for name, weight in self.parameters.items()}

    def _tensors(self) -> dict[str, Tensor]:
        return {name: tensor for part in self._parts() for name, tensor in part.tensors().items()}

    def state_dict(self) -> dict[str, Tensor]:
        """Return copies of all states as flat named tensors: `PARAMETER.momentum`, `PARAMETER.exp_avg` and so on."""
        return {name: tensor.detach().clone() for name, tensor in self._tensors().items()}

    @torch.no_grad()
    def load_state_dict(self, saved: Mapping[str, Tensor]) -> None:
        """Take over saved states; the next step equals that of the run which saved them, bit for bit.

        Raises:
            CheckpointError: A state is missing, unknown, or of another shape or type; nothing was changed.
        """
        own = self._tensors()
        for wrong, what in ((own.keys() - saved.keys(), "is missing"), (saved.keys() - own.keys(), "is unknown here")):
            if wrong:
                raise CheckpointError(
                    f"optimiser state: `{min(wrong)}` {what}; {len(wrong)} such in all; "
                    "resume with the model and the optimiser settings of the saved run"
                )
        for name, tensor in own.items():
            found = saved[name]
            if found.shape != tensor.shape or found.dtype != tensor.dtype:
                raise CheckpointError(
                    f"optimiser state: `{name}` should be {tensor.dtype} {list(tensor.shape)}; found {found.dtype} "
                    f"{list(found.shape)}; resume with the model and the optimiser settings of the saved run"
                )
        for name, tensor in own.items():
            tensor.copy_(saved[name])


def build(
    model: nn.Module, settings: MuonClipSettings | AdamWSettings, *, reduce_max: Reduce | None = None
) -> Optimizer:
    """Return the optimiser that the settings describe."""
    return Optimizer(model, settings, reduce_max=reduce_max)
