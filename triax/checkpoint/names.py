"""The published name, shape and file dtype of every tensor of a decoder."""

from collections.abc import Iterator
from math import prod
from typing import Literal, NamedTuple

from triax.checkpoint.published import Family
from triax.checkpoint.vision_names import vision_tensors
from triax.config.model import Model
from triax.model.count import Weight, weights

FileDtype = Literal["BF16", "F32"]


class TensorSpec(NamedTuple):
    """One tensor of a released checkpoint and the place of its values in our decoder."""

    name: str
    """Published name."""
    shape: tuple[int, ...]
    """Shape in the file."""
    dtype: str
    """Dtype in the released files when it is not packed: `BF16` or `F32`."""
    ours: str
    """Name in the decoder's state dict."""
    index: int | None
    """Which expert of our stack it is; none for a tensor of its own."""
    held: tuple[int, ...]
    """Shape as we hold it (of one expert, for a stack): the file's without padding and singleton axes."""


_TOP = {
    "embed.weight": "model.embed_tokens.weight",
    "head.weight": "lm_head.weight",
    "output_norm.weight": "model.norm.weight",
    "output_mix.norm": "model.output_attn_res_norm.weight",
    "output_mix.query": "model.output_attn_res_proj.weight",
    # No names are published for the extra prediction layer; these are ours.
    "multi_token.hidden_norm.weight": "model.multi_token.hidden_norm.weight",
    "multi_token.embed_norm.weight": "model.multi_token.embed_norm.weight",
    "multi_token.project.weight": "model.multi_token.project.weight",
}

_LAYER = {
    "attention_mix.norm": "self_attention_res_norm.weight",
    "attention_mix.query": "self_attention_res_proj.weight",
    "attention_norm.weight": "input_layernorm.weight",
    "mlp_mix.norm": "mlp_res_norm.weight",
    "mlp_mix.query": "mlp_res_proj.weight",
    "mlp_norm.weight": "post_attention_layernorm.weight",
    "attention.query.weight": "self_attn.q_proj.weight",
    "attention.key.weight": "self_attn.k_proj.weight",
    "attention.value.weight": "self_attn.v_proj.weight",
    "attention.query_conv": "self_attn.q_conv1d.weight",
    "attention.key_conv": "self_attn.k_conv1d.weight",
    "attention.value_conv": "self_attn.v_conv1d.weight",
    "attention.decay_down.weight": "self_attn.f_a_proj.weight",
    "attention.decay_up.weight": "self_attn.f_b_proj.weight",
    "attention.decay_rate": "self_attn.A_log",
    "attention.decay_bias": "self_attn.dt_bias",
    "attention.beta.weight": "self_attn.b_proj.weight",
    "attention.gate.weight": "self_attn.g_proj.weight",
    "attention.gate_down.weight": "self_attn.g_a_proj.weight",
    "attention.gate_up.weight": "self_attn.g_b_proj.weight",
    "attention.norm.weight": "self_attn.o_norm.weight",
    "attention.output.weight": "self_attn.o_proj.weight",
    "attention.query_down.weight": "self_attn.q_a_proj.weight",
    "attention.query_norm.weight": "self_attn.q_a_layernorm.weight",
    "attention.query_up.weight": "self_attn.q_b_proj.weight",
    "attention.latent_down.weight": "self_attn.kv_a_proj_with_mqa.weight",
    "attention.latent_norm.weight": "self_attn.kv_a_layernorm.weight",
    "attention.latent_up.weight": "self_attn.kv_b_proj.weight",
    "mlp.gate.weight": "mlp.gate_proj.weight",
    "mlp.up.weight": "mlp.up_proj.weight",
    "mlp.down.weight": "mlp.down_proj.weight",
    "mlp.router.weight": "{moe}.gate.weight",
    "mlp.router.balance_bias": "{moe}.gate.e_score_correction_bias",
    "mlp.latent_down.weight": "{moe}.routed_expert_down_proj.weight",
    "mlp.latent_norm.weight": "{moe}.routed_expert_norm.weight",
    "mlp.latent_up.weight": "{moe}.routed_expert_up_proj.weight",
    "mlp.shared.gate.weight": "{moe}.shared_experts.gate_proj.weight",
    "mlp.shared.up.weight": "{moe}.shared_experts.up_proj.weight",
    "mlp.shared.down.weight": "{moe}.shared_experts.down_proj.weight",
}

_EXPERT = {
    "block_sparse_moe": {"gate": "w1", "up": "w3", "down": "w2"},
    "mlp": {"gate": "gate_proj", "up": "up_proj", "down": "down_proj"},
}

# Kimi Linear's files hold only these two in F32; K3's and K2's hold whatever we keep in float32.
_KIMI_LINEAR_F32 = ("attention.decay_rate", "attention.decay_bias")

PREFIX = "language_model."


def inventory(settings: Model, family: Family, *, multi_token: bool = False) -> Iterator[TensorSpec]:
    """List the tensors of a released checkpoint with plain (unquantised) weights, those of a vision tower last.

    Args:
        settings: The decoder.
        family: Whose names, shapes and dtypes.
        multi_token: List the extra prediction layer too; released checkpoints leave it out.

    Source: the tensor lists of Kimi-K3, Kimi-Linear-48B-A3B, Kimi-K2 and Kimi-K2.5 as released.
    """
    prefix = PREFIX if family in ("kimi_k3", "kimi_k25") else ""
    moe = "block_sparse_moe" if family in ("kimi_k3", "kimi_linear") else "mlp"
    for weight in weights(settings):
        if weight.part == "vision" or (weight.part == "multi_token" and not multi_token):
            continue
        layer, local = _split(weight.name)
        if weight.is_stack:
            kind = _EXPERT[moe][local.rpartition(".")[2]]
            shape = weight.shape[1:]
            for index in range(weight.shape[0]):
                name = f"{prefix}model.{layer}.{moe}.experts.{index}.{kind}.weight"
                yield TensorSpec(name, shape, "BF16", weight.name, index, shape)
            continue
        name = f"model.{layer}.{_LAYER[local].format(moe=moe)}" if layer else _TOP[local]
        shape, dtype = _shape(weight, local, settings, family), _dtype(weight, local, family)
        yield TensorSpec(prefix + name, shape, dtype, weight.name, None, weight.shape)
    for tensor in vision_tensors(settings):
        yield TensorSpec(tensor.name, tensor.shape, tensor.dtype, tensor.ours, None, tensor.shape)


def own_inventory(settings: Model) -> Iterator[TensorSpec]:
    """List the tensors of our own layout: names of the decoder's state dict, the experts of a layer in one stack."""
    for weight in weights(settings):
        dtype: FileDtype = "F32" if weight.is_float32 else "BF16"
        yield TensorSpec(weight.name, weight.shape, dtype, weight.name, None, weight.shape)


def _split(name: str) -> tuple[str, str]:
    """Part `layers.3.mlp.up.weight` into the layer and the name inside it; the layer is empty outside of layers."""
    for depth, start in ((2, "layers."), (2, "multi_token.layer.")):
        if name.startswith(start):
            parts = name.split(".", depth)
            return ".".join(parts[:depth]), parts[depth]
    return "", name


def _shape(weight: Weight, local: str, settings: Model, family: Family) -> tuple[int, ...]:
    if local.endswith("_mix.query"):
        return (1, *weight.shape)
    if local.endswith("_conv"):
        return (weight.shape[0], 1, weight.shape[1])
    if local == "attention.decay_rate" and settings.kda is not None:
        heads = settings.kda.num_heads
        return (max(heads, settings.kda.head_dim),) if family == "kimi_k3" else (1, 1, heads, 1)
    return weight.shape


def _dtype(weight: Weight, local: str, family: Family) -> FileDtype:
    if family == "kimi_linear" and local not in _KIMI_LINEAR_F32:
        return "BF16"
    return "F32" if weight.is_float32 else "BF16"


def accepts(spec: TensorSpec, shape: tuple[int, ...]) -> bool:
    """Whether a file may hold the tensor in this shape: as released, or as the known other writers spell it."""
    if shape == spec.shape:
        return True
    if spec.ours.endswith(".decay_rate"):
        return (len(shape) == 1 and shape[0] >= spec.held[0]) or shape == (1, 1, spec.held[0], 1)
    if spec.ours.endswith(".decay_bias"):
        return prod(shape) == prod(spec.held)
    return spec.ours.endswith(("_conv", "_mix.query")) and shape == spec.held
