"""What the model writes while it learns: text of its own, now and then, for a person to read."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from triax.config.train import Run
from triax.data.kimi import KimiTokenizer
from triax.data.tokenizer import Tokenizer
from triax.errors import TrainError
from triax.model.decoder import Decoder
from triax.model.layout import Layout
from triax.train.metrics import cut, read


class Samples:
    """Writes continuations of fixed prompts into `samples.jsonl`.

    They are drawn with a generator of their own, seeded by the run's seed and the step, so that the run computes the
    same numbers with samples and without.
    """

    def __init__(self, path: Path, run: Run, tokenizer: Tokenizer | KimiTokenizer, *, after_step: int = 0) -> None:
        """Be ready to write, without the samples that a resumed run will write again."""
        self.path, self.settings, self.seed, self.tokenizer = path, run.samples, run.seed, tokenizer
        if self.settings is not None:
            cut(path, after_step)

    def is_due(self, step: int) -> bool:
        """Return whether samples are to be written after a step."""
        return self.settings is not None and step % self.settings.every == 0

    def write(self, model: Decoder, step: int, tokens: int) -> list[str]:
        """Continue every prompt, append the texts to the file and return them with their prompts.

        Raises:
            TrainError: They cannot be written.
        """
        assert self.settings is not None
        texts = continuations(
            model,
            self.tokenizer,
            self.settings.prompts,
            self.settings.max_tokens,
            self.settings.temperature,
            seed=hash((self.seed, step)) & (2**63 - 1),  # of whole numbers: the same in every process
        )
        pairs = list(zip(self.settings.prompts, texts, strict=True))
        rows = [{"step": step, "train/tokens": tokens, "prompt": p, "text": text} for p, text in pairs]
        try:
            with self.path.open("a") as file:
                file.write("".join(json.dumps(row) + "\n" for row in rows))
        except OSError as problem:
            raise TrainError(
                f"{self.path}: samples could not be written; {problem.strerror or problem}; make room and resume"
            ) from problem
        return [prompt + text for prompt, text in pairs]


def newest(path: Path) -> list[dict[str, Any]]:
    """Return the samples of the last step that has any."""
    rows = read(path)
    return [row for row in rows if row["step"] == rows[-1]["step"]] if rows else []


@torch.no_grad()
def continuations(
    model: Decoder,
    tokenizer: Tokenizer | KimiTokenizer,
    prompts: Sequence[str],
    max_tokens: int,
    temperature: float,
    seed: int,
) -> list[str]:
    """Return how a model goes on after each prompt, up to the end of its document.

    Args:
        model: Predicts; it is left in the mode that it was in.
        tokenizer: Of the model.
        prompts: Beginnings of documents.
        max_tokens: Most tokens of an answer.
        temperature: 0 takes the likeliest token.
        seed: Same seed, same texts.
    """
    device = model.head.weight.device
    generator = torch.Generator().manual_seed(seed)
    started = [[*tokenizer.opening, *tokenizer.encode(prompt)] for prompt in prompts]
    made: list[list[int]] = [[] for _ in prompts]
    live, was_training = list(range(len(prompts))), model.training
    model.eval()
    try:
        cache, feed = model.empty_cache(len(prompts)), started
        for _ in range(max_tokens):
            layout = Layout.of([len(tokens) for tokens in feed])
            flat = torch.tensor([token for tokens in feed for token in tokens], device=device)
            last = torch.tensor([end - 1 for end in layout.starts[1:]], device=device)
            logits = model.logits(model(flat, layout, cache)[last])[:, : tokenizer.vocab_size]
            drawn = _draw(logits.float().cpu(), temperature, generator)
            going = [row for row, token in enumerate(drawn) if token not in tokenizer.ends]
            for row in going:
                made[live[row]].append(drawn[row])
            if not going:
                break
            if len(going) < len(live):
                cache, live = cache.select(going), [live[row] for row in going]
            feed = [[drawn[row]] for row in going]
    finally:
        model.train(was_training)
    return [tokenizer.decode(tokens) for tokens in made]


def _draw(logits: Float[Tensor, "N vocab"], temperature: float, generator: torch.Generator) -> list[int]:
    if not temperature:
        return logits.argmax(-1).tolist()
    shares = (logits / temperature).softmax(-1).nan_to_num(nan=1.0)  # a model that diverged still writes something
    return torch.multinomial(shares, 1, generator=generator).flatten().tolist()
