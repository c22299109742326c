"""A part of a model as a model of its own: some layers, some experts, renumbered from 0."""

import re
from collections.abc import Sequence

from triax.config.model import Model
from triax.errors import ConfigError

_LAYER = re.compile(r"^layers\.(\d+)\.")


def cut_settings(settings: Model, layers: range | None, experts: Sequence[int] | None) -> Model:
    """Return the settings of a model that has only these layers and experts.

    A cut that begins at layer 0 computes what the whole model does up to there; any other gives layer by layer the
    same weights, fed with the embedding.

    Args:
        settings: The whole model.
        layers: Layers to keep, without a gap; all if not given.
        experts: Routed experts to keep in every layer; all if not given.

    Raises:
        ConfigError: The model has no such layers or experts, or the rest would be no model.
    """
    update: dict[str, object] = {}
    if layers is not None:
        if layers.step != 1 or not 0 <= layers.start < layers.stop <= settings.num_layers:
            raise ConfigError(
                f"layers: must be a..b with 0 <= a < b <= {settings.num_layers}; "
                f"found `{layers.start}..{layers.stop}`; b is the layer after the last"
            )
        update["num_layers"] = len(layers)
        mla_layers = tuple(layer - layers.start for layer in settings.mla_layers if layer in layers)
        update["mla_layers"] = mla_layers
        update["num_dense_layers"] = max(0, min(settings.num_dense_layers, layers.stop) - layers.start)
        update["multi_token"] = None
        if not mla_layers:
            update["mla"] = None
        if len(mla_layers) == len(layers):
            update["kda"] = None
    if experts is not None:
        moe = settings.moe
        if moe is None or not experts or len(set(experts)) != len(experts):
            raise ConfigError("experts: must name different experts of a routed model; found none or one twice")
        if not all(0 <= expert < moe.num_experts for expert in experts):
            raise ConfigError(
                f"experts: must lie between 0 and {moe.num_experts - 1}; found `{max(experts)}`; correct them"
            )
        if moe.num_groups > 1:
            raise ConfigError(f"experts: cannot be cut out of {moe.num_groups} groups; load all of them")
        kept = {"num_experts": len(experts), "top_k": min(moe.top_k, len(experts))}
        update["moe"] = moe.model_copy(update=kept)
    return Model.model_validate(settings.model_copy(update=update).model_dump())


def origin(name: str, layers: range | None) -> str:
    """Return the name in the whole model of a tensor of the cut one."""
    if layers is None:
        return name
    return _LAYER.sub(lambda found: f"layers.{int(found[1]) + layers.start}.", name)
