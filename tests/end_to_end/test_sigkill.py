"""A run killed at any moment goes on as if it never was."""

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from triax.checkpoint import sharded
from triax.config.load import load_recipe
from triax.train import metrics
from triax.train.loop import train

PROGRAM = """
import json, sys, time
from pathlib import Path
import torch
torch.set_num_threads(1)
from triax.config.train import Recipe
from triax.train.loop import train
last = int(sys.argv[3]) if sys.argv[3:] else 10**9

def hold(step, metrics):
    if step == last:  # whoever kills this run may be late
        time.sleep(600)

train(Recipe.model_validate(json.loads(Path(sys.argv[1]).read_text())), Path(sys.argv[2]), resume=True, on_step=hold)
"""


@pytest.fixture(scope="module")
def recipe(tmp_path_factory):
    place = tmp_path_factory.mktemp("text")
    for part in range(3):
        (place / f"{part}.txt").write_text("".join(f"{part} {n}: {n * n * (part + 3)}\n" for n in range(300)))
    overrides = [
        f'data.sources=[{{kind = "folder", path = "{place}"}}]',
        *("train.tokens=1280", "train.batch_tokens=64", "train.micro_tokens=64", "train.save_every=2"),
        *("train.log_every=5", "data.tokenizer.vocab_size=300", "data.held_out_share=0.02", "train.check_after=0"),
        *("model.num_layers=2", "model.mla_layers=[1]"),
    ]
    return load_recipe("nano", overrides)


def losses(run_dir):
    lines = metrics.read(run_dir / "metrics.jsonl")
    return [(line["step"], line.get("train/loss"), line.get("eval/bits_per_byte")) for line in lines]


def kill_at(command, run_dir, step, moment):
    """Start the run, wait until it has begun (step 0) or written this step, and kill it a random instant later."""
    with Path(f"{run_dir}.stderr").open("w") as said:
        words = [*command, str(step + 4)]
        process = subprocess.Popen(words, stderr=said, env=os.environ | {"OMP_NUM_THREADS": "1"})
    with process:
        path = run_dir / ("metrics.jsonl" if step else "recipe.json")
        while process.poll() is None and not (path.exists() and (not step or f'"step": {step},' in path.read_text())):
            time.sleep(0.002)
        time.sleep(moment.uniform(0, 0.03))
        process.send_signal(signal.SIGKILL)
    return process.returncode


@pytest.mark.slow
def test_killed_again_and_again_the_run_ends_with_the_same_bits(recipe, tmp_path):
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    expected = train(recipe, whole)
    (tmp_path / "recipe.json").write_text(recipe.model_dump_json())
    command = [sys.executable, "-c", PROGRAM, str(tmp_path / "recipe.json"), str(killed)]
    moment = random.Random()
    for step in (0, moment.randint(1, 6), moment.randint(7, 14)):
        status = kill_at(command, killed, step, moment)
        assert status == -signal.SIGKILL, Path(f"{killed}.stderr").read_text()
    assert 7 <= max(step for step, *_ in losses(killed)) < expected.steps
    subprocess.run(command, check=True, capture_output=True, timeout=200, env=os.environ | {"OMP_NUM_THREADS": "1"})
    assert losses(killed) == losses(whole)
    assert sharded.verify(killed / "checkpoints" / f"step-{expected.steps}")["step"] == expected.steps
    ours, theirs = (sharded.load(run / "checkpoints" / f"step-{expected.steps}") for run in (killed, whole))
    for part in ("model", "optimizer"):
        assert ours[part].keys() == theirs[part].keys()
        for name, tensor in theirs[part].items():
            assert torch.equal(ours[part][name], tensor), name
    assert ours["loader"] == theirs["loader"]
    assert torch.equal(ours["random"]["torch"], theirs["random"]["torch"])
