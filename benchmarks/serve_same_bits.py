"""What deterministic mode costs on a CPU: prefill and decode of the tiny preset with and without it, in turns.

Run: python -m benchmarks.serve_same_bits [--rounds 5]

One thread, random weights. First checks that the mode keeps its promise here: a prompt alone, in chunks and in company.
"""

import argparse
import statistics
import time

import torch

from triax.config.load import load_model
from triax.config.serve import Caching, Scheduling, Serve
from triax.data.tokenizer import Tokenizer
from triax.model.decoder import Decoder
from triax.serve.engine import Engine
from triax.serve.request import Request

BATCH, PROMPT, STEPS = 8, 256, 32


def engine_of(model: Decoder, tokenizer: Tokenizer, *, is_deterministic: bool, step_tokens: int = 2048) -> Engine:
    """Return an engine without a prefix cache."""
    scheduling = Scheduling(step_tokens=step_tokens, max_running=16)
    caching = Caching(pages=128, slots=20, prefixes=None)
    settings = Serve(is_deterministic=is_deterministic, scheduling=scheduling, cache=caching)
    return Engine(model, tokenizer, settings)


def ask(row: int, count: int) -> Request:
    """Return a request for exactly so many tokens."""
    prompt = tuple(1 + (i * (7 + row) + row) % 250 for i in range(PROMPT))
    return Request(str(row), prompt, max_tokens=count, ignore_ends=True, top_logprobs=0)


def said(engine: Engine, rows: range) -> dict[str, list[tuple[int, float]]]:
    """Return tokens and logprobs of each answer."""
    for row in rows:
        engine.add(ask(row, 6))
    found: dict[str, list[tuple[int, float]]] = {str(row): [] for row in rows}
    while engine.has_work:
        for update in engine.step():
            found[update.id] += [(info.token, info.logprob) for info in update.tokens]
    return found


def speed(engine: Engine) -> tuple[float, float]:
    """Return tokens a second of prefill and of decoding."""
    for row in range(BATCH):
        engine.add(ask(row, STEPS + 1))
    started, begun = time.perf_counter(), 0
    while begun < BATCH:
        begun += sum(bool(update.tokens) for update in engine.step())
    between, tokens = time.perf_counter(), 0
    while engine.has_work:
        tokens += sum(len(update.tokens) for update in engine.step())
    return BATCH * PROMPT / (between - started), tokens / (time.perf_counter() - between)


def main() -> None:
    """Check, measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    rounds = parser.parse_args().rounds
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = Decoder(load_model("tiny")).eval()
    tokenizer = Tokenizer.train(["some words of some text, some more words"] * 3, 270)

    together = said(engine_of(model, tokenizer, is_deterministic=True), range(4))
    cut = said(engine_of(model, tokenizer, is_deterministic=True, step_tokens=50), range(4))
    alone = {
        str(row): said(engine_of(model, tokenizer, is_deterministic=True), range(row, row + 1))[str(row)]
        for row in range(4)
    }
    assert together == cut == alone, "deterministic mode broke its promise on this machine"
    print("alone, in chunks and in company: the same bits")
    found: dict[bool, list[tuple[float, float]]] = {False: [], True: []}
    for _ in range(rounds):
        for mode in found:
            found[mode].append(speed(engine_of(model, tokenizer, is_deterministic=mode)))
    for place, name in enumerate(("prefill", "decode")):
        plain, same = (sorted(one[place] for one in found[mode]) for mode in (False, True))
        print(
            f"{name:8} plain {statistics.median(plain):8.0f} tok/s ({plain[0]:.0f} to {plain[-1]:.0f})   "
            f"deterministic {statistics.median(same):8.0f} tok/s ({same[0]:.0f} to {same[-1]:.0f})   "
            f"{statistics.median(plain) / statistics.median(same):.2f} times slower"
        )


if __name__ == "__main__":
    main()
