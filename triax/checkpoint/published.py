"""Published `config.json` files and our settings, each turned into the other."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

from pydantic import ValidationError

from triax.checkpoint.keys import Keys
from triax.checkpoint.published_vision import SLOT, parse_vision
from triax.checkpoint.transformers_keys import DEFAULT_ONLY, NOT_READ, SAMPLING
from triax.config.model import BlockResiduals, BoundedGate, Kda, Mla, Model, Moe, MultiToken, Situ, Swiglu
from triax.config.vision import Vision
from triax.errors import ConfigError

Family = Literal["kimi_k3", "kimi_linear", "kimi_k2", "deepseek_v3", "kimi_k25"]
FAMILIES: tuple[Family, ...] = get_args(Family)
OF_A_RUN = ("recipe.json", "manifest.json")
"""What a run and a checkpoint of one hold in place of a config."""
LAYER_KINDS = ("linear_attention", "full_attention")

# Keys that say nothing about the text model's tensors or arithmetic.
_SILENT = frozenset(
    """
    head_dim qk_head_dim pretraining_tp output_router_logits ep_size seq_aux aux_loss_alpha use_grouped_topk
    """.split()  # noqa: SIM905
)
_SILENT_NOPE = frozenset({"rope_theta", "rope_scaling", "rope_parameters"})  # no NoPE model reads them
_SILENT_MEDIA = frozenset(
    """
    ignore_index image_placeholder video_placeholder use_unified_vision_chunk
    video_token_id vision_start_token_id vision_end_token_id
    """.split()  # noqa: SIM905
)


class Published(NamedTuple):
    """What a published config says about the text model."""

    family: Family
    """The `model_type` that decides tensor names and file dtypes."""
    settings: Model
    """The same model in our settings."""
    notes: tuple[str, ...] = ()
    """What the file also says and the settings do not hold, for a person to read."""
    vision: Vision | None = None
    """The tower, if the file describes one; the settings are those of the text model."""


def read_config(folder: Path) -> Published:
    """Read `config.json` of a folder of released weights."""
    path = folder / "config.json"
    try:
        config = json.loads(path.read_text(encoding="utf-8-sig"))
    except (FileNotFoundError, NotADirectoryError):
        raise _without_config(folder) from None
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as problem:
        raise ConfigError(f"{path}: cannot be read as JSON; {problem}; copy it again") from None
    if not isinstance(config, dict):
        raise ConfigError(f"{path}: must be a JSON object; found `{type(config).__name__}`; copy it again")
    return parse(config, where=str(path))


def _without_config(folder: Path) -> ConfigError:
    """Tell what is no folder of released weights by what it is instead."""
    if not folder.is_dir():
        found = "a file" if folder.exists() else "nothing"
        return ConfigError(
            f"{folder}: is no folder of weights; found {found}; name one with `config.json` and its files"
        )
    for mark in OF_A_RUN:
        if (folder / mark).is_file():
            return ConfigError(
                f"{folder}: is a run or a checkpoint of one, which is checked whenever it is read; found `{mark}`; "
                f"for released weights write `triax convert {folder} FOLDER --to bf16` first"
            )
    return ConfigError(f"{folder / 'config.json'}: not found; a folder of released weights has one; copy it there")


def parse(config: Mapping[str, Any], where: str = "config.json") -> Published:
    """Turn a published config into settings.

    Args:
        config: The parsed `config.json`.
        where: How errors call it.

    Raises:
        ConfigError: The family is not supported, a key is unknown, missing or of the wrong type, or two disagree.

    Source: the released configs of Kimi-K3, Kimi-Linear-48B-A3B, Kimi-K2, Kimi-K2.5 and Moonlight-16B-A3B.
    """
    family = config.get("model_type")
    if family not in FAMILIES:
        raise ConfigError(
            f"{where}: model_type is not supported; found `{family}`; choose one of {', '.join(FAMILIES)}"
        )
    notes: list[str] = []
    text, tower, slot, whole, projector_eps = config, {}, SLOT, where, None
    if "text_config" in config:
        outer = Keys(config, where)
        text = outer.take("text_config", dict)
        tower = outer.take("vision_config", dict, {})
        slot = outer.take("media_placeholder_token_id", int, outer.take("image_token_id", int, SLOT))
        outer.expect("image_token_id", slot)
        outer.expect("tie_word_embeddings", False)
        projector_eps = outer.take("projection_layer_norm_eps", float, None)
        outer.take("projection_hidden_size", int, None)
        _note_quantization(outer, notes)
        notes += outer.finish_config(_SILENT_MEDIA)
        where = f"{where}: text_config"
    elif family in ("kimi_k3", "kimi_k25"):
        raise ConfigError(f"{where}: `text_config` is missing; a {family} config holds the text model there; add it")
    keys = Keys(text, where)
    _note_quantization(keys, notes)
    hybrid = family in ("kimi_k3", "kimi_linear")
    try:
        settings = _hybrid(keys) if hybrid else _deepseek(keys)
    except ValidationError as problem:
        first = problem.errors()[0]
        place = ".".join(str(part) for part in first["loc"]) or "the whole"
        raise ConfigError(f"{where}: {place}: {first['msg']}; found `{first['input']}`; correct it") from None
    notes += keys.finish_config(_SILENT | (_SILENT_NOPE if hybrid else frozenset()))
    vision = None
    if tower:
        described = Keys(tower, f"{whole}: vision_config")
        vision = parse_vision(described, settings.width, slot, projector_eps=projector_eps)
    return Published(family, settings, tuple(notes), vision)


def carry(config: dict[str, Any], source: Mapping[str, Any]) -> None:
    """Take over from a published config what a newly written one does not say and no setting of ours holds.

    Args:
        config: The new config; changed in place.
        source: The published one, as it was read.
    """
    kept = _SILENT | _SILENT_MEDIA | NOT_READ | SAMPLING.keys() | DEFAULT_ONLY.keys()
    for name, value in source.items():
        if name not in config and name in kept:
            config[name] = value
    for name in ("text_config", "vision_config"):
        if name in config and name in source:
            carry(config[name], source[name])


def family_of(settings: Model) -> Family:
    """Return the plainest family that can express the settings.

    K2 is DeepSeek-V3's class under a name of its own, which transformers does not know: only released files bear it.
    """
    if settings.mla is not None and settings.mla.rope is not None:
        return "deepseek_v3" if settings.vision is None else "kimi_k25"
    k3_parts = (
        settings.vision is not None,
        settings.residuals is not None,
        isinstance(settings.activation, Situ),
        settings.moe is not None and settings.moe.latent_dim > 0,
        settings.mla is not None and (settings.mla.output_gate or settings.mla.q_latent_dim > 0),
        settings.kda is not None
        and (settings.kda.output_gate == "full" or isinstance(settings.kda.decay, BoundedGate)),
    )
    return "kimi_k3" if any(k3_parts) else "kimi_linear"


def _note_quantization(keys: Keys, notes: list[str]) -> None:
    quantization = keys.take("quantization_config", dict, {})
    if quantization:
        kind = quantization.get("format") or quantization.get("quant_method")
        notes.append(f"quantization_config announces `{kind}`; each tensor's own form decides")


def _multi_token(keys: Keys) -> MultiToken | None:
    depth = keys.take("num_nextn_predict_layers", int, 0)
    if depth > 1:
        raise ConfigError(f"{keys.where}: `num_nextn_predict_layers` must be 0 or 1; found `{depth}`; lower it")
    return MultiToken() if depth else None


def _check_heads(keys: Keys, num_heads: int) -> None:
    keys.expect("num_key_value_heads", num_heads)
    keys.expect("tie_word_embeddings", False)
    keys.expect("attention_bias", False)
    keys.expect("attention_dropout", 0.0)
    keys.expect("moe_layer_freq", 1)
    keys.expect("topk_method", "noaux_tc")


def _hybrid(keys: Keys) -> Model:
    """Read the class that describes K3 and Kimi Linear; absent keys mean its defaults."""
    num_layers = keys.take("num_hidden_layers", int)
    num_heads = keys.take("num_attention_heads", int)
    _check_heads(keys, num_heads)
    keys.expect("mla_use_nope", True)
    keys.expect("moe_router_activation_func", "sigmoid")
    mla_layers, kda = _attention_layers(keys, num_layers)
    mla = Mla(
        num_heads=num_heads,
        q_latent_dim=keys.take("q_lora_rank", int, 0),
        kv_latent_dim=keys.take("kv_lora_rank", int),
        nope_dim=keys.take("qk_nope_head_dim", int),
        rope_dim=keys.take("qk_rope_head_dim", int),
        value_dim=keys.take("v_head_dim", int),
        output_gate=keys.take("mla_use_output_gate", bool, False),
    )
    moe_keys = {
        "top_k": keys.take("num_experts_per_token", int, None),
        "num_shared_experts": keys.take("num_shared_experts", int, 0),
        "expert_dim": keys.take("moe_intermediate_size", int, None),
        "latent_dim": keys.take("routed_expert_hidden_size", int, 0),
        "renormalize": keys.take("moe_renormalize", bool, True),
        "share_scale": keys.take("routed_scaling_factor", float, 1.0),
        "num_groups": keys.take("num_expert_group", int, 1),
        "top_groups": keys.take("topk_group", int, 1),
    }
    latent_norm = keys.take("latent_moe_use_norm", bool, False)
    num_experts = keys.take("num_experts", int, None)
    if moe_keys["latent_dim"]:
        moe_keys["latent_norm"] = latent_norm
    block_layers = keys.take("attn_res_block_size", int, None)
    return Model(
        vocab_size=keys.take("vocab_size", int),
        width=keys.take("hidden_size", int),
        num_layers=num_layers,
        mla_layers=mla_layers,
        num_dense_layers=_dense_layers(keys, num_layers) if num_experts else num_layers,
        dense_dim=keys.take("intermediate_size", int, 0),
        activation=_activation(keys),
        kda=kda,
        mla=mla if mla_layers else None,
        moe=Moe(num_experts=num_experts, **moe_keys) if num_experts else None,
        residuals=BlockResiduals(block_layers=block_layers) if block_layers else None,
        multi_token=_multi_token(keys),
        norm_eps=keys.take("rms_norm_eps", float, 1e-6),
        init_std=keys.take("initializer_range", float, 0.02),
        context_len=keys.take("model_max_length", int, keys.take("max_position_embeddings", int, 1048576)),
    )


def _activation(keys: Keys) -> Situ | Swiglu:
    kind = keys.take("hidden_act", str, "silu")
    gate_cap = keys.take("activation_situ_beta", float, 1.0)
    up_cap = keys.take("activation_situ_linear_beta", float, None)
    if kind not in ("silu", "situ"):
        raise ConfigError(
            f"{keys.where}: `hidden_act` is not supported; found `{kind}`; only `silu` or `situ` can be built"
        )
    return Swiglu() if kind == "silu" else Situ(gate_cap=gate_cap, up_cap=up_cap)


def _attention_layers(keys: Keys, num_layers: int) -> tuple[tuple[int, ...], Kda | None]:
    """Read which layers are MLA and the shape of the others, from either of the two published spellings."""
    spelled: dict[str, Any] = {}  # transformers writes the same facts flat, beside or instead of the table
    for flat, nested in (
        ("linear_num_heads", "num_heads"),
        ("linear_head_dim", "head_dim"),
        ("linear_conv_kernel_dim", "short_conv_kernel_size"),
    ):
        spelled[nested] = keys.take(flat, int, None)
    kinds = keys.take("layer_types", list, None)
    table = keys.take("linear_attn_config", dict, None)
    linear = Keys(
        table or {name: value for name, value in spelled.items() if value is not None},
        f"{keys.where}: linear_attn_config",
    )
    full = linear.take("full_attn_layers", list, None)
    delta = linear.take("kda_layers", list, None)
    if full is not None or delta is not None:
        full, delta = full or [], delta or []
        if sorted([*full, *delta]) != list(range(1, num_layers + 1)):
            raise ConfigError(
                f"{linear.where}: `full_attn_layers` and `kda_layers` must name each layer from 1 to {num_layers} "
                f"once; found `{sorted([*full, *delta])}`; correct them"
            )
        mla_layers = tuple(layer - 1 for layer in sorted(full))
    elif kinds is not None:
        mla_layers = tuple(layer for layer, kind in enumerate(kinds) if kind == "full_attention")
    elif table is None and not any(spelled.values()):
        mla_layers = tuple(range(num_layers))
    else:
        raise ConfigError(f"{linear.where}: `full_attn_layers` is missing; it says which layers are MLA; add it")
    if kinds is not None and kinds != [LAYER_KINDS[layer in mla_layers] for layer in range(num_layers)]:
        raise ConfigError(
            f"{keys.where}: `layer_types` does not describe the {num_layers} layers of the rest of the file; "
            f"found `{kinds}`; correct it"
        )
    if len(mla_layers) == num_layers:
        for name in ("num_heads", "head_dim", "short_conv_kernel_size", "use_full_rank_gate", "gate_lower_bound"):
            linear.taken.add(name)
        linear.finish()
        return mla_layers, None
    lowest = linear.take("gate_lower_bound", float, None)
    kda = Kda.model_validate(
        {
            "num_heads": linear.take("num_heads", int),
            "head_dim": linear.take("head_dim", int),
            "conv_kernel": linear.take("short_conv_kernel_size", int, 4),
            "decay": {"kind": "softplus"} if lowest is None else {"kind": "bounded", "lowest_log_decay": lowest},
            "output_gate": "full" if linear.take("use_full_rank_gate", bool, False) else "low_rank",
        }
    )
    linear.finish()
    for name, value in spelled.items():
        if table is not None and value is not None and value != linear.table.get(name, value):
            raise ConfigError(
                f"{linear.where}: `{name}` is written twice; found `{linear.table[name]}` and `{value}`; remove one"
            )
    return mla_layers, kda


def _dense_layers(keys: Keys, num_layers: int) -> int:
    """Read how many layers come before the first routed one, from either of the two published spellings."""
    kinds = keys.take("mlp_layer_types", list, None)
    count = keys.take("first_k_dense_replace", int, 0 if kinds is None else kinds.count("dense"))
    if kinds is not None and kinds != ["dense" if layer < count else "sparse" for layer in range(num_layers)]:
        raise ConfigError(
            f"{keys.where}: `mlp_layer_types` must be {count} dense layers and then routed ones; "
            f"found `{kinds}`; only that order can be built"
        )
    return count


def _deepseek(keys: Keys) -> Model:
    """Read the class that describes K2, K2.5 and Moonlight."""
    num_layers = keys.take("num_hidden_layers", int)
    num_heads = keys.take("num_attention_heads", int)
    _check_heads(keys, num_heads)
    keys.expect("hidden_act", "silu")
    keys.expect("scoring_func", "sigmoid")
    keys.expect("rope_interleave", True)
    return Model(
        vocab_size=keys.take("vocab_size", int),
        width=keys.take("hidden_size", int),
        num_layers=num_layers,
        mla_layers=tuple(range(num_layers)),
        num_dense_layers=_dense_layers(keys, num_layers),
        dense_dim=keys.take("intermediate_size", int, 0),
        activation=Swiglu(),
        mla=Mla(
            num_heads=num_heads,
            q_latent_dim=keys.take("q_lora_rank", int, 0),
            kv_latent_dim=keys.take("kv_lora_rank", int),
            nope_dim=keys.take("qk_nope_head_dim", int),
            rope_dim=keys.take("qk_rope_head_dim", int),
            value_dim=keys.take("v_head_dim", int),
            rope=_rope(keys),
        ),
        moe=Moe(
            num_experts=keys.take("n_routed_experts", int),
            top_k=keys.take("num_experts_per_tok", int),
            num_shared_experts=keys.take("n_shared_experts", int, 0),
            expert_dim=keys.take("moe_intermediate_size", int),
            renormalize=keys.take("norm_topk_prob", bool, True),
            share_scale=keys.take("routed_scaling_factor", float, 1.0),
            num_groups=keys.take("n_group", int),
            top_groups=keys.take("topk_group", int),
        ),
        multi_token=_multi_token(keys),
        norm_eps=keys.take("rms_norm_eps", float, 1e-6),
        init_std=keys.take("initializer_range", float, 0.02),
        context_len=keys.take("model_max_length", int, keys.take("max_position_embeddings", int, 1048576)),
    )


def _rope(keys: Keys) -> dict[str, Any]:
    """Read rotary positions: `rope_theta` and `rope_scaling`, or transformers' single `rope_parameters`."""
    table = keys.take("rope_parameters", dict, None)
    scaling = keys.take("rope_scaling", dict, {})
    theta = keys.take("rope_theta", float, None if table else 10000.0)
    place = "rope_scaling" if table is None else "rope_parameters"
    inner = Keys(scaling if table is None else table, f"{keys.where}: {place}")
    theta = inner.take("rope_theta", float, theta if theta is not None else 10000.0)
    kinds = {inner.take(name, str, None) for name in ("type", "rope_type")} - {None}
    if kinds - {"yarn", "default"} or len(kinds) > 1:
        raise ConfigError(
            f"{inner.where}: the type is not supported; found `{sorted(kinds)}`; only `yarn` can be built"
        )
    if kinds != {"yarn"}:
        inner.finish()
        return {"theta": theta}
    yarn = {
        "factor": inner.take("factor", float),
        "original_len": inner.take("original_max_position_embeddings", int),
        "beta_fast": inner.take("beta_fast", float, 32.0),
        "beta_slow": inner.take("beta_slow", float, 1.0),
        "mscale": inner.take("mscale", float, 1.0),
        "mscale_all_dim": inner.take("mscale_all_dim", float, 0.0),
    }
    inner.finish()
    return {"theta": theta, "yarn": yarn}
