"""Drafts from a small model of the same vocabulary, with a memory of its own that follows each sequence."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from triax.config.serve import Drafting, Serve
from triax.errors import ConfigError
from triax.model.decoder import Decoder
from triax.model.memory import Memory, Part
from triax.serve.arena import Store
from triax.serve.cache.tiers import Sizes
from triax.serve.plan import Copy
from triax.serve.request import Sampling
from triax.serve.sampler import choose, distribution, uniform
from triax.serve.speculative import Length, NgramDrafter

SALT = 0x5DEECE66D  # drafts are drawn by other numbers than answers


@dataclass
class _Follower:
    slot: int
    scratch: int
    pages: list[int]
    position: int
    length: Length
    odds: Tensor | None = None


class ModelDrafter:
    """Continues each sequence by itself and proposes that.

    What it remembers of a sequence is always exact for the tokens that stayed: drafts are tried in a second slot, and
    their latents are overwritten by what comes next. A prompt that the engine restored is read from its beginning.

    Args:
        model: The small model.
        settings: How many drafts.
        vocab_size: Tokens that the target can say.
        num_sequences: Sequences that it can follow at once; others get no drafts.
        num_pages: Pages for all of them.
        page_tokens: Tokens of a page.

    Raises:
        ConfigError: The models do not share a vocabulary.
    """

    def __init__(
        self,
        model: Decoder,
        settings: Drafting,
        vocab_size: int,
        num_sequences: int = 16,
        num_pages: int = 1024,
        page_tokens: int = 64,
    ) -> None:
        if model.settings.vocab_size < vocab_size:
            raise ConfigError(
                f"engine: the drafting model does not know all tokens; found {model.settings.vocab_size} for "
                f"{vocab_size}; use one with the same tokenizer"
            )
        self.model, self.settings, self.vocab_size, self.page_tokens = model.eval(), settings, vocab_size, page_tokens
        weight = model.embed.weight
        sizes = Sizes(num_pages + 1, 2 * num_sequences + 1)
        self.store = Store(model.settings, sizes, page_tokens, weight.device, weight.dtype)
        self._slots, self._pages = list(range(1, sizes.slots)), list(range(1, sizes.pages))
        self._followers: dict[int, _Follower] = {}
        self._ways: dict[int, tuple[Sampling, int, int]] = {}

    def watch(self, number: int, how: Sampling, seed: int, prompt_tokens: int) -> None:
        """Say how a sequence draws: drafts of drawn sequences are drawn alike, and keep their odds."""
        self._ways[number] = (how, seed, prompt_tokens)

    def propose(self, number: int, tokens: Sequence[int], most: int) -> tuple[int, ...]:
        """Return drafts for a sequence; arguments as in `NgramDrafter.propose`."""
        follower = self._followers.get(number) or self._follow(number)
        if follower is None:
            return ()
        count = min(follower.length.choose(), most)
        if not count or not self._grow(follower, len(tokens) + count):
            return ()
        fresh = tokens[follower.position :]
        logits = self._run(follower.slot, follower, follower.position, fresh)
        follower.position = len(tokens)
        self.store.copy([Copy("slot", "device", follower.slot, "device", follower.scratch)])
        how, seed, prompt_tokens = self._ways.get(number, (Sampling(), 0, 0))
        drafts: list[int] = []
        odds: list[Tensor] = []
        while True:
            place = len(tokens) - prompt_tokens + len(drafts)
            point = torch.tensor([uniform(seed ^ SALT, place)], dtype=torch.float64, device=logits.device)
            odds.append(distribution(logits, how)[0])
            drafts.append(int(choose(logits, point, how).token))
            if len(drafts) == count:
                break
            logits = self._run(follower.scratch, follower, len(tokens) + len(drafts) - 1, drafts[-1:])
        follower.odds = torch.stack(odds) if how.temperature > 0 else None
        return tuple(drafts)

    def odds(self, number: int) -> Float[Tensor, "k V"] | None:
        """Return the probabilities that a sequence's latest drafts were drawn from; None for likeliest tokens."""
        follower = self._followers.get(number)
        return follower.odds if follower is not None else None

    def learn(self, number: int, tried: int, right: int) -> None:
        """Take over what became of a sequence's drafts."""
        if number in self._followers:
            self._followers[number].length.learn(tried, right)

    def drop(self, number: int) -> None:
        """Forget a sequence."""
        self._ways.pop(number, None)
        follower = self._followers.pop(number, None)
        if follower is not None:
            self._slots += [follower.slot, follower.scratch]
            self._pages += follower.pages

    def _follow(self, number: int) -> _Follower | None:
        if len(self._slots) < 2:
            return None
        slot, scratch = self._slots.pop(), self._slots.pop()
        self.store.clear([slot])
        length = Length(self.settings.max_drafts, self.settings.is_adaptive)
        follower = self._followers[number] = _Follower(slot, scratch, [], 0, length)
        return follower

    def _grow(self, follower: _Follower, length: int) -> bool:
        missing = -(-length // self.page_tokens) - len(follower.pages)
        if missing > len(self._pages):
            return False
        follower.pages += [self._pages.pop() for _ in range(missing)]
        return True

    @torch.no_grad()
    def _run(self, slot: int, follower: _Follower, position: int, tokens: Sequence[int]) -> Float[Tensor, "1 V"]:
        part = Part(slot, follower.pages, position, len(tokens))
        memory = Memory.of(self.model.settings, self.store.device, [part], int(len(tokens) == 1))
        device = self.model.embed.weight.device
        hidden = self.model(torch.tensor(tokens, device=device), memory.layout, memory)
        return self.model.logits(hidden[-1:])[:, : self.vocab_size].float()


def drafter_of(settings: Serve, vocab_size: int, model: Decoder | None) -> NgramDrafter | ModelDrafter | None:
    """Return who makes an engine's drafts, if anybody.

    Args:
        settings: Of the engine.
        vocab_size: Tokens that the target can say.
        model: A small model, for drafts of kind `model`.

    Raises:
        ConfigError: It is missing, or knows fewer tokens.
    """
    drafting = settings.drafting
    if drafting is None:
        return None
    if drafting.kind == "ngram":
        return NgramDrafter(drafting)
    if model is None:
        raise ConfigError("engine: drafting.kind is `model` but no draft model was given; found none; give one")
    return ModelDrafter(model, drafting, vocab_size, page_tokens=settings.cache.page_tokens)
