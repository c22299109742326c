import json
import logging
import re
import resource
import shutil

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from triax.checkpoint.account import INDEX, account
from triax.checkpoint.names import inventory
from triax.checkpoint.released import load_released, save_released
from triax.config.model import Model, MultiToken
from triax.errors import CheckpointError, ConfigError
from triax.model.count import weights
from triax.model.decoder import Decoder
from triax.model.layout import Layout

K3_LAYER = "language_model.model.layers.1."
A_LOG = f"{K3_LAYER}self_attn.A_log"


def plain(t0):
    """T0 as Kimi Linear builds it: without any part that is K3's own."""
    tree = t0.model_dump() | {"activation": {"kind": "swiglu"}, "residuals": None}
    tree["kda"] |= {"decay": {"kind": "softplus"}, "output_gate": "low_rank"}
    tree["mla"] |= {"q_latent_dim": 0, "output_gate": False}
    tree["moe"] |= {"latent_dim": 0, "share_scale": 2.446}
    return Model.model_validate(tree)


def rotary(t0):
    """T0 as K2 builds it: MLA in every layer, with stretched rotary positions."""
    tree = plain(t0).model_dump() | {"mla_layers": (0, 1, 2, 3), "kda": None, "norm_eps": 1e-6}
    tree["mla"] |= {"q_latent_dim": 48, "rope": {"theta": 50000.0, "yarn": {"factor": 32.0, "beta_fast": 1.0}}}
    return Model.model_validate(tree)


SHAPES = {"kimi_k3": lambda t0: t0, "kimi_linear": plain, "kimi_k2": rotary, "kimi_k25": rotary, "deepseek_v3": rotary}


def random_model(shape, seed=0):
    """A decoder whose every tensor is random, so that no two can be swapped unseen."""
    torch.manual_seed(seed)
    model = Decoder(shape)
    with torch.no_grad():
        for name, tensor in model.state_dict().items():
            tensor.normal_(1.0 if "norm" in name else 0.0, 0.1)
    return model


def test_an_export_that_fails_leaves_nothing(t0, tmp_path):
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, limits[1]))
    try:
        with pytest.raises(CheckpointError, match=r"could not be written.*nothing was left there"):
            save_released(random_model(t0), tmp_path / "out")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert list(tmp_path.iterdir()) == []


def test_an_export_is_on_the_disk_before_it_has_its_name(t0, tmp_path, disk):
    save_released(random_model(t0), tmp_path / "out", shard_bytes=100_000)
    disk.check()
    assert len(disk.synced) > 5


def same(ours, theirs):
    expected, found = ours.state_dict(), theirs.state_dict()
    assert expected.keys() == found.keys()
    for name, tensor in expected.items():
        assert torch.equal(tensor, found[name]), name


@pytest.fixture
def folder(t0, tmp_path):
    """T0 in the layout of K3, in several files."""
    save_released(random_model(t0), tmp_path / "k3", dtype=torch.float32, shard_bytes=100_000)
    assert len(list((tmp_path / "k3").glob("*.safetensors"))) > 3
    return tmp_path / "k3"


def rewrite(folder, change):
    """Apply `change` to the tensors of the file that holds the A_log of layer 1, keeping the index."""
    path = folder / json.loads((folder / INDEX).read_text())["weight_map"][A_LOG]
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path)
    listed = json.loads((folder / INDEX).read_text())
    listed["weight_map"] = {k: f for k, f in listed["weight_map"].items() if f != path.name or k in tensors}
    listed["weight_map"] |= dict.fromkeys(tensors, path.name)
    (folder / INDEX).write_text(json.dumps(listed))


@pytest.mark.parametrize("family", SHAPES)
def test_every_bit_comes_back_from_a_float32_export(t0, tmp_path, family):
    model = random_model(SHAPES[family](t0))
    save_released(model, tmp_path / "out", dtype=torch.float32, family=family)
    same(model, load_released(tmp_path / "out"))


@pytest.mark.parametrize("family", SHAPES)
def test_files_hold_the_names_shapes_and_dtypes_of_the_family(t0, tmp_path, family):
    shape = SHAPES[family](t0)
    model = random_model(shape)
    for router in [layer.mlp.router for layer in model.layers[1:]]:
        router.balance_bias.zero_()
    save_released(model, tmp_path / "out", family=family)
    stored = load_file(tmp_path / "out" / "model.safetensors")
    kinds = {torch.bfloat16: "BF16", torch.float32: "F32"}
    found = {name: (tuple(tensor.shape), kinds[tensor.dtype]) for name, tensor in stored.items()}
    assert found == {spec.name: (spec.shape, spec.dtype) for spec in inventory(shape, family)}


def test_a_bf16_export_rounds_matrices_and_nothing_else(t0, tmp_path):
    model = random_model(t0)
    save_released(model, tmp_path / "out")
    loaded = load_released(tmp_path / "out").state_dict()
    for weight in weights(t0):
        ours, theirs = model.state_dict()[weight.name], loaded[weight.name]
        if weight.is_float32:
            assert theirs.dtype == torch.float32
            assert torch.equal(ours, theirs), weight.name
        else:
            assert torch.equal(ours.bfloat16(), theirs), weight.name


@pytest.mark.parametrize("family", ["kimi_k3", "kimi_linear"])
def test_the_balance_bias_keeps_its_bits_in_a_bf16_export(t0, tmp_path, family):
    model = random_model(SHAPES[family](t0))
    fine = 1.0 + 1e-4 * torch.arange(8)
    assert len(set(fine.bfloat16().tolist())) == 1
    model.layers[2].mlp.router.balance_bias.copy_(fine)
    save_released(model, tmp_path / "out", family=family)
    assert torch.equal(load_released(tmp_path / "out").layers[2].mlp.router.balance_bias, fine)


def test_a_loaded_model_computes_what_the_saved_one_does(t0, tmp_path):
    model = random_model(t0).eval()
    save_released(model, tmp_path / "out", dtype=torch.float32)
    loaded = load_released(tmp_path / "out").eval()
    tokens, layout = torch.randint(512, (12,)), Layout.of([5, 7])
    assert torch.equal(model(tokens, layout), loaded(tokens, layout))


def test_a_model_loaded_as_bf16_keeps_its_fp32_tensors(t0, tmp_path):
    model = random_model(t0)
    save_released(model, tmp_path / "out", dtype=torch.float32)
    loaded = load_released(tmp_path / "out", dtype=torch.bfloat16).state_dict()
    for weight in weights(t0):
        kept = torch.equal(loaded[weight.name].float(), model.state_dict()[weight.name])
        assert kept == weight.is_float32, weight.name


def test_a_loaded_model_can_be_trained(t0, tmp_path):
    save_released(random_model(t0), tmp_path / "out")
    loaded = load_released(tmp_path / "out", dtype=torch.float32)
    assert all(p.requires_grad and p.dtype == torch.float32 for p in loaded.parameters())
    loaded.logits(loaded(torch.randint(512, (6,)), Layout.of([6]))).square().mean().backward()
    assert loaded.embed.weight.grad.abs().sum() > 0


def test_the_extra_prediction_layer_is_left_out_unless_asked_for(t0, tmp_path):
    model = random_model(t0.model_copy(update={"multi_token": MultiToken(loss_weight=0.3)}))
    save_released(model, tmp_path / "without", dtype=torch.float32)
    save_released(model, tmp_path / "with", dtype=torch.float32, multi_token=True)
    assert not any("multi_token" in name for name in load_file(tmp_path / "without" / "model.safetensors"))
    assert load_released(tmp_path / "without").settings.multi_token is None
    same(model, load_released(tmp_path / "with"))


def test_an_announced_layer_that_is_not_there_is_left_out_and_told(t0, tmp_path, caplog):
    save_released(random_model(t0), tmp_path / "out")
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    config["text_config"]["num_nextn_predict_layers"] = 1
    (tmp_path / "out" / "config.json").write_text(json.dumps(config))
    with caplog.at_level(logging.INFO, logger="triax.checkpoint"):
        assert load_released(tmp_path / "out").settings == t0
    assert "multi-token layer" in caplog.text


@settings(max_examples=3)
@given(seed=st.integers(0, 99), shard_bytes=st.integers(30_000, 10**6))
def test_any_cut_into_files_holds_the_same_tensors(t0, tmp_path_factory, seed, shard_bytes):
    folder = tmp_path_factory.mktemp("cut")
    model = random_model(t0, seed)
    save_released(model, folder / "out", dtype=torch.float32, shard_bytes=shard_bytes)
    same(model, load_released(folder / "out"))
    shutil.rmtree(folder)


# --- what is not accepted


def refused(folder, *expected):
    with pytest.raises(CheckpointError) as problem:
        load_released(folder)
    for text in expected:
        assert text in str(problem.value)


def test_a_missing_tensor_is_named(folder):
    rewrite(folder, lambda tensors: tensors.pop(A_LOG))
    refused(folder, "1 missing", A_LOG)


def test_an_unexpected_tensor_is_named(folder):
    rewrite(folder, lambda tensors: tensors.update({f"{K3_LAYER}self_attn.A_logs": torch.zeros(2)}))
    refused(folder, "1 unexpected", "A_logs")


def test_a_renamed_tensor_is_both_missing_and_unexpected(folder):
    """A head under a name that no parameter has must never leave a random head behind."""

    def rename(tensors):
        tensors["language_model.lm_heads.weight"] = torch.zeros(512, 64)

    rewrite(folder, rename)
    listed = json.loads((folder / INDEX).read_text())["weight_map"]
    path = folder / listed["language_model.lm_head.weight"]
    tensors = load_file(path)
    del tensors["language_model.lm_head.weight"]
    save_file(tensors, path)
    del listed["language_model.lm_head.weight"]
    (folder / INDEX).write_text(json.dumps({"weight_map": listed}))
    refused(folder, "1 missing: `language_model.lm_head.weight`", "1 unexpected: `language_model.lm_heads.weight`")


def test_a_tensor_in_two_files_is_named_with_both(folder):
    save_file({A_LOG: torch.zeros(32)}, folder / "more.safetensors")
    refused(folder, "stored twice", A_LOG, "more.safetensors")


def test_a_tensor_in_two_spellings_is_stored_twice(folder):
    rewrite(folder, lambda tensors: tensors.update({A_LOG.removeprefix("language_model."): tensors[A_LOG].clone()}))
    refused(folder, "stored twice", A_LOG)


@pytest.mark.parametrize("shape", [(31, 2), (1,), (2, 1), (1, 1, 32, 1)])
def test_a_wrong_shape_is_named_with_both_shapes(folder, shape):
    rewrite(folder, lambda tensors: tensors.update({A_LOG: torch.zeros(shape)}))
    refused(folder, "1 of the wrong shape", A_LOG, str(list(shape)), "expected [32]")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64, torch.int64])
def test_decay_rates_in_another_dtype_are_refused(folder, dtype):
    rewrite(folder, lambda tensors: tensors.update({A_LOG: torch.zeros(32, dtype=dtype)}))
    refused(folder, "1 of the wrong dtype", A_LOG, "expected F32")


def test_matrices_in_float16_are_refused(folder):
    name = f"{K3_LAYER}self_attn.b_proj.weight"
    rewrite(folder, lambda tensors: tensors.update({name: torch.zeros(2, 64).half()}))
    refused(folder, "1 of the wrong dtype", name, "F16, expected BF16")


def test_a_tensor_that_only_the_index_knows_is_named(folder):
    listed = json.loads((folder / INDEX).read_text())
    listed["weight_map"][f"{K3_LAYER}ghost"] = listed["weight_map"][A_LOG]
    (folder / INDEX).write_text(json.dumps(listed))
    refused(folder, "listed in the index but not stored there", f"{K3_LAYER}ghost")


def test_a_tensor_that_the_index_does_not_know_is_named(folder):
    listed = json.loads((folder / INDEX).read_text())
    del listed["weight_map"][A_LOG]
    (folder / INDEX).write_text(json.dumps(listed))
    refused(folder, "stored but not in the index", A_LOG)


def test_a_missing_file_is_named(folder):
    path = sorted(folder.glob("*.safetensors"))[1]
    path.unlink()
    refused(folder, "files of its index are missing", path.name)


@pytest.mark.parametrize("left", [0, 4, 100, -1])
def test_a_file_cut_short_is_named(folder, left):
    path = sorted(folder.glob("*.safetensors"))[1]
    path.write_bytes(path.read_bytes()[:left])
    refused(folder, str(path), "cut short", f"found {path.stat().st_size:,} bytes", "copy it again")


def test_a_folder_without_weights_is_refused(folder):
    for path in [*folder.glob("*.safetensors"), folder / INDEX]:
        path.unlink()
    refused(folder, "holds no weights")


@pytest.mark.parametrize("content", ["", "{}", '{"weight_map": 3}', '{"weight_map": {"a": 3}}'])
def test_a_broken_index_is_refused(folder, content):
    (folder / INDEX).write_text(content)
    refused(folder, INDEX)


def test_a_weight_both_plain_and_packed_is_refused(folder):
    name = f"{K3_LAYER}block_sparse_moe.experts.0.w1.weight"
    packed = {f"{name}_packed": torch.zeros(32, 16, dtype=torch.uint8), f"{name}_scale": torch.ones(32, 1).byte()}
    rewrite(folder, lambda tensors: tensors.update(packed))
    refused(folder, "stored twice", name)


def test_long_lists_are_counted(folder):
    rewrite(folder, lambda tensors: tensors.update({f"extra.{i}": torch.zeros(1) for i in range(9)}))
    refused(folder, "9 unexpected", "`extra.3` and 5 more")


def test_vision_weights_that_the_config_does_not_describe_are_refused(folder):
    rewrite(folder, lambda tensors: tensors.update({"vision_tower.patch_embed.proj.weight": torch.zeros(2)}))
    refused(folder, "1 unexpected", "vision_tower.patch_embed.proj.weight")


def test_stored_rotary_tables_are_left_aside(t0, tmp_path):
    model = random_model(rotary(t0))
    save_released(model, tmp_path / "out", dtype=torch.float32, family="kimi_k2")
    path = tmp_path / "out" / "model.safetensors"
    tables = {f"model.layers.{i}.self_attn.rotary_emb.inv_freq": torch.zeros(8) for i in range(4)}
    save_file(load_file(path) | tables, path)
    same(model, load_released(tmp_path / "out"))


# --- heads that are stored padded


def six_heads(t0):
    tree = t0.model_dump()
    tree["kda"] |= {"num_heads": 6, "head_dim": 8}
    return Model.model_validate(tree)


def padded(t0, tmp_path, tail):
    """T0 with 6 heads of 8 channels, its second A_log written with the given tail."""
    model = random_model(six_heads(t0))
    save_released(model, tmp_path / "out", dtype=torch.float32)
    path = tmp_path / "out" / "model.safetensors"
    tensors = load_file(path)
    tensors[A_LOG] = torch.cat([model.layers[1].attention.decay_rate.detach(), torch.tensor(tail)])
    save_file(tensors, path)
    return model, tmp_path / "out"


def test_padding_is_written_and_taken_off(t0, tmp_path):
    model, folder = padded(t0, tmp_path, [0.0, 0.0])
    rate = load_file(folder / "model.safetensors")["language_model.model.layers.0.self_attn.A_log"]
    assert rate.shape == (8,)
    assert torch.equal(rate[:6], model.layers[0].attention.decay_rate)
    assert torch.equal(rate[6:], torch.zeros(2))
    same(model, load_released(folder))


@pytest.mark.parametrize("tail", [[0.0, 1e-30], [-1.0, 0.0], [float("nan"), 0.0], [0.0, float("inf")]])
def test_padding_that_is_not_zero_is_refused(t0, tmp_path, tail):
    _, folder = padded(t0, tmp_path, tail)
    refused(folder, A_LOG, "padding after its 6 heads must be exactly 0")


def test_decay_rates_without_padding_are_read(t0, tmp_path):
    model, folder = padded(t0, tmp_path, [])
    same(model, load_released(folder))


def test_fewer_heads_than_the_config_has_are_refused(t0, tmp_path):
    _, folder = padded(t0, tmp_path, [])
    path = folder / "model.safetensors"
    save_file(load_file(path) | {A_LOG: torch.zeros(5)}, path)
    refused(folder, "of the wrong shape", A_LOG)


# --- vocabulary


def tokenizer(num_tokens, added=()):
    return json.dumps(
        {"model": {"vocab": {str(i): i for i in range(num_tokens)}}, "added_tokens": [{"id": i} for i in added]}
    )


@pytest.mark.parametrize(("num_tokens", "added"), [(514, ()), (512, (512, 513))])
def test_a_tokenizer_with_more_tokens_than_rows_is_refused(folder, num_tokens, added):
    (folder / "tokenizer.json").write_text(tokenizer(num_tokens, added))
    refused(folder, "tokenizer.json", "found 514 where `vocab_size` is 512")


def test_rows_beyond_the_tokenizer_are_padding(folder):
    (folder / "tokenizer.json").write_text(tokenizer(500, (500,)))
    assert account(folder).published.settings.vocab_size == 512


def test_the_control_tokens_of_a_tiktoken_file_count(folder):
    (folder / "tiktoken.model").write_text("".join(f"AA== {i}\n" for i in range(512)))
    account(folder)
    (folder / "tokenizer_config.json").write_text(json.dumps({"added_tokens_decoder": {"512": {"content": "<|end|>"}}}))
    refused(folder, "tiktoken.model", "found 513")


def test_a_tokenizer_that_is_none_is_refused(folder):
    (folder / "tokenizer.json").write_text("[]")
    refused(folder, "is not a tokenizer")


def test_a_config_with_another_vocabulary_is_refused_by_shape(folder):
    config = json.loads((folder / "config.json").read_text())
    config["text_config"]["vocab_size"] = 500
    (folder / "config.json").write_text(json.dumps(config))
    refused(folder, "2 of the wrong shape", "embed_tokens.weight [512, 64], expected [500, 64]", "lm_head.weight")


# --- writing


def test_a_folder_in_use_is_never_written_into(t0, tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine.txt").write_text("keep")
    with pytest.raises(CheckpointError, match="is in use"):
        save_released(random_model(t0), tmp_path / "out")
    assert (tmp_path / "out" / "mine.txt").read_text() == "keep"


def test_a_place_that_cannot_be_written_leaves_nothing(t0, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="could not be written"):
        save_released(random_model(t0), tmp_path / "file" / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_a_draft_left_by_a_kill_is_replaced(t0, tmp_path):
    (tmp_path / "out.tmp").mkdir()
    (tmp_path / "out.tmp" / "model.safetensors").write_text("half")
    save_released(random_model(t0), tmp_path / "out")
    load_released(tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_a_model_that_the_family_cannot_express_is_not_written(t0, tmp_path):
    with pytest.raises(ConfigError, match="choose kimi_linear or kimi_k3"):
        save_released(random_model(t0), tmp_path / "out", family="deepseek_v3")
    assert list(tmp_path.iterdir()) == []


def test_other_dtypes_are_not_written(t0, tmp_path):
    with pytest.raises(CheckpointError, match=r"torch\.float16"):
        save_released(random_model(t0), tmp_path / "out", dtype=torch.float16)


def test_the_index_adds_up_the_bytes(folder):
    index = json.loads((folder / INDEX).read_text())
    stored = [tensor.nbytes for path in folder.glob("*.safetensors") for tensor in load_file(path).values()]
    assert index["metadata"]["total_size"] == sum(stored)


def own_layer(model):
    model.layers[0].mine = torch.nn.Linear(4, 4, bias=False)
    return "layers.0.mine.weight"


def own_buffer(model):
    model.layers[1].register_buffer("seen", torch.zeros(1))
    return "layers.1.seen"


def other_shape(model):
    model.output_norm.weight = torch.nn.Parameter(torch.ones(model.settings.width - 1))
    return "output_norm.weight"


def lost(model):
    del model.output_norm.weight
    return "output_norm.weight"


@pytest.mark.parametrize("change", [own_layer, own_buffer, other_shape, lost])
def test_f67_a_layer_of_ones_own_has_no_released_name_and_is_told_before_anything_is_written(t0, tmp_path, change):
    model = random_model(t0)
    name = re.escape(change(model))
    with pytest.raises(CheckpointError, match=rf"no name, or another shape, for `{name}`; keep a model with layers of"):
        save_released(model, tmp_path / "out")
    assert not list(tmp_path.iterdir())
