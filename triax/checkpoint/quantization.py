"""The `quantization_config` of a published config: which weights are codes, as other programs are told."""

import re
from collections.abc import Collection, Mapping
from typing import Any

from triax.checkpoint.forms import BLOCK, GROUP, Form
from triax.checkpoint.names import TensorSpec

KEY = "quantization_config"


def announced(config: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return what a config says about quantisation, wherever it says it."""
    return config.get(KEY) or config.get("text_config", {}).get(KEY)


def announce(
    config: dict[str, Any],
    form: Form,
    packed: Collection[TensorSpec],
    plain: Collection[TensorSpec],
    kept: Mapping[str, Any] | None = None,
) -> None:
    """Write into a config how its weights are stored; nothing is said about plain ones.

    Args:
        config: The published config; changed in place.
        form: Form of the packed weights.
        packed: Weights stored as codes.
        plain: Weights stored as they are.
        kept: What the source's config said, when its weights keep their form.
    """
    place = config.get("text_config", config)
    config.pop(KEY, None)
    place.pop(KEY, None)
    if form != "plain" and packed:
        place[KEY] = dict(kept) if kept else _describe(form, plain)


def _describe(form: Form, plain: Collection[TensorSpec]) -> dict[str, Any]:
    if form == "fp8":
        return {
            "quant_method": "fp8",
            "fmt": "e4m3",
            "activation_scheme": "dynamic",
            "weight_block_size": [BLOCK, BLOCK],
            "modules_to_not_convert": _modules(plain),
        }
    weights: dict[str, Any] = {
        "num_bits": 4,
        "type": "float" if form == "mxfp4" else "int",
        "strategy": "group",
        "group_size": GROUP,
        "symmetric": True,
        "dynamic": False,
        "observer": "minmax",
        "actorder": None,
    }
    if form == "mxfp4":
        weights |= {"scale_dtype": "torch.uint8", "zp_dtype": None}
    group = {"targets": ["Linear"], "weights": weights, "input_activations": None, "output_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "format": "mxfp4-pack-quantized" if form == "mxfp4" else "pack-quantized",
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "kv_cache_scheme": None,
        "ignore": [f"re:.*{re.escape(module)}$" for module in _modules(plain)],
    }


def _modules(plain: Collection[TensorSpec]) -> list[str]:
    """Name the modules whose matrices stay plain, once for all layers."""
    names = {
        spec.name.removesuffix(".weight") for spec in plain if len(spec.held) == 2 and spec.name.endswith("weight")
    }
    ends = {re.split(r"\.\d+\.", name)[-1] for name in names}
    return sorted(end for end in ends if not end.endswith(("conv1d", "embed_tokens", "pos_emb")))
