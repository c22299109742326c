"""The numbers of a step: cheap ones each time, the looks inside only where a log line is due."""

import math
import resource
import sys
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from triax.config.model import Situ
from triax.config.train import Recipe
from triax.model.balance import evenness
from triax.model.count import sheet
from triax.model.decoder import DecoderLayer
from triax.model.gated_mlp import GatedMlp
from triax.model.kda import KDA
from triax.model.latent_moe import LatentMoe
from triax.model.router import Router
from triax.train.groups import group_of
from triax.train.metrics import Value
from triax.train.parts import Parts
from triax.train.step import Outcome

PEAK_FLOPS = {"H100": 989e12, "H200": 989e12, "H800": 989e12, "A100": 312e12, "B200": 2250e12, "GB200": 2500e12}
"""Dense bf16 operations per second, by a part of the device's name."""

UNREAD = ("layers.0.attention_mix.",)
"""Parameters that exist for the layout of published files but are never read: the first mix has one source."""


MEANS = ("score_mean", "load_cv", "load_diversity", "dead_share", "margins_at_edges")
"""Router metrics whose layers are averaged; of the others the worst layer counts."""


class Measure:
    """Turns what happened in a step into named numbers."""

    def __init__(self, parts: Parts, recipe: Recipe) -> None:
        self.parts, self.recipe = parts, recipe
        model = parts.model
        self.routers = {name: m for name, m in model.named_modules() if isinstance(m, Router)}
        self.group = {name: group_of(name, recipe.model) for name, _ in model.named_parameters()}
        self.device = model.head.weight.device
        self.flops_per_token = 6 * sheet(recipe.model).active_parameters
        self.peak = peak_flops(self.device)
        self.load: dict[str, Tensor] = {}
        self.heard: dict[str, dict[int, list[Tensor]]] = {}
        self.hooks: list[Any] = []

    def is_exempt(self, name: str) -> bool:
        """Whether a parameter may stand still: it is never read, or its loss has no weight."""
        extra = self.recipe.model.multi_token
        return name.startswith(UNREAD) or (
            name.startswith("multi_token.") and extra is not None and not extra.loss_weight
        )

    def step(self, outcome: Outcome, tokens: int, share: float, took: float, waited: float) -> dict[str, Value]:
        """Return the metrics of every step."""
        per_s = self.recipe.train.batch_tokens / max(took, 1e-9)
        found: dict[str, Value] = {
            "train/tokens": tokens,
            "train/loss": outcome.loss,
            "train/bits_per_byte": outcome.loss / math.log(2) / self.parts.bytes_per_token,
            "train/learning_rate": self.recipe.optim.lr * share,
            "train/grad_norm": outcome.grad_norm,
            "train/tokens_per_s": per_s,
            "train/step_s": took,
            "train/data_wait_s": waited,
            "train/memory_bytes": memory_bytes(self.device),
        }
        found |= {f"train/grad_norm/{group}": norm for group, norm in outcome.grad_norms.items()}
        if outcome.further_loss is not None:
            found["train/further_loss"] = outcome.further_loss
        if self.peak:
            found["train/mfu"] = self.flops_per_token * per_s / self.peak
        if outcome.moved is not None and outcome.moved.query_key.largest_logit:
            clipped = outcome.moved.query_key
            largest = torch.stack([heads.max() for heads in clipped.largest_logit.values()]).tolist()
            per_layer = dict(zip(map(layer_of, clipped.largest_logit), largest, strict=True))
            found |= {
                "attention/largest_logit": max(largest),
                "attention/largest_logit_per_layer": per_layer,
                "attention/clipped_heads": clipped.num_clipped,
                "attention/smallest_clip_factor": clipped.smallest_factor,
            }
        return found | (self._routers() if outcome.moved is not None else {})

    @torch.no_grad()
    def _routers(self) -> dict[str, Value]:
        """Return how evenly the experts of each layer were loaded over the whole batch."""
        found: dict[str, Value] = {}
        layers = [layer_of(name) for name, router in self.routers.items() if router.tally is not None]
        for name, values in evenness(list(self.routers.values())).items():
            found[f"router/{name}"] = sum(values) / len(values) if name in MEANS else max(values)
            found[f"router/{name}_per_layer"] = dict(zip(layers, values, strict=True))
        return found

    def note_load(self) -> None:
        """Add the last step's load to what the experts have seen."""
        for name, router in self.routers.items():
            if router.tally is not None:
                self.load[name] = self.load.get(name, 0) + router.tally.load

    def used_experts(self) -> dict[str, list[bool]]:
        """Return, for each stacked parameter, which experts saw tokens since the start."""
        found = {}
        for name, load in self.load.items():
            prefix = name.removesuffix("router")
            for part in ("gate", "up", "down"):
                found[f"{prefix}experts.{part}"] = (load > 0).tolist()
        return {name: used for name, used in found.items() if not self.is_exempt(name)}

    def listen(self, *, on: bool) -> None:
        """Turn on, or off, the hooks that look inside the next step's forwards."""
        for hook in self.hooks:
            hook.remove()
        self.hooks, self.heard = [], {}
        self.parts.model.record_mix_weights(on)
        if not on:
            return
        for number, layer in enumerate(self.parts.model.layers):
            if not isinstance(layer, DecoderLayer):
                continue
            if isinstance(layer.attention, KDA):
                self._hook(layer.attention, number, _decay)
            dense = layer.mlp if isinstance(layer.mlp, GatedMlp) else getattr(layer.mlp, "shared", None)
            if isinstance(dense, GatedMlp) and isinstance(dense.activation, Situ):
                self._hook(dense, number, _saturation)
            self._hook(layer.mlp_norm, number, _size)

    def _hook(self, module: nn.Module, layer: int, look: Callable[[Any, Tensor], dict[str, Tensor]]) -> None:
        def hook(module: nn.Module, inputs: tuple[Any, ...]) -> None:
            if module.training and torch.is_grad_enabled():
                with torch.no_grad():
                    for name, value in look(module, inputs[0]).items():
                        self.heard.setdefault(name, {}).setdefault(layer, []).append(value)

        self.hooks.append(module.register_forward_pre_hook(hook))

    def details(self) -> dict[str, Value]:
        """Return what was heard in the step, and the sizes of weights and updates by group."""
        found: dict[str, Value] = {}
        for name, by_layer in self.heard.items():
            reduce = torch.amin if "smallest" in name else torch.amax if "largest" in name else torch.mean
            values = torch.stack([reduce(torch.stack(heard), 0) for _, heard in sorted(by_layer.items())])
            per_layer = dict(zip(map(str, sorted(by_layer)), values.tolist(), strict=True))
            found |= {name: reduce(values, 0).item(), f"{name}_per_layer": per_layer}
        experts = [(name, m) for name, m in self.parts.model.named_modules() if isinstance(m, LatentMoe)]
        if latent := {layer_of(name): float(m.latent_rms) for name, m in experts if m.latent_rms is not None}:
            found["moe/latent_rms_per_layer"] = latent
        optimizer = self.parts.optimizer
        for name, of_parameter in (("update_rms", optimizer.update_rms()), ("weight_rms", optimizer.weight_rms())):
            found |= {f"train/{name}/{group}": value for group, value in self._by_group(of_parameter).items()}
        return found | self._mixes()

    def _by_group(self, rms: Mapping[str, float]) -> dict[str, float]:
        """Return the root mean square over all entries of a group."""
        squares: dict[str, float] = {}
        sizes: dict[str, int] = {}
        for name, value in rms.items():
            group, size = self.group[name], self.parts.optimizer.parameters[name].numel()
            squares[group] = squares.get(group, 0.0) + size * value**2
            sizes[group] = sizes.get(group, 0) + size
        return {group: math.sqrt(square / sizes[group]) for group, square in squares.items()}

    def _mixes(self) -> dict[str, Value]:
        """Return what each place of the residual mix reads: shares, their entropy, the embedding's share."""
        found: dict[str, Value] = {}
        entropy, embedding = [], []
        for name, weight in self.parts.model.mean_mix_weights().items():
            shares = weight.double().tolist()
            place = name.removeprefix("layers.").removesuffix("_mix").replace(".", " ")
            found[f"residual_mix/share/{place}"] = shares
            entropy.append(-sum(share * math.log(share) for share in shares if share > 0))
            embedding.append(shares[0])
        if found:
            found["residual_mix/entropy_nats"] = sum(entropy) / len(entropy)
            found["residual_mix/embedding_share"] = sum(embedding) / len(embedding)
        return found


def layer_of(name: str) -> str:
    """Return the number of the layer that a module belongs to, as text; outside the stack, the first part of its name.

    For example `3` for `layers.3.mlp.router`, and `multi_token` for `multi_token.layer.mlp.router`.
    """
    first, _, rest = name.partition(".")
    return rest.partition(".")[0] if first == "layers" else first


def _decay(layer: KDA, hidden: Tensor) -> dict[str, Tensor]:
    keeps = layer.log_decay(hidden).exp()
    return {
        "kda/keep_mean": keeps.mean(),
        "kda/keep_smallest": keeps.min(),
        "kda/beta_mean": layer.beta(hidden).float().sigmoid().mean(),
    }


def _saturation(layer: GatedMlp, hidden: Tensor) -> dict[str, Tensor]:
    assert isinstance(layer.activation, Situ)
    beyond = layer.gate(hidden).abs() > layer.activation.gate_cap
    return {"mlp/situ_saturated_share": beyond.float().mean()}


def _size(norm: nn.Module, hidden: Tensor) -> dict[str, Tensor]:
    return {"model/activation_largest": hidden.abs().max().float()}


def peak_flops(device: torch.device) -> float:
    """Return a GPU's dense bf16 operations per second; 0 where unknown, and on CPUs."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else ""
    return next((peak for part, peak in PEAK_FLOPS.items() if part in name), 0.0)


def memory_bytes(device: torch.device) -> int:
    """Return the peak memory so far: of the GPU, or of this process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
