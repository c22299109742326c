"""Continue prompts with a model: prefill all, decode all, one token a step, finished sequences leave."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor

from triax.data.tokenizer import Language
from triax.errors import CheckpointError, ConfigError, DataError
from triax.model.cache import Cache
from triax.model.decoder import Decoder
from triax.model.layout import Layout
from triax.serve.sampler import Sampling, choose
from triax.serve.text import Text

FinishReason = Literal["stop", "length", "invalid"]
Prompt = str | Sequence[int]


@dataclass(frozen=True)
class Completion:
    """What a model wrote after a prompt."""

    text: str
    """The tokens as text, up to a stop string."""
    tokens: tuple[int, ...]
    """Generated tokens, without a stop token; those of a stop string are among them."""
    logprobs: tuple[float, ...]
    """Natural log-probability of each token under the model, before temperature and filters."""
    finish_reason: FinishReason
    """A stop token or string, the limit of tokens, or logits that were no distribution (NaN or infinite)."""


@dataclass
class _Sequence:
    prompt: list[int]
    random: torch.Generator
    text: Text
    pieces: list[str] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    finish_reason: FinishReason | None = None

    def completion(self) -> Completion:
        assert self.finish_reason is not None
        return Completion("".join(self.pieces), tuple(self.tokens), tuple(self.logprobs), self.finish_reason)


class Engine:
    """Generates text; what a prompt gets depends on the prompt, the options and its seed, not on its company.

    A text prompt is the beginning of a document: with a tokenizer of ours it is read after a border, with a released
    one as it is. A border, or an end that the released models know, ends the sequence. Weights are used as they are:
    low precision is the caller's autocast.

    Args:
        model: The network; it is put into evaluation mode for each step and back.
        tokenizer: The one that it was trained with.

    Raises:
        CheckpointError: The tokenizer has more tokens than the model.
    """

    def __init__(self, model: Decoder, tokenizer: Language) -> None:
        if tokenizer.vocab_size > model.settings.vocab_size:
            raise CheckpointError(
                f"engine: the tokenizer does not belong to this model; found {tokenizer.vocab_size} tokens for "
                f"{model.settings.vocab_size} rows of the embedding; use the tokenizer that it was trained with"
            )
        self.model, self.tokenizer = model, tokenizer
        slots = {model.settings.vision.slot_token} if model.settings.vision else set()
        self._unsaid = sorted(tokenizer.unsaid | slots)

    def generate(
        self,
        prompts: Sequence[Prompt],
        max_tokens: int = 128,
        *,
        temperature: float = 0.0,
        top_k: int = 0,
        top_p: float = 1.0,
        min_p: float = 0.0,
        seed: int | Sequence[int] = 0,
        stop: Sequence[str] = (),
        stop_ids: Sequence[int] = (),
    ) -> list[Completion]:
        """Continue several prompts together.

        Args:
            prompts: Texts, or tokens that are taken as they are; an empty one starts from the tokenizer's first token.
            max_tokens: Most tokens to generate for a prompt.
            temperature: Divides the logits; 0 takes the likeliest token.
            top_k: Keep this many of the likeliest tokens; 0 keeps all.
            top_p: Keep the fewest likeliest tokens that hold this share of the probability.
            min_p: Drop tokens less likely than this share of the likeliest one.
            seed: One for all prompts, or one for each: equal prompts need different seeds to get different texts.
            stop: Strings that end a text just before themselves.
            stop_ids: Tokens that end a text beside the tokenizer's own ends.

        Raises:
            ConfigError: An option is out of range.
            DataError: A prompt holds tokens that the model does not have.
        """
        seeds = [seed] * len(prompts) if isinstance(seed, int) else list(seed)
        if len(seeds) != len(prompts):
            raise ConfigError(f"engine: one seed a prompt is needed; found {len(seeds)} for {len(prompts)} prompts")
        sequences = [self._start(prompt, one, stop) for prompt, one in zip(prompts, seeds, strict=True)]
        how = Sampling(temperature, top_k, top_p, min_p)
        for _ in self._steps(sequences, max_tokens, how, frozenset(stop_ids)):
            pass
        return [sequence.completion() for sequence in sequences]

    def stream(
        self,
        prompt: Prompt,
        max_tokens: int = 128,
        *,
        temperature: float = 0.0,
        top_k: int = 0,
        top_p: float = 1.0,
        min_p: float = 0.0,
        seed: int = 0,
        stop: Sequence[str] = (),
        stop_ids: Sequence[int] = (),
    ) -> Iterator[str]:
        """Continue one prompt, piece by piece; the pieces joined are the text of `generate` with these options.

        A piece is whole characters; a character whose bytes come in several tokens comes in one piece.
        """
        sequence = self._start(prompt, seed, stop)
        how = Sampling(temperature, top_k, top_p, min_p)
        return self._pieces(sequence, self._steps([sequence], max_tokens, how, frozenset(stop_ids)))

    @staticmethod
    def _pieces(sequence: _Sequence, steps: Iterator[None]) -> Iterator[str]:
        done = 0
        for _ in steps:
            yield from (piece for piece in sequence.pieces[done:] if piece)
            done = len(sequence.pieces)

    def _start(self, prompt: Prompt, seed: int, stop: Sequence[str]) -> _Sequence:
        if not 0 <= seed < 2**64:
            raise ConfigError(f"engine: seed is out of range; found `{seed}`; give a number from 0 to 2^64 - 1")
        tokens = [*self.tokenizer.opening, *self.tokenizer.encode(prompt)] if isinstance(prompt, str) else list(prompt)
        tokens = tokens or [self.tokenizer.start]
        wrong = [token for token in tokens if not 0 <= token < self.model.settings.vocab_size]
        if wrong:
            raise DataError(
                f"prompt: token `{wrong[0]}` is not in the vocabulary; the model has "
                f"`{self.model.settings.vocab_size}`; encode the prompt with the model's tokenizer"
            )
        return _Sequence(tokens, torch.Generator().manual_seed(seed), Text(self.tokenizer, stop))

    def _steps(
        self, sequences: list[_Sequence], max_tokens: int, how: Sampling, stop_ids: frozenset[int]
    ) -> Iterator[None]:
        """Advance all sequences by one token and hand over, until none is left."""
        if max_tokens < 0:
            raise ConfigError(f"engine: max_tokens is out of range; found `{max_tokens}`; give 0 or more")
        active = list(sequences) if max_tokens else []
        for sequence in sequences[len(active) :]:
            sequence.finish_reason = "length"
        cache = self.model.empty_cache(len(active))
        fresh = [sequence.prompt for sequence in active]
        while active:
            self._advance(active, self._next_logits(fresh, cache), max_tokens, how, stop_ids)
            staying = [row for row, sequence in enumerate(active) if sequence.finish_reason is None]
            yield
            if len(staying) < len(active):
                active = [active[row] for row in staying]
                cache = cache.select(staying)
            fresh = [sequence.tokens[-1:] for sequence in active]

    @torch.no_grad()
    def _next_logits(self, fresh: list[list[int]], cache: Cache) -> Float[Tensor, "B V"]:
        layout = Layout.of([len(tokens) for tokens in fresh])
        device = self.model.embed.weight.device
        flat = torch.tensor([token for tokens in fresh for token in tokens], dtype=torch.long, device=device)
        was_training = self.model.training
        if was_training:
            self.model.eval()
        try:
            hidden = self.model(flat, layout, cache)
            last = torch.tensor(layout.starts[1:], device=device) - 1
            logits = self.model.logits(hidden[last])
        finally:
            if was_training:
                self.model.train()
        logits[:, self._unsaid] = -torch.inf
        return logits[:, : self.tokenizer.vocab_size]  # rows past the tokenizer's end stand for no text

    def _advance(
        self,
        active: list[_Sequence],
        logits: Float[Tensor, "B V"],
        max_tokens: int,
        how: Sampling,
        stop_ids: frozenset[int],
    ) -> None:
        draws = torch.stack([torch.rand((), generator=s.random, dtype=torch.float64) for s in active])
        chosen = choose(logits, draws.to(logits.device), how)
        results = zip(active, *(column.tolist() for column in chosen), strict=True)
        for sequence, token, logprob, is_valid in results:
            if not is_valid:
                sequence.finish_reason = "invalid"
            elif token in self.tokenizer.ends or token in stop_ids:
                sequence.finish_reason = "stop"
            else:
                sequence.tokens.append(token)
                sequence.logprobs.append(logprob)
                sequence.pieces.append(sequence.text.push(token))
                if sequence.text.has_stopped:
                    sequence.finish_reason = "stop"
                elif len(sequence.tokens) == max_tokens:
                    sequence.finish_reason = "length"
            if sequence.finish_reason is not None:
                sequence.pieces.append(sequence.text.flush())
