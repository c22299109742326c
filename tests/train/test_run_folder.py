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
    (path / "tokenizer.json").write_text("{}")
    assert run_folder.prepare(path, resume=True) is True


def test_a_run_that_has_not_read_its_text_may_be_begun_anew(tmp_path, recipe):
    run_folder.record(tmp_path, recipe, None)
    (tmp_path / "log.txt").write_text("")
    for resume in (True, False):
        assert run_folder.prepare(tmp_path, resume=resume) is False


def test_a_folder_that_holds_a_run_needs_resume(tmp_path, recipe):
    run_folder.record(tmp_path, recipe, None)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"holds a run already.*--resume"):
        run_folder.prepare(tmp_path, resume=False)


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
    ],
)
def test_length_schedule_cadence_and_device_may_change(tmp_path, recipe, path, value):
    saved = json.loads(json.dumps(run_folder.fingerprint(recipe, 1)))
    run_folder.refuse_other_settings(tmp_path, saved, changed(recipe, path, value), 1)
