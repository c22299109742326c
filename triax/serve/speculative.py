"""Drafts of the next tokens, and which of them stay: guesses cost a little, right ones save whole steps.

Two rules decide. Drafts without odds of their own are kept while they are the very tokens that would have been drawn:
the answer is token for token the one without drafts. Drafts that were drawn from a small model's distribution go
through rejection sampling, which keeps the distribution but not the draws.

Source: speculative sampling (arXiv 2302.01318); K3 report (arXiv 2607.24653) section 5.4.2 for the replay of states.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from jaxtyping import Float
from torch import Tensor

from triax.config.serve import Drafting

COST = 0.08  # of a draft, in plain steps of one token: what an adaptive length weighs against its chance
MEMORY = 0.9  # share of the past in the running acceptance
PROBE_EVERY = 32  # plain tokens after which one draft finds out whether drafting pays again


@dataclass
class Ngrams:
    """Where each run of tokens of a text last went on, kept up to date as the text grows."""

    longest: int
    """Length of the longest runs that are looked up."""
    tokens: list[int] = field(default_factory=list)
    _after: dict[tuple[int, ...], int] = field(default_factory=dict)

    def extend(self, tokens: Sequence[int]) -> None:
        """Add tokens at the end."""
        for token in tokens:
            end = len(self.tokens)
            for length in range(1, min(self.longest, end) + 1):
                self._after[tuple(self.tokens[end - length :])] = end
            self.tokens.append(token)

    def continuation(self, most: int) -> tuple[int, ...]:
        """Return what followed the latest earlier place that ends as the text does, longest runs first."""
        end = len(self.tokens)
        for length in range(min(self.longest, end), 0, -1):
            place = self._after.get(tuple(self.tokens[end - length :]))
            if place is not None:
                found = self.tokens[place : place + most]
                while len(found) < most:  # the text repeats itself up to its end
                    found = (found + self.tokens[place:])[:most]
                return tuple(found)
        return ()


@dataclass
class Length:
    """How many drafts are worth trying for one sequence, by how many were right of late."""

    most: int
    is_adaptive: bool = True
    rate: float = 0.6
    """Running share of drafts that were right, given that those before them were."""
    _plain: int = 0

    def choose(self) -> int:
        """Return the number of drafts that saves most, 0 where none does."""
        if not self.is_adaptive:
            return self.most
        rate = min(self.rate, 0.99)
        gains = [(1 - rate ** (n + 1)) / (1 - rate) / (1 + COST * n) for n in range(self.most + 1)]
        best = max(range(len(gains)), key=gains.__getitem__)
        if best == 0:
            self._plain += 1
            if self._plain >= PROBE_EVERY:
                self._plain = 0
                return 1
        return best

    def learn(self, tried: int, right: int) -> None:
        """Take over what became of the drafts of one step."""
        for outcome in (1.0,) * right + ((0.0,) if right < tried else ()):
            self.rate = MEMORY * self.rate + (1 - MEMORY) * outcome


@dataclass
class _Text:
    ngrams: Ngrams
    length: Length


class NgramDrafter:
    """Copies drafts from the sequence's own text.

    Args:
        settings: How long and how many.
    """

    def __init__(self, settings: Drafting) -> None:
        self.settings = settings
        self._texts: dict[int, _Text] = {}

    def propose(self, number: int, tokens: Sequence[int], most: int) -> tuple[int, ...]:
        """Return drafts for a sequence.

        Args:
            number: The sequence.
            tokens: Prompt and answer so far.
            most: Drafts that have room.
        """
        text = self._texts.get(number)
        if text is None:
            length = Length(self.settings.max_drafts, self.settings.is_adaptive)
            text = self._texts[number] = _Text(Ngrams(self.settings.ngram), length)
        text.ngrams.extend(tokens[len(text.ngrams.tokens) :])
        count = min(text.length.choose(), most)
        return text.ngrams.continuation(count) if count else ()

    def odds(self, number: int) -> None:
        """Copies have no odds of their own."""

    def learn(self, number: int, tried: int, right: int) -> None:
        """Take over what became of a sequence's drafts."""
        if number in self._texts:
            self._texts[number].length.learn(tried, right)

    def drop(self, number: int) -> None:
        """Forget a sequence."""
        self._texts.pop(number, None)


def agree(drafts: Sequence[int], drawn: Sequence[int]) -> int:
    """Return how many of the first drafts are what was drawn in their places."""
    return next((n for n, (one, other) in enumerate(zip(drafts, drawn, strict=False)) if one != other), len(drafts))


def reject(
    target: Float[Tensor, "K V"],
    odds: Float[Tensor, "k V"],
    drafts: Sequence[int],
    accepting: Sequence[float],
    drawing: Sequence[float],
) -> tuple[int, ...]:
    """Return the tokens that stay of drafts drawn from `odds`, and one more: together distributed as `target`.

    A draft stays with probability target / odds, at most 1; the first one that does not is replaced by a draw from
    what target has above odds. After the last draft one token more is drawn.

    Args:
        target: Probabilities in each draft's place and in the one after the last.
        odds: Probabilities that each draft was drawn from.
        drafts: The drafts.
        accepting: Number in [0, 1) that decides about each draft.
        drawing: Number in [0, 1) that decides the draw in each place.
    """
    kept: list[int] = []
    for place, draft in enumerate(drafts):
        wanted, proposed = float(target[place, draft]), float(odds[place, draft])
        if accepting[place] * proposed < wanted:
            kept.append(draft)
            continue
        rest = (target[place] - odds[place]).clamp_(min=0)
        return (*kept, _draw(rest if float(rest.sum()) > 0 else target[place], drawing[place]))
    return (*kept, _draw(target[len(drafts)], drawing[len(drafts)]))


def _draw(weight: Float[Tensor, " V"], point: float) -> int:
    ends = weight.cumsum(-1)
    token = int(torch.searchsorted(ends, ends[-1:] * point, right=True))
    return min(token, int((weight > 0).nonzero()[-1]))
