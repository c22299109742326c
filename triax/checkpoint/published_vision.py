"""The `vision_config` of published files and our settings of the tower, each turned into the other."""

from typing import Any

from pydantic import ValidationError

from triax.checkpoint.keys import Keys
from triax.config.vision import Vision
from triax.errors import ConfigError

SLOT = 163605  # `<|media_pad|>`
# How transformers 5.x spells the keys of K2.5's tower, beside or instead of the released ones.
_ALIASES = {
    "vt_hidden_size": "hidden_size",
    "vt_num_hidden_layers": "num_hidden_layers",
    "vt_num_attention_heads": "num_attention_heads",
    "vt_intermediate_size": "intermediate_size",
    "activation_func": "hidden_act",
    "init_pos_emb_height": "pos_emb_height",
    "init_pos_emb_width": "pos_emb_width",
    "init_pos_emb_time": "pos_emb_time",
}
_TYPE_OF_K25 = "kimi_k25_vision"  # transformers' own class, which knows one projector and names none
# What K2.5's shipped code does and its file does not say, beside K3's defaults of the settings.
_K25 = {"norm": "layer", "norm_eps": 1e-5, "bias": True, "resize": "bicubic", "projector": "norm_before"}
_EXPECTED = {
    "pos_emb_type": "divided_fixed",
    "mlp_type": "mlp2",
    "merge_type": "sd2_tpool",
    "activation_func": "gelu_pytorch_tanh",
    "projector_hidden_act": "gelu",
    "video_attn_type": "spatial_temporal",
    "rope_parameters": {"rope_theta": 10000.0, "rope_type": "axial"},
}
_PROJECTORS = {"patchmergerv2": "norm_after", "patchmerger": "norm_before"}
_NORMS = {"rmsnorm": "rms", "layernorm": "layer"}


def parse_vision(keys: Keys, width: int, slot_token: int, *, projector_eps: float | None = None) -> Vision:
    """Turn a published `vision_config` into settings.

    Args:
        keys: The table.
        width: Channels of the decoder, which the file repeats.
        slot_token: Token whose embeddings the features replace.
        projector_eps: Of the projector's norm, where the file tells it outside of the table.

    Raises:
        ConfigError: A key is unknown, missing or of another type, or asks for what cannot be built.

    Source: the released configs of Kimi-K3 and Kimi-K2.5, and the latter as transformers 5.24 writes it.
    """
    for name, other in _ALIASES.items():
        keys.alias(name, other)
    for name, value in _EXPECTED.items():
        keys.expect(name, value)
    native = ("patchmerger",) if keys.table.get("model_type") == _TYPE_OF_K25 else ()
    kind = keys.take("mm_projector_type", str, *native)
    if kind not in _PROJECTORS:
        raise ConfigError(
            f"{keys.where}: `mm_projector_type` is not supported; found `{kind}`; "
            f"only {' or '.join(f'`{one}`' for one in _PROJECTORS)} can be built"
        )
    tree: dict[str, Any] = dict(_K25) if kind == "patchmerger" else {}
    tree["projector"] = _PROJECTORS[kind]
    norm = keys.take("norm_type", str, None)
    if norm is not None:
        tree["norm"] = _NORMS.get(norm, norm)
    tree["resize"] = keys.take("pos_emb_interpolation_mode", str, tree.get("resize", "bilinear"))
    bias = tree.get("bias", False)
    found = {keys.take(name, bool, bias) for name in ("attn_bias", "linear_bias", "patch_embed_proj_bias")}
    if len(found) != 1:
        raise ConfigError(
            f"{keys.where}: `attn_bias`, `linear_bias` and `patch_embed_proj_bias` must agree; found both values; "
            "only one for all can be built"
        )
    own, heads = keys.take("vt_hidden_size", int), keys.take("vt_num_attention_heads", int)
    inner = keys.take("qkv_hidden_size", int, own)
    if heads < 1 or inner % heads:
        raise ConfigError(f"{keys.where}: {heads} heads do not share `qkv_hidden_size`; found `{inner}`; correct it")
    merge = keys.take("merge_kernel_size", list, [2, 2])
    if len(merge) != 2 or merge[0] != merge[1]:
        raise ConfigError(f"{keys.where}: `merge_kernel_size` must be a square; found `{merge}`; correct it")
    keys.expect("mm_hidden_size", own)
    keys.expect("text_hidden_size", width)
    tree |= {
        "bias": found.pop(),
        "width": own,
        "num_layers": keys.take("vt_num_hidden_layers", int),
        "num_heads": heads,
        "head_dim": inner // heads,
        "mlp_dim": keys.take("vt_intermediate_size", int),
        "patch": keys.take("patch_size", int, 14),
        "merge": merge[0],
        "table_rows": keys.take("init_pos_emb_height", int, 64),
        "table_columns": keys.take("init_pos_emb_width", int, 64),
        "max_frames": keys.take("init_pos_emb_time", int, 4),
        "projector_eps": keys.take("projector_ln_eps", float, 1e-5 if projector_eps is None else projector_eps),
        "slot_token": slot_token,
    }
    keys.finish_config(frozenset({"tie_word_embeddings"}))  # a tower has no head, yet 4.x writes its default
    try:
        return Vision.model_validate(tree)
    except ValidationError as problem:
        first = problem.errors()[0]
        place = ".".join(str(part) for part in first["loc"]) or "the whole"
        raise ConfigError(f"{keys.where}: {place}: {first['msg']}; found `{first['input']}`; correct it") from None


def compose_vision(vision: Vision, width: int) -> dict[str, Any]:
    """Write the settings of a tower as a published `vision_config`."""
    return {
        "patch_size": vision.patch,
        "init_pos_emb_height": vision.table_rows,
        "init_pos_emb_width": vision.table_columns,
        "init_pos_emb_time": vision.max_frames,
        "pos_emb_type": "divided_fixed",
        "pos_emb_interpolation_mode": vision.resize,
        "vt_hidden_size": vision.width,
        "vt_num_hidden_layers": vision.num_layers,
        "vt_num_attention_heads": vision.num_heads,
        "qkv_hidden_size": vision.num_heads * vision.head_dim,
        "vt_intermediate_size": vision.mlp_dim,
        "activation_func": "gelu_pytorch_tanh",
        "norm_type": next(theirs for theirs, ours in _NORMS.items() if ours == vision.norm),
        "mlp_type": "mlp2",
        "attn_bias": vision.bias,
        "linear_bias": vision.bias,
        "patch_embed_proj_bias": vision.bias,
        "merge_kernel_size": [vision.merge, vision.merge],
        "merge_type": "sd2_tpool",
        "mm_projector_type": next(theirs for theirs, ours in _PROJECTORS.items() if ours == vision.projector),
        "mm_hidden_size": vision.width,
        "text_hidden_size": width,
        "projector_hidden_act": "gelu",
        "projector_ln_eps": vision.projector_eps,
    }
