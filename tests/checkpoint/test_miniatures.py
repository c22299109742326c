"""Miniatures of all five families, in the forms of their releases: loaded whole and in part."""

import shutil

import pytest
import torch

from triax.checkpoint.account import account, examine
from triax.checkpoint.load import load_released, load_vision
from triax.checkpoint.names import inventory
from triax.errors import CheckpointError, ConfigError
from triax.model.layout import Layout

FAMILIES = ("kimi_k3", "kimi_linear", "kimi_k2", "kimi_k25", "moonlight")
VISUAL = ("kimi_k3", "kimi_k25")


@pytest.fixture(scope="module")
def folders(miniature, tmp_path_factory):
    """A miniature of each family and its tensors."""
    place = tmp_path_factory.mktemp("miniatures")
    return {family: (place / family, miniature.write(family, place / family)) for family in FAMILIES}


@pytest.mark.parametrize("family", FAMILIES)
def test_every_value_of_a_miniature_arrives_in_its_place(miniature, folders, family):
    folder, tensors = folders[family]
    ledger = account(folder)
    state = load_released(folder).state_dict()
    assert len(state) == len({spec.ours for spec in ledger.specs})
    for spec in inventory(ledger.settings, ledger.published.family):
        found = state[spec.ours] if spec.index is None else state[spec.ours][spec.index]
        expected = miniature.values_of(tensors, spec.name).flatten()[: found.numel()].view(found.shape)
        # Every MXFP4 value is exact in BF16; the products of FP8 and INT4 are rounded to it once.
        assert torch.equal(found.double(), expected.to(found.dtype).double()), spec.name


@pytest.mark.parametrize("family", FAMILIES)
def test_the_form_of_each_weight_is_found_by_its_tensors(miniature, folders, family):
    forms = {entry.form for entry in account(folders[family][0]).entries.values()}
    assert forms == {"plain", miniature.FORM[family]}


@pytest.mark.parametrize("family", FAMILIES)
def test_a_loaded_miniature_computes(folders, family):
    model = load_released(folders[family][0], dtype=torch.float32).eval()
    assert torch.isfinite(model.logits(model(torch.randint(250, (9,)), Layout.of([4, 5])))).all()


def test_u090_the_tensors_decide_what_is_packed_and_not_the_ignore_list(miniature, tmp_path):
    """A shared expert is packed though the config says that none is, and one routed expert is plain."""
    from safetensors.torch import load_file, save_file

    tensors = miniature.write("kimi_k3", tmp_path / "k3")
    at = "language_model.model.layers.1.block_sparse_moe"
    shared, routed = f"{at}.shared_experts.gate_proj.weight", f"{at}.experts.2.w2.weight"
    path = next(path for path in (tmp_path / "k3").glob("*.safetensors") if routed + "_packed" in load_file(path))
    stored = load_file(path)
    plain = miniature.values_of(tensors, routed).bfloat16()
    rows, columns = stored[shared].shape
    del stored[shared], stored[f"{routed}_packed"], stored[f"{routed}_scale"]
    stored[routed] = plain
    stored[f"{shared}_packed"] = torch.randint(0, 256, (rows, columns // 2)).byte()
    stored[f"{shared}_scale"] = torch.randint(110, 125, (rows, columns // 32)).byte()
    save_file(stored, path)
    (tmp_path / "k3" / "model.safetensors.index.json").unlink()
    entries = account(tmp_path / "k3").entries
    assert (entries[shared].form, entries[routed].form) == ("mxfp4", "plain")
    state = load_released(tmp_path / "k3").state_dict()
    assert torch.equal(state["layers.1.mlp.experts.down"][2], plain)
    expected = miniature.values_of(stored, shared)
    assert torch.equal(state["layers.1.mlp.shared.gate.weight"].double(), expected)


@pytest.mark.soak
@pytest.mark.parametrize("family", FAMILIES)
def test_every_name_of_a_release_is_loaded_at_toy_widths(miniature, tmp_path, family):
    full = miniature.FULL[family]
    sizes = miniature.replace(
        miniature.toy(family), layers=full.layers, mla=full.mla, experts=full.experts, top_k=full.top_k, hidden=64,
        dense=64, expert=32, latent=32 if full.latent else 0, blocks=full.blocks,
    )  # fmt: skip
    tensors = miniature.write(family, tmp_path / family, sizes)
    counts = {"kimi_k3": 497_220, "kimi_linear": 20_493, "kimi_k2": 139_644, "kimi_k25": 208_550, "moonlight": 5_317}
    # The toy towers have two layers instead of 27: 25 blocks fewer, of 6 matrices and norms, twice as many with biases.
    missing = {"kimi_k3": 25 * 6, "kimi_k25": 25 * 12}.get(family, 0)
    assert len(tensors) == counts[family] - missing
    state = load_released(tmp_path / family).state_dict()
    ledger = account(tmp_path / family)
    for spec in ledger.specs[:: max(1, len(ledger.specs) // 500)]:
        found = state[spec.ours] if spec.index is None else state[spec.ours][spec.index]
        expected = miniature.values_of(tensors, spec.name).flatten()[: found.numel()].view(found.shape)
        assert torch.equal(found.double(), expected.to(found.dtype).double()), spec.name


# --- parts


def test_the_first_layers_compute_what_the_whole_does_up_to_there(folders):
    folder, _ = folders["kimi_linear"]
    whole, part = load_released(folder).eval().float(), load_released(folder, layers=range(2)).eval().float()
    taps = {}
    tokens, layout = torch.randint(250, (7,)), Layout.of([7])
    whole(tokens, layout, taps=taps)
    cut = {}
    part(tokens, layout, taps=cut)
    assert part.settings.num_layers == 2
    assert torch.equal(cut[1], taps[1])
    assert torch.equal(part.output_norm.weight, whole.output_norm.weight)


def test_layers_from_the_middle_are_renumbered_and_keep_their_kind(folders):
    folder, _ = folders["kimi_k3"]
    whole, part = load_released(folder), load_released(folder, layers=range(2, 4))
    assert (part.settings.num_layers, part.settings.mla_layers, part.settings.num_dense_layers) == (2, (1,), 0)
    for name, tensor in part.state_dict().items():
        number = name.split(".")[1]
        theirs = name.replace(f"layers.{number}.", f"layers.{int(number) + 2}.", 1) if "layers." in name[:7] else name
        assert torch.equal(tensor, whole.state_dict()[theirs]), name


@pytest.mark.parametrize("family", FAMILIES)
def test_a_subset_of_experts_brings_their_rows_of_the_router(folders, family):
    folder, _ = folders[family]
    whole, part = load_released(folder).state_dict(), load_released(folder, experts=[3, 1]).state_dict()
    for name in ("experts.gate", "experts.down", "router.weight", "router.balance_bias"):
        assert torch.equal(part[f"layers.1.mlp.{name}"], whole[f"layers.1.mlp.{name}"][[3, 1]]), name


@pytest.mark.parametrize("family", VISUAL)
def test_text_and_vision_can_be_loaded_apart(folders, family):
    folder, _ = folders[family]
    whole = load_released(folder)
    text, tower = load_released(folder, towers="text"), load_vision(folder)
    assert text.settings.vision is None
    assert not any(name.startswith("vision.") for name in text.state_dict())
    found = {f"vision.{name}": tensor for name, tensor in tower.state_dict().items()}
    expected = {name: tensor for name, tensor in whole.state_dict().items() if name.startswith("vision.")}
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


def test_only_the_files_of_a_part_have_to_be_there(folders, tmp_path):
    shutil.copytree(folders["kimi_k3"][0], tmp_path / "some")
    for number in (4, 5):
        next((tmp_path / "some").glob(f"model-0000{number}-*")).unlink()
    assert load_released(tmp_path / "some", layers=range(3)).settings.num_layers == 3
    with pytest.raises(CheckpointError, match="missing"):
        load_released(tmp_path / "some", layers=range(4))


def test_nothing_is_drawn_anew_unless_it_is_asked_for_by_name(folders, tmp_path):
    shutil.copytree(folders["kimi_k3"][0], tmp_path / "some")
    next((tmp_path / "some").glob("model-00003-*")).unlink()
    with pytest.raises(CheckpointError, match="missing"):
        load_released(tmp_path / "some")
    with pytest.raises(CheckpointError, match="missing"):
        load_released(tmp_path / "some", fresh=["layers.2.attention.*"])
    model = load_released(tmp_path / "some", fresh=["layers.2.*"])
    whole = load_released(folders["kimi_k3"][0]).state_dict()
    for name, tensor in model.state_dict().items():
        assert torch.isfinite(tensor).all(), name
        assert name.startswith("layers.2.") or torch.equal(tensor, whole[name]), name
    assert not torch.equal(
        model.state_dict()["layers.2.attention.query.weight"], whole["layers.2.attention.query.weight"]
    )


def test_a_fresh_name_that_fits_nothing_is_refused(folders):
    with pytest.raises(ConfigError, match=r"`head\.wait` fits no tensor"):
        load_released(folders["kimi_k2"][0], fresh=["head.wait"])


@pytest.mark.parametrize("layers", [range(3, 3), range(0, 9), range(0, 4, 2)])
def test_layers_that_are_not_there_are_refused(folders, layers):
    with pytest.raises(ConfigError, match=r"layers: must be a\.\.b"):
        load_released(folders["kimi_k3"][0], layers=layers)


@pytest.mark.parametrize("experts", [[], [1, 1], [4], [-1]])
def test_experts_that_are_not_there_are_refused(folders, experts):
    with pytest.raises(ConfigError, match="experts: "):
        load_released(folders["kimi_k3"][0], experts=experts)


def test_a_text_model_has_no_tower_to_load(folders):
    with pytest.raises(ConfigError, match="no `vision_config`"):
        load_vision(folders["kimi_k2"][0])


# --- what a packed file must not be


def damaged(folder, tmp_path, change):
    from safetensors.torch import load_file, save_file

    shutil.copytree(folder, tmp_path / "damaged")
    path = next((tmp_path / "damaged").glob("model-00002-*"))
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path)
    return tmp_path / "damaged"


@pytest.mark.parametrize(
    ("family", "ending", "value"),
    [
        ("kimi_k3", "experts.0.w1.weight_scale", 255),
        ("kimi_k2", "experts.0.up_proj.weight_scale_inv", float("nan")),
        ("kimi_k2", "q_a_proj.weight_scale_inv", -1.0),
        ("kimi_k25", "experts.0.up_proj.weight_scale", float("inf")),
    ],
)
def test_a_scale_that_is_no_number_is_refused_by_name(folders, tmp_path, family, ending, value):
    def change(tensors):
        (name,) = [name for name in tensors if name.endswith(ending)]
        tensors[name][-1, -1] = value

    with pytest.raises(CheckpointError, match=ending.split(".weight")[0].replace(".", r"\.")):
        load_released(damaged(folders[family][0], tmp_path, change))


@pytest.mark.parametrize("family", ["kimi_k3", "kimi_k2", "kimi_k25"])
def test_u086_scales_that_were_lost_are_refused(folders, tmp_path, family):
    """Zero for every scale of expert 0, as a renaming that drops them leaves it."""

    def change(tensors):
        for name in [name for name in tensors if ".experts.0." in name and "_scale" in name]:
            tensors[name].zero_()

    with pytest.raises(CheckpointError, match=r"experts\.0\."):
        load_released(damaged(folders[family][0], tmp_path, change))


@pytest.mark.parametrize("ending", ["weight_scale", "weight_packed"])
def test_u086_half_of_a_pair_is_refused(folders, tmp_path, ending):
    def change(tensors):
        del tensors[next(name for name in tensors if name.endswith(f"experts.0.w1.{ending}"))]

    with pytest.raises(CheckpointError, match=r"missing: `[^`]*experts\.0\.w1"):
        load_released(damaged(folders["kimi_k3"][0], tmp_path, change))


def test_an_int4_shape_that_disagrees_is_refused(folders, tmp_path):
    def change(tensors):
        tensors[next(name for name in tensors if name.endswith("experts.1.up_proj.weight_shape"))][0] += 1

    with pytest.raises(CheckpointError, match="weight_shape says"):
        load_released(damaged(folders["kimi_k25"][0], tmp_path, change))


def test_packed_tensors_of_the_wrong_width_are_named(folders, tmp_path):
    def change(tensors):
        name = next(name for name in tensors if name.endswith("experts.0.w1.weight_scale"))
        tensors[name] = tensors[name][:, :-1].contiguous()

    problems = examine(damaged(folders["kimi_k3"][0], tmp_path, change)).problems
    assert "expected [64, 3]" in problems["of the wrong shape"][0]
