import itertools
import json
import os
import re
import subprocess
import sys
from types import SimpleNamespace

import pytest

from triax import machine
from triax.machine import install_command


def test_a_refused_recipe_is_a_message_and_status_2(triax):
    status, out, err = triax("recipe", "check", "nano", "optim.momentun=3")
    assert (status, out) == (2, "")
    assert err == ("error: command line: optim.momentun is not a setting of MuonClip; nearest is `optim.momentum`\n")


@pytest.mark.parametrize(
    "words", [["frobnicate"], ["train"], ["train", "nano", "--lr", "3"], ["recipe", "chek", "nano"]]
)
def test_misuse_has_status_2_and_says_how_to_go_on(triax, words):
    status, out, err = triax(*words)
    assert (status, out) == (2, "")
    assert "--help" in err


def test_the_version_is_that_of_the_package(triax):
    import triax as package

    assert triax("--version") == (0, f"triax {package.__version__}\n", "")


def test_no_summary_of_a_verb_is_cut_off_in_a_wide_terminal(triax, monkeypatch):
    monkeypatch.setenv("COLUMNS", "120")
    for words in ([], ["model"], ["checkpoint"], ["recipe"], ["bench"], ["sandbox"]):
        status, out, _ = triax(*words, "--help")
        summaries = out.partition("Commands:")[2].splitlines()
        assert (status, [line for line in summaries if line.endswith("...")]) == (0, [])
        assert len(summaries) > 1


@pytest.mark.parametrize(
    ("module", "verb", "remedy"),
    [
        (
            "httpx",
            "list",
            f"needs the extra `sandbox`; found no `httpx`; install it with `{install_command('sandbox')}`",
        ),
        ("mcp", "mcp", "needs the package `mcp`; it is not installed; install it with `pip install mcp`"),
    ],
)
def test_a_verb_that_lacks_its_extra_or_a_package_beside_it_names_what_to_install(module, verb, remedy):
    program = f"import sys; sys.modules[{module!r}] = None; from triax.cli.app import main; main(['sandbox', {verb!r}])"
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=200)
    assert (ended.returncode, ended.stdout, ended.stderr) == (1, "", f"error: sandbox: {remedy}\n")


def test_a_broken_installation_of_our_own_keeps_its_traceback():
    program = "import sys; sys.modules['triax.sandbox.backend.remote'] = None; from triax.cli.app import main"
    ended = subprocess.run(
        [sys.executable, "-c", f"{program}; main(['sandbox', 'list'])"], capture_output=True, text=True, timeout=200
    )
    assert ended.returncode == 1
    assert ended.stderr.startswith("Traceback")


def test_check_names_the_kind_of_recipe(triax):
    assert triax("recipe", "check", "nano")[1].endswith("nano.toml: ok, a training recipe\n")
    assert triax("recipe", "check", "k3")[1].endswith("k3.toml: ok, a model, without a run\n")


def test_show_without_a_name_lists_what_is_shipped(triax):
    names = [line.split()[0] for line in triax("recipe", "show")[1].splitlines()]
    assert {"nano", "tiny", "small", "k3", "kimi-linear", "k2", "moonlight"} <= set(names)
    told = json.loads(triax("recipe", "show", "--json")[1])
    assert list(told) == names
    assert "2.78 T parameters" in told["k3"]


def test_show_tells_where_an_override_came_from(triax):
    assert any(
        line.startswith("optim.lr = 0.5 ") and line.endswith("# command line")
        for line in triax("recipe", "show", "nano", "optim.lr=0.5")[1].splitlines()
    )


def test_show_as_json_holds_every_setting_and_the_origins(triax):
    told = json.loads(triax("recipe", "show", "nano", "optim.lr=0.5", "--json")[1])
    assert told["recipe"]["optim"]["momentum"] == 0.95
    assert told["origins"]["optim.lr"] == "command line"


def test_model_show_counts_k3(triax):
    told = json.loads(triax("model", "show", "k3", "--json")[1])
    assert told["num_tensors"] == 249_756
    assert told["parameters"] == 2_779_484_476_000
    assert told["active_parameters"] == 104_189_612_640


def test_model_show_draws_the_tree(triax):
    out = triax("model", "show", "nano")[1]
    assert "attention.decay_rate" in out
    assert "cache bytes a token" in out


def test_model_show_reads_a_published_config_by_file_or_folder(triax, tmp_path):
    from triax.checkpoint.compose import compose
    from triax.config.load import load_model

    settings = load_model("kimi-linear")
    (tmp_path / "config.json").write_text(json.dumps(compose(settings)))
    for path in (tmp_path, tmp_path / "config.json"):
        assert json.loads(triax("model", "show", path, "--json")[1])["parameters"] == 49_122_681_728


def test_a_conversion_tells_a_program_what_it_would_write_and_what_it_wrote(triax, tmp_path):
    from triax.checkpoint.released import save_released
    from triax.config.load import load_model
    from triax.model.decoder import Decoder

    save_released(Decoder(load_model("nano")), tmp_path / "nano")
    words = ("convert", tmp_path / "nano", tmp_path / "packed", "--to", "mxfp4", "--json")
    planned = json.loads(triax(*words, "--plan")[1])
    assert (planned["form"], planned["written"], (tmp_path / "packed").exists()) == ("mxfp4", False, False)
    written = json.loads(triax(*words)[1])
    assert written == planned | {"written": True}
    assert written["files"] == len(list((tmp_path / "packed").glob("*.safetensors")))


def test_a_file_that_is_cut_short_does_not_bury_the_summary(triax, tmp_path):
    from triax.checkpoint.released import save_released
    from triax.config.load import load_model
    from triax.model.decoder import Decoder

    save_released(Decoder(load_model("nano")), tmp_path)
    (file,) = tmp_path.glob("*.safetensors")
    os.truncate(file, file.stat().st_size - 100)
    status, out, _ = triax("checkpoint", "verify", tmp_path)
    told = json.loads(triax("checkpoint", "verify", tmp_path, "--json")[1])
    missing = len(told["problems"]["missing"])
    assert status == 1
    assert f"{missing} missing:" in out
    assert f"  … and {missing - 20} more; `--json` lists all" in out
    assert len(out.splitlines()) < 40


@pytest.mark.parametrize("verb", ["verify", "inspect"])
@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("absent", "is no folder of weights; found nothing; name one"),
        ("file", "is no folder of weights; found a file; name one"),
        ("run", "found `recipe.json`; for released weights write `triax convert"),
        ("run/checkpoints/step-1", "found `manifest.json`; for released weights write `triax convert"),
        ("empty", "config.json: not found"),
    ],
)
def test_what_is_no_folder_of_weights_is_told_by_what_it_is(triax, tmp_path, verb, name, told):
    (tmp_path / "run" / "checkpoints" / "step-1").mkdir(parents=True)
    (tmp_path / "run" / "recipe.json").touch()
    (tmp_path / "run" / "checkpoints" / "step-1" / "manifest.json").touch()
    (tmp_path / "file").touch()
    (tmp_path / "empty").mkdir()
    status, out, err = triax("checkpoint", verb, tmp_path / name)
    assert (status, out) == (2, "")
    assert err.startswith(f"error: {tmp_path / name}")
    assert told in err


@pytest.mark.parametrize("form", ["mxfp4", "fp8", "int4"])
def test_training_in_a_format_of_packed_weights_is_refused(triax, form):
    status, out, err = triax("recipe", "check", "nano", f"train.precision={form}")
    assert (status, out) == (2, "")
    assert f"found `{form}`" in err


def test_packed_weights_take_the_memory_of_plain_ones_once_loaded(triax, tmp_path):
    from triax.checkpoint.load import load_released
    from triax.checkpoint.released import save_released
    from triax.config.load import load_model
    from triax.model.decoder import Decoder

    save_released(Decoder(load_model("nano")), tmp_path / "plain")
    assert triax("convert", tmp_path / "plain", tmp_path / "packed", "--to", "mxfp4")[0] == 0
    plain, packed = (load_released(tmp_path / name) for name in ("plain", "packed"))
    sizes = [{name: tensor.nbytes for name, tensor in model.state_dict().items()} for model in (plain, packed)]
    assert sizes[0] == sizes[1]


def test_a_long_look_at_numbers_tells_how_much_is_left(triax, tmp_path, monkeypatch):
    from triax.checkpoint.released import save_released
    from triax.cli import progress
    from triax.config.load import load_model
    from triax.model.decoder import Decoder

    save_released(Decoder(load_model("nano")), tmp_path)
    ticks = itertools.count(0.0, 20.0)  # every look at the clock is 20 s later
    monkeypatch.setattr(progress, "time", SimpleNamespace(monotonic=lambda: next(ticks)))
    err = triax("checkpoint", "verify", tmp_path)[2]
    shares = [int(share) for share in re.findall(r"verify: .* GB \((\d+)%\), .* left", err)]
    assert len(shares) > 100
    assert shares == sorted(shares)
    assert 95 <= shares[-1] <= 100


def test_model_show_refuses_a_config_of_another_family_by_name(triax, tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    status, _, err = triax("model", "show", tmp_path)
    assert status == 2
    assert "llama" in err


def test_doctor_tells_facts_that_fit_this_machine(triax):
    told = json.loads(triax("doctor", "--json")[1])
    assert told["cores"] == machine.cores() >= 1
    assert told["python"] == sys.version.split()[0]
    assert 0 < told["free_memory_bytes"] <= told["memory_bytes"]
    assert set(told["extras"]) == set(machine.EXTRAS)
    assert told["means"]


@pytest.mark.parametrize(
    ("devices", "expected"),
    [([], "data, serve, sandbox"), ([{"name": "a GPU", "memory_bytes": 8e9}], "data, serve, sandbox, gpu")],
)
def test_doctor_offers_every_extra_that_this_machine_can_use(devices, expected):
    from triax.cli.doctor import _meaning

    extras = {"data": False, "video": True, "serve": False, "sandbox": False, "gpu": False, "dev": False, "docs": False}
    facts = {"devices": devices, "bf16": True, "threads": 2, "cores": 2, "extras": extras}
    assert _meaning(facts)[-1].startswith(f"not installed: {expected};")


def test_doctor_in_words_names_the_same(triax):
    out = triax("doctor")[1]
    assert f"cores     {machine.cores()}" in out
    assert "torch" in out


def test_more_threads_than_cores_give_one_warning_with_the_remedy():
    environment = os.environ | {"OMP_NUM_THREADS": str(machine.cores() + 3)}
    words = [sys.executable, "-m", "triax", "doctor", "--json"]
    told = json.loads(subprocess.run(words, env=environment, capture_output=True, check=True).stdout)
    assert len(told["warnings"]) == 1
    assert f"OMP_NUM_THREADS={machine.cores()}" in told["warnings"][0]


@pytest.mark.parametrize(("threads", "expected"), [(2, 0), (1, 0), (3, 1)])
def test_threads_are_only_remarked_on_when_they_do_not_fit(monkeypatch, threads, expected):
    for name in machine.THREAD_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    assert len(machine.thread_warnings(threads, num_cores=2)) == expected


def test_a_number_format_that_this_processor_cannot_multiply_is_remarked_on(monkeypatch):
    monkeypatch.setattr(machine, "has_bf16", lambda: False)
    assert "train.precision=fp32" in machine.precision_warnings("bf16", on_cpu=True)[0]
    assert not machine.precision_warnings("bf16", on_cpu=False)
    assert not machine.precision_warnings("fp32", on_cpu=True)


def test_a_folder_that_cannot_be_made_is_a_message(triax, tmp_path):
    (tmp_path / "file").write_text("")
    status, _, err = triax("train", "nano", "--run", tmp_path / "file" / "run")
    assert status == 2
    assert str(tmp_path / "file" / "run") in err
    assert "choose another run folder" in err


def test_a_full_disk_is_a_message_and_status_1(triax, monkeypatch):
    import errno

    from triax.cli import app

    def full(args):
        raise OSError(errno.ENOSPC, "No space left on device", "runs/x/metrics.jsonl")

    monkeypatch.setattr(app, "app", full)
    status, _, err = triax()
    assert status == 1
    assert err.startswith("error: runs/x/metrics.jsonl: cannot be written or read; found no space left on device; make")


def test_a_fault_of_the_program_keeps_its_traceback(triax, monkeypatch):
    from triax.cli import app

    def broken(args):
        raise ZeroDivisionError

    monkeypatch.setattr(app, "app", broken)
    with pytest.raises(ZeroDivisionError):
        triax()
