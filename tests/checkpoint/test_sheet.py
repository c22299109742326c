"""The released models, counted: every figure is that of the published tensors."""

import json
from collections import Counter
from functools import cache
from math import prod
from pathlib import Path

import pytest
import torch

from triax.checkpoint.names import inventory
from triax.checkpoint.published import parse
from triax.config.load import load_model
from triax.config.model import MultiToken
from triax.model.count import sheet, weights
from triax.model.decoder import Decoder

FOLDER = Path(__file__).parent / "published"
RELEASED = ["kimi_k3", "kimi_linear", "kimi_k2", "moonlight"]


@cache
def published(name):
    return parse(json.loads((FOLDER / f"{name}.json").read_text()))


@cache
def listed(name):
    family, settings, *_ = published(name)
    return list(inventory(settings, family))


@pytest.mark.parametrize(
    ("name", "num_tensors", "parameters", "active"),
    [
        ("kimi_k3", 249_756, 2_779_484_476_000, 104_189_612_640),
        ("kimi_linear", 20_493, 49_122_681_728, 3_106_972_544),
        ("kimi_k2", 69_975, 1_026_408_232_448, 31_687_095_808),
        ("kimi_k25", 69_975, 1_026_408_232_448, 31_687_095_808),
        ("moonlight", 5_317, 15_960_110_208, 2_243_687_552 + 163_840 * 2_048),
    ],
)
def test_the_sheet_counts_what_was_released(name, num_tensors, parameters, active):
    counted = sheet(published(name).settings)
    assert (counted.num_tensors, counted.parameters, counted.active_parameters) == (num_tensors, parameters, active)


@pytest.mark.parametrize(
    ("preset", "name"),
    [("k3", "kimi_k3"), ("kimi-linear", "kimi_linear"), ("k2", "kimi_k2"), ("moonlight", "moonlight")],
)
def test_a_preset_is_the_released_model(preset, name):
    assert load_model(preset) == published(name).settings


def test_the_parts_of_k3_are_those_of_its_tensors():
    parts = sheet(published("kimi_k3").settings).parameters_by_part
    assert parts["mixing"] == 2_680_832
    assert parts["embedding"] == parts["head"] == 163_840 * 7_168
    assert round(parts["experts"] / 1e9, 2) == 2_722.74
    assert round(parts["latent"] / 1e9, 2) == 4.73
    assert round(parts["router"] / 1e9, 3) == 0.591


def test_a_k3_token_leaves_27_kilobytes_in_the_cache_and_a_sequence_one_state():
    counted = sheet(published("kimi_k3").settings)
    assert counted.cache_bytes_per_token == 27_648
    assert counted.cache_bytes_per_sequence == 434_110_464 + 69 * 221_184


@pytest.mark.parametrize("name", RELEASED)
def test_the_inventory_lists_each_released_tensor_once(name):
    family, settings, *_ = published(name)
    specs = listed(name)
    assert len({spec.name for spec in specs}) == len(specs) == sheet(settings).num_tensors
    padding = 69 * 32 if family == "kimi_k3" else 0  # 96 heads in a tensor of 128
    assert sum(prod(spec.shape) for spec in specs) == sheet(settings).parameters + padding
    assert sum(prod(spec.held) for spec in specs) == sheet(settings).parameters


# Some rows of the released tensor lists, layer by layer where they differ.
ROWS = {
    "kimi_k3": {
        "language_model.model.embed_tokens.weight": ((163840, 7168), "BF16"),
        "language_model.lm_head.weight": ((163840, 7168), "BF16"),
        "language_model.model.output_attn_res_proj.weight": ((1, 7168), "BF16"),
        "language_model.model.layers.0.self_attention_res_norm.weight": ((7168,), "BF16"),
        "language_model.model.layers.0.mlp_res_proj.weight": ((1, 7168), "BF16"),
        "language_model.model.layers.0.mlp.gate_proj.weight": ((33792, 7168), "BF16"),
        "language_model.model.layers.0.self_attn.q_conv1d.weight": ((12288, 1, 4), "F32"),
        "language_model.model.layers.0.self_attn.A_log": ((128,), "F32"),
        "language_model.model.layers.0.self_attn.dt_bias": ((12288,), "F32"),
        "language_model.model.layers.0.self_attn.o_norm.weight": ((128,), "F32"),
        "language_model.model.layers.0.self_attn.g_proj.weight": ((12288, 7168), "BF16"),
        "language_model.model.layers.0.self_attn.f_b_proj.weight": ((12288, 128), "BF16"),
        "language_model.model.layers.92.self_attn.g_proj.weight": ((12288, 7168), "BF16"),
        "language_model.model.layers.92.self_attn.q_b_proj.weight": ((18432, 1536), "BF16"),
        "language_model.model.layers.91.self_attn.kv_a_proj_with_mqa.weight": ((576, 7168), "BF16"),
        "language_model.model.layers.91.self_attn.kv_b_proj.weight": ((24576, 512), "BF16"),
        "language_model.model.layers.1.block_sparse_moe.gate.e_score_correction_bias": ((896,), "F32"),
        "language_model.model.layers.1.block_sparse_moe.routed_expert_down_proj.weight": ((3584, 7168), "BF16"),
        "language_model.model.layers.1.block_sparse_moe.shared_experts.down_proj.weight": ((7168, 6144), "BF16"),
        "language_model.model.layers.92.block_sparse_moe.experts.895.w1.weight": ((3072, 3584), "BF16"),
        "language_model.model.layers.92.block_sparse_moe.experts.895.w2.weight": ((3584, 3072), "BF16"),
    },
    "kimi_linear": {
        "model.layers.0.self_attn.A_log": ((1, 1, 32, 1), "F32"),
        "model.layers.0.self_attn.dt_bias": ((4096,), "F32"),
        "model.layers.0.self_attn.k_conv1d.weight": ((4096, 1, 4), "BF16"),
        "model.layers.0.self_attn.o_norm.weight": ((128,), "BF16"),
        "model.layers.0.self_attn.g_b_proj.weight": ((4096, 128), "BF16"),
        "model.layers.3.self_attn.q_proj.weight": ((6144, 2304), "BF16"),
        "model.layers.26.self_attn.kv_b_proj.weight": ((8192, 512), "BF16"),
        "model.layers.1.block_sparse_moe.gate.e_score_correction_bias": ((256,), "BF16"),
        "model.layers.26.block_sparse_moe.experts.255.w2.weight": ((2304, 1024), "BF16"),
        "model.layers.0.mlp.down_proj.weight": ((2304, 9216), "BF16"),
    },
    "kimi_k2": {
        "model.layers.0.self_attn.q_a_proj.weight": ((1536, 7168), "BF16"),
        "model.layers.60.self_attn.kv_b_proj.weight": ((16384, 512), "BF16"),
        "model.layers.60.self_attn.o_proj.weight": ((7168, 8192), "BF16"),
        "model.layers.1.mlp.gate.weight": ((384, 7168), "BF16"),
        "model.layers.1.mlp.gate.e_score_correction_bias": ((384,), "F32"),
        "model.layers.60.mlp.experts.383.down_proj.weight": ((7168, 2048), "BF16"),
        "model.layers.60.mlp.shared_experts.up_proj.weight": ((2048, 7168), "BF16"),
    },
    "moonlight": {
        "model.layers.26.self_attn.q_proj.weight": ((3072, 2048), "BF16"),
        "model.layers.26.mlp.shared_experts.up_proj.weight": ((2816, 2048), "BF16"),
        "lm_head.weight": ((163840, 2048), "BF16"),
    },
}


@pytest.mark.parametrize("name", RELEASED)
def test_names_shapes_and_dtypes_are_the_released_ones(name):
    found = {spec.name: (spec.shape, spec.dtype) for spec in listed(name)}
    assert {row: found.get(row) for row in ROWS[name]} == ROWS[name]


def test_k3_and_k25_carry_the_prefix_of_a_model_with_vision():
    for name in ("kimi_k3", "kimi_k25"):
        assert all(spec.name.startswith("language_model.") for spec in listed(name))


@pytest.mark.parametrize("name", RELEASED)
def test_the_model_built_without_memory_has_exactly_these_tensors(name):
    settings = published(name).settings
    with torch.device("meta"):
        model = Decoder(settings)
    built = {key: tuple(tensor.shape) for key, tensor in model.state_dict().items()}
    assert built == {weight.name: weight.shape for weight in weights(settings)}
    experts = Counter()
    for spec in listed(name):
        held = built[spec.ours] if spec.index is None else built[spec.ours][1:]
        assert held == spec.held
        experts[spec.ours] += 1
    assert set(experts) == set(built)
    assert all(count in (1, built[ours][0]) for ours, count in experts.items())


def test_tensors_that_stay_float32_do_so_when_the_model_is_cast(t0):
    with torch.device("meta"):
        model = Decoder(t0).to(torch.bfloat16)
    state = model.state_dict()
    for weight in weights(t0):
        assert state[weight.name].dtype == (torch.float32 if weight.is_float32 else torch.bfloat16), weight.name


def test_the_extra_prediction_layer_is_built_as_it_is_counted(t0):
    settings = t0.model_copy(update={"multi_token": MultiToken()})
    with torch.device("meta"):
        model = Decoder(settings)
    built = {key: tuple(tensor.shape) for key, tensor in model.state_dict().items()}
    assert built == {weight.name: weight.shape for weight in weights(settings)}
