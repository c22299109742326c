"""The path of the README, word by word: train, go on, sample, chat."""

import io
import json
import logging
import os
import shutil
import subprocess
import sys
from contextlib import chdir, redirect_stderr, redirect_stdout

import pytest

from triax.cli.app import main

TEXT = "".join(f"line {n}: the square of {n} is {n * n}, and of {n + 1} it is {(n + 1) ** 2}.\n" for n in range(40))


def triax(folder, *words, typed=""):
    """Run one command in this process, as if typed in `folder`; give exit status, stdout and stderr."""
    out, err, status = io.StringIO(), io.StringIO(), 0
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(out), redirect_stderr(err), chdir(folder):
        patch.setattr("sys.stdin", io.StringIO(typed))
        try:
            main(words)
        except SystemExit as end:
            status = end.code or 0
    for handler in list(logging.getLogger("triax").handlers):
        logging.getLogger("triax").removeHandler(handler)
    return status, out.getvalue(), err.getvalue()


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with a recipe of one's own and a finished run of it."""
    folder = tmp_path_factory.mktemp("home")
    (folder / "notes").mkdir()
    for number in range(12):
        (folder / "notes" / f"part{number}.txt").write_text(TEXT.replace("line", f"row {number}"))
    (folder / "mine.toml").write_text(
        'extends = "nano"\n\n[data]\nheld_out_share = 0.2\ntokenizer.vocab_size = 300\n'
        'sources = [{ kind = "folder", path = "notes" }]\n'
    )
    status, out, err = triax(
        folder,
        "train",
        "mine.toml",
        "train.tokens=1024",
        "train.batch_tokens=128",
        "train.micro_tokens=64",
        "train.check_after=0",
        "--run",
        "runs/mine",
        "--json",
    )
    assert status == 0, err
    return folder, json.loads(out)


def test_training_ends_with_its_result_on_stdout(place):
    folder, result = place
    assert result["steps"] == 8
    assert result["bits_per_byte"] > 0
    assert (folder / "runs" / "mine" / "report.html").is_file()


def test_the_run_is_not_overwritten(place):
    folder, _ = place
    status, out, err = triax(folder, "train", "mine.toml", "--run", "runs/mine")
    assert (status, out) == (2, "")
    assert "--resume" in err


def test_resuming_a_finished_run_repeats_its_result(place):
    folder, result = place
    status, out, _ = triax(folder, "train", "runs/mine", "--run", "runs/mine", "--resume", "--json")
    assert status == 0
    assert json.loads(out) == result


def test_resuming_with_another_model_is_refused_by_setting(place):
    folder, _ = place
    status, _, err = triax(folder, "train", "runs/mine", "model.moe.top_k=3", "--run", "runs/mine", "--resume")
    assert status == 1
    assert "`model.moe.top_k` was `2`, is `3`" in err


def test_a_sample_begins_with_its_prompt_and_repeats_by_seed(place):
    folder, _ = place
    words = ("sample", "runs/mine", "row 1", "--max-tokens", "12", "--seed", "3")
    status, out, _ = triax(folder, *words)
    assert status == 0
    assert out.startswith("row 1")
    told = json.loads(triax(folder, *words, "--json")[1])
    assert f"{told['prompt']}{told['text']}\n" == out
    assert told["finish_reason"] in ("length", "stop")
    assert told["tokens"] <= 12


def test_a_prompt_may_come_from_a_pipe(place):
    folder, _ = place
    assert triax(folder, "sample", "runs/mine", "-", "--max-tokens", "0", typed="piped")[1] == "piped\n"


def test_chat_says_that_it_continues_and_works_in_a_pipe(place):
    folder, _ = place
    status, out, err = triax(folder, "chat", "runs/mine", "--max-tokens", "5", typed="row 1\n\n/quit\nnever\n")
    assert status == 0
    assert out.startswith("row 1")
    assert "never" not in out
    assert "base model" in err


def test_options_out_of_range_are_refused_by_name(place):
    folder, _ = place
    status, _, err = triax(folder, "sample", "runs/mine", "x", "--top-p", "1.5")
    assert status == 2
    assert err.startswith("error: sampling: top_p is out of range")


@pytest.mark.parametrize("option", [("--top-p", "0"), ("--seed", str(2**64))])
def test_a_refused_sample_writes_nothing(place, option):
    folder, _ = place
    status, out, err = triax(folder, "sample", "runs/mine", "x", *option)
    assert (status, out) == (2, "")
    assert err.startswith("error: ")


def test_bytes_that_are_no_text_are_refused_by_place_not_by_a_traceback(place):
    folder, _ = place
    command = [sys.executable, "-c", "from triax.cli.app import main; main()", "sample", "runs/mine", "-"]
    strict = os.environ | {"PYTHONIOENCODING": "ascii:strict", "OMP_NUM_THREADS": "1"}
    ended = subprocess.run(command, input=b"line\xe9", cwd=folder, env=strict, capture_output=True)
    assert (ended.returncode, ended.stdout) == (1, b"")
    assert ended.stderr.startswith(b"error: text 0: not valid Unicode; found a lone surrogate")


def test_a_run_folder_goes_on_where_it_lies(place):
    folder, result = place
    (folder / "elsewhere").mkdir()
    shutil.copytree(folder / "runs" / "mine", folder / "elsewhere" / "copy")
    status, out, _ = triax(folder, "train", "elsewhere/copy", "--resume", "--json")
    assert status == 0
    assert json.loads(out) == result
    assert not (folder / "runs" / "copy").exists()


def test_a_run_that_was_refused_for_its_text_may_be_begun_anew(place):
    folder, _ = place
    words = ("train", "mine.toml", "train.tokens=64", "train.batch_tokens=64", "train.micro_tokens=64")
    assert triax(folder, *words, "data.sources=[{kind='folder', path='ntoes'}]", "--run", "runs/again")[0] == 1
    assert triax(folder, *words, "--run", "runs/again")[0] == 0


def test_text_that_is_not_there_is_named(place):
    folder, _ = place
    source = "data.sources=[{kind='folder', path='nowhere'}]"
    status, _, err = triax(folder, "train", "mine.toml", source, "--run", "runs/other")
    assert status == 1
    assert err.startswith("error: ")
    assert "nowhere" in err


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_the_demo_beats_both_baselines(tmp_path):
    status, out, err = triax(tmp_path, "train", "tiny", "train.baselines=true", "--run", "demo", "--json")
    assert status == 0, err
    result = json.loads(out)
    assert result["bits_per_byte"] < min(result["baselines"]["byte_model"], result["baselines"]["xz"])
