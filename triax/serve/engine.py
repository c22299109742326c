"""Requests in, updates out: scheduler, runner and caches, one step at a time."""

import itertools
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from triax.config.serve import Serve
from triax.data.tokenizer import Language
from triax.errors import CheckpointError, ConfigError, DataError, TriaxError, UnsupportedError
from triax.kernels.linear import tiled
from triax.log import logger
from triax.model.decoder import Decoder
from triax.serve.arena import Store
from triax.serve.cache.check import faults
from triax.serve.cache.disk import Disk
from triax.serve.cache.manager import Manager
from triax.serve.draft_model import ModelDrafter
from triax.serve.graphs import Graphs
from triax.serve.plan import Plan
from triax.serve.progress import Progress
from triax.serve.request import FinishReason, Request, Sampling, TokenInfo, Update
from triax.serve.runner import Flight, Runner
from triax.serve.scheduler import Scheduler
from triax.serve.sequence import Sequence as Running
from triax.serve.sizes import sizes_of
from triax.serve.speculative import NgramDrafter
from triax.serve.structure import Guides
from triax.serve.weights import fingerprint, replace_weights

Prompt = str | Sequence[int]
PauseMode = Literal["abort", "wait", "keep"]
SAVED_WHEN_IDLE = 4  # snapshots written to disk in one idle step


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
class _Story:
    pieces: list[str] = field(default_factory=list)
    infos: list[TokenInfo] = field(default_factory=list)
    finish_reason: FinishReason | None = None

    def take(self, update: Update) -> None:
        self.pieces.append(update.text)
        self.infos += update.tokens
        self.finish_reason = update.finish_reason


class Engine:
    """Answers many requests at once; what one gets depends on itself, and in deterministic mode to the last bit.

    A text prompt of `generate` is the beginning of a document: with a tokenizer of ours it is read after a border,
    with a released one as it is. A border, or an end that the released models know, ends the answer.

    Args:
        model: The network; it is put into evaluation mode for each step and back.
        tokenizer: The one that it was trained with.
        settings: Scheduling, caches, speculation.
        draft: A small model of the same vocabulary, for drafts of kind `model`.

    Raises:
        CheckpointError: The tokenizer has more tokens than the model.
        ConfigError: The memory holds no sequence, or a draft model is missing or does not fit.
        UnsupportedError: Deterministic mode on a machine whose products do not allow it.
    """

    def __init__(
        self, model: Decoder, tokenizer: Language, settings: Serve | None = None, draft: Decoder | None = None
    ) -> None:
        if tokenizer.vocab_size > model.settings.vocab_size:
            raise CheckpointError(
                f"engine: the tokenizer does not belong to this model; found {tokenizer.vocab_size} tokens for "
                f"{model.settings.vocab_size} rows of the embedding; use the tokenizer that it was trained with"
            )
        self.model, self.tokenizer, self.settings = model, tokenizer, settings or Serve()
        weight, cache = model.embed.weight, self.settings.cache
        if self.settings.is_deterministic:
            _check_products(model)
        elif weight.is_cuda:
            model.join()
        sizes = sizes_of(model.settings, self.settings, weight.device, weight.dtype)
        self.store = Store(model.settings, sizes, cache.page_tokens, weight.device, weight.dtype)
        self.manager = Manager(sizes, cache.page_tokens, cache.prefixes)
        self.scheduler = Scheduler(self.manager, self.settings.scheduling)
        self.drafter = self._drafter(draft)
        slots = {model.settings.vision.slot_token} if model.settings.vision else set()
        unsaid = sorted(token for token in tokenizer.unsaid | slots if token < tokenizer.vocab_size)
        self._is_ahead = weight.is_cuda and self.drafter is None
        self.runner = Runner(
            model,
            self.store,
            tokenizer.vocab_size,
            unsaid,
            is_exact=self.settings.is_deterministic,
            drafter=self.drafter,
            graphs=self._graphs(unsaid),
        )
        self._flights: deque[tuple[Plan, Flight]] = deque()
        self.guides = Guides(tokenizer)
        self.context = min(self.settings.context or model.settings.context_len, model.settings.context_len)
        """Most tokens of prompt and answer together."""
        self.weight_version = 0
        """Updates of the weights so far."""
        self._going: dict[int, Progress] = {}
        self._numbers: dict[str, int] = {}
        self._told: list[Update] = []
        self._pause: PauseMode | None = None
        self._names = itertools.count()
        self._time_s = 0.0
        self._tokens = {"prefill": 0, "decode": 0, "generated": 0}
        self.disk: Disk | None = None
        if cache.disk is not None:
            self._open_disk()

    def _drafter(self, draft: Decoder | None) -> NgramDrafter | ModelDrafter | None:
        drafting = self.settings.drafting
        if drafting is None:
            return None
        if drafting.kind == "ngram":
            return NgramDrafter(drafting)
        if draft is None:
            raise ConfigError("engine: drafting.kind is `model` but no draft model was given; found none; give one")
        return ModelDrafter(draft, drafting, self.tokenizer.vocab_size, page_tokens=self.settings.cache.page_tokens)

    def _graphs(self, unsaid: Sequence[int]) -> Graphs | None:
        weight = self.model.embed.weight
        if not weight.is_cuda or not self.settings.has_graphs or self.settings.is_deterministic:
            return None
        forbidden = torch.tensor(unsaid, dtype=torch.long, device=weight.device)
        most = self.scheduler.most_running
        return Graphs(self.model, self.store, self.tokenizer.vocab_size, forbidden, most)

    # requests

    @property
    def has_work(self) -> bool:
        """Whether `step` has anything to do."""
        return bool(self._told) or (self._pause != "keep" and self.scheduler.has_work)

    def add(self, request: Request) -> None:
        """Take a request; its updates come out of `step`.

        Raises:
            ConfigError: Its id is in use, its structure is impossible, or the engine is paused for good.
            DataError: Its tokens, pictures or length do not fit the model.
            CapacityError: It can never fit, or too many wait.
        """
        self._check(request)
        guide = self.guides.guide(request.structure) if request.structure is not None else None
        sequence = self.scheduler.add(request)
        self._numbers[request.id] = sequence.number
        self._going[sequence.number] = progress = Progress(sequence, self.tokenizer)
        self.runner.add(sequence.number, request, guide)
        if isinstance(self.drafter, ModelDrafter):
            self.drafter.watch(sequence.number, request.sampling, request.seed, len(request.tokens))
        if request.max_tokens == 0 and not request.score_prompt:
            self._told.append(progress.finish("length"))
            self._forget(sequence.number)

    def abort(self, request_id: str) -> None:
        """End a request; one that is not known (any more) is no error."""
        number = self._numbers.get(request_id)
        if number is not None:
            self._end(number, "abort")

    def _end(self, number: int, reason: FinishReason, error: str | None = None) -> None:
        self._told.append(self._going[number].finish(reason, error))
        self._forget(number)

    def _forget(self, number: int) -> None:
        progress = self._going.pop(number)
        del self._numbers[progress.request.id]
        self.scheduler.finish(number, keep=progress.finish_reason != "invalid")
        self.runner.drop(number)
        if self.drafter is not None:
            self.drafter.drop(number)

    def _check(self, request: Request) -> None:
        model, where = self.model.settings, f"request {request.id}"
        if request.id in self._numbers:
            raise ConfigError(f"{where}: the id is in use; found another request of it; give each its own")
        if not 0 <= request.seed < 2**64:
            raise ConfigError(
                f"{where}: seed is out of range; found `{request.seed}`; give a number from 0 to 2^64 - 1"
            )
        if request.max_tokens < 0:
            raise ConfigError(f"{where}: max_tokens is out of range; found `{request.max_tokens}`; give 0 or more")
        if request.top_logprobs is not None and not 0 <= request.top_logprobs <= 20:
            raise ConfigError(f"{where}: top_logprobs is out of range; found `{request.top_logprobs}`; give 0 to 20")
        if not request.tokens:
            raise DataError(f"{where}: there is no prompt; found 0 tokens; give at least one")
        said = self.tokenizer.vocab_size  # what lies beyond stands for no text and has no logprob
        tokens = {token: model.vocab_size for token in request.tokens}
        tokens |= {token: said for token, _ in request.sampling.bias} | dict.fromkeys(
            request.stop_ids, model.vocab_size
        )
        if request.score_prompt:
            tokens |= dict.fromkeys(request.tokens[1:], said)
        wrong = [(token, most) for token, most in tokens.items() if not 0 <= token < most]
        if wrong:
            raise DataError(
                f"{where}: token `{wrong[0][0]}` is not in the vocabulary; the model has `{wrong[0][1]}`; encode with "
                "the model's tokenizer"
            )
        if len(request.tokens) + request.max_tokens > self.context:
            raise DataError(
                f"{where}: too long; found {len(request.tokens)} tokens of prompt and {request.max_tokens} of answer "
                f"for a context of {self.context}; shorten the prompt or lower max_tokens"
            )
        _check_media(request, self.model)

    # steps

    def step(self) -> list[Update]:
        """Run one step and return what it changed; requests appear at most once."""
        started = time.perf_counter()
        for number in self.scheduler.expired():
            if number in self._going:
                self._end(number, "deadline")
        if self._pause != "keep":
            self._advance()
        if self.settings.is_debugging:
            self._poison()
            self.check_invariants()
        if not self.scheduler.has_work and self.disk is not None:
            self.disk.save(self.manager, self.store, SAVED_WHEN_IDLE)
        self._time_s += time.perf_counter() - started
        told, self._told = self._told, []
        return told

    def _advance(self) -> None:
        """Launch the next step, and take over the results of the oldest one; on a GPU one runs meanwhile."""
        plan = self.scheduler.plan(self._propose if self.drafter is not None else None)
        if not plan.is_empty:
            try:
                self._flights.append((plan, self.runner.launch(plan)))
            except Exception as problem:
                self._recover(plan, problem)
                return
        if self._flights and (plan.is_empty or len(self._flights) > self._is_ahead):
            self._land(*self._flights.popleft())

    def _land(self, plan: Plan, flight: Flight) -> None:
        try:
            result = flight.result()
        except Exception as problem:
            self._recover(plan, problem)
            return
        for row, given in zip(plan.rows, result.rows, strict=True):
            if given.prompt and row.sequence in self._going:
                self._going[row.sequence].note_prompt(row.position + 1, given.prompt)
            if row.drafts and self.drafter is not None:
                self.drafter.learn(row.sequence, row.drafts, max(0, len(given.tokens) - 1))
        self._tokens["prefill"] += plan.prefill_tokens
        self._tokens["decode"] += plan.decode_tokens
        for sequence, given in self.scheduler.commit(plan, result):
            progress = self._going[sequence.number]
            if not given.tokens and given.is_valid:
                continue
            self._tokens["generated"] += len(given.tokens)
            update = progress.advance(given)
            if update is not None:
                self._told.append(update)
            if progress.finish_reason is not None:
                self._forget(sequence.number)

    def _recover(self, plan: Plan, problem: Exception) -> None:
        """Go on after a step that did not run: its sequences start again from what is known.

        Raises:
            AssertionError: A programmer's error, which running on would hide.
        """
        if isinstance(problem, AssertionError):
            raise problem
        logger("serve").warning("step %d failed: %s", plan.step, problem)
        self._flights.clear()
        self.runner.forget()
        for sequence in self.scheduler.fail():
            if sequence.number in self._going:
                self._end(sequence.number, "error", f"the step failed {sequence.failures} times; {problem}")
        for number, progress in self._going.items():
            sequence = progress.sequence
            self.runner.rewind(number, sequence.tokens[len(sequence.request.tokens) :])

    def _propose(self, sequence: Running, most: int) -> tuple[int, ...]:
        assert self.drafter is not None
        return self.drafter.propose(sequence.number, sequence.tokens, most)

    def _poison(self) -> None:
        self.store.poison("slot", self.manager.tiers.slots.free())
        self.store.poison("page", self.manager.tiers.pages.free())

    # weights

    def pause(self, mode: PauseMode) -> None:
        """Stop answering before the weights change.

        Args:
            mode: `abort` ends all requests; `wait` works off those that run, which takes further steps, and refuses
                none; `keep` holds them as they are until `resume`.
        """
        if mode == "abort":
            for number in list(self._going):
                self._end(number, "abort")
        self._pause = mode

    def resume(self) -> None:
        """Go on."""
        self._pause = None

    def update_weights(self, source: Path | Mapping[str, Tensor]) -> int:
        """Replace the weights in place and forget all prefixes; running requests go on with the memory they have.

        Args:
            source: A checkpoint of the same shape, or all tensors of the model's state by name.

        Returns:
            The new weight version.

        Raises:
            CheckpointError: They do not fit; the old weights stay and the caches with them.
        """
        while self._flights:
            self._land(*self._flights.popleft())
        replace_weights(self.model, source)
        self.weight_version += 1
        self.manager.reset()
        if self.disk is not None:
            self._open_disk()
        return self.weight_version

    # pool on disk

    def _open_disk(self) -> None:
        disk = self.settings.cache.disk
        assert disk is not None
        if self.disk is not None:
            self.disk.close()
        self.disk = Disk(disk.path, self._identity(), disk.memory_bytes)
        self.disk.load(self.manager, self.store)

    def _identity(self) -> str:
        arena = self.store.device
        layout = (
            f"{self.settings.cache.page_tokens} {arena.state.dtype} {arena.latent.dtype} {arena.latent.device.type}"
        )
        return f"{fingerprint(self.model)} {layout} {self.settings.is_deterministic}"

    def save_pool(self, path: Path) -> int:
        """Write all known prefixes into a folder and return how many snapshots that are."""
        disk = Disk(path, self._identity(), 1 << 62)
        try:
            return disk.save(self.manager, self.store)
        finally:
            disk.close()

    def load_pool(self, path: Path) -> int:
        """Take in prefixes of the same weights from a folder and return how many snapshots that are."""
        disk = Disk(path, self._identity(), 1 << 62)
        try:
            return disk.load(self.manager, self.store)
        finally:
            disk.close()

    def close(self) -> None:
        """Save what outlives the process."""
        if self.disk is not None:
            self.disk.save(self.manager, self.store)
            self.disk.close()
            self.disk = None

    # looking in

    def check_invariants(self) -> None:
        """Compare the books of the cache with the sequences that live.

        Raises:
            TriaxError: They disagree; each fault is named.
        """
        found = faults(self.manager)
        if self.runner.sequences.keys() != self._going.keys():
            found.append("the runner knows other sequences than the engine")
        if found:
            raise TriaxError(f"cache: {len(found)} faults; found {'; '.join(found[:5])}; report this with the settings")

    def metrics(self) -> dict[str, float]:
        """Return the figures of the moment by name."""
        tiers, sizes, counts = self.manager.tiers, self.manager.sizes, self.manager.counts
        prompt = max(1, counts["prompt_tokens"])
        drafted, accepted = (
            sum(getattr(p.sequence, name) for p in self._going.values()) for name in ("drafted", "accepted")
        )
        return {
            "running": float(len(self.scheduler.running)),
            "waiting": float(self.scheduler.num_waiting),
            "pages": float(sizes.pages - 1),
            "pages_free": float(tiers.pages.num_free),
            "slots": float(sizes.slots - 1),
            "slots_free": float(tiers.slots.num_free),
            "prefix_hit_share": counts["cached_tokens"] / prompt,
            "prefix_match_share": counts["matched_tokens"] / prompt,
            "prefill_tokens": float(self._tokens["prefill"]),
            "decode_tokens": float(self._tokens["decode"]),
            "generated_tokens": float(self._tokens["generated"]),
            "drafts_running": float(drafted),
            "drafts_accepted_running": float(accepted),
            "busy_s": self._time_s,
            "weight_version": float(self.weight_version),
            **{f"{name}_count": float(value) for name, value in (self.scheduler.counts | counts).items()},
        }

    def cache_report(self) -> dict[str, object]:
        """Return what the cache holds and, where it serves nobody, why."""
        nodes = self.manager.tree.nodes()
        snapshots = sum(len(node.snapshots) for node in nodes)
        off = "cache.prefixes is none" if self.manager.prefixes is None else ""
        return {
            "weight_version": self.weight_version,
            "page_tokens": self.manager.page_tokens,
            "page_bytes": self.store.device.page_bytes,
            "slot_bytes": self.store.device.slot_bytes,
            "pages_known": sum(node.page is not None for node in nodes),
            "pages_on_host": sum(node.host is not None for node in nodes),
            "snapshots": snapshots,
            "why_no_hits": off or ("" if snapshots else "no prompt has left a snapshot yet"),
            **{name: value for name, value in self.metrics().items() if name.startswith(("pages", "slots", "prefix"))},
        }

    # in one call

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
            DataError: A prompt holds tokens that the model does not have, or is too long.
        """
        seeds = [seed] * len(prompts) if isinstance(seed, int) else list(seed)
        if len(seeds) != len(prompts):
            raise ConfigError(f"engine: one seed a prompt is needed; found {len(seeds)} for {len(prompts)} prompts")
        how = Sampling(temperature, top_k, top_p, min_p)
        requests = [
            self._request(prompt, max_tokens, how, one, stop, stop_ids)
            for prompt, one in zip(prompts, seeds, strict=True)
        ]
        stories = {request.id: _Story() for request in requests}
        for update in self._updates(requests):
            stories[update.id].take(update)
        return [
            Completion(
                "".join(story.pieces),
                tuple(info.token for info in story.infos),
                tuple(info.logprob for info in story.infos),
                story.finish_reason or "error",
            )
            for story in stories.values()
        ]

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
        how = Sampling(temperature, top_k, top_p, min_p)
        request = self._request(prompt, max_tokens, how, seed, stop, stop_ids)
        self._check(request)
        return (update.text for update in self._updates([request]) if update.text)

    def _request(
        self, prompt: Prompt, max_tokens: int, how: Sampling, seed: int, stop: Sequence[str], stop_ids: Sequence[int]
    ) -> Request:
        tokens = [*self.tokenizer.opening, *self.tokenizer.encode(prompt)] if isinstance(prompt, str) else list(prompt)
        name = f"generate-{next(self._names)}"
        limit = max_tokens if max_tokens < 0 else max(0, min(max_tokens, self.context - len(tokens)))
        return Request(
            name,
            tuple(tokens or [self.tokenizer.start]),
            limit,
            how,
            seed,
            tuple(stop),
            tuple(stop_ids),
            top_logprobs=0,
        )

    def _updates(self, requests: Sequence[Request]) -> Iterator[Update]:
        """Step until all these requests have ended; updates of others wait for the next `step`."""
        open_ids = {request.id for request in requests}
        others: list[Update] = []
        try:
            for request in requests:
                self.add(request)
            while open_ids:
                if not self.has_work:
                    raise ConfigError("engine: it is paused; found requests that cannot go on; call resume first")
                for update in self.step():
                    if update.id not in open_ids:
                        others.append(update)
                        continue
                    if update.finish_reason is not None:
                        open_ids.discard(update.id)
                    yield update
        finally:
            for request_id in open_ids:
                self.abort(request_id)
            self._told = others + [update for update in self._told if update.id not in open_ids]


def _check_products(model: Decoder) -> None:
    if model.embed.weight.is_cuda:
        raise UnsupportedError(
            "engine: deterministic mode is a promise about processors; found a GPU, whose libraries choose by the "
            "shape of a batch; use the device `cpu`, or run without is_deterministic"
        )
    shapes = {(w.shape[1], w.shape[0], w.dtype, str(w.device)) for w in model.parameters() if w.dim() == 2}
    uneven = [shape for shape in shapes if not shape[0] % tiled.ALIGNED and not tiled.is_even(*shape)]
    if uneven:
        raise UnsupportedError(
            f"engine: deterministic mode needs products that treat all rows alike; found others on this machine for "
            f"{len(uneven)} shapes, such as {uneven[0]}; run without is_deterministic"
        )


def _check_media(request: Request, model: Decoder) -> None:
    where, vision = f"request {request.id}", model.settings.vision
    if vision is None:
        if request.media:
            raise DataError(f"{where}: this model reads text only; found {len(request.media)} pictures; leave them out")
        return
    slots = {place for place, token in enumerate(request.tokens) if token == vision.slot_token}
    filled: set[int] = set()
    for item in request.media:
        frames, rows, columns = item.grid
        places = set(range(item.start, item.start + item.length))
        wanted = frames * rows * columns * 3 * vision.patch**2 * 4
        if rows % vision.merge or columns % vision.merge or item.length != vision.num_tokens(rows, columns):
            raise DataError(
                f"{where}: a picture does not fit its slots; found {item.length} for a grid of {rows} x {columns}; "
                "render the prompt with the picture's own size"
            )
        if len(item.pixels) != wanted or frames < 1:
            raise DataError(
                f"{where}: a picture has {len(item.pixels)} bytes of pixels; found a grid of {item.grid}; give {wanted}"
            )
        if places & filled:
            raise DataError(f"{where}: two pictures share slots; found both at token {min(places & filled)}; part them")
        filled |= places
    if filled != slots:
        raise DataError(
            f"{where}: slots and pictures do not match; found {len(slots)} slots for {len(filled)} tokens of pictures; "
            "render the prompt with the pictures that go with it"
        )
