"""A run's folder refuses what it could not keep, and other settings on resuming."""

import json
import os
import subprocess
import sys

import pytest

from triax.checkpoint.run import recipe_of
from triax.config.load import load_recipe
from triax.errors import CheckpointError, ConfigError
from triax.train import run_folder


@pytest.fixture(scope="module")
def recipe():
    return load_recipe("nano")


def test_a_new_folder_holds_the_resolved_recipe_its_origins_and_the_environment(tmp_path, recipe):
    path = tmp_path / "a" / "b"
    assert run_folder.prepare(path, resume=False) is False
    run_folder.record(path, recipe, {"optim.lr": "nano.toml"})
    assert recipe_of(path) == recipe
    assert json.loads((path / "recipe.json").read_text())["origins"] == {"optim.lr": "nano.toml"}
    environment = json.loads((path / "environment.json").read_text())
    assert environment["versions"]["torch"].startswith("2.")
    (path / "checkpoints" / "step-5").mkdir(parents=True)
    assert run_folder.prepare(path, resume=True) is True


@pytest.mark.parametrize("names", [(), ("log.txt",), ("log.txt", "tokenizer.json", "metrics.jsonl", "tensorboard/a")])
def test_f64_a_run_without_a_checkpoint_may_be_begun_anew(tmp_path, recipe, names):
    run_folder.record(tmp_path, recipe, None)
    for name in (*names, "checkpoints/step-3.tmp/state.json"):  # a half-written checkpoint is none
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("{}")
    for resume in (True, False):
        assert run_folder.prepare(tmp_path, resume=resume) is False
    assert run_folder.clear(tmp_path) is (len(names) > 1)
    assert {path.name for path in tmp_path.iterdir()} - {"checkpoints"} == {
        "recipe.json",
        "environment.json",
        *names[:1],
    }


@pytest.mark.parametrize("name", ["result.json", "checkpoints/step-3"])
def test_a_folder_that_holds_work_of_a_run_needs_resume(tmp_path, recipe, name):
    run_folder.record(tmp_path, recipe, None)
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).mkdir()
    with pytest.raises(ConfigError, match=rf"holds a run already, with `{name}`; pass --resume"):
        run_folder.prepare(tmp_path, resume=False)
    assert run_folder.prepare(tmp_path, resume=True) is True


def test_f27_a_recipe_of_a_run_names_its_text_wherever_it_is_read(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    words = ['data.sources=[{kind = "folder", path = "notes"}]', "data.tokenizer.path=t.json"]
    run_folder.record(tmp_path, load_recipe("nano", words), None)
    read = recipe_of(tmp_path)
    assert (read.data.sources[0].path, read.data.tokenizer.path) == (tmp_path / "notes", tmp_path / "t.json")


@pytest.mark.parametrize("resume", [True, False])
def test_a_folder_that_holds_something_else_is_refused(tmp_path, resume):
    (tmp_path / "thesis.tex").write_text("")
    with pytest.raises(ConfigError, match=r"is not empty and holds no run; found `thesis.tex`"):
        run_folder.prepare(tmp_path, resume=resume)
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]


def test_two_processes_do_not_train_in_one_folder(tmp_path):
    hold = "import pathlib, sys, time; from triax.train.run_folder import held\n"
    hold += "with held(pathlib.Path(sys.argv[1])): print('held', flush=True); time.sleep(600)"
    other = subprocess.Popen([sys.executable, "-c", hold, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    try:
        assert other.stdout.readline() == "held\n"
        with pytest.raises(ConfigError, match="another process trains here"), run_folder.held(tmp_path):
            pass
    finally:
        other.kill()
        other.communicate()
    with run_folder.held(tmp_path):  # whatever ended the other one, its hold ended with it
        pass


def test_a_path_below_a_file_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot be written; Not a directory"):
        run_folder.prepare(tmp_path / "file" / "run", resume=False)


def test_a_folder_without_write_permission_is_refused(tmp_path):
    tmp_path.chmod(0o555)
    user = os.geteuid()
    if user == 0:
        os.seteuid(65534)  # root may write anywhere
    try:
        with pytest.raises(ConfigError, match="cannot be written; Permission denied"):
            run_folder.prepare(tmp_path, resume=False)
    finally:
        os.seteuid(user)


@pytest.mark.parametrize("content", [None, "{", '{"recipe": {"model": 3}}'])
def test_a_folder_without_a_readable_recipe_is_no_run(tmp_path, content):
    if content is not None:
        (tmp_path / "recipe.json").write_text(content)
    with pytest.raises(CheckpointError, match="is not the folder of a run"):
        recipe_of(tmp_path)


def changed(recipe, path, value):
    tree = recipe.model_dump(mode="json")
    *tables, key = path.split(".")
    inner = tree
    for table in tables:
        inner = inner[table]
    inner[key] = value
    return type(recipe).model_validate(tree)


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("model.kda.num_heads", 4),
        ("data.held_out_share", 0.5),
        ("optim.lr", 0.5),
        ("balance.rule", "sign"),
        ("train.batch_tokens", 1024),
        ("train.seed", 7),
    ],
)
def test_other_settings_are_refused_by_name(tmp_path, recipe, path, value):
    saved = json.loads(json.dumps(run_folder.fingerprint(recipe, 1)))
    with pytest.raises(CheckpointError, match=rf"`{path}` was `.*`, is `{value}`; set them back"):
        run_folder.refuse_other_settings(tmp_path, saved, changed(recipe, path, value), 1)


def test_another_world_size_is_refused(tmp_path, recipe):
    with pytest.raises(CheckpointError, match="`world_size` was `1`, is `2`"):
        run_folder.refuse_other_settings(tmp_path, run_folder.fingerprint(recipe, 1), recipe, 2)


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("train.tokens", 999),
        ("train.save_every", 3),
        ("train.device", "cuda"),
        ("schedule.segments", [{"shape": "linear", "until": 1, "to": 0.5}]),
        ("data.tokenizer.path", "elsewhere.json"),
    ],
)
def test_length_schedule_cadence_and_device_may_change(tmp_path, recipe, path, value):
    saved = json.loads(json.dumps(run_folder.fingerprint(recipe, 1)))
    run_folder.refuse_other_settings(tmp_path, saved, changed(recipe, path, value), 1)


def test_f27_where_text_lies_may_change_but_not_what_it_is(tmp_path):
    def source(kind, path):
        return load_recipe("nano", [f'data.sources=[{{kind = "{kind}", path = "{path}"}}]'])

    saved = json.loads(json.dumps(run_folder.fingerprint(source("folder", "/old/place"), 1)))
    run_folder.refuse_other_settings(tmp_path, saved, source("folder", "new"), 1)
    with pytest.raises(CheckpointError, match=r"`data.sources.0.kind` was `folder`, is `jsonl`"):
        run_folder.refuse_other_settings(tmp_path, saved, source("jsonl", "new"), 1)
