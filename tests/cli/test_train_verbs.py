"""`triax train`, `sample`, `runs` and `report`: what they check, print and end with."""

import json
from types import SimpleNamespace

import pytest

from triax.config.load import load_recipe
from triax.train import run_folder


@pytest.fixture
def notes(tmp_path, monkeypatch):
    """A folder of a little text, seen from where commands run."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "notes").mkdir()
    for number in range(4):
        (tmp_path / "notes" / f"{number}.txt").write_text(f"note {number}: " + "some words, and more of them. " * 20)
    return ('data.sources=[{kind = "folder", path = "notes"}]', "train.tokens=1000")


def test_f62_a_dry_run_plans_checks_and_writes_nothing(triax, notes, tmp_path):
    status, out, _ = triax("train", "nano", *notes, "--dry-run")
    assert status == 0
    assert "# 2 steps of 512 tokens, into runs/nano" in out
    assert "# on c" in out
    assert "# text: 0.00 MB in 3 documents to learn from, 0.00 MB in 1 held out" in out
    assert [path.name for path in tmp_path.iterdir()] == ["notes"]


@pytest.mark.parametrize(
    ("words", "status", "told"),
    [
        (['data.sources=[{kind = "folder", path = "absent"}]'], 1, "absent: no such folder"),
        (["train.device=cuda:99"], 2, "train.device"),
        (["--branch", "absent"], 1, "absent: no checkpoint to branch off from"),
        (["--run", "notes"], 2, "notes: is not empty and holds no run"),
        (["--run", "notes/0.txt/run"], 2, "cannot be written; Not a directory"),
        (["data.tokenizer.path=absent.json"], 1, "absent.json"),
        (["data.seq_len=4096", "train.micro_tokens=4096", "train.batch_tokens=4096"], 1, "data.seq_len `4096` is more"),
    ],
)
def test_f62_a_dry_run_finds_what_would_stop_the_run(triax, notes, tmp_path, words, status, told):
    found, out, err = triax("train", "nano", *notes, *words, "--dry-run")
    assert (found, out) == (status, "")
    assert told in err
    assert [path.name for path in tmp_path.iterdir()] == ["notes"]


def test_f62_a_dry_run_sees_a_folder_that_another_process_trains_in(triax, notes, tmp_path):
    (tmp_path / "runs" / "nano").mkdir(parents=True)
    with run_folder.held(tmp_path / "runs" / "nano"):
        status, _, err = triax("train", "nano", *notes, "--dry-run")
    assert (status, "another process trains here" in err) == (2, True)


@pytest.mark.parametrize(("stopped", "tokens", "status"), [("SIGTERM", 512, 1), ("SIGTERM", 1000, 0), ("", 1000, 0)])
@pytest.mark.parametrize("form", [(), ("--json",)])
def test_a_run_that_a_signal_ended_before_its_last_token_has_status_1(
    triax, notes, monkeypatch, stopped, tokens, status, form
):
    from triax.train import loop
    from triax.train.run import Result

    seen = {}

    def learn(recipe, run_dir, **options):
        seen.update(options, tokens=recipe.train.tokens)
        return Result(str(run_dir), 1, tokens, 2.0, stopped=stopped)

    monkeypatch.setattr(loop, "train", learn)
    words = ("train", "nano", *notes, *form, "--resume", "--branch", "there", "--profile", "3")
    found, out, _ = triax(*words)
    assert found == status
    assert (json.loads(out)["stopped"] if form else "") == (stopped if form else "")
    assert (seen["tokens"], seen["resume"], str(seen["branch"]), seen["profile"]) == (1000, True, "there", 3)


@pytest.mark.parametrize("form", [(), ("--json",)])
def test_a_sample_passes_every_option_on_in_both_forms(triax, monkeypatch, form):
    from triax.serve import open as room

    seen = []

    class Engine:
        def generate(self, prompts, max_tokens, **options):
            seen.append((prompts[0], max_tokens, options))
            return [SimpleNamespace(text="b", tokens=[1], finish_reason="stop")]

        def stream(self, prompt, max_tokens, **options):
            seen.append((prompt, max_tokens, options))
            return ["b"]

    monkeypatch.setattr(room, "open_engine", lambda folder, device: Engine())
    given = ["--max-tokens", "3", "--temperature", "0.5", "--top-k", "4", "--top-p", "0.6", "--min-p", "0.1"]
    given += ["--seed", "9", "--stop", "x", "--stop", "y"]
    status, out, _ = triax("sample", "there", "a", *given, *form)
    assert status == 0
    assert out == ('{"prompt": "a", "text": "b", "tokens": 1, "finish_reason": "stop"}\n' if form else "ab\n")
    options = {"temperature": 0.5, "top_k": 4, "top_p": 0.6, "min_p": 0.1, "seed": 9, "stop": ["x", "y"]}
    assert seen == [("a", 3, options)]


def test_runs_are_compared_in_words_and_as_json_and_drawn(triax, notes, tmp_path):
    for name, rate in (("a", 0.01), ("b", 0.02)):
        (tmp_path / "runs" / name).mkdir(parents=True)
        recipe = load_recipe("nano", [f"optim.lr={rate}"])
        run_folder.record(tmp_path / "runs" / name, recipe, None)
        line = {"step": 1, "train/tokens": 512, "train/loss": 2.5, "train/bits_per_byte": 1.5, "train/step_s": 2.0}
        (tmp_path / "runs" / name / "metrics.jsonl").write_text(json.dumps(line) + "\n")
    status, out, err = triax("runs", "runs", "--plot", "p.png")
    rows = [row.split() for row in out.splitlines()]
    assert (status, err) == (0, "p.png: loss against tokens, time and FLOPs\n")
    assert rows[1][:6] == ["a", "stopped", "1", "512", "2.5000", "-"]
    assert rows[4:] == [["setting", "a", "b"], ["optim.lr", "0.01", "0.02"]]
    assert (tmp_path / "p.png").read_bytes().startswith(b"\x89PNG")
    told = json.loads(triax("runs", "runs/b", "runs/a", "--json")[1])
    assert [row["settings"] for row in told] == [{"optim.lr": 0.02}, {"optim.lr": 0.01}]
    assert told[0]["loss"] == 2.5
    assert triax("runs", "notes")[0] == 1


def test_f63_a_page_is_written_for_any_run_and_nothing_else(triax, notes, tmp_path):
    run_folder.record(tmp_path, load_recipe("nano"), None)
    status, out, _ = triax("report", tmp_path)
    assert (status, out) == (0, f"{tmp_path}/report.html\n")
    assert "The first step is not done yet" in (tmp_path / "report.html").read_text()
    status, out, err = triax("report", "notes")
    assert (status, out) == (1, "")
    assert "is not the folder of a run" in err
