"""K2.5's tower, projector and decoder against transformers' own classes, with the same random weights.

The weights travel under their published names, so the names are held to an implementation that is not ours too.
"""

import json
import math

import pytest
import torch
from safetensors.torch import save_file

from triax.checkpoint.compose import compose
from triax.checkpoint.names import PREFIX, inventory
from triax.checkpoint.vision_names import vision_tensors
from triax.config.model import Model
from triax.model.decoder import Decoder
from triax.model.layout import Layout
from triax.model.vision import Media

TOLERANCE = 1e-4  # of the largest value; float32 sums in another order
SLOT = 90
VISION = {
    "width": 48,
    "num_layers": 3,
    "num_heads": 2,
    "head_dim": 24,
    "mlp_dim": 40,
    "norm": "layer",
    "norm_eps": 1e-5,
    "bias": True,
    "table_rows": 6,
    "table_columns": 6,
    "resize": "bicubic",
    "projector": "norm_before",
    "slot_token": SLOT,
}
TEXT = {
    "vocab_size": 96,
    "width": 32,
    "num_layers": 2,
    "mla_layers": (0, 1),
    "num_dense_layers": 1,
    "dense_dim": 40,
    "activation": {"kind": "swiglu"},
    "mla": {"num_heads": 2, "q_latent_dim": 20, "kv_latent_dim": 16, "nope_dim": 8, "rope_dim": 8, "value_dim": 12}
    | {"rope": {"theta": 50000.0}},
    "moe": {"num_experts": 4, "top_k": 2, "num_shared_experts": 1, "expert_dim": 24},
}
GRIDS = ((1, 4, 4), (4, 2, 6), (1, 6, 6), (3, 8, 10), (1, 32, 32))


def build():
    torch.manual_seed(0)
    model = Decoder(Model.model_validate(TEXT | {"vision": VISION})).eval()
    with torch.no_grad():
        for name, tensor in model.state_dict().items():
            if "norm" in name and name.endswith("weight"):
                tensor.normal_(1.0, 0.2)
            elif name.endswith("bias"):
                tensor.normal_(0.0, 0.2)
            else:
                tensor.normal_(0.0, 1.0 if name.endswith(("position", "embed.weight")) else tensor[0].numel() ** -0.5)
    return model


def write(model, folder):
    """The released layout, by the published names, with transformers' words in its config."""
    settings, vision = model.settings, model.settings.vision
    text = settings.model_copy(update={"vision": None})
    state, tensors = model.state_dict(), {}
    for spec in inventory(text, "kimi_k25"):
        ours = state[spec.ours] if spec.index is None else state[spec.ours][spec.index]
        tensors[f"{PREFIX}{spec.name.removeprefix(PREFIX)}"] = ours.reshape(spec.shape).contiguous().clone()
    for tensor in vision_tensors(settings):
        tensors[tensor.name] = state[tensor.ours].clone()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    words = {
        "hidden_size": vision.width,
        "num_attention_heads": vision.num_heads,
        "num_hidden_layers": vision.num_layers,
        "intermediate_size": vision.mlp_dim,
        "pos_emb_height": vision.table_rows,
        "pos_emb_width": vision.table_columns,
    }
    config = compose(text, "kimi_k25", dtype="float32")
    config |= {"vision_config": words, "projection_hidden_size": vision.width, "image_token_id": SLOT}
    config |= {"video_token_id": SLOT + 1}
    (folder / "config.json").write_text(json.dumps(config))


@pytest.fixture(scope="module")
def both(tmp_path_factory):
    from transformers import Kimi_K25ForConditionalGeneration, logging

    logging.disable_progress_bar()
    ours, folder = build(), tmp_path_factory.mktemp("k25")
    write(ours, folder)
    theirs, report = Kimi_K25ForConditionalGeneration.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager", output_loading_info=True
    )
    assert not any(report.values()), report
    return ours, theirs.eval()


def media(*grids):
    patches = torch.randn(sum(map(math.prod, grids)), 3, 14, 14, generator=torch.Generator().manual_seed(0))
    return Media(patches, grids)


def assert_same(ours, theirs, what):
    assert ours.shape == theirs.shape, what
    assert torch.isfinite(theirs).all(), what
    difference = (ours - theirs).abs().max() / theirs.abs().max()
    assert difference < TOLERANCE, f"{what}: relative difference {difference:.2e}"


@torch.no_grad()
def test_the_tower_is_the_same_layer_by_layer(both):
    """U152: pictures of 4x4 and 32x32 patches, non-square ones and clips, each layer compared."""
    ours, theirs = both
    stream, taps = media(*GRIDS), {}
    ours.vision(stream, taps)
    tower = theirs.model.vision_tower
    out = tower(stream.patches, grid_thw=torch.tensor(GRIDS), output_hidden_states=True)
    states = out.hidden_states
    assert len(states) in (VISION["num_layers"], VISION["num_layers"] + 1)
    for layer, state in enumerate(states[-VISION["num_layers"] :]):
        expected = taps["vision.norm"] if torch.equal(state, out.last_hidden_state) else taps[f"vision.{layer}"]
        assert_same(expected, state, f"layer {layer}")
    assert_same(taps["vision.norm"], out.last_hidden_state, "last norm")
    assert_same(taps["vision.merged"], out.pooler_output, "merged")
    assert_same(taps["vision.tokens"], theirs.model.mm_projector(out.pooler_output).squeeze(1), "tokens")


def test_gradients_of_the_tower_have_the_same_size(both):
    """Names and the order of query channels differ there; the sum of squares does not."""
    ours, theirs = both
    stream = media(*GRIDS[:4])
    ours.zero_grad()
    theirs.zero_grad()
    tokens = ours.vision(stream)
    pull = torch.randn_like(tokens)
    (tokens * pull).sum().backward()
    out = theirs.model.vision_tower(stream.patches, grid_thw=torch.tensor(stream.grids))
    (theirs.model.mm_projector(out.pooler_output).squeeze(1) * pull).sum().backward()

    def size(module, parts):
        found = [
            p.grad for n, p in module.named_parameters() if p.grad is not None and any(part in n for part in parts)
        ]
        return torch.stack([gradient.double().square().sum() for gradient in found]).sum().sqrt()

    assert_same(size(ours.vision, ["position"]), size(theirs, ["position_embeddings"]), "table")
    assert_same(size(ours.vision.tower, [""]), size(theirs.model.vision_tower, [""]), "tower")
    assert_same(size(ours.vision.projector, [""]), size(theirs.model.mm_projector, [""]), "projector")


@torch.no_grad()
def test_logits_of_a_prompt_with_pictures_are_the_same(both):
    ours, theirs = both
    grids = ((1, 4, 4), (1, 2, 6))
    stream = media(*grids)
    tokens = torch.tensor([3, 5, *[SLOT] * 4, 8, 13, *[SLOT] * 3, 21, 34])
    mine = ours.logits(ours(tokens, Layout.of([len(tokens)]), media=stream))
    out = theirs(input_ids=tokens[None], pixel_values=stream.patches, image_grid_thw=torch.tensor(grids))
    assert_same(mine, out.logits[0], "logits")
    other = ours.logits(ours(tokens, Layout.of([len(tokens)]), media=stream._replace(patches=-stream.patches)))
    assert (other - mine).abs().max() > 100 * TOLERANCE * mine.abs().max()
