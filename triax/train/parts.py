"""From a recipe to what a run is made of: text, tokenizer, rows, network, optimiser."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from triax.checkpoint.tokenizer import has_tokenizer, load_tokenizer, save_tokenizer
from triax.config.train import Recipe
from triax.data.corpus import Corpus
from triax.data.kimi import KimiTokenizer
from triax.data.mixture import PackedLoader, Part
from triax.data.pack import TokenStream
from triax.data.tokenizer import Tokenizer
from triax.errors import ConfigError
from triax.model.count import sheet
from triax.model.decoder import Decoder
from triax.model.device import device_of
from triax.optim.build import Optimizer
from triax.optim.build import build as build_optimizer
from triax.train.progress import duration, short

TOLD_EVERY_S = 10.0
USEFUL_READINGS = 4


@dataclass
class Parts:
    """What a run is made of."""

    corpus: Corpus
    tokenizer: Tokenizer | KimiTokenizer
    loader: PackedLoader
    held_out: TokenStream
    bytes_per_token: float
    """Of the training text; turns nats per token into bits per byte."""
    model: Decoder
    optimizer: Optimizer

    def texts(self) -> tuple[list[bytes], list[bytes]]:
        """Return the training and the held-out documents as bytes."""
        training = [document.text.encode() for source in self.corpus.training for document in source]
        return training, [document.text.encode() for document in self.corpus.held_out]


def build(recipe: Recipe, run_dir: Path, say: Callable[[str], None]) -> Parts:
    """Read the text, learn or load the tokenizer, and build network and optimiser on the run's device.

    The tokenizer is written to the run's folder once and read from there ever after, so a resumed run has the same.

    Raises:
        ConfigError: The device does not exist, or the tokenizer has more tokens than the model.
        DataError: The text cannot be read or is too short.
    """
    device = device_of(recipe.train.device)
    corpus = Corpus.read(recipe.data)
    for note in corpus.notes:
        say(f"text: {note}")
    tokenizer = _tokenizer(corpus, recipe, run_dir, say)
    parts, held_out = corpus.encode(tokenizer, reporter(say))
    loader = PackedLoader(parts, recipe.data.seq_len, recipe.train.micro_tokens, recipe.train.seed)
    num_bytes = sum(part.stream.num_bytes for part in parts)
    num_tokens = sum(part.stream.num_tokens for part in parts)
    say(
        f"text: {num_bytes / 1e6:.1f} MB, {short(num_tokens)} tokens to learn from, "
        f"{held_out.num_bytes / 1e6:.2f} MB held out"
    )
    for note in repetitions(parts, recipe.train.tokens):
        say(f"text: {note}")
    with device:
        model = Decoder(recipe.model)
    counted = sheet(recipe.model, recipe.data.seq_len)
    say(f"model: {short(counted.parameters)} parameters, {short(counted.active_parameters)} active, on {device}")
    if model.vision is not None:
        model.vision.requires_grad_(False)
        say("vision: the text holds no pictures, so the tower is frozen: it costs no gradients and no optimiser state")
    optimizer = build_optimizer(model, recipe.optim)
    return Parts(corpus, tokenizer, loader, held_out, num_bytes / num_tokens, model, optimizer)


def repetitions(parts: Sequence[Part], tokens: int) -> list[str]:
    """Tell of sources that a run of this many tokens reads more often than repetition teaches.

    Source: Muennighoff et al., "Scaling Data-Constrained Language Models" (2023): up to four readings teach about as
    much as new text.
    """
    weight = sum(part.weight for part in parts)
    times = {part.name: tokens * part.weight / weight / part.stream.num_tokens for part in parts}
    return [
        f"{name} is read {count:.1f} times in {short(tokens)} tokens; after about {USEFUL_READINGS} readings a text "
        "teaches less and is learned by heart: give more text or fewer train.tokens"
        for name, count in times.items()
        if count > USEFUL_READINGS
    ]


def reporter(
    say: Callable[[str], None], what: str = "text: {share} turned into tokens", every_s: float = TOLD_EVERY_S
) -> Callable[[int, int], None]:
    """Return what takes the work done and the work in all, and now and then says how far that is and how long it takes.

    Args:
        say: Tells the person.
        what: The sentence, with `{share}` where the share that is done belongs.
        every_s: Seconds between two sentences.
    """
    start = told = time.monotonic()

    def report(done: int, total: int) -> None:
        nonlocal told
        now = time.monotonic()
        if now - told >= every_s and done < total:
            told = now
            left = (now - start) * (total - done) / max(1, done)
            say(f"{what.format(share=f'{done / total:.0%}')}, {duration(left)} left")

    return report


def _tokenizer(corpus: Corpus, recipe: Recipe, run_dir: Path, say: Callable[[str], None]) -> Tokenizer | KimiTokenizer:
    if has_tokenizer(run_dir):
        tokenizer = load_tokenizer(run_dir)
    else:
        if recipe.data.tokenizer.path is None:
            say(f"tokenizer: learning {recipe.data.tokenizer.vocab_size} tokens from the text")
        tokenizer = corpus.tokenizer(recipe.data.tokenizer)
        save_tokenizer(tokenizer, run_dir)
    refuse_too_large(tokenizer, recipe)
    return tokenizer


def refuse_too_large(tokenizer: Tokenizer | KimiTokenizer, recipe: Recipe) -> None:
    """Refuse a tokenizer whose tokens the model has no places for.

    Raises:
        ConfigError: It has more tokens than the model.
    """
    if tokenizer.vocab_size > recipe.model.vocab_size:
        raise ConfigError(
            f"data.tokenizer: has more tokens than model.vocab_size `{recipe.model.vocab_size}`; "
            f"found `{tokenizer.vocab_size}`; raise model.vocab_size"
        )
