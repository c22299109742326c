"""Serving speed on one H200 in the shape of Kimi-Linear-48B, bf16, random weights; transformers' model beside it.

Run: python -m benchmarks.serve_h200 [--parts ours,prefix,peer] [--layers 27] [--step-tokens 32768] [--json FILE]

Decoding at batch 1 and 64 beside the bound that memory bandwidth sets, from the experts that the steps really touched;
prefill of 64 prompts; the first token after a shared prefix of 80k tokens, computed and restored; the GPU's idle time
between decode steps. transformers' `kimi_linear` runs last, once our model has left the card: both do not fit. Its
figures need transformers and flash-linear-attention.
"""

import argparse
import gc
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from triax.config.load import load_model
from triax.config.serve import Caching, Prefixes, Scheduling, Serve
from triax.model.decoder import Decoder
from triax.model.precision import KeepsFp32
from triax.model.replay import record
from triax.model.router import Router
from triax.serve.engine import Engine
from triax.serve.request import Request

BANDWIDTH = 4.3e12  # bytes a second of a device-to-device copy, read and written
LAYERS = 27
CPU, WARMING = DeviceType.CPU, 4
CONTEXT, PROMPT, SHARED, TAIL = 2048, 512, 80_000, 32
BARS = {
    "decode, batch 1, tok/s": 340.0,
    "decode, batch 64, tok/s": 1950.0,
    "prefill, tok/s": 60_000.0,
    "warm TTFT, times faster": 20.0,
    "warm TTFT, ms": 100.0,
    "idle between steps, ms": 0.3,
}


class Numbers:
    """A vocabulary without words."""

    opening: tuple[int, ...] = ()
    start = 1
    ends: frozenset[int] = frozenset()
    unsaid: frozenset[int] = frozenset()

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size = vocab_size

    def encode(self, text: str) -> list[int]:
        """Return one token."""
        return [1]

    def token_bytes(self, token: int) -> bytes:
        """Return a letter."""
        return b"x"


def random_model(num_layers: int) -> Decoder:
    """Return a model of random weights, made on the GPU in bf16."""
    settings = load_model("kimi-linear")
    mla = tuple(layer for layer in settings.mla_layers if layer < num_layers)
    settings = settings.model_copy(update={"num_layers": num_layers, "mla_layers": mla})
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device("cuda"), torch.no_grad():
            model = Decoder(settings).eval()
    finally:
        torch.set_default_dtype(torch.float32)
    for module in model.modules():
        if isinstance(module, KeepsFp32):
            for name in module.fp32:
                tensor = getattr(module, name)
                tensor.data = tensor.data.float()
    return model


def tokens(count: int, seed: int) -> tuple[int, ...]:
    """Return random tokens."""
    random = torch.Generator().manual_seed(seed)
    return tuple(torch.randint(0, 160_000, (count,), generator=random).tolist())


def ask(name: str, prompt: tuple[int, ...], count: int) -> Request:
    """Return a request for exactly so many tokens."""
    return Request(name, prompt, max_tokens=count, ignore_ends=True)


def sync() -> float:
    """Wait for the GPU and return the time."""
    torch.cuda.synchronize()
    return time.perf_counter()


def until_first(engine: Engine, count: int) -> float:
    """Step until so many requests have their first token; return the seconds until the last of them was known here."""
    started, seen, known = sync(), set(), 0.0
    while len(seen) < count:
        for update in engine.step():
            assert update.finish_reason != "error", update
            seen |= {update.id} if update.tokens else set()
        known = time.perf_counter()
    sync()
    return known - started


def finish(engine: Engine) -> None:
    """Abort everything and empty the pipeline."""
    for name in list(engine._numbers):
        engine.abort(name)
    while engine.has_work:
        engine.step()
    engine.check_invariants()


def decode(engine: Engine, batch: int, prompt: int, steps: int, say: Callable[..., None]) -> dict[str, float]:
    """Measure plain decoding of `batch` sequences; return the figures."""
    for row in range(batch):
        engine.add(ask(f"decode {batch} {row}", tokens(prompt, 1000 * batch + row), 4 * steps + 40))
    prefill_s = until_first(engine, batch)
    for _ in range(8):
        engine.step()
    times: list[float] = []
    for _ in range(3):
        started = sync()
        for _ in range(steps):
            engine.step()
        times.append((sync() - started) / steps)
    gap, longest = idle(engine, min(steps, 24))
    touched = distinct_experts(engine)
    finish(engine)
    step_s = statistics.median(times)
    bound_s = bytes_of_step(engine.model, batch, prompt + 2 * steps, touched) / BANDWIDTH
    say(
        part="decode", batch=batch, prompt=prompt, step_ms=round(step_s * 1e3, 3), tok_s=round(batch / step_s, 1),
        spread_ms=[round(one * 1e3, 3) for one in times], distinct_experts=round(touched, 1),
        bound_ms=round(bound_s * 1e3, 3), share_of_bound=round(bound_s / step_s, 3), idle_ms=gap,
        longest_idle_ms=longest, first_tokens_s=round(prefill_s, 3),
    )  # fmt: skip
    return {"tok_s": batch / step_s, "idle_ms": gap}


def idle(engine: Engine, steps: int) -> tuple[float, float]:
    """Return median and largest time in ms between the last kernel of a decode step and the first of the next.

    Copies of tokens that run in between count as idle. Traced by the profiler, which lengthens gaps if anything; the
    first steps, in which it starts, are left out.
    """
    with profile(activities=[ProfilerActivity.CUDA]) as trace:
        for _ in range(steps + WARMING):
            engine.step()
        sync()
    gaps: list[float] = []
    last, begins = 0.0, False
    events = [event for event in trace.events() or () if event.device_type != CPU]
    spans = sorted((event.time_range.start, event.time_range.end, event.name) for event in events)
    for start, end, name in spans:
        if name.startswith("Memcpy HtoD"):  # the numbers of a step
            begins = True
        elif not name.startswith("Mem"):
            if begins:
                gaps.append((start - last) / 1e3)
            last, begins = max(last, end), False
    gaps = gaps[WARMING:]
    return round(statistics.median(gaps), 4), round(max(gaps), 4)


def distinct_experts(engine: Engine) -> float:
    """Return how many experts a layer's tokens chose in one decode step, on average."""
    graphs, engine.runner.graphs = engine.runner.graphs, None
    routers = [module for module in engine.model.modules() if isinstance(module, Router)]
    with record(routers) as found:
        engine.step()
        engine.step()
    engine.runner.graphs = graphs
    counts = [len(one.expert.unique()) for layer in found for one in layer[-1:]]
    return statistics.mean(counts) if counts else 0.0


def bytes_of_step(model: Decoder, batch: int, context: int, touched: float) -> float:
    """Return the bytes that a decode step must move: weights read once, states read and written, latents read."""
    settings = model.settings
    assert settings.moe is not None
    assert settings.kda is not None
    assert settings.mla is not None
    routed = sum(p.numel() for n, p in model.named_parameters() if ".experts." in n)
    other = sum(p.numel() for n, p in model.named_parameters()) - routed - model.embed.weight.numel()
    mla = len(settings.mla_layers)
    state = (settings.num_layers - mla) * settings.kda.num_heads * settings.kda.head_dim**2 * 4
    latent = mla * (settings.mla.kv_latent_dim + settings.mla.rope_dim) * 2
    return 2 * (other + routed * touched / settings.moe.num_experts) + batch * (2 * state + latent * context)


def prefill(engine: Engine, say: Callable[..., None]) -> float:
    """Measure the prefill of 64 prompts; return tokens a second."""
    rates = []
    for turn in range(6):
        for row in range(64):
            engine.add(ask(f"prefill {turn} {row}", tokens(PROMPT, 77_000 + 64 * turn + row), 4))
        rates.append(64 * PROMPT / until_first(engine, 64))
        finish(engine)
    say(part="prefill", tok_s=round(statistics.median(rates[1:])), all=[round(rate) for rate in rates])
    return statistics.median(rates[1:])


def prefix(engine: Engine, say: Callable[..., None]) -> tuple[float, float]:
    """Measure the first token after a shared prefix, computed and restored; return both in seconds."""
    shared = tokens(SHARED, 5)
    found: list[float] = []
    for turn in range(4):
        engine.add(ask(f"prefix {turn}", shared + tokens(TAIL, 100 + turn), 4))
        found.append(until_first(engine, 1))
        finish(engine)
    cold, warm = found[0], statistics.median(found[1:])
    say(part="prefix", cold_ms=round(cold * 1e3, 1), warm_ms=[round(one * 1e3, 1) for one in found[1:]])
    return cold, warm


def peer(num_layers: int, say: Callable[..., None]) -> None:
    """Measure transformers' model with random weights of the same shape: static batches, greedy."""
    import transformers
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.initialization import no_init_weights

    settings = AutoConfig.for_model(
        "kimi_linear", **({} if num_layers == LAYERS else {"num_hidden_layers": num_layers})
    )
    torch.set_default_dtype(torch.bfloat16)
    with torch.device("cuda"), no_init_weights():
        model = AutoModelForCausalLM.from_config(settings, dtype=torch.bfloat16)
    torch.set_default_dtype(torch.float32)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.dim() >= 2:
                weight.normal_(0, 0.02)
            elif name.endswith("A_log"):
                weight.uniform_(0, 2)
            elif name.endswith("dt_bias"):
                weight.normal_(-3, 1)
            else:
                weight.fill_(float("norm" in name))
    model.set_experts_implementation("grouped_mm")
    model.eval()

    def run(batch: int, prompt: int, count: int) -> float:
        ids = torch.tensor([tokens(prompt, row) for row in range(batch)], device="cuda")
        started = sync()
        with torch.inference_mode():
            model.generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, min_new_tokens=count, do_sample=False,
                pad_token_id=0,
            )  # fmt: skip
        return sync() - started

    for batch, prompt, count in ((1, CONTEXT, 16), (64, PROMPT, 6)):
        run(batch, prompt, 2)
        first, whole = run(batch, prompt, 1), run(batch, prompt, 1 + count)
        step = (whole - first) / count
        say(
            part="peer", version=transformers.__version__, batch=batch, prompt=prompt, step_ms=round(step * 1e3, 2),
            tok_s=round(batch / step, 1), prefill_tok_s=round(batch * prompt / first),
        )  # fmt: skip


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--parts", default="ours,prefix,peer")
    parser.add_argument("--layers", type=int, default=LAYERS)
    parser.add_argument("--step-tokens", type=int, default=32_768)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("benchmarks.serve_h200 needs a CUDA device; found none; run it on an H200")
    rows: list[dict[str, Any]] = []

    def say(**row: Any) -> None:
        rows.append(row)
        print(json.dumps(row), flush=True)
        if given.json:
            given.json.write_text(json.dumps(rows))

    reached: dict[str, float] = {}
    started = time.perf_counter()
    if "ours" in given.parts or "prefix" in given.parts:
        model = random_model(given.layers)
        settings = Serve(
            scheduling=Scheduling(step_tokens=given.step_tokens, mixed_prefill_tokens=8192, max_running=64),
            cache=Caching(pages=6000, slots=200, prefixes=Prefixes()),
        )
        engine = Engine(model, Numbers(model.settings.vocab_size), settings)
        gc.collect()
        gc.freeze()  # as the engine's own process does
        say(
            part="built", seconds=round(time.perf_counter() - started, 1), torch=torch.__version__,
            gpu=torch.cuda.get_device_name(), parameters=sum(p.numel() for p in model.parameters()),
            gib=round(torch.cuda.memory_allocated() / 2**30, 1), step_tokens=given.step_tokens,
        )  # fmt: skip
        if "ours" in given.parts:
            reached["decode, batch 1, tok/s"] = decode(engine, 1, CONTEXT, 64, say)["tok_s"]
            many = decode(engine, 64, PROMPT, 32, say)
            reached["decode, batch 64, tok/s"], reached["idle between steps, ms"] = many["tok_s"], many["idle_ms"]
            reached["prefill, tok/s"] = prefill(engine, say)
        if "prefix" in given.parts:
            cold, warm = prefix(engine, say)
            reached["warm TTFT, times faster"], reached["warm TTFT, ms"] = cold / warm, warm * 1e3
        del engine, model
        gc.collect()
        torch.cuda.empty_cache()
    if "peer" in given.parts:
        peer(given.layers, say)
    for name, bar in BARS.items():
        if name in reached:
            is_less = name.endswith("ms")
            met = reached[name] <= bar if is_less else reached[name] >= bar
            sign = "<=" if is_less else ">="
            print(f"{name:28} {reached[name]:12.2f}  bar {sign} {bar:9.1f}  {'met' if met else 'MISSED'}")


if __name__ == "__main__":
    main()
