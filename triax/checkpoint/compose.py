"""Our settings written as a published `config.json`."""

from collections.abc import Mapping
from typing import Any

from triax.checkpoint.published import Family, family_of, parse
from triax.checkpoint.published_vision import compose_vision
from triax.config.model import BlockResiduals, BoundedGate, Mla, Model, Situ
from triax.errors import ConfigError

_OUTER = {"kimi_k3": "KimiK3ForConditionalGeneration", "kimi_k25": "KimiK25ForConditionalGeneration"}


def compose(
    settings: Model,
    family: Family | None = None,
    *,
    dtype: str = "bfloat16",
    token_ids: Mapping[str, int | None] | None = None,
) -> dict[str, Any]:
    """Write settings as a published config.

    Args:
        settings: The decoder.
        family: Published form; `family_of(settings)` if not given.
        dtype: The dtype that the file announces.
        token_ids: Any of `bos_token_id`, `eos_token_id`, `pad_token_id`; the others are written as null.

    Raises:
        ConfigError: The family cannot express these settings.
    """
    family = family or family_of(settings)
    ids = {name: (token_ids or {}).get(name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    if family in ("kimi_k3", "kimi_linear"):
        text = _compose_hybrid(settings, family) | ids
    else:
        text = _compose_deepseek(settings, "deepseek_v3" if family == "kimi_k25" else family) | ids
    if family in _OUTER:
        outer = {"architectures": [_OUTER[family]], "model_type": family, "dtype": dtype}
        config = outer | ids | {"tie_word_embeddings": False, "text_config": text}
        if settings.vision is not None:
            config["media_placeholder_token_id"] = settings.vision.slot_token
            config["vision_config"] = compose_vision(settings.vision, settings.width)
    else:
        config = text | {"dtype": dtype}
    read = parse(config)
    back = read.settings.model_copy(update={"vision": read.vision})
    if back != settings:
        theirs, ours = _flat(back.model_dump()), _flat(settings.model_dump())
        lost = next(name for name in [*ours, *theirs] if ours.get(name) != theirs.get(name))
        raise ConfigError(
            f"{family}: its published form cannot express `{lost}`; found `{ours.get(lost)}` where it means "
            f"`{theirs.get(lost)}`; choose another family or change that setting"
        )
    return config


def _compose_hybrid(settings: Model, family: Family) -> dict[str, Any]:
    kda, mla, moe = settings.kda, settings.mla, settings.moe
    full = [layer + 1 for layer in sorted(settings.mla_layers)]
    config: dict[str, Any] = {
        "architectures": ["KimiLinearForCausalLM"],
        "model_type": "kimi_linear",
        "vocab_size": settings.vocab_size,
        "hidden_size": settings.width,
        "num_hidden_layers": settings.num_layers,
        "intermediate_size": settings.dense_dim,
        "hidden_act": "silu",
        "rms_norm_eps": settings.norm_eps,
        "initializer_range": settings.init_std,
        "max_position_embeddings" if family == "kimi_k3" else "model_max_length": settings.context_len,
        "num_nextn_predict_layers": int(settings.multi_token is not None),
        "tie_word_embeddings": False,
        "first_k_dense_replace": settings.num_dense_layers,
        "moe_layer_freq": 1,
        "mla_use_nope": True,
    }
    if isinstance(settings.activation, Situ):
        config["hidden_act"] = "situ"
        config["activation_situ_beta"] = settings.activation.gate_cap
        config["activation_situ_linear_beta"] = settings.activation.up_cap
    # A model without MLA layers has no MLA sizes to tell; the class wants some, and nothing is built from them.
    sizes = mla or Mla(num_heads=1, kv_latent_dim=1, nope_dim=1, rope_dim=0, value_dim=1)
    config |= {
        "num_attention_heads": sizes.num_heads,
        "num_key_value_heads": sizes.num_heads,
        "q_lora_rank": sizes.q_latent_dim or None,
        "kv_lora_rank": sizes.kv_latent_dim,
        "qk_nope_head_dim": sizes.nope_dim,
        "qk_rope_head_dim": sizes.rope_dim,
        "v_head_dim": sizes.value_dim,
    }
    if sizes.output_gate:
        config["mla_use_output_gate"] = True
    if kda is not None:
        linear: dict[str, Any] = {
            "num_heads": kda.num_heads,
            "head_dim": kda.head_dim,
            "short_conv_kernel_size": kda.conv_kernel,
            "full_attn_layers": full,
            "kda_layers": [layer for layer in range(1, settings.num_layers + 1) if layer not in full],
        }
        if kda.output_gate == "full":
            linear["use_full_rank_gate"] = True
        if isinstance(kda.decay, BoundedGate):
            linear["gate_lower_bound"] = kda.decay.lowest_log_decay
        config["linear_attn_config"] = linear
    if moe is not None:
        config |= {
            "num_experts": moe.num_experts,
            "num_experts_per_token": moe.top_k,
            "num_shared_experts": moe.num_shared_experts,
            "moe_intermediate_size": moe.expert_dim,
            "moe_router_activation_func": "sigmoid",
            "moe_renormalize": moe.renormalize,
            "routed_scaling_factor": moe.share_scale,
            "num_expert_group": moe.num_groups,
            "topk_group": moe.top_groups,
            "use_grouped_topk": True,
        }
        if moe.latent_dim:
            config |= {"routed_expert_hidden_size": moe.latent_dim, "latent_moe_use_norm": moe.latent_norm}
    if isinstance(settings.residuals, BlockResiduals):
        config["attn_res_block_size"] = settings.residuals.block_layers
    return config


def _compose_deepseek(settings: Model, model_type: str) -> dict[str, Any]:
    mla, moe = settings.mla, settings.moe
    if mla is None or moe is None or mla.rope is None:
        raise ConfigError(
            f"{model_type}: its published form needs MLA with rotary positions and experts; found neither or one; "
            "choose kimi_linear or kimi_k3"
        )
    yarn = mla.rope.yarn
    return {
        "architectures": ["DeepseekV3ForCausalLM"],
        "model_type": model_type,
        "vocab_size": settings.vocab_size,
        "hidden_size": settings.width,
        "num_hidden_layers": settings.num_layers,
        "intermediate_size": settings.dense_dim,
        "hidden_act": "silu",
        "rms_norm_eps": settings.norm_eps,
        "initializer_range": settings.init_std,
        "max_position_embeddings": settings.context_len,
        "num_nextn_predict_layers": int(settings.multi_token is not None),
        "tie_word_embeddings": False,
        "attention_bias": False,
        "first_k_dense_replace": settings.num_dense_layers,
        "moe_layer_freq": 1,
        "num_attention_heads": mla.num_heads,
        "num_key_value_heads": mla.num_heads,
        "q_lora_rank": mla.q_latent_dim or None,
        "kv_lora_rank": mla.kv_latent_dim,
        "qk_nope_head_dim": mla.nope_dim,
        "qk_rope_head_dim": mla.rope_dim,
        "v_head_dim": mla.value_dim,
        "rope_theta": mla.rope.theta,
        "rope_scaling": yarn
        and {
            "type": "yarn",
            "factor": yarn.factor,
            "original_max_position_embeddings": yarn.original_len,
            "beta_fast": yarn.beta_fast,
            "beta_slow": yarn.beta_slow,
            "mscale": yarn.mscale,
            "mscale_all_dim": yarn.mscale_all_dim,
        },
        "n_routed_experts": moe.num_experts,
        "num_experts_per_tok": moe.top_k,
        "n_shared_experts": moe.num_shared_experts,
        "moe_intermediate_size": moe.expert_dim,
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
        "n_group": moe.num_groups,
        "topk_group": moe.top_groups,
        "norm_topk_prob": moe.renormalize,
        "routed_scaling_factor": moe.share_scale,
    }


def _flat(tree: Mapping[str, Any], above: str = "") -> dict[str, Any]:
    """Name every leaf by its dotted path, so that two trees can be compared."""
    leaves: dict[str, Any] = {}
    for name, value in tree.items():
        path = f"{above}{name}"
        leaves |= _flat(value, f"{path}.") if isinstance(value, dict) else {path: value}
    return leaves
