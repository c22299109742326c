"""Tokens a second and model FLOP utilisation of training steps on one GPU: whole steps, and without the optimiser.

MFU = 6 x active parameters x tokens/s / 989e12, the dense bf16 rate of an H100 or H200.

Run: python -m benchmarks.train_step [--recipe linear-2.7b] [--steps 5] [--json]
"""

import argparse
import json
import random
import statistics
import sys
import time
from collections.abc import Callable

import torch

from triax.config.load import load_recipe
from triax.data.pack import Batch
from triax.model.count import sheet
from triax.model.decoder import Decoder
from triax.optim.build import build
from triax.train.step import Step

PEAK = 989e12
LENGTHS = (200, 600, 1500, 4000)  # documents of a packed row


def main() -> None:
    """Print one line a figure, or JSON at the end."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--recipe", default="linear-2.7b")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("benchmarks.train_step needs a CUDA device; found none; run it on an H200")
    recipe = load_recipe(arguments.recipe)
    torch.manual_seed(0)
    random.seed(0)
    with torch.device("cuda"):
        model = Decoder(recipe.model)
    step = Step(model, build(model, recipe.optim), recipe)
    per_row = recipe.train.micro_tokens or recipe.data.seq_len
    batches = [row(per_row, recipe.model.vocab_size) for _ in range(recipe.train.batch_tokens // per_row)]
    tokens = sum(len(batch.tokens) for batch in batches)
    active = sheet(recipe.model).active_parameters
    ways: dict[str, Callable[[], object]] = {
        "whole step": lambda: step(batches, 1.0),
        "forward and backward": lambda: step._accumulate(batches, tokens),
    }
    figures = []
    for name, run in ways.items():
        run()
        seconds = [timed(run) for _ in range(arguments.steps)]
        median = statistics.median(seconds)
        figures.append(
            {
                "what": name,
                "tokens": tokens,
                "seconds": median,
                "spread": [min(seconds), max(seconds)],
                "tokens_per_second": tokens / median,
                "mfu": 6 * active * tokens / median / PEAK,
                "peak_gib": torch.cuda.max_memory_allocated() / 2**30,
            }
        )
        if not arguments.json:
            print(
                f"{name:<22} {median:.3f} s ({min(seconds):.3f}-{max(seconds):.3f})  {tokens / median:,.0f} tokens/s  "
                f"MFU {figures[-1]['mfu']:.1%}  peak {figures[-1]['peak_gib']:.1f} GiB",
                flush=True,
            )
    if arguments.json:
        print(json.dumps({"gpu": torch.cuda.get_device_name(), "recipe": arguments.recipe, "figures": figures}))


def row(length: int, vocabulary: int) -> Batch:
    """Return a row of random tokens, packed from documents of several lengths."""
    lengths: list[int] = []
    while sum(lengths) < length:
        lengths.append(min(random.choice(LENGTHS), length - sum(lengths)))
    tokens = torch.randint(vocabulary, (length + 1,))
    return Batch(tokens[:-1], tokens[1:], tuple(lengths))


def timed(run: Callable[[], object]) -> float:
    """Return how many seconds a call takes until the GPU is done."""
    torch.cuda.synchronize()
    start = time.perf_counter()
    run()
    torch.cuda.synchronize()
    return time.perf_counter() - start


if __name__ == "__main__":
    main()
