import pytest

from triax.config.load import load_model, load_recipe, purpose, recipe_names
from triax.config.model import Model
from triax.model.count import sheet


@pytest.mark.parametrize(
    ("preset", "num_tensors", "parameters"),
    [
        ("k3", 249_756, 2_779_484_476_000),
        ("kimi-linear", 20_493, 49_122_681_728),
        ("k2", 69_975, 1_026_408_232_448),
        ("moonlight", 5_317, 15_960_110_208),
    ],
)
def test_a_published_preset_counts_as_its_files_do(preset, num_tensors, parameters):
    counted = sheet(load_model(preset))
    assert (counted.num_tensors, counted.parameters) == (num_tensors, parameters)


def test_k3_has_its_mla_layers_where_the_release_has_them():
    k3 = load_model("k3")
    assert k3.mla_layers == (*range(3, 92, 4), 92)
    assert k3.num_layers - len(k3.mla_layers) == 69


@pytest.mark.parametrize(("preset", "least", "most"), [("nano", 0, 0.3e6), ("tiny", 1e6, 9e6), ("small", 18e6, 22e6)])
def test_our_presets_have_the_size_that_is_promised(preset, least, most):
    recipe = load_recipe(preset)
    assert least < sheet(recipe.model).parameters < most
    assert recipe.model.residuals is not None
    assert recipe.model.moe.latent_dim > 0
    assert recipe.model.mla.output_gate


def test_every_shipped_recipe_opens_with_what_it_is_for():
    assert all(len(purpose(name)) > 20 for name in recipe_names())


SMALL = {
    "vocab_size": 16,
    "width": 8,
    "num_layers": 1,
    "kda": {"num_heads": 1, "head_dim": 4},
    "mla": {"num_heads": 1, "kv_latent_dim": 4, "nope_dim": 4, "rope_dim": 0, "value_dim": 4},
    "moe": {"num_experts": 1, "top_k": 1, "expert_dim": 4},
}


@pytest.mark.parametrize(
    "edge",
    [
        {},
        {"mla_layers": (0,), "kda": None},
        {"mla": None},
        {"moe": None, "num_dense_layers": 1, "dense_dim": 8},
        {"moe": {"num_experts": 4, "top_k": 4, "expert_dim": 4}},
        {"moe": {"num_experts": 4, "top_k": 4, "num_shared_experts": 0, "expert_dim": 4}},
        {"residuals": {"kind": "block", "block_layers": 5}},
    ],
    ids=["one-expert", "all-mla", "all-kda", "all-dense", "every-expert", "no-shared", "block-longer-than-model"],
)
def test_edges_of_the_counts_are_legal(edge):
    assert sheet(Model.model_validate(SMALL | edge)).parameters > 0


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ({"mla_layers": (1,)}, "mla_layers"),
        ({"mla_layers": (0, 0)}, "mla_layers"),
        ({"kda": None}, "the table `kda`"),
        ({"mla": None, "mla_layers": (0,)}, "the table `mla`"),
        ({"moe": None}, "the table `moe`"),
        ({"moe": {"num_experts": 2, "top_k": 3, "expert_dim": 4}}, "top_k `3`"),
        ({"moe": {"num_experts": 3, "top_k": 1, "expert_dim": 4, "num_groups": 2}}, "num_groups `2`"),
        ({"num_dense_layers": 1}, "dense_dim is 0"),
        ({"num_dense_layers": 9, "dense_dim": 8}, "num_dense_layers `9` is more than num_layers"),
        ({"mla": SMALL["mla"] | {"rope_dim": 3, "rope": {}}}, "rope_dim is `3`"),
        ({"mla": SMALL["mla"] | {"rope_dim": 0, "rope": {}}}, "rope_dim is `0`"),
    ],
)
def test_a_model_that_cannot_be_built_is_refused(fault, message):
    with pytest.raises(ValueError, match=message):
        Model.model_validate(SMALL | fault)
