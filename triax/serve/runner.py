"""Runs plans: copies, one forward for all rows, the next tokens."""

from collections.abc import Callable, Mapping, Sequence
from math import prod
from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Float
from torch import Tensor

from triax.kernels.dispatch import batch_invariant
from triax.kernels.linear import tiled
from triax.model.decoder import Decoder
from triax.model.device import on_device
from triax.model.media import Inserts
from triax.model.memory import Memory, Part
from triax.model.vision import Media
from triax.serve.arena import Store
from triax.serve.flight import Flight, Live
from triax.serve.graphs import Graphs, Line
from triax.serve.plan import PENDING, Plan, Row, StepResult
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


class Runner:
    """One model with its memory.

    Args:
        model: The decoder; used in evaluation mode.
        store: Where states and latents lie.
        vocab_size: Tokens that the tokenizer has; logits beyond stand for no text.
        unsaid: Tokens that are never chosen.
        is_batch_invariant: Compute each token to the same bits whatever runs beside it.
        drafter: Who makes drafts, if anybody.
        graphs: Runs steps that only decode, on a GPU.
    """

    def __init__(
        self,
        model: Decoder,
        store: Store,
        vocab_size: int,
        unsaid: Sequence[int],
        *,
        is_batch_invariant: bool = False,
        drafter: Drafter | None = None,
        graphs: Graphs | None = None,
    ) -> None:
        self.model, self.store, self.vocab_size, self.is_batch_invariant, self.drafter = (
            model,
            store,
            vocab_size,
            is_batch_invariant,
            drafter,
        )
        self.device = model.embed.weight.device
        self.unsaid = torch.tensor(sorted(unsaid), dtype=torch.long, device=self.device)
        self.sequences: dict[int, Live] = {}
        self.graphs = graphs
        self._latest = torch.zeros(store.device.num_slots + 1, dtype=torch.long, device=self.device)
        self._last: Flight | None = None
        if graphs is not None:
            graphs.latest = self._latest
        self.poison: Callable[[Tensor], None] | None = None
        """For tests of faults: may change the logits of a step."""

    def add(self, number: int, request: Request, guide: Guide | None = None) -> None:
        """Meet a sequence before its first row."""
        self.sequences[number] = Live(request, guide=guide)

    def drop(self, number: int) -> None:
        """Forget a sequence; one that is not known is no error."""
        self.sequences.pop(number, None)

    def forget(self) -> None:
        """Forget the steps under way, after one that failed."""
        self._last = None

    def rewind(self, number: int, answer: Sequence[int]) -> None:
        """Go back to the tokens that are known of a sequence, after a step that failed."""
        live = self.sequences[number]
        if live.guide is not None:
            live.guide.restart(answer)
        live.answer, live.ahead = list(answer), 0

    def run(self, plan: Plan) -> StepResult:
        """Do all that a plan says, and wait for it."""
        return self.launch(plan).result()

    @torch.no_grad()
    def launch(self, plan: Plan) -> Flight:
        """Begin what a plan says; on a GPU it may run on while the next one is planned and launched."""
        leaving = [copy for copy in plan.before if copy.target == "host"]
        self.store.copy(leaving)
        self.store.copy([copy for copy in plan.before if copy.target != "host"])
        self.store.clear(plan.clear)
        was_training = self.model.training
        if was_training:
            self.model.eval()
        try:
            with batch_invariant(self.is_batch_invariant):
                flight = self._rows(plan.rows) if plan.rows else Flight(self, ())
        finally:
            if was_training:
                self.model.train()
        self.store.copy(plan.after)
        self.store.copy(plan.beside)
        flight.depart()
        self._last = flight
        return flight

    def _rows(self, rows: tuple[Row, ...]) -> Flight:
        if any(row.drafts or (PENDING in row.tokens and self._reads(row)) for row in rows) and self._last is not None:
            self._last.result()  # what these rows read must be known
        if self.graphs is not None and self._is_plain(rows):
            return self._decode(rows, self.graphs)
        memory, tokens = self._memory(rows)
        hidden = self.model(tokens, memory.layout, memory, media=self._inserts(rows, memory))
        starts = memory.layout.starts
        asked: list[int] = []
        for n, row in enumerate(rows):
            if row.samples:
                last = starts[n] + len(row.tokens) - 1
                asked += range(last - row.drafts, last + 1)
        logits = self._logits(hidden[on_device(asked, self.device)]) if asked else hidden.new_zeros(0, 1)
        prompts = {
            n: self._prompt_infos(row, hidden[starts[n] : starts[n] + len(row.tokens)])
            for n, row in enumerate(rows)
            if row.kind == "prefill" and self.sequences[row.sequence].request.score_prompt
        }
        flight = self._choose(rows, logits, prompts)
        if any(row.drafts for row in rows):
            early = [n for n, row in enumerate(rows) if row.kind != "prefill"]
            tried = early if self.store.device.has_kernels else [n for n in early if rows[n].drafts]
            results = flight.result().rows
            memory.accept([max(1, len(results[n].tokens)) for n in tried])
        return flight

    def _reads(self, row: Row) -> bool:
        """Whether the choice of a row's token reads the tokens before it."""
        live = self.sequences[row.sequence]
        how = live.request.sampling
        penalises = how.presence_penalty or how.frequency_penalty or how.repetition_penalty != 1
        return bool(penalises) or live.guide is not None

    def _is_plain(self, rows: Sequence[Row]) -> bool:
        return all(row.kind == "decode" and not row.media for row in rows)

    def _memory(self, rows: Sequence[Row]) -> tuple[Memory, Tensor]:
        """Return the memory of a step's rows, and their tokens."""
        early = sum(row.kind != "prefill" for row in rows)
        by_kernels, tries = self.store.device.has_kernels, any(row.drafts for row in rows)
        width = max((len(row.tokens) for row in rows[:early]), default=1)
        streams: list[list[int]] = []
        parts: list[Part] = []
        for n, row in enumerate(rows):
            tokens = list(row.tokens)
            if by_kernels and n < early:  # all as long as the longest
                tokens += [0] * (width - len(tokens))
            is_kept = not tries if by_kernels and n < early else row.kind != "verify"
            parts.append(Part(row.slot, row.pages, row.position, len(tokens), is_kept, len(row.tokens)))
            streams.append(tokens)
        stream = [token for tokens in streams for token in tokens]
        pads = -len(stream) % tiled.ROWS if self.is_batch_invariant else 0
        memory = Memory.of(self.model.settings, self.store.device, parts, early, pads)
        tokens = on_device(stream + [0] * pads, self.device)
        if PENDING in stream:
            tokens = torch.where(
                tokens == PENDING, self._latest[memory.slots[memory.layout.sequence(self.device)]], tokens
            )
        return memory, tokens

    def _logits(self, hidden: Float[Tensor, "R D"]) -> Float[Tensor, "R V"]:
        logits = self.model.logits(hidden)
        return logits if logits.dtype is torch.float64 else logits.float()

    def _decode(self, rows: tuple[Row, ...], graphs: Graphs) -> Flight:
        """Run one token a row as a graph, which chooses too unless a choice reads more than the logits."""
        graph = graphs.run([Line(row.tokens[0], row.slot, row.position, row.pages, self._way(row)) for row in rows])
        if self.poison is not None or any(self._needs_logits(row) for row in rows):
            return self._choose(rows, graph.logits[: len(rows)].clone(), {})
        for row in rows:
            self.sequences[row.sequence].ahead += 1
        tops = [self.sequences[row.sequence].request.top_logprobs for row in rows]
        token, logprob, is_valid = (part[: len(rows)].clone() for part in graph.drawn)
        return Flight(self, rows, token, is_valid, tops=tops, logprob=logprob if any(x == 0 for x in tops) else None)

    def _needs_logits(self, row: Row) -> bool:
        request = self.sequences[row.sequence].request
        return bool(request.sampling.bias) or self._reads(row) or bool(request.top_logprobs)

    def _way(self, row: Row) -> tuple[float, int, float, float, float]:
        live = self.sequences[row.sequence]
        how = live.request.sampling
        if how.temperature == 0:
            return 0.0, 0, 1.0, 0.0, 0.0
        place = uniform(live.request.seed, len(live.answer) + live.ahead)
        return how.temperature, how.top_k, how.top_p, how.min_p, place

    # choosing

    def _choose(
        self, rows: tuple[Row, ...], logits: Float[Tensor, "R V"], prompts: Mapping[int, tuple[TokenInfo, ...]]
    ) -> Flight:
        draws: list[Draw] = []
        for row in rows:
            if row.samples:
                draws += self._draws(row)
        if self.poison is not None:
            self.poison(logits)
        if not draws:
            return Flight(self, rows, prompts=prompts)
        said = logits[:, : self.vocab_size]
        token, is_valid = sample(said, draws, self.unsaid)
        tops = [
            self.sequences[row.sequence].request.top_logprobs
            for row in rows
            if row.samples
            for _ in range(row.drafts + 1)
        ]
        flight = Flight(
            self, rows, token, is_valid, said if any(top is not None for top in tops) else None, tops, prompts
        )
        flight.draws = draws
        if any(row.drafts for row in rows):
            flight.said = said
        else:
            slots = on_device([row.slot for row in rows if row.samples], self.device)
            self._latest[slots] = token
        for row in rows:
            self.sequences[row.sequence].ahead += row.samples and not row.drafts
        return flight

    def _draws(self, row: Row) -> list[Draw]:
        """Return how the token after each of a row's last tokens is chosen, as if the drafts before it stayed."""
        live = self.sequences[row.sequence]
        request, drafts = live.request, list(row.tokens[len(row.tokens) - row.drafts :])
        masks = live.guide.allowed(drafts) if live.guide is not None else [None] * (row.drafts + 1)
        how, place = request.sampling, len(live.answer) + live.ahead
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

    def kept(
        self, row: Row, drawn: list[int], fine: list[bool], logits: Float[Tensor, "K V"] | None, draws: Sequence[Draw]
    ) -> list[int]:
        """Return a row's new tokens; none where its logits were no distribution.

        Args:
            row: The row.
            drawn: What was drawn in each of its places.
            fine: Whether the logits there were a distribution.
            logits: Those logits, for drafts that have odds.
            draws: How each place was drawn.
        """
        if not fine[0]:
            return []
        if not row.drafts:
            return drawn
        drafts = row.tokens[len(row.tokens) - row.drafts :]
        odds = self.drafter.odds(row.sequence) if self.drafter is not None and not self.is_batch_invariant else None
        count = next((n for n, is_fine in enumerate(fine) if not is_fine), len(fine))
        if odds is None:
            return drawn[: min(agree(drafts, drawn) + 1, count)]
        assert logits is not None
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

    def _prompt_infos(self, row: Row, hidden: Float[Tensor, "T D"]) -> tuple[TokenInfo, ...]:
        request = self.sequences[row.sequence].request
        following = request.tokens[row.position + 1 : row.position + 1 + len(row.tokens)]
        found: list[TokenInfo] = []
        for first in range(0, len(following), HEAD_ROWS):
            some = following[first : first + HEAD_ROWS]
            tops = [request.top_logprobs or 0] * len(some)
            found += infos(self._logits(hidden[first : first + len(some)])[:, : self.vocab_size], some, tops)
        return tuple(found)

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
        return Inserts(on_device(places, self.device), torch.cat(vectors))

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
