"""The published names of the tower: as many as the files have, each once, of the published shapes."""

from math import prod

import pytest
import torch

from triax.checkpoint.vision_names import vision_tensors
from triax.config.model import Model
from triax.config.vision import Vision
from triax.model.decoder import Decoder

K25 = {"width": 1152, "num_heads": 16, "head_dim": 72, "mlp_dim": 4304, "norm": "layer", "norm_eps": 1e-5}
K25 |= {"bias": True, "resize": "bicubic", "projector": "norm_before"}


def settings(t0, vision, width=7168):
    return t0.model_copy(update={"vision": Vision.model_validate(vision), "width": width})


def test_k3_has_168_tensors_of_the_published_names_and_shapes(t0):
    found = {tensor.name: tensor for tensor in vision_tensors(settings(t0, {}))}
    blocks = [
        ("wqkv", (4608, 1024)),
        ("wo", (1024, 1536)),
        ("mlp.fc0", (4096, 1024)),
        ("mlp.fc1", (1024, 4096)),
        ("norm0", (1024,)),
        ("norm1", (1024,)),
    ]
    expected = {
        f"vision_tower.encoder.blocks.{block}.{name}.weight": shape for block in range(27) for name, shape in blocks
    } | {
        "vision_tower.patch_embed.proj.weight": (1024, 3, 14, 14),
        "vision_tower.patch_embed.pos_emb.weight": (64, 64, 1024),
        "vision_tower.encoder.final_layernorm.weight": (1024,),
        "mm_projector.proj.0.weight": (4096, 4096),
        "mm_projector.proj.2.weight": (7168, 4096),
        "mm_projector.post_norm.weight": (7168,),
    }
    assert {name: tensor.shape for name, tensor in found.items()} == expected
    assert len(found) == 168
    assert {tensor.dtype for tensor in found.values()} == {"BF16"}
    assert sum(prod(tensor.shape) for tensor in found.values()) == 401_214_464 + 46_144_512


def test_k25_has_335_tensors_biases_included(t0):
    found = {tensor.name: tensor.shape for tensor in vision_tensors(settings(t0, K25))}
    assert len(found) == 335
    assert found["vision_tower.encoder.blocks.26.wqkv.bias"] == (3456,)
    assert found["vision_tower.encoder.blocks.0.norm1.bias"] == (1152,)
    assert found["vision_tower.patch_embed.proj.bias"] == (1152,)
    assert found["mm_projector.pre_norm.weight"] == found["mm_projector.pre_norm.bias"] == (1152,)
    assert found["mm_projector.proj.2.bias"] == (7168,)


@pytest.mark.parametrize("vision", [{}, K25], ids=["k3", "k25"])
def test_every_tensor_of_the_tower_has_a_name(t0, vision):
    chosen = Model.model_validate(t0.model_dump() | {"vision": vision | {"num_layers": 2, "slot_token": 7}})
    with torch.device("meta"):
        state = Decoder(chosen).state_dict()
    held = {name: tuple(tensor.shape) for name, tensor in state.items() if name.startswith("vision.")}
    assert {tensor.ours: tensor.shape for tensor in vision_tensors(chosen)} == held


def test_a_text_model_has_none(t0):
    assert not list(vision_tensors(t0))
