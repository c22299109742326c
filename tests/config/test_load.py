import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from triax.config import show
from triax.config.load import (
    COMMAND_LINE,
    find_recipe,
    gather,
    load,
    load_either,
    load_model,
    load_recipe,
    merge,
    purpose,
)
from triax.config.optim import AdamW, MuonClip
from triax.config.train import Recipe
from triax.errors import ConfigError


def write(folder, name, text):
    path = folder / name
    path.write_text(text)
    return path


def refusal(*overrides, recipe="nano"):
    with pytest.raises(ConfigError) as problem:
        load_recipe(recipe, overrides)
    return str(problem.value)


def test_a_child_recipe_changes_only_what_it_names(tmp_path):
    write(tmp_path, "parent.toml", 'extends = "nano"\n[optim]\nlr = 0.5\nmomentum = 0.5\n')
    child = write(tmp_path, "child.toml", 'extends = "parent.toml"\n[optim]\nlr = 0.25\n')
    recipe = load_recipe(child)
    assert (recipe.optim.lr, recipe.optim.momentum) == (0.25, 0.5)
    assert recipe.model == load_recipe("nano").model


def test_f28_a_byte_order_mark_before_a_recipe_is_no_part_of_it(tmp_path):
    (tmp_path / "marked.toml").write_text('# A marked one.\nextends = "nano"\n[optim]\nlr = 0.25\n', "utf-8-sig")
    assert load_recipe(tmp_path / "marked.toml").optim.lr == 0.25
    assert purpose(tmp_path / "marked.toml") == "A marked one."
    written = {"recipe": load_recipe("nano").model_dump(mode="json")}
    (tmp_path / "recipe.json").write_text(json.dumps(written), "utf-8-sig")
    assert load_recipe(tmp_path / "recipe.json") == load_recipe("nano")


def test_recipes_that_extend_each_other_in_a_circle_are_refused(tmp_path):
    write(tmp_path, "a.toml", 'extends = "b.toml"\n')
    write(tmp_path, "b.toml", 'extends = "a.toml"\n')
    with pytest.raises(ConfigError, match=r"circle.*a\.toml extends .*b\.toml extends .*a\.toml"):
        load_recipe(tmp_path / "a.toml")


def test_a_missing_parent_is_named_with_the_file_that_wants_it(tmp_path):
    path = write(tmp_path, "child.toml", 'extends = "parnt.toml"\n')
    with pytest.raises(ConfigError, match=r"child\.toml: extends recipe `parnt\.toml`: no such file"):
        load_recipe(path)


@pytest.mark.parametrize("order", [1, -1])
def test_changing_the_kind_leaves_nothing_of_the_other_kind_in_either_order(order):
    optim = load_recipe("nano", ["optim.kind=adamw", "optim.lr=1e-4"][::order]).optim
    assert optim == AdamW(lr=1e-4)


def test_a_table_may_leave_out_the_default_kind():
    assert isinstance(load_recipe("nano", ["optim.momentum=0.9"]).optim, MuonClip)


def test_the_word_none_turns_off_what_can_be_off():
    recipe = load_recipe("nano", ["optim.qk_clip=none", "model.residuals=none"])
    assert recipe.optim.qk_clip is None
    assert recipe.model.residuals is None


def test_whole_numbers_may_be_written_as_floats():
    assert load_recipe("nano", ["train.tokens=2e6"]).train.tokens == 2_000_000


def test_text_needs_no_quotes_on_the_command_line():
    assert gather(["train.device=cuda:0", "train.wandb=2026-11-30"]) == {
        "train": {"device": "cuda:0", "wandb": "2026-11-30"}
    }


def test_an_unknown_key_is_refused_with_the_nearest_name():
    assert refusal("train.toknes=5") == "command line: train.toknes is not a setting of Run; nearest is `train.tokens`"


def test_a_key_in_the_wrong_table_is_refused_with_the_right_place():
    assert refusal("train.lr=1") == "command line: train.lr is not a setting of Run; did you mean `optim.lr`"


def test_the_nearest_name_comes_from_the_chosen_kind():
    message = refusal("optim.kind=adamw", "optim.moment=0.9")
    assert "optim.moment is not a setting of AdamW" in message
    assert "`optim.momentum`" not in message


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("train.tokens=0", "train.tokens must be more than 0; found `0`"),
        ("train.tokens=2.5", "train.tokens must be a whole number; found `2.5`"),
        ("train.tokens=true", "train.tokens must be a whole number; found `true`"),
        ('train.tokens="7"', 'train.tokens must be a whole number; found `"7"`'),
        ("train.precision=fp8", "train.precision must be `auto`, `fp32` or `bf16`; found `fp8`"),
        ("optim.lr=fast", 'optim.lr must be a number; found `"fast"`'),
        ("model.moe=3", "model.moe must be a table; found `3`"),
        ("model.residuals.kind=blok", "model.residuals.kind must be one of `block`, `full`; found `blok`"),
        ("data.held_out_share=1.5", "data.held_out_share must be less than 1; found `1.5`"),
        ("model.moe.top_k=40", "model.moe: top_k `40` is more than the eligible experts of num_experts `8`"),
        ("data.sources=[]", "data.sources must have at least 1 entries; found `[]`"),
        ("optim.lr=inf", "optim.lr must be a finite number; found `inf`"),
        ("optim.weight_decay=nan", "optim.weight_decay must be a finite number; found `nan`"),
        ("optim.betas=[1.0, 0.9]", "optim.betas[0] must be less than 1; found `1.0`"),
        ("optim.betas=[0.9]", "the setting `optim.betas[1]` is required; none was found; add it to the recipe"),
        (f"train.seed={2**64}", "train.seed must be less than"),
        ("schedule.segments=[{shape='linear', until=1, to=0}]", "schedule: segments never leave rate 0"),
        ("model.multi_token=true", "model.multi_token must be a table; found `true`; write `none`"),
        ("model.vision.width=63", "model.vision.width must be a multiple of 2; found `63`"),
        ("model.mla.rope.theta=1", "model.mla.rope.theta must be more than 1; found `1`"),
        ("model.mla.rope.yarn={factor = 2, beta_fast = 0}", "model.mla.rope.yarn.beta_fast must be more than 0"),
    ],
)
def test_a_wrong_value_is_named_with_what_was_found(override, message):
    assert refusal(override).startswith(f"command line: {message}")


def test_a_wrong_value_in_a_parent_is_blamed_on_the_parent(tmp_path):
    parent = write(tmp_path, "parent.toml", 'extends = "nano"\n[train]\ntokens = -1\n')
    child = write(tmp_path, "child.toml", 'extends = "parent.toml"\n[optim]\nlr = 1\n')
    with pytest.raises(ConfigError, match=f"^{parent}: train.tokens must be more than 0; found `-1`$"):
        load_recipe(child)


def test_a_fault_in_a_file_is_mended_by_an_override_because_validation_comes_last(tmp_path):
    path = write(tmp_path, "r.toml", 'extends = "nano"\n[train]\nbatch_tokens = 100\n')
    assert load_recipe(path, ["train.batch_tokens=1024"]).train.batch_tokens == 1024


def test_every_problem_is_reported_at_once():
    assert refusal("train.tokens=0", "optim.lr=0", "modell.width=3").count("\n") == 2


def test_entries_of_lists_are_named_by_their_number():
    message = refusal("data.sources=[{kind='folder',pat='*.md'}]")
    assert "data.sources[0].pat is not a setting of Folder; nearest is `data.sources[0].path`" in message
    assert "the setting `data.sources[0].path`" in message


@pytest.mark.parametrize("word", ["foo", "=3", "a..b=1", "optim.=1"])
def test_words_that_are_no_settings_are_refused(word):
    assert "key.path=value" in refusal(word)


def test_two_words_may_not_set_the_same_table_whole_and_in_part():
    for words in (["optim=x", "optim.lr=1"], ["optim.lr=1", "optim=x"]):
        assert "whole" in refusal(*words)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"[model\nwidth = 3", "not TOML"),
        (b"\xff\xfe\x00", "not a text file in UTF-8"),
        (b"\x7fELF\x00\x01", "not TOML"),
        (b'extends = ["a"]', "extends must be one name or path"),
    ],
)
def test_a_file_that_is_no_recipe_is_refused_by_name(tmp_path, content, message):
    path = tmp_path / "bad.toml"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=rf"bad\.toml: {message}"):
        load_recipe(path)


@pytest.mark.parametrize("content", ["[1]", '{"recipe": 3}', "{", "[" * 100_000])
def test_json_that_is_no_recipe_is_refused_by_name(tmp_path, content):
    path = tmp_path / "bad.json"
    path.write_text(content)
    with pytest.raises(ConfigError, match=r"bad\.json: not a recipe written by a run"):
        load_recipe(path)


def test_a_misspelt_name_is_refused_with_the_nearest_shipped_one():
    with pytest.raises(ConfigError, match="recipe `tinny`: no such file or shipped recipe; nearest is `tiny`"):
        find_recipe("tinny")


def test_a_preset_without_a_run_says_what_a_run_needs():
    assert "the table `train`" in refusal(recipe="k3")
    assert load_either("k3").settings.model == load_model("k3")


def test_each_value_knows_where_it_was_written(tmp_path):
    path = write(tmp_path, "mine.toml", 'extends = "nano"\n[optim]\nlr = 0.5\n')
    origins = load(Recipe, path, ["train.seed=7"]).origins
    assert origins["optim.lr"] == str(path)
    assert origins["train.seed"] == COMMAND_LINE
    assert origins["model.width"].endswith("nano.toml")
    assert "optim.momentum" not in origins


@pytest.mark.parametrize(
    "overrides",
    [
        [],
        ["optim.kind=adamw", "optim.betas=[0.8, 0.9]"],
        ["model.residuals.kind=full", "optim.qk_clip=none", "model.activation.up_cap=none"],
        ["data.sources=[{kind='folder', path='a b', weight=2}, {kind='stdlib'}]", "model.multi_token.loss_weight=0.3"],
        ["schedule.segments=[{shape='linear', until=0.5, to=1}, {shape='1-sqrt', until=1, to=0}]"],
    ],
)
def test_what_is_shown_is_a_recipe_of_the_same_settings(tmp_path, overrides):
    loaded = load(Recipe, "nano", overrides)
    again = load_recipe(write(tmp_path, "again.toml", show.as_toml(loaded)))
    assert again == loaded.settings


def test_shown_values_are_the_non_default_ones_with_their_origin():
    lines = show.as_toml(load(Recipe, "nano", ["optim.lr=0.5", "optim.momentum=0.95"])).splitlines()
    assert any(line.startswith("optim.lr = 0.5 ") and line.endswith("# command line") for line in lines)
    assert not any(line.startswith("optim.momentum") for line in lines)


def test_a_run_folder_is_a_recipe_again(tmp_path):
    import json

    loaded = load(Recipe, "nano", ["optim.lr=0.5"])
    (tmp_path / "recipe.json").write_text(json.dumps(show.as_json(loaded)))
    assert load_recipe(tmp_path) == loaded.settings
    assert load_recipe(tmp_path, ["train.seed=3"]).train.seed == 3


names = st.sampled_from(["a", "b", "c"])
trees = st.recursive(st.integers(0, 3), lambda inner: st.dictionaries(names, inner, max_size=3), max_leaves=6)
tables = st.dictionaries(names, trees, max_size=3)


@given(tables, tables, tables)
def test_merging_does_not_depend_on_where_the_brackets_are(a, b, c):
    # a scalar between two tables hides the lower one either way only if it is not hidden first itself
    def clash(low, high):
        return any(
            isinstance(low.get(k), dict) != isinstance(v, dict) or (isinstance(v, dict) and clash(low[k], v))
            for k, v in high.items()
            if k in low
        )

    if not (clash(a, b) or clash(b, c) or clash(a, c)):
        assert merge(merge(a, b), c) == merge(a, merge(b, c))


@given(tables)
def test_merging_with_nothing_changes_nothing(tree):
    assert merge(tree, {}) == tree == merge({}, tree)


@pytest.mark.parametrize(
    ("word", "told"),
    [
        ("train.batch_tokens=100", "command line: train.batch_tokens `100` is not a multiple of"),
        ("data.seq_len=100", "command line: train.micro_tokens `512` is not a multiple of"),
        ("model.vocab_size=300", "command line: data.tokenizer.vocab_size `320` is more than"),
        ("schedule.segments=[{shape='linear', until=0.5, to=1.0}]", "command line: schedule: segments must end at"),
    ],
)
def test_f68_a_rule_across_settings_blames_the_word_that_broke_it(word, told):
    with pytest.raises(ConfigError) as problem:
        load_recipe("nano", [word])
    assert str(problem.value).startswith(told)


def test_f68_a_rule_that_a_file_broke_blames_the_file(tmp_path):
    (tmp_path / "mine.toml").write_text('extends = "nano"\n[train]\nbatch_tokens = 100\n')
    with pytest.raises(ConfigError, match=r"mine.toml: train.batch_tokens `100` is not a multiple"):
        load_recipe(tmp_path / "mine.toml", ["optim.lr=0.1"])
