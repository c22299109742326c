"""What a run shows."""

import io

import pytest

from triax.train import progress


def test_the_line_has_its_fixed_order():
    metrics = {
        "train/memory_bytes": 61e9,
        "train/mfu": 0.38,
        "train/tokens_per_s": 41_200.0,
        "train/grad_norm": 0.81,
        "train/loss": 2.413,
    }
    expected = "step 1200  loss 2.413  grad 0.81  tok/s 41.2k  mfu 38%  mem 61.0 GB  eta 3h12m"
    assert progress.line(1200, metrics, 3 * 3600 + 12 * 60) == expected


def test_a_pipe_gets_a_line_every_few_steps(capsys):
    shown = progress.Progress(100, every=3)
    for step in range(1, 8):
        shown.step(step, 10 * step, {"train/loss": 1.0})
    shown.close()
    assert [line.split("  ")[0] for line in capsys.readouterr().err.splitlines()] == ["step 3", "step 6"]


def test_a_terminal_gets_a_live_line_and_keeps_what_is_said(monkeypatch):
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    stream = Terminal()
    monkeypatch.setattr("sys.stderr", stream)
    shown = progress.Progress(100, every=1)
    shown.step(1, 10, {"train/loss": 1.5})
    shown.say("held-out 2.1")
    shown.close()
    assert "held-out 2.1" in stream.getvalue()
    assert "loss 1.500" in stream.getvalue()


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.2, "0s"), (59.6, "1m00s"), (200, "3m20s"), (3600, "1h00m"), (100_000, "27h46m")]
)
def test_durations_are_short(seconds, text):
    assert progress.duration(seconds) == text


@pytest.mark.parametrize(("number", "text"), [(950, "950"), (41_234, "41.2k"), (3.4e6, "3.4M"), (2e9, "2.0G")])
def test_numbers_are_short(number, text):
    assert progress.short(number) == text
