import copy
import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from triax.checkpoint.compose import compose
from triax.checkpoint.published import FAMILIES, family_of, parse, read_config
from triax.config.model import BlockResiduals, BoundedGate, FullResiduals, Model, Situ, SoftplusGate, Swiglu
from triax.errors import ConfigError

FOLDER = Path(__file__).parent / "published"
RELEASED = ["kimi_k3", "kimi_linear", "kimi_k2", "kimi_k25", "moonlight"]


def config(name):
    return json.loads((FOLDER / f"{name}.json").read_text())


def changed(name, **values):
    """The released config with keys of its text model replaced."""
    whole = config(name)
    whole.get("text_config", whole).update(values)
    return whole


def test_k3_is_read_as_the_report_describes_it():
    family, settings, notes, _ = parse(config("kimi_k3"))
    assert family == "kimi_k3"
    assert (settings.width, settings.num_layers, settings.vocab_size) == (7168, 93, 163840)
    assert settings.mla_layers == (*range(3, 92, 4), 92)
    assert settings.activation == Situ(gate_cap=4.0, up_cap=25.0)
    assert settings.residuals == BlockResiduals(block_layers=12)
    assert settings.kda.decay == BoundedGate(lowest_log_decay=-5.0)
    assert settings.kda.output_gate == "full"
    assert settings.mla.output_gate
    assert settings.mla.rope is None
    assert settings.mla.latent_norm_eps == 1e-6
    assert settings.norm_eps == 1e-5
    assert settings.moe.latent_dim == 3584
    assert settings.moe.latent_norm
    assert settings.multi_token is None
    assert any("mxfp4-pack-quantized" in note for note in notes)


def test_kimi_linear_is_the_same_class_with_its_defaults():
    family, settings, notes, _ = parse(config("kimi_linear"))
    assert (family, notes) == ("kimi_linear", ())
    assert settings.kda.decay == SoftplusGate()
    assert settings.kda.output_gate == "low_rank"
    assert settings.activation == Swiglu()
    assert settings.residuals is None
    assert (settings.moe.latent_dim, settings.moe.share_scale) == (0, 2.446)
    assert (settings.mla.q_latent_dim, settings.mla.output_gate, settings.mla.rope) == (0, False, None)


def test_k2_stretches_its_rotary_positions_and_moonlight_does_not():
    k2, moonlight = parse(config("kimi_k2")).settings, parse(config("moonlight")).settings
    assert k2.kda is None
    assert k2.mla_layers == tuple(range(61))
    assert (k2.mla.rope.theta, k2.mla.rope.yarn.factor, k2.mla.rope.yarn.beta_fast) == (50000.0, 32.0, 1.0)
    assert (k2.norm_eps, k2.mla.q_latent_dim) == (1e-6, 1536)
    assert (moonlight.mla.rope.yarn, moonlight.mla.q_latent_dim, moonlight.moe.num_shared_experts) == (None, 0, 2)


def test_k25_holds_the_same_text_model_as_k2_but_for_its_context():
    k2, k25 = parse(config("kimi_k2")).settings, parse(config("kimi_k25")).settings
    assert k25.moe == k2.moe
    assert (k25.mla.rope.yarn.factor, k25.norm_eps, k25.context_len) == (64.0, 1e-5, 262144)


@pytest.mark.parametrize("name", RELEASED)
def test_settings_written_and_read_again_are_the_same(name):
    family, settings, *_ = parse(config(name))
    assert parse(compose(settings, family)).settings == settings
    assert parse(compose(settings, family)).family == family


@pytest.mark.parametrize("name", RELEASED)
def test_what_we_write_agrees_with_the_released_file(name):
    family, settings, *_ = parse(config(name))
    ours, theirs = compose(settings, family), config(name)
    ours, theirs = ours.get("text_config", ours), theirs.get("text_config", theirs)
    shared = (ours.keys() & theirs.keys()) - {"bos_token_id", "eos_token_id", "pad_token_id"}
    assert len(shared) > 20
    assert {key: ours[key] for key in shared} == {key: theirs[key] for key in shared}


@pytest.mark.parametrize(
    ("name", "family"),
    [("kimi_k3", "kimi_k3"), ("kimi_linear", "kimi_linear"), ("kimi_k2", "deepseek_v3"), ("moonlight", "deepseek_v3")],
)
def test_the_family_is_known_from_the_settings(name, family):
    assert family_of(parse(config(name)).settings) == family


def test_the_form_that_transformers_saves_is_read_as_the_released_one():
    released = config("kimi_linear")
    saved = {key: value for key, value in released.items() if key not in ("first_k_dense_replace", "mla_use_nope")}
    for router_key in ("moe_router_activation_func", "use_grouped_topk", "moe_layer_freq", "num_nextn_predict_layers"):
        del saved[router_key]
    full = released["linear_attn_config"]["full_attn_layers"]
    saved |= {
        "mlp_layer_types": ["dense"] + ["sparse"] * 26,
        "layer_types": ["full_attention" if layer in full else "linear_attention" for layer in range(1, 28)],
        "linear_conv_kernel_dim": 4,
        "linear_head_dim": 128,
        "linear_num_heads": 32,
        "qk_head_dim": 192,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "output_router_logits": False,
        "pretraining_tp": 1,
        "transformers_version": "5.24.0",
    }
    assert parse(saved).settings == parse(released).settings
    del saved["linear_attn_config"]
    assert parse(saved).settings == parse(released).settings


def test_rope_parameters_say_the_same_as_rope_scaling():
    released = config("kimi_k2")
    saved = {key: value for key, value in released.items() if key not in ("rope_theta", "rope_scaling")}
    saved["rope_parameters"] = released["rope_scaling"] | {"rope_type": "yarn", "rope_theta": 50000.0}
    assert parse(saved).settings == parse(released).settings
    saved["rope_parameters"] = {"rope_type": "default", "rope_theta": 50000.0}
    assert parse(saved).settings.mla.rope.yarn is None


def test_absent_keys_mean_the_defaults_of_the_class():
    text = {"rms_norm_eps", "routed_scaling_factor", "num_expert_group", "topk_group", "first_k_dense_replace"}
    short = {key: value for key, value in config("kimi_linear").items() if key not in text}
    settings = parse(short).settings
    assert (settings.norm_eps, settings.moe.share_scale, settings.num_dense_layers) == (1e-6, 1.0, 0)
    assert (settings.moe.num_groups, settings.moe.top_groups) == (1, 1)


@pytest.mark.parametrize(
    ("name", "values", "expected"),
    [
        ("kimi_linear", {"num_expert": 3}, "`num_expert` is not a key of this family; nearest is `num_experts`"),
        ("kimi_k3", {"atn_res_block_size": 3}, "nearest is `attn_res_block_size`"),
        ("kimi_k2", {"n_shared_expert": 1}, "nearest is `n_shared_experts`"),
        ("kimi_k2", {"hidden_size": None}, "`hidden_size` is missing"),
        ("kimi_k2", {"hidden_size": "7168"}, "`hidden_size` must be a whole number; found `'7168'`"),
        ("kimi_k2", {"hidden_size": True}, "`hidden_size` must be a whole number"),
        ("kimi_k2", {"hidden_size": -1}, "width: Input should be greater than 0"),
        ("kimi_k2", {"scoring_func": "softmax"}, "only `sigmoid` can be built"),
        ("kimi_k2", {"tie_word_embeddings": True}, "`tie_word_embeddings` is not supported"),
        ("kimi_k2", {"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "only `yarn` can be built"),
        ("kimi_k2", {"rope_scaling": {"type": "yarn", "faktor": 2.0}}, "`factor` is missing"),
        ("kimi_k2", {"num_key_value_heads": 8}, "`num_key_value_heads` is not supported; found `8`; only `64`"),
        ("kimi_k2", {"num_nextn_predict_layers": 3}, "must be 0 or 1"),
        ("kimi_k3", {"mla_use_nope": False}, "only `True` can be built"),
        ("kimi_k3", {"hidden_act": "gelu"}, "only `silu` or `situ`"),
        ("kimi_k3", {"num_experts_per_token": 1000}, "top_k `1000`"),
        ("kimi_linear", {"linear_attn_config": {"num_heads": 2, "head_dim": 8}}, "`full_attn_layers` is missing"),
        (
            "kimi_linear",
            {"linear_attn_config": {"num_heads": 2, "head_dim": 8, "full_attn_layers": [4], "kda_layers": [1, 2]}},
            "must name each layer from 1 to 27 once",
        ),
        ("kimi_linear", {"layer_types": ["full_attention"] * 27}, "`layer_types` does not describe"),
        ("kimi_linear", {"linear_num_heads": 31}, "`num_heads` is written twice; found `32` and `31`"),
        ("kimi_linear", {"mlp_layer_types": ["sparse"] * 26 + ["dense"]}, "only that order can be built"),
    ],
)
def test_a_config_that_cannot_be_built_is_refused_with_its_key(name, values, expected):
    with pytest.raises(ConfigError) as problem:
        parse(changed(name, **values))
    assert expected in str(problem.value)


def test_an_unsupported_family_is_refused_with_those_that_are():
    with pytest.raises(ConfigError) as problem:
        parse({"model_type": "llama", "hidden_size": 64})
    assert "found `llama`" in str(problem.value)
    assert all(family in str(problem.value) for family in FAMILIES)


def test_a_k3_config_without_its_text_model_is_refused():
    with pytest.raises(ConfigError, match="`text_config` is missing"):
        parse({"model_type": "kimi_k3"})


def test_unknown_keys_are_also_refused_outside_of_the_text_model():
    with pytest.raises(ConfigError, match="`vision_confg` is not a key of this family; nearest is `vision_config`"):
        parse(config("kimi_k3") | {"vision_confg": {}})


# --- F05: configs as transformers writes them

WRITTEN = json.loads((FOLDER / "transformers.json").read_text())
"""What `PretrainedConfig().to_dict()` gives in each version: the keys of every config that it writes."""


def tables(config):
    """The tables of a config that are transformers configs of their own."""
    return [config, *(config[name] for name in ("text_config", "vision_config") if name in config)]


@pytest.mark.parametrize("version", WRITTEN)
@pytest.mark.parametrize("name", RELEASED)
def test_f05_defaults_that_transformers_writes_change_nothing(name, version):
    written = config(name)
    for table in tables(written):
        own = dict(table)
        table |= WRITTEN[version]  # ids and the tied head too, where the table does not say otherwise
        table |= own | ({} if "vt_hidden_size" in own else {"tie_word_embeddings": False})
    assert parse(written) == parse(config(name))


@pytest.mark.parametrize("name", ["kimi_linear", "kimi_k2", "moonlight", "kimi_k25"])
@pytest.mark.parametrize("use_diff", [True, False])
@pytest.mark.filterwarnings("ignore:`rope_scaling` is deprecated:FutureWarning")
def test_f05_the_installed_transformers_writes_the_same_model(name, use_diff):
    transformers = pytest.importorskip("transformers")
    kinds = {"kimi_linear": "KimiLinearConfig", "kimi_k25": "Kimi_K25Config"}
    kind = getattr(transformers, kinds.get(name, "DeepseekV3Config"), None)
    if kind is None:
        pytest.skip(f"transformers {transformers.__version__} does not know {name}")
    written = json.loads(kind.from_dict(config(name)).to_json_string(use_diff=use_diff))
    assert written != config(name)
    found, released = parse(written), parse(config(name))
    assert (found.settings, found.vision) == (released.settings, released.vision)


def test_f05_a_tower_in_transformers_own_spelling_is_the_released_one():
    written, released = config("kimi_k25_transformers"), config("kimi_k25")
    assert not any(key.startswith("vt_") for key in written["vision_config"])
    assert parse(written).vision == parse(released).vision
    written["projection_layer_norm_eps"] = 1e-3
    assert parse(written).vision.projector_eps == 1e-3
    written["vision_config"]["vt_hidden_size"] = 64
    with pytest.raises(ConfigError, match="`vt_hidden_size` and `hidden_size` mean the same; found `64` and `1152`"):
        parse(written)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("add_cross_attention", True),
        ("cross_attention_hidden_size", 64),
        ("is_encoder_decoder", True),
        ("pruned_heads", {"0": [1]}),
        ("tie_encoder_decoder", True),
        ("attention_dropout", 0.1),
        ("attention_bias", True),
    ],
)
@pytest.mark.parametrize("name", ["kimi_k3", "kimi_k2"])
def test_f05_a_common_key_that_would_change_the_model_is_refused(name, key, value):
    with pytest.raises(ConfigError, match=f"`{key}` is not supported; found"):
        parse(changed(name, **{key: value}))


def test_f05_sampling_settings_of_a_config_are_told_and_change_nothing():
    found = parse(changed("kimi_k3", temperature=0.6, num_beams=4, top_k=None))
    assert found.settings == parse(config("kimi_k3")).settings
    assert "sampling settings, which are not read here: `num_beams` 4, `temperature` 0.6" in found.notes[-1]


def test_f05_an_unknown_key_passes_only_when_it_says_nothing():
    assert parse(changed("kimi_k3", a_new_option=None)) == parse(config("kimi_k3"))
    with pytest.raises(ConfigError, match="`a_new_option` is not a key of this family"):
        parse(changed("kimi_k3", a_new_option=False))


def test_f28_a_byte_order_mark_before_a_config_is_no_part_of_it(tmp_path):
    (tmp_path / "config.json").write_text((FOLDER / "kimi_k3.json").read_text(), encoding="utf-8-sig")
    assert read_config(tmp_path) == parse(config("kimi_k3"))


@pytest.mark.parametrize("content", [None, "", "{", "[1]", "\0\0"])
def test_a_config_file_that_is_absent_or_broken_is_refused_with_its_path(tmp_path, content):
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    with pytest.raises(ConfigError, match=r"config\.json"):
        read_config(tmp_path)


@pytest.mark.parametrize(("name", "found"), [("none", "nothing"), ("file", "a file")])
def test_what_is_no_folder_is_told_as_that(tmp_path, name, found):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=f"{name}: is no folder of weights; found {found}"):
        read_config(tmp_path / name)


@pytest.mark.parametrize(
    ("update", "lost"),
    [
        ({"residuals": FullResiduals()}, "residuals"),
        ({"mla": {"latent_norm_eps": 1e-5}}, "mla.latent_norm_eps"),
        ({"multi_token": {"loss_weight": 0.3}}, "multi_token.loss_weight"),
    ],
)
def test_settings_that_no_published_key_expresses_are_refused(t0, update, lost):
    tree = t0.model_dump()
    for name, value in update.items():
        tree[name] = tree[name] | value if name == "mla" else value
    with pytest.raises(ConfigError, match=f"kimi_k3: its published form cannot express `{lost}"):
        compose(Model.model_validate(tree))


def test_k3_parts_are_not_silently_dropped_by_a_plainer_family(t0):
    with pytest.raises(ConfigError, match="needs MLA with rotary positions"):
        compose(t0, "kimi_k2")


def test_token_ids_are_written_where_each_family_keeps_them(t0):
    written = compose(t0, "kimi_k3", token_ids={"bos_token_id": 1, "eos_token_id": 2})
    assert (written["eos_token_id"], written["text_config"]["eos_token_id"]) == (2, 2)
    assert written["text_config"]["pad_token_id"] is None


@st.composite
def models(draw):
    """Any K3-like model that the released form can express."""
    num_layers = draw(st.integers(1, 6))
    mla_layers = draw(st.sets(st.integers(0, num_layers - 1), min_size=1, max_size=max(1, num_layers - 1)))
    tree = {
        "vocab_size": draw(st.integers(1, 99)),
        "width": draw(st.integers(1, 99)),
        "num_layers": num_layers,
        "mla_layers": tuple(sorted(mla_layers)),
        "num_dense_layers": draw(st.integers(0, num_layers)),
        "dense_dim": draw(st.integers(1, 9)),
        "activation": draw(st.sampled_from([{"kind": "swiglu"}, {"kind": "situ", "gate_cap": 2.5, "up_cap": None}])),
        "mla": {
            "num_heads": draw(st.integers(1, 9)),
            "q_latent_dim": draw(st.integers(0, 9)),
            "kv_latent_dim": draw(st.integers(1, 9)),
            "nope_dim": draw(st.integers(1, 9)),
            "rope_dim": draw(st.integers(0, 9)),
            "value_dim": draw(st.integers(1, 9)),
            "output_gate": draw(st.booleans()),
        },
        "moe": {
            "num_experts": 8,
            "top_k": draw(st.integers(1, 4)),
            "num_shared_experts": draw(st.integers(0, 2)),
            "expert_dim": draw(st.integers(1, 9)),
            "latent_dim": draw(st.integers(0, 9)),
            "renormalize": draw(st.booleans()),
            "share_scale": draw(st.sampled_from([1.0, 2.446])),
            "num_groups": 2,
            "top_groups": draw(st.integers(1, 2)),
        },
        "residuals": draw(st.sampled_from([None, {"kind": "block", "block_layers": 3}])),
        "multi_token": draw(st.sampled_from([None, {}])),
        "context_len": draw(st.integers(1, 99)),
    }
    if len(mla_layers) < num_layers:
        tree["kda"] = {
            "num_heads": draw(st.integers(1, 9)),
            "head_dim": draw(st.integers(1, 9)),
            "conv_kernel": draw(st.integers(1, 5)),
            "decay": draw(st.sampled_from([{"kind": "softplus"}, {"kind": "bounded", "lowest_log_decay": -2.5}])),
            "output_gate": draw(st.sampled_from(["full", "low_rank"])),
        }
    return Model.model_validate(tree)


@given(settings=models(), family=st.sampled_from(["kimi_k3", "kimi_linear"]))
def test_any_hybrid_model_survives_its_published_form(settings, family):
    written = json.loads(json.dumps(compose(settings, family)))
    assert parse(written).settings == settings


@given(name=st.sampled_from(RELEASED), data=st.data())
def test_no_key_of_a_released_config_can_be_misspelled_unseen(name, data):
    whole = copy.deepcopy(config(name))
    text = whole.get("text_config", whole)
    key = data.draw(st.sampled_from(sorted(name for name, value in text.items() if value is not None)))
    text[f"{key}_"] = text.pop(key)
    with pytest.raises(ConfigError):
        parse(whole)
