"""Answers as a whole, put together from the updates that tell of them."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from triax.data.tokenizer import Language
from triax.serve.request import FinishReason, Request, Sampling, TokenInfo, Update

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
class Story:
    """What has been told of one answer so far."""

    pieces: list[str] = field(default_factory=list)
    infos: list[TokenInfo] = field(default_factory=list)
    finish_reason: FinishReason | None = None

    def take(self, update: Update) -> None:
        """Add what an update tells."""
        self.pieces.append(update.text)
        self.infos += update.tokens
        self.finish_reason = update.finish_reason

    def completion(self) -> Completion:
        """Return the answer as it is now."""
        return Completion(
            "".join(self.pieces),
            tuple(info.token for info in self.infos),
            tuple(info.logprob for info in self.infos),
            self.finish_reason or "error",
        )


def request_of(
    name: str, prompt: Prompt, tokenizer: Language, context: int, max_tokens: int, how: Sampling, seed: int
) -> Request:
    """Return the request that continues a prompt.

    Args:
        name: Its id.
        prompt: A text, which is the beginning of a document, or tokens that are taken as they are.
        tokenizer: The model's.
        context: Most tokens of prompt and answer together; the answer ends there at the latest.
        max_tokens: Most tokens of the answer.
        how: How they are drawn.
        seed: Decides the draws.
    """
    tokens = [*tokenizer.opening, *tokenizer.encode(prompt)] if isinstance(prompt, str) else list(prompt)
    limit = max_tokens if max_tokens < 0 else max(0, min(max_tokens, context - len(tokens)))
    return Request(name, tuple(tokens or [tokenizer.start]), limit, how, seed, top_logprobs=0)
