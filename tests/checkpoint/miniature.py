"""Checkpoints made from the published tensor tables, at any width: a second statement of names, shapes and dtypes.

Nothing here asks triax what a release holds. `write` fills a miniature with random codes and numbers; `write_sparse`
makes a set of the real size whose tensors are holes in their files.
"""

import json
import math
import struct
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from safetensors.torch import save_file

FOLDER = Path(__file__).parent / "published"
BYTES = {"BF16": 2, "F32": 4, "U8": 1, "I32": 4, "F8_E4M3": 1}
E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype=torch.float64)


@dataclass(frozen=True)
class Tower:
    width: int
    inner: int
    mlp: int
    heads: int
    layers: int = 27
    patch: int = 14
    table: int = 64
    bias: bool = False


@dataclass(frozen=True)
class Sizes:
    layers: int
    mla: tuple[int, ...]  # from 0
    hidden: int
    dense: int
    experts: int
    shared: int
    expert: int
    heads: int
    q_lora: int
    nope: int = 128
    rope: int = 64
    value: int = 128
    kv_lora: int = 512
    vocab: int = 163840
    kda_heads: int = 0
    kda_dim: int = 128
    latent: int = 0
    blocks: int = 0
    top_k: int = 2
    tower: Tower | None = None
    others: dict = field(default_factory=dict)


K3_MLA = (*range(3, 92, 4), 92)
FULL = {
    "kimi_k3": Sizes(
        93, K3_MLA, 7168, 33792, 896, 2, 3072, 96, 1536, kda_heads=96, latent=3584, blocks=12, top_k=16,
        tower=Tower(1024, 1536, 4096, 12),
    ),
    "kimi_linear": Sizes(27, (3, 7, 11, 15, 19, 23, 26), 2304, 9216, 256, 1, 1024, 32, 0, kda_heads=32, top_k=8),
    "kimi_k2": Sizes(61, tuple(range(61)), 7168, 18432, 384, 1, 2048, 64, 1536, top_k=8),
    "kimi_k25": Sizes(
        61, tuple(range(61)), 7168, 18432, 384, 1, 2048, 64, 1536, top_k=8, tower=Tower(1152, 1152, 4304, 16, bias=True)
    ),
    "moonlight": Sizes(27, tuple(range(27)), 2048, 11264, 64, 2, 1408, 16, 0, top_k=6),
}  # fmt: skip
FORM = {"kimi_k3": "mxfp4", "kimi_linear": "plain", "kimi_k2": "fp8", "kimi_k25": "int4", "moonlight": "plain"}
FAMILIES = tuple(FULL)


def toy(family):
    """Every kind of tensor of the family in four layers (K3: five, as it ends on two MLA layers) and a few experts."""
    small = {
        "hidden": 160, "dense": 96, "experts": 4, "expert": 64, "heads": 2, "nope": 16, "rope": 8, "value": 16,
        "kv_lora": 32, "vocab": 256, "top_k": 2,
    }  # fmt: skip
    sizes = FULL[family]
    small["q_lora"] = 32 if sizes.q_lora else 0
    if sizes.kda_heads:
        small |= {"kda_heads": 3, "kda_dim": 8, "blocks": 2 if sizes.blocks else 0, "latent": 96 if sizes.latent else 0}
        small |= {"layers": 5, "mla": (3, 4)} if family == "kimi_k3" else {"layers": 4, "mla": (3,)}
    else:
        small |= {"layers": 3, "mla": (0, 1, 2)}
    if sizes.tower:
        small["tower"] = replace(
            sizes.tower, width=16, inner=24 if family == "kimi_k3" else 16, mlp=24, heads=2, layers=2, patch=2, table=4
        )
    return replace(sizes, **small)


def config_of(family, sizes):
    """The published config with these sizes."""
    config = json.loads((FOLDER / f"{family}.json").read_text())
    text = config.get("text_config", config)
    full = [layer + 1 for layer in sizes.mla]
    text |= {
        "vocab_size": sizes.vocab, "hidden_size": sizes.hidden, "num_hidden_layers": sizes.layers,
        "intermediate_size": sizes.dense, "num_attention_heads": sizes.heads, "num_key_value_heads": sizes.heads,
        "q_lora_rank": sizes.q_lora or None, "kv_lora_rank": sizes.kv_lora, "qk_nope_head_dim": sizes.nope,
        "qk_rope_head_dim": sizes.rope, "v_head_dim": sizes.value, "moe_intermediate_size": sizes.expert,
    }  # fmt: skip
    if sizes.kda_heads:
        text |= {"num_experts": sizes.experts, "num_experts_per_token": sizes.top_k}
        text["linear_attn_config"] |= {
            "num_heads": sizes.kda_heads,
            "head_dim": sizes.kda_dim,
            "full_attn_layers": full,
            "kda_layers": [layer for layer in range(1, sizes.layers + 1) if layer not in full],
        }
    else:
        text |= {"n_routed_experts": sizes.experts, "num_experts_per_tok": sizes.top_k}
    if sizes.latent:
        text["routed_expert_hidden_size"] = sizes.latent
    if sizes.blocks:
        text["attn_res_block_size"] = sizes.blocks
    if sizes.vocab < 1000:
        for table in (config, text):
            table |= {
                key: sizes.vocab - 2 for key in ("eos_token_id", "pad_token_id", "bos_token_id") if table.get(key)
            }
    tower = sizes.tower
    if tower is not None:
        config["media_placeholder_token_id"] = min(163605, sizes.vocab - 1)
        config["vision_config"] |= {
            "vt_hidden_size": tower.width, "vt_num_hidden_layers": tower.layers, "vt_num_attention_heads": tower.heads,
            "vt_intermediate_size": tower.mlp, "patch_size": tower.patch, "init_pos_emb_height": tower.table,
            "init_pos_emb_width": tower.table,
        }  # fmt: skip
        if family == "kimi_k3":
            config["vision_config"] |= {
                "qkv_hidden_size": tower.inner, "mm_hidden_size": tower.width, "text_hidden_size": sizes.hidden,
            }  # fmt: skip
    return config


def packed(name, rows, columns, form):
    """The tensors of one matrix in the form of its release."""
    if form == "mxfp4":
        return {f"{name}_packed": ((rows, columns // 2), "U8"), f"{name}_scale": ((rows, columns // 32), "U8")}
    if form == "int4":
        words = {f"{name}_packed": ((rows, columns // 8), "I32"), f"{name}_scale": ((rows, columns // 32), "BF16")}
        return words | {f"{name}_shape": ((2,), "I32")}
    if form == "fp8":
        blocks = (math.ceil(rows / 128), math.ceil(columns / 128))
        return {name: ((rows, columns), "F8_E4M3"), f"{name}_scale_inv": (blocks, "F32")}
    return {name: ((rows, columns), "BF16")}


def kda_tensors(family, s):
    inner, is_k3 = s.kda_heads * s.kda_dim, family == "kimi_k3"
    fine = "F32" if is_k3 else "BF16"
    yield from ((f"{x}_proj.weight", (inner, s.hidden), "BF16") for x in "qkv")
    yield from ((f"{x}_conv1d.weight", (inner, 1, 4), fine) for x in "qkv")
    yield "f_a_proj.weight", (s.kda_dim, s.hidden), "BF16"
    yield "f_b_proj.weight", (inner, s.kda_dim), "BF16"
    yield "b_proj.weight", (s.kda_heads, s.hidden), "BF16"
    yield "A_log", (s.kda_dim,) if is_k3 else (1, 1, s.kda_heads, 1), "F32"
    yield "dt_bias", (inner,), "F32"
    yield "o_norm.weight", (s.kda_dim,), fine
    if is_k3:
        yield "g_proj.weight", (inner, s.hidden), "BF16"
    else:
        yield "g_a_proj.weight", (s.kda_dim, s.hidden), "BF16"
        yield "g_b_proj.weight", (inner, s.kda_dim), "BF16"
    yield "o_proj.weight", (s.hidden, inner), "BF16"


def mla_tensors(family, s):
    queries = s.heads * (s.nope + s.rope)
    if s.q_lora:
        yield "q_a_proj.weight", (s.q_lora, s.hidden), "BF16"
        yield "q_a_layernorm.weight", (s.q_lora,), "BF16"
        yield "q_b_proj.weight", (queries, s.q_lora), "BF16"
    else:
        yield "q_proj.weight", (queries, s.hidden), "BF16"
    yield "kv_a_proj_with_mqa.weight", (s.kv_lora + s.rope, s.hidden), "BF16"
    yield "kv_a_layernorm.weight", (s.kv_lora,), "BF16"
    yield "kv_b_proj.weight", (s.heads * (s.nope + s.value), s.kv_lora), "BF16"
    if family == "kimi_k3":
        yield "g_proj.weight", (s.heads * s.value, s.hidden), "BF16"
    yield "o_proj.weight", (s.hidden, s.heads * s.value), "BF16"
    if family == "kimi_k2":
        yield "rotary_emb.inv_freq", (56,), "BF16"


def layer_tensors(family, s, layer):
    """Shapes and dtypes of one layer's tensors, by the name inside the layer."""
    form, hybrid = FORM[family], bool(s.kda_heads)
    found = {}

    def add(name, shape, dtype="BF16", matrix=False):
        if form == "fp8" and matrix:
            found.update(packed(name, *shape, "fp8"))
        else:
            found[name] = (shape, dtype)

    for name in ("input_layernorm.weight", "post_attention_layernorm.weight"):
        add(name, (s.hidden,))
    if s.blocks:
        for site in ("self_attention", "mlp"):
            add(f"{site}_res_norm.weight", (s.hidden,))
            add(f"{site}_res_proj.weight", (1, s.hidden))
    attention = mla_tensors if layer in s.mla else kda_tensors
    for name, shape, dtype in attention(family, s):
        add(f"self_attn.{name}", shape, dtype, matrix="_proj" in name)
    if layer == 0:
        for name, shape in (("gate", (s.dense, s.hidden)), ("up", (s.dense, s.hidden)), ("down", (s.hidden, s.dense))):
            add(f"mlp.{name}_proj.weight", shape, matrix=True)
        return found
    moe = "block_sparse_moe" if hybrid else "mlp"
    add(f"{moe}.gate.weight", (s.experts, s.hidden))
    add(f"{moe}.gate.e_score_correction_bias", (s.experts,), "BF16" if family == "kimi_linear" else "F32")
    width = s.latent or s.hidden
    if s.latent:
        add(f"{moe}.routed_expert_down_proj.weight", (s.latent, s.hidden))
        add(f"{moe}.routed_expert_norm.weight", (s.latent,))
        add(f"{moe}.routed_expert_up_proj.weight", (s.hidden, s.latent))
    inner = s.shared * s.expert
    for name, shape in (("gate", (inner, s.hidden)), ("up", (inner, s.hidden)), ("down", (s.hidden, inner))):
        add(f"{moe}.shared_experts.{name}_proj.weight", shape, matrix=True)
    names = ("w1", "w3", "w2") if hybrid else ("gate_proj", "up_proj", "down_proj")
    for expert in range(s.experts):
        for name, shape in zip(names, ((s.expert, width), (s.expert, width), (width, s.expert)), strict=True):
            found.update(packed(f"{moe}.experts.{expert}.{name}.weight", *shape, form))
    return found


def tower_tensors(family, s):
    t, is_k3 = s.tower, family == "kimi_k3"

    def both(name, shape):
        yield f"{name}.weight", shape
        if t.bias:
            yield f"{name}.bias", shape[:1]

    yield from both("vision_tower.patch_embed.proj", (t.width, 3, t.patch, t.patch))
    yield "vision_tower.patch_embed.pos_emb.weight", (t.table, t.table, t.width)
    for block in range(t.layers):
        at = f"vision_tower.encoder.blocks.{block}"
        yield from both(f"{at}.wqkv", (3 * t.inner, t.width))
        yield from both(f"{at}.wo", (t.width, t.inner))
        yield from both(f"{at}.mlp.fc0", (t.mlp, t.width))
        yield from both(f"{at}.mlp.fc1", (t.width, t.mlp))
        yield from both(f"{at}.norm0", (t.width,))
        yield from both(f"{at}.norm1", (t.width,))
    yield from both("vision_tower.encoder.final_layernorm", (t.width,))
    wide = 4 * t.width
    yield from both("mm_projector.proj.0", (wide, wide))
    yield from both("mm_projector.proj.2", (s.hidden, wide))
    if is_k3:
        yield "mm_projector.post_norm.weight", (s.hidden,)
    else:
        yield from both("mm_projector.pre_norm", (t.width,))


def shards(family, s):
    """The tensors of each file, as the releases cut them: a layer a file, then the ends, projector and tower."""
    prefix = "language_model." if family in ("kimi_k3", "kimi_k25") else ""
    for layer in range(s.layers):
        at = f"{prefix}model.layers.{layer}."
        yield {f"{at}{name}": entry for name, entry in layer_tensors(family, s, layer).items()}
    ends = {
        f"{prefix}model.embed_tokens.weight": ((s.vocab, s.hidden), "BF16"),
        f"{prefix}lm_head.weight": ((s.vocab, s.hidden), "BF16"),
        f"{prefix}model.norm.weight": ((s.hidden,), "BF16"),
    }
    if s.blocks:
        ends[f"{prefix}model.output_attn_res_norm.weight"] = ((s.hidden,), "BF16")
        ends[f"{prefix}model.output_attn_res_proj.weight"] = ((1, s.hidden), "BF16")
    yield ends
    if s.tower:
        vision = {name: (shape, "BF16") for name, shape in tower_tensors(family, s)}
        for start in ("mm_projector.", "vision_tower."):
            yield {name: entry for name, entry in vision.items() if name.startswith(start)}


def draw(name, shape, dtype, noise):
    """Random content that a trained tensor could have; no two tensors are alike."""
    if name.endswith("weight_packed"):
        low, high = (-(2**31), 2**31) if dtype == "I32" else (0, 256)
        return torch.randint(low, high, shape, generator=noise).to(torch.int32 if dtype == "I32" else torch.uint8)
    if name.endswith("weight_shape"):
        return torch.zeros(2, dtype=torch.int32)
    if dtype == "U8":
        return torch.randint(110, 125, shape, generator=noise, dtype=torch.uint8)
    if dtype == "F8_E4M3":
        codes = torch.randint(0, 127, shape, generator=noise) + 128 * torch.randint(0, 2, shape, generator=noise)
        return codes.to(torch.uint8).view(torch.float8_e4m3fn)
    values = torch.randn(shape, generator=noise) * 0.05
    if "_scale" in name:
        values = values.abs() + 1e-3
    elif "norm" in name or name.endswith("A_log"):
        values += 1
    return values.bfloat16() if dtype == "BF16" else values


def write(family, folder, sizes=None, seed=0):
    """Write a miniature and return its tensors by name."""
    s = sizes or toy(family)
    noise = torch.Generator().manual_seed(seed)
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config_of(family, s), indent=1))
    (folder / "generation_config.json").write_text('{\n  "max_length": 1048576,\n  "eos_token_id": 254\n}')
    (folder / "tokenizer_config.json").write_text("{}")
    cut = list(shards(family, s))
    everything, listed = {}, {}
    for number, shard in enumerate(cut, start=1):
        tensors = {name: draw(name, shape, dtype, noise) for name, (shape, dtype) in shard.items()}
        for name in tensors:
            if name.endswith("weight_shape"):
                rows, words = tensors[name.replace("_shape", "_packed")].shape
                tensors[name] = torch.tensor([rows, words * 8], dtype=torch.int32)
            elif name.endswith("A_log") and tensors[name].dim() == 1:
                tensors[name][s.kda_heads :] = 0
        file = f"model-{number:05d}-of-{len(cut):06d}.safetensors"
        save_file(tensors, folder / file, metadata={"format": "pt"})
        listed |= dict.fromkeys(tensors, file)
        everything |= tensors
    total = sum(tensor.nbytes for tensor in everything.values())
    index = {"metadata": {"total_size": total}, "weight_map": listed}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return everything


def write_sparse(family, folder, sizes=None):
    """Write headers and index of a set whose tensor bytes are holes; return tensors and bytes in all."""
    s = sizes or FULL[family]
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config_of(family, s)))
    cut = list(shards(family, s))
    listed, total = {}, 0
    for number, shard in enumerate(cut, start=1):
        header, end = {"__metadata__": {"format": "pt"}}, 0
        for name, (shape, dtype) in shard.items():
            size = math.prod(shape) * BYTES[dtype]
            header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [end, end + size]}
            end += size
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        file = f"model-{number:05d}-of-{len(cut):06d}.safetensors"
        with (folder / file).open("wb") as out:
            out.write(struct.pack("<Q", len(text)) + text)
            out.truncate(8 + len(text) + end)
        listed |= dict.fromkeys(shard, file)
        total += end
    index = {"metadata": {"total_size": total}, "weight_map": listed}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return len(listed), total


def values_of(tensors, name):
    """What a weight of a miniature is worth, in float64."""
    if f"{name}_packed" in tensors:
        codes, scale = tensors[f"{name}_packed"], tensors[f"{name}_scale"]
        if codes.dtype == torch.uint8:
            four = torch.stack((codes & 15, codes >> 4), -1).flatten(1)
            numbers = torch.where(four >= 8, -1.0, 1.0).double() * E2M1[(four & 7).long()]
            return numbers * torch.exp2(scale.double() - 127).repeat_interleave(32, 1)
        four = torch.stack([codes >> 4 * place & 15 for place in range(8)], -1).flatten(1)
        return (four.double() - 8) * scale.double().repeat_interleave(32, 1)
    weight = tensors[name]
    if f"{name}_scale_inv" in tensors:
        scale = tensors[f"{name}_scale_inv"].double()
        full = scale.repeat_interleave(128, 0).repeat_interleave(128, 1)
        return weight.float().double() * full[: weight.shape[0], : weight.shape[1]]
    return weight.double()
