"""Training speed on CPU against transformers' kimi_linear: the same weights and batch, the losses compared first.

Run: python -m benchmarks.cpu_train [--steps 3] [--json]

The model has Kimi Linear's form at about 17 M parameters. transformers must be installed, and flash-linear-attention
must not be: with it that class has no CPU path. Prints the ratio for fp32 against fp32 and bf16 autocast against bf16
autocast, beside the bar of 8, and then how fast we decode at contexts of 1k, 16k and 64k tokens.
"""

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")

import torch
import transformers
from torch import Tensor, nn

from triax.checkpoint.released import save_released
from triax.config.model import Model
from triax.machine import keep_freed_memory
from triax.model.cache import Cache, KdaCache, MlaCache
from triax.model.count import sheet
from triax.model.decoder import Decoder
from triax.model.layout import Layout
from triax.train.loss import cross_entropy

BAR = 8.0
CONTEXTS = (1024, 16_384, 65_536)
LOSS_GAP = {"fp32": 1e-4, "bf16": 1e-2}  # relative; bf16 differs in where each side rounds

SETTINGS = Model.model_validate(
    {
        "vocab_size": 4096,
        "width": 256,
        "num_layers": 8,
        "mla_layers": (3, 7),
        "num_dense_layers": 1,
        "dense_dim": 1024,
        "activation": {"kind": "swiglu"},
        "kda": {"num_heads": 4, "head_dim": 64, "decay": {"kind": "softplus"}, "output_gate": "low_rank"},
        "mla": {"num_heads": 4, "kv_latent_dim": 128, "nope_dim": 64, "rope_dim": 32, "value_dim": 64},
        "moe": {"num_experts": 16, "top_k": 4, "num_shared_experts": 1, "expert_dim": 128, "share_scale": 2.446},
    }
)


def our_loss(model: Decoder, tokens: Tensor) -> Tensor:
    """Return the mean nats of the next token, over all but the last token of each row."""
    rows, length = tokens.shape
    hidden = model(tokens.flatten(), Layout.of([length] * rows)).unflatten(0, (rows, length))
    nats = cross_entropy(hidden[:, :-1].flatten(0, 1), model.head.weight, tokens[:, 1:].flatten())
    return nats / (rows * (length - 1))


def their_loss(model: nn.Module, tokens: Tensor) -> Tensor:
    """Return the same from transformers."""
    return model(input_ids=tokens, labels=tokens, use_cache=False).loss


class Side:
    """One of the two models in training, and the times it took."""

    def __init__(self, name: str, model: nn.Module, mean_nats: Callable[[], Tensor], kind: str) -> None:
        self.name, self.model, self.mean_nats, self.kind = name, model, mean_nats, kind
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=0.0, fused=True)  # 0 keeps the weights equal
        self.loss = 0.0
        self.backward_s: list[float] = []
        self.optimizer_s: list[float] = []

    def forward_backward(self) -> None:
        """Compute the loss and all gradients."""
        self.optimizer.zero_grad(set_to_none=True)
        with torch.autocast("cpu", torch.bfloat16, enabled=self.kind == "bf16"):
            nats = self.mean_nats()
        nats.backward()
        self.loss = nats.item()


def read_by_transformers(ours: Decoder, experts: str) -> nn.Module:
    """Hand our weights over through an export."""
    transformers.logging.disable_progress_bar()
    with tempfile.TemporaryDirectory() as folder:
        save_released(ours, Path(folder) / "model", dtype=torch.float32, family="kimi_linear")
        theirs = transformers.AutoModelForCausalLM.from_pretrained(
            Path(folder) / "model", dtype=torch.float32, experts_implementation=experts
        )
    return theirs.train()


def seconds(step: Callable[[], object]) -> float:
    """Return the wall time of one call."""
    start = time.perf_counter()
    step()
    return time.perf_counter() - start


def train(ours: Decoder, theirs: nn.Module, tokens: Tensor, kind: str, steps: int) -> dict[str, float]:
    """Time both sides in turn, so that a slow minute of the machine touches both."""
    sides = [
        Side("our", ours, lambda: our_loss(ours, tokens), kind),
        Side("their", theirs, lambda: their_loss(theirs, tokens), kind),
    ]
    for side in sides:
        side.forward_backward()  # first calls allocate and choose kernels
    us, them = sides
    if abs(us.loss - them.loss) > LOSS_GAP[kind] * them.loss:
        raise SystemExit(f"{kind}: the losses differ: {us.loss:.6f} and {them.loss:.6f}; nothing was timed")
    for _ in range(steps):
        for side in sides:
            side.backward_s.append(seconds(side.forward_backward))
            side.optimizer_s.append(seconds(side.optimizer.step))
    result = {}
    for side in sides:
        backward, optimizer = statistics.median(side.backward_s), statistics.median(side.optimizer_s)
        result |= {
            f"{side.name}_loss": side.loss,
            f"{side.name}_tokens_per_s": tokens.numel() / backward,
            f"{side.name}_tokens_per_s_with_adamw": tokens.numel() / (backward + optimizer),
        }
    for ending in ("", "_with_adamw"):
        result[f"ratio{ending}"] = result[f"our_tokens_per_s{ending}"] / result[f"their_tokens_per_s{ending}"]
    return result


@contextmanager
def timed(layers: list[nn.Module]) -> Generator[list[float]]:
    """Collect the seconds that each call of these layers takes."""
    starts: dict[int, float] = {}
    spent: list[float] = []

    def before(layer: nn.Module, _: object) -> None:
        starts[id(layer)] = time.perf_counter()

    def after(layer: nn.Module, _: object, __: object) -> None:
        spent.append(time.perf_counter() - starts[id(layer)])

    hooks = [layer.register_forward_pre_hook(before) for layer in layers]
    hooks += [layer.register_forward_hook(after) for layer in layers]
    try:
        yield spent
    finally:
        for hook in hooks:
            hook.remove()


def filled_cache(model: Decoder, context: int) -> Cache:
    """Return the memory of a sequence of that many tokens, with random content: what is timed does not depend on it."""
    cache, layout = model.empty_cache(1), Layout.of([context])
    for memory in cache.layers:
        if isinstance(memory, MlaCache):
            memory.append(torch.randn(context, memory.latent.shape[-1]), layout)
        elif isinstance(memory, KdaCache):
            memory.state.normal_()
            memory.window.normal_()
    cache.advance(layout)
    return cache


@torch.no_grad()
def decode(model: Decoder, context: int, steps: int) -> dict[str, float]:
    """Time single tokens after a context."""
    cache, token, one = filled_cache(model, context), torch.zeros(1, dtype=torch.long), Layout.of([1])
    kda = [
        layer.get_submodule("attention") for index, layer in enumerate(model.layers) if not model.settings.is_mla(index)
    ]
    for _ in range(3):
        model.logits(model(token, one, cache))
    with timed(kda) as spent:
        times = [seconds(lambda: model.logits(model(token, one, cache))) for _ in range(steps)]
    each = [sum(spent[i : i + len(kda)]) for i in range(0, len(spent), len(kda))]
    return {
        "context": context,
        "tokens_per_s": 1 / statistics.median(times),
        "step_ms": 1e3 * statistics.median(times),
        "kda_layers_ms": 1e3 * statistics.median(each),
    }


def main() -> None:
    """Print both comparisons and the decoding speeds."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=3, help="training steps timed; decoding takes 10 times these")
    parser.add_argument("--rows", type=int, default=4, help="sequences of the batch")
    parser.add_argument("--length", type=int, default=512, help="tokens of each")
    parser.add_argument("--experts", default="grouped_mm", help="how transformers runs experts: or `eager`")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    words = parser.parse_args()

    keep_freed_memory()  # as `triax train` does; the other side gains by it too
    torch.manual_seed(0)
    ours = Decoder(SETTINGS).train()
    theirs = read_by_transformers(ours, words.experts)
    tokens = torch.randint(SETTINGS.vocab_size, (words.rows, words.length))
    training = {kind: train(ours, theirs, tokens, kind, words.steps) for kind in ("fp32", "bf16")}
    decoding = [decode(ours.eval(), context, 10 * words.steps) for context in CONTEXTS]
    result = {
        "parameters": sheet(SETTINGS).parameters,
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "batch": [words.rows, words.length],
        "bar": BAR,
        "training": training,
        "decoding": decoding,
    }
    if words.json:
        print(json.dumps(result, indent=1))
        return
    print(f"{result['parameters']:,} parameters, batch {words.rows} x {words.length}, torch {torch.__version__}")
    print(f"{result['threads']} threads, transformers {transformers.__version__} with {words.experts} experts")
    for kind, row in training.items():
        print(f"{kind}: losses {row['our_loss']:.5f} (ours) and {row['their_loss']:.5f} (transformers)")
        for title, ending in (("forward and backward", ""), ("and the same AdamW step", "_with_adamw")):
            our, their, ratio = (row[f"{what}{ending}"] for what in ("our_tokens_per_s", "their_tokens_per_s", "ratio"))
            print(f"  {title:<24} {our:>8,.0f} tokens/s against {their:>7,.0f}: {ratio:.1f} times")
        print(f"  bar {BAR:.0f} times: {'kept' if row['ratio'] >= BAR else 'MISSED'}")
    print("decoding one sequence; of each step, the time in its KDA layers together")
    for row in decoding:
        speed = f"{row['tokens_per_s']:>6.1f} tokens/s, {row['step_ms']:.1f} ms"
        print(f"  context {row['context']:>6,}: {speed}, KDA {row['kda_layers_ms']:.2f} ms")


if __name__ == "__main__":
    main()
