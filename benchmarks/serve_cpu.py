"""A server on the CPU under many streaming clients: errors, times between tokens, memory that stays.

Run: python -m benchmarks.serve_cpu [--clients 200] [--seconds 600] [--json]

The model is the tiny preset with random weights behind `triax serve`, with at most 128 prompt tokens in a step that
also decodes, so that newcomers do not hold up the others; the engine leaves one core to its neighbours. Clients stream
without a pause, each beginning anew when its answer ends. Bars: no error; the 99th percentile of the time between two
pieces of an answer at most three times the median; memory of both processes after the last tenth of the run at most 5 %
over that after the second tenth.
"""

import argparse
import gc
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import torch

from triax.checkpoint.released import save_released
from triax.config.load import load_model
from triax.data.tokenizer import Tokenizer
from triax.model.decoder import Decoder
from triax.serve.bench import Bench, Load, lines

GAP_BAR, MEMORY_BAR = 3.0, 1.05
START_S = 180.0


def write_model(folder: Path) -> None:
    """Write the tiny preset with random weights and a small tokenizer of its own."""
    torch.manual_seed(0)
    tokenizer = Tokenizer.train(["def f(x):\n    return x + 1\n" * 50], 270)
    save_released(Decoder(load_model("tiny")), folder, dtype=torch.float32)
    tokenizer.save(folder / "tokenizer.json")


@contextmanager
def served(folder: Path, *settings: str) -> Generator[tuple[str, psutil.Process]]:
    """Run `triax serve` on a folder; gives its address and process."""
    log = folder.parent / "log.txt"
    command = [sys.executable, "-m", "triax", "serve", str(folder), "http.port=0", *settings]
    threads = max(1, (os.cpu_count() or 2) - 1)  # a core for the server's own process and the clients
    with log.open("w") as file:
        process = subprocess.Popen(command, stderr=file, env=os.environ | {"OMP_NUM_THREADS": str(threads)})
    try:
        end = time.monotonic() + START_S
        while "ready: " not in (told := log.read_text()):
            if process.poll() is not None or time.monotonic() > end:
                raise RuntimeError(f"no server: {told}")
            time.sleep(0.1)
        yield told.split("listening on ")[1].split()[0], psutil.Process(process.pid)
    finally:
        process.terminate()
        process.wait(60)


def watch(process: psutil.Process, seconds: float, found: list[int]) -> None:
    """Note the memory of a server and its engine fifty times over a run, in bytes."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        try:
            found.append(sum(one.memory_info().rss for one in (process, *process.children(recursive=True))))
        except psutil.Error:
            return
        time.sleep(seconds / 50)


def measure(clients: int, seconds: float) -> dict[str, Any]:
    """Load a server and return what was found, the bars beside it."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "tiny"
        write_model(folder)
        settings = (
            f"scheduling.max_running={clients}",
            f"cache.slots={3 * clients}",
            "cache.pages=2048",  # full before memory is first looked at
            "scheduling.mixed_prefill_tokens=128",
        )
        with served(folder, *settings) as (url, process):
            memory: list[int] = []
            watcher = threading.Thread(target=watch, args=(process, seconds, memory))
            watcher.start()
            gc.collect()
            gc.freeze()
            load = Load(10**9, clients, prompt_tokens=32, answer_tokens=64, seconds=seconds)
            tree = Bench(url, load).run()
            watcher.join()
    early, late = max(memory[5:10]), max(memory[-5:])
    return tree | {
        "memory_bytes": memory,
        "bars": {
            "errors": [sum(tree["errors"].values()), 0],
            "itl_p99_over_median": [tree["itl_s"]["p99"] / tree["itl_s"]["p50"], GAP_BAR],
            "memory_late_over_early": [late / early, MEMORY_BAR],
        },
    }


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--clients", type=int, default=200)
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    tree = measure(arguments.clients, arguments.seconds)
    told = {name: value for name, value in tree.items() if name not in ("measured", "memory_bytes")}
    words = [*lines(tree), *(f"{name}: {value:.3g} (bar {bar:g})" for name, (value, bar) in tree["bars"].items())]
    sys.stdout.write((json.dumps(told) if arguments.json else "\n".join(words)) + "\n")


if __name__ == "__main__":
    main()
