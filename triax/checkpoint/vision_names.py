"""The published name, shape and dtype of every tensor of the vision tower and its projector."""

import re
from collections.abc import Iterator
from typing import Literal, NamedTuple

from triax.config.model import Model
from triax.model.vision_count import vision_weights


class VisionTensor(NamedTuple):
    """One tensor of the tower or the projector; its values are the same in the file and in the decoder."""

    ours: str
    """Name in the decoder's state dict."""
    name: str
    """Published name, which has no `language_model.` before it."""
    shape: tuple[int, ...]
    """Shape, in the file as with us."""
    dtype: Literal["BF16"]
    """Dtype in the released files."""


_NAMES = {
    "tower.patch": "vision_tower.patch_embed.proj",
    "tower.output_norm": "vision_tower.encoder.final_layernorm",
    "projector.inner": "mm_projector.proj.0",
    "projector.output": "mm_projector.proj.2",
}
_LAYER = {
    "attention_norm": "norm0",
    "attention.query_key_value": "wqkv",
    "attention.output": "wo",
    "mlp_norm": "norm1",
    "mlp.up": "mlp.fc0",
    "mlp.down": "mlp.fc1",
}
_LAYERS = re.compile(r"tower\.layers\.(\d+)\.(.+)")


def vision_tensors(settings: Model) -> Iterator[VisionTensor]:
    """List the tensors of tower and projector; nothing for a text model.

    Source: the tensor lists of Kimi-K3 (168 tensors) and Kimi-K2.5 (335) as released.
    """
    vision = settings.vision
    if vision is None:
        return
    norm = "mm_projector.pre_norm" if vision.projector == "norm_before" else "mm_projector.post_norm"
    for ours, shape in vision_weights(vision, settings.width):
        stem, _, kind = ours.removeprefix("vision.").rpartition(".")
        if ours == "vision.tower.position":
            name = "vision_tower.patch_embed.pos_emb.weight"
        elif layer := _LAYERS.fullmatch(stem):
            name = f"vision_tower.encoder.blocks.{layer[1]}.{_LAYER[layer[2]]}.{kind}"
        else:
            name = f"{norm if stem == 'projector.norm' else _NAMES[stem]}.{kind}"
        yield VisionTensor(ours, name, shape, "BF16")
