import json
from dataclasses import asdict
from math import prod

import pytest

from triax.config.model import Model
from triax.model.count import attention_flops_per_token, render, sheet, tree, weights


def test_the_parts_add_up_to_the_total(t0):
    counted = sheet(t0)
    assert sum(counted.parameters_by_part.values()) == counted.parameters
    assert counted.parameters == sum(prod(weight.shape) for weight in weights(t0))


def test_names_are_listed_once(t0):
    names = [weight.name for weight in weights(t0)]
    assert len(names) == len(set(names)) > 50


def test_active_leaves_out_the_embedding_and_the_experts_that_are_not_chosen(t0):
    counted = sheet(t0)
    routed = counted.parameters_by_part["experts"]
    idle = routed * (t0.moe.num_experts - t0.moe.top_k) // t0.moe.num_experts
    assert counted.active_parameters == counted.parameters - counted.parameters_by_part["embedding"] - idle


def test_the_extra_prediction_layer_is_counted_apart(t0):
    longer = Model.model_validate(t0.model_dump() | {"multi_token": {}})
    plain, more = sheet(t0), sheet(longer)
    assert more.active_parameters == plain.active_parameters
    assert more.parameters - plain.parameters == more.parameters_by_part["multi_token"] > 0
    assert [weight.name for weight in weights(longer)][: len(list(weights(t0)))] == [w.name for w in weights(t0)]


def test_each_expert_counts_as_tensors_of_its_own(t0):
    stacks = sum(weight.is_stack for weight in weights(t0))
    assert stacks == 9
    assert sheet(t0).num_tensors == len(list(weights(t0))) + stacks * (t0.moe.num_experts - 1)


def test_float32_tensors_take_four_bytes(t0):
    wide = sum(prod(weight.shape) for weight in weights(t0) if weight.is_float32)
    assert wide > 0
    assert sheet(t0).weight_bytes == 2 * sheet(t0).parameters + 2 * wide


def test_only_mla_grows_with_the_context(t0):
    mla, kda = t0.mla, t0.kda
    grown = attention_flops_per_token(t0, 3000) - attention_flops_per_token(t0, 1000)
    assert grown == 2000 * mla.num_heads * (mla.nope_dim + mla.rope_dim + mla.value_dim)
    assert attention_flops_per_token(t0, 0) == 3 * kda.num_heads * (6 * 32**2 + 3 * 64 * 32 + 64**2)


def test_training_costs_six_operations_for_each_active_parameter_and_token(t0):
    counted = sheet(t0, context_len=512)
    assert counted.context_len == 512
    assert counted.training_flops_per_token == 6 * counted.active_parameters + 3 * attention_flops_per_token(t0, 512)


def test_the_cache_holds_a_latent_for_each_token_and_a_state_for_each_sequence(t0):
    counted = sheet(t0)
    assert counted.cache_bytes_per_token == 2 * (32 + 16)
    assert counted.cache_bytes_per_sequence == 3 * (4 * 2 * 32 * 32 + 2 * 3 * 3 * 2 * 32)


def test_a_model_without_kda_keeps_nothing_for_a_sequence(t0):
    only_mla = Model.model_validate(t0.model_dump() | {"mla_layers": (0, 1, 2, 3), "kda": None})
    assert sheet(only_mla).cache_bytes_per_sequence == 0


def test_the_sheet_is_plain_data(t0):
    assert json.loads(json.dumps(asdict(sheet(t0))))["parameters"] == sheet(t0).parameters


def test_the_tree_shows_each_kind_of_layer_once(t0):
    lines = tree(t0)
    titles = [line.split(":")[0] for line in lines if line.startswith("layers ")]
    assert titles == ["layers 0", "layers 1-2", "layers 3"]
    assert any(line.split() == ["mlp.experts.gate", "2", "x", "[8,", "32,", "32]"] for line in lines)
    assert (
        sum(int(line.split()[-1].replace(",", "")) for line in lines if not line.startswith(" "))
        == sheet(t0).parameters
    )


@pytest.mark.parametrize("number", ["tensors", "parameters", "active for one token", "cache bytes a token"])
def test_the_text_names_what_it_counts(t0, number):
    assert f"\n{number}" in render(t0)
