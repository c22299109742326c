"""Runs plans: copies, one forward for all rows, the next tokens."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Float
from torch import Tensor

from triax.kernels.linear import tiled
from triax.model.decoder import Decoder
from triax.model.exact import exact
from triax.model.media import Inserts
from triax.model.memory import Memory, Part
from triax.model.vision import Media
from triax.serve.arena import Store
from triax.serve.plan import PENDING, Plan, Row, RowResult, StepResult
from triax.serve.request import MediaItem, Request, TokenInfo
from triax.serve.sampler import Draw, adjusted, distribution, infos, sample, uniform
from triax.serve.speculative import agree, reject
from triax.serve.structure import Guide

HEAD_ROWS = 512  # rows of logits at a time where a prompt is scored
ACCEPTING = 0x9E3779B97F4A7C15  # whether a draft stays is decided by other numbers than what replaces it


@runtime_checkable
class Drafter(Protocol):
    """What the runner asks of whoever made the drafts."""

    def odds(self, number: int) -> Tensor | None:
        """Return what the latest drafts of a sequence were drawn from, if they were drawn."""
        ...


@dataclass
class Live:
    """What the runner knows of a sequence."""

    request: Request
    answer: list[int] = field(default_factory=list)
    guide: Guide | None = None
    vectors: dict[str, Tensor] = field(default_factory=dict)
    """Encoded pictures by their digest."""


class Runner:
    """One model with its memory.

    Args:
        model: The decoder; used in evaluation mode.
        store: Where states and latents lie.
        vocab_size: Tokens that the tokenizer has; logits beyond stand for no text.
        unsaid: Tokens that are never chosen.
        is_exact: Compute each token to the same bits whatever runs beside it.
        drafter: Who makes drafts, if anybody.
    """

    def __init__(
        self,
        model: Decoder,
        store: Store,
        vocab_size: int,
        unsaid: Sequence[int],
        *,
        is_exact: bool = False,
        drafter: Drafter | None = None,
    ) -> None:
        self.model, self.store, self.vocab_size, self.is_exact, self.drafter = (
            model,
            store,
            vocab_size,
            is_exact,
            drafter,
        )
        self.device = model.embed.weight.device
        self.unsaid = torch.tensor(sorted(unsaid), dtype=torch.long, device=self.device)
        self.sequences: dict[int, Live] = {}
        self.poison: Callable[[Tensor], None] | None = None
        """For tests of faults: may change the logits of a step."""

    def add(self, number: int, request: Request, guide: Guide | None = None) -> None:
        """Meet a sequence before its first row."""
        self.sequences[number] = Live(request, guide=guide)

    def drop(self, number: int) -> None:
        """Forget a sequence; one that is not known is no error."""
        self.sequences.pop(number, None)

    def rewind(self, number: int, answer: Sequence[int]) -> None:
        """Go back to the tokens that are known of a sequence, after a step that failed."""
        live = self.sequences[number]
        if live.guide is not None:
            live.guide.restart(answer)
        live.answer = list(answer)

    @torch.no_grad()
    def run(self, plan: Plan) -> StepResult:
        """Do all that a plan says."""
        leaving = [copy for copy in plan.before if copy.target == "host"]
        self.store.copy(leaving)
        self.store.copy([copy for copy in plan.before if copy.target != "host"])
        self.store.clear(plan.clear)
        was_training = self.model.training
        self.model.eval()
        try:
            with exact(self.is_exact):
                results = self._rows(plan.rows) if plan.rows else ()
        finally:
            self.model.train(was_training)
        self.store.copy(plan.after)
        self.store.copy(plan.beside)
        return StepResult(results)

    def _rows(self, rows: tuple[Row, ...]) -> tuple[RowResult, ...]:
        early = sum(row.kind != "prefill" for row in rows)
        parts = [Part(row.slot, row.pages, row.position, len(row.tokens), row.kind != "verify") for row in rows]
        stream = [self._known(row, token) for row in rows for token in row.tokens]
        pads = -len(stream) % tiled.ROWS if self.is_exact else 0
        memory = Memory.of(self.model.settings, self.store.device, parts, early, pads)
        tokens = torch.tensor(stream + [0] * pads, device=self.device)
        hidden = self.model(tokens, memory.layout, memory, media=self._inserts(rows, memory))
        starts = memory.layout.starts
        asked = [
            starts[n + 1] - 1 - back for n, row in enumerate(rows) if row.samples for back in range(row.drafts, -1, -1)
        ]
        logits = self._logits(hidden[torch.tensor(asked, device=self.device)]) if asked else hidden.new_zeros(0, 1)
        if self.poison is not None:
            self.poison(logits)
        results = self._choose(rows, logits)
        tried = [result for row, result in zip(rows, results, strict=True) if row.kind == "verify"]
        if tried:
            memory.accept([max(1, len(result.tokens)) for result in tried])
        return tuple(
            self._with_prompt(row, result, hidden[starts[n] : starts[n + 1]])
            for n, (row, result) in enumerate(zip(rows, results, strict=True))
        )

    def _known(self, row: Row, token: int) -> int:
        return self.sequences[row.sequence].answer[-1] if token == PENDING else token

    def _logits(self, hidden: Float[Tensor, "R D"]) -> Float[Tensor, "R V"]:
        logits = self.model.logits(hidden)
        return logits if logits.dtype is torch.float64 else logits.float()

    # choosing

    def _choose(self, rows: Sequence[Row], logits: Float[Tensor, "R V"]) -> list[RowResult]:
        draws: list[Draw] = []
        for row in rows:
            if row.samples:
                draws += self._draws(row)
        if not draws:
            return [RowResult() for _ in rows]
        said = logits[:, : self.vocab_size]
        token, is_valid = sample(said, draws, self.unsaid)
        drawn, fine = token.tolist(), is_valid.tolist()
        results: list[RowResult] = []
        reports: list[tuple[int, int, int]] = []  # row of logits, token, alternatives
        owners: list[tuple[int, int]] = []
        first = 0
        for n, row in enumerate(rows):
            if not row.samples:
                results.append(RowResult())
                continue
            span = slice(first, first + row.drafts + 1)
            tokens = self._kept(row, drawn[span], fine[span], said[span], draws[span])
            live = self.sequences[row.sequence]
            live.answer += tokens
            if live.guide is not None:
                live.guide.push(tokens)
            if live.request.top_logprobs is not None:
                reports += [(first + i, token, live.request.top_logprobs) for i, token in enumerate(tokens)]
                owners.append((n, len(tokens)))
            results.append(RowResult(tuple(tokens), is_valid=bool(tokens)))
            first += row.drafts + 1
        if reports:
            places, tokens, tops = (list(column) for column in zip(*reports, strict=True))
            table = iter(infos(said[torch.tensor(places, device=logits.device)], tokens, tops))
            for n, count in owners:
                results[n] = RowResult(
                    results[n].tokens, tuple(next(table) for _ in range(count)), (), results[n].is_valid
                )
        return results

    def _draws(self, row: Row) -> list[Draw]:
        """Return how the token after each of a row's last tokens is chosen, as if the drafts before it stayed."""
        live = self.sequences[row.sequence]
        request, drafts = live.request, list(row.tokens[len(row.tokens) - row.drafts :])
        masks = live.guide.allowed(drafts) if live.guide is not None else [None] * (row.drafts + 1)
        how, place = request.sampling, len(live.answer)
        reads = how.presence_penalty or how.frequency_penalty or how.repetition_penalty != 1
        return [
            Draw(
                how,
                uniform(request.seed, place + n) if how.temperature else 0.0,
                request.tokens if how.repetition_penalty != 1 else (),
                (*live.answer, *drafts[:n]) if reads else (),
                masks[n],
            )
            for n in range(row.drafts + 1)
        ]

    def _kept(
        self, row: Row, drawn: list[int], fine: list[bool], logits: Float[Tensor, "K V"], draws: Sequence[Draw]
    ) -> list[int]:
        """Return a row's new tokens; none where its logits were no distribution."""
        if not fine[0]:
            return []
        if not row.drafts:
            return drawn
        drafts = row.tokens[len(row.tokens) - row.drafts :]
        odds = self.drafter.odds(row.sequence) if self.drafter is not None and not self.is_exact else None
        count = next((n for n, is_fine in enumerate(fine) if not is_fine), len(fine))
        if odds is None:
            return drawn[: min(agree(drafts, drawn) + 1, count)]
        live, drafts = self.sequences[row.sequence], drafts[: count - 1]
        score, _ = adjusted(logits[:count], draws[:count], self.unsaid)
        places = range(len(live.answer), len(live.answer) + count)
        seed = live.request.seed
        return list(
            reject(
                distribution(score, live.request.sampling),
                odds,
                drafts,
                [uniform(seed ^ ACCEPTING, place) for place in places],
                [uniform(seed, place) for place in places],
            )
        )

    def _with_prompt(self, row: Row, result: RowResult, hidden: Float[Tensor, "T D"]) -> RowResult:
        request = self.sequences[row.sequence].request
        if not request.score_prompt or row.kind != "prefill":
            return result
        following = request.tokens[row.position + 1 : row.position + 1 + len(row.tokens)]
        found: list[TokenInfo] = []
        for first in range(0, len(following), HEAD_ROWS):
            some = following[first : first + HEAD_ROWS]
            tops = [request.top_logprobs or 0] * len(some)
            found += infos(self._logits(hidden[first : first + len(some)])[:, : self.vocab_size], some, tops)
        return RowResult(result.tokens, result.infos, tuple(found), result.is_valid)

    # pictures

    def _inserts(self, rows: Sequence[Row], memory: Memory) -> Inserts | None:
        places: list[int] = []
        vectors: list[Tensor] = []
        for n, row in enumerate(rows):
            for item in row.media:
                first = max(item.start, row.position)
                end = min(item.start + item.length, row.position + len(row.tokens))
                begin = memory.layout.starts[n] + first - row.position
                places += range(begin, begin + end - first)
                vectors.append(self._vectors(row.sequence, item)[first - item.start : end - item.start])
        if not places:
            return None
        return Inserts(torch.tensor(places, device=self.device), torch.cat(vectors))

    def _vectors(self, number: int, item: MediaItem) -> Float[Tensor, "S D"]:
        known = self.sequences[number].vectors
        if item.digest not in known:
            vision = self.model.vision
            assert vision is not None
            side = vision.settings.patch
            patches = torch.frombuffer(bytearray(item.pixels), dtype=torch.float32).view(prod(item.grid), 3, side, side)
            weight = self.model.embed.weight
            known[item.digest] = vision(Media(patches.to(weight.device, weight.dtype), (item.grid,)))
        return known[item.digest]
