"""Requests in, updates out: scheduler, runner and caches, one step at a time."""

import itertools
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Literal

from torch import Tensor

from triax.config.serve import Serve
from triax.data.tokenizer import Language
from triax.errors import CheckpointError, ConfigError, TriaxError
from triax.log import logger
from triax.model.decoder import Decoder
from triax.serve.arena import Store
from triax.serve.cache.check import faults
from triax.serve.cache.manager import Manager
from triax.serve.completion import Completion, Prompt, Story, request_of
from triax.serve.draft_model import ModelDrafter, drafter_of
from triax.serve.figures import figures, report
from triax.serve.fit import check_products, check_request
from triax.serve.flight import Flight
from triax.serve.graphs import graphs_of
from triax.serve.plan import Plan
from triax.serve.progress import Progress
from triax.serve.request import FinishReason, Request, Sampling, Update
from triax.serve.runner import Runner
from triax.serve.saved import Saved
from triax.serve.scheduler import Scheduler
from triax.serve.sequence import Sequence as Running
from triax.serve.sizes import sizes_of
from triax.serve.structure import Guides
from triax.serve.weights import replace_weights

PauseMode = Literal["abort", "wait", "keep"]


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
            check_products(model)
        elif weight.is_cuda:
            model.join()
        sizes = sizes_of(model.settings, self.settings, weight.device, weight.dtype)
        self.store = Store(model.settings, sizes, cache.page_tokens, weight.device, weight.dtype)
        self.manager = Manager(sizes, cache.page_tokens, cache.prefixes)
        self.scheduler = Scheduler(self.manager, self.settings.scheduling)
        self.drafter = drafter_of(self.settings, tokenizer.vocab_size, draft)
        slots = {model.settings.vision.slot_token} if model.settings.vision else set()
        unsaid = sorted(token for token in tokenizer.unsaid | slots if token < tokenizer.vocab_size)
        self._is_ahead, most = weight.is_cuda and self.drafter is None, self.scheduler.most_running
        self.runner = Runner(
            model,
            self.store,
            tokenizer.vocab_size,
            unsaid,
            is_batch_invariant=self.settings.is_deterministic,
            drafter=self.drafter,
            graphs=graphs_of(model, self.store, self.settings, most, tokenizer.vocab_size, unsaid),
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
        self.saved = Saved(self.settings, model, self.manager, self.store)

    # requests

    @property
    def has_work(self) -> bool:
        """Whether `step` has anything to do."""
        return bool(self._told) or self.scheduler.is_late or (self._pause != "keep" and self.scheduler.has_work)

    def add(self, request: Request) -> None:
        """Take a request; its updates come out of `step`.

        Raises:
            ConfigError: Its id is in use, its structure is impossible, or the engine is paused for good.
            DataError: Its tokens, pictures or length do not fit the model.
            CapacityError: It can never fit, or too many wait.
        """
        if request.id in self._numbers:
            raise ConfigError(f"request {request.id}: the id is in use; found another request of it; give each its own")
        self._check(request)
        guide = self.guides.guide(request.structure, request.max_tokens) if request.structure is not None else None
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
        check_request(request, self.model.settings, self.tokenizer.vocab_size, self.context)

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
            self.store.poison("slot", self.manager.tiers.slots.free())
            self.store.poison("page", self.manager.tiers.pages.free())
            self.check_invariants()
        self.saved.save_some(is_idle=not self.scheduler.has_work)
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

    def rest(self) -> bool:
        """Do a little of what can wait until nothing runs; False once all is done."""
        return self.saved.save_some(is_idle=True) > 0

    # weights

    def pause(self, mode: PauseMode) -> None:
        """Stop answering before the weights change.

        Args:
            mode: `abort` ends all requests, `wait` works them off, `keep` holds them; later ones begin after `resume`.
        """
        if mode == "abort":
            for number in list(self._going):
                self._end(number, "abort")
        self.scheduler.admission.hold()
        self._pause = mode

    def resume(self) -> None:
        """Go on."""
        self.scheduler.admission.release()
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
        self.saved.open()
        return self.weight_version

    # pool on disk

    def save_pool(self, path: Path) -> int:
        """Write all known prefixes into a folder and return how many snapshots that are."""
        return self.saved.save_to(path)

    def load_pool(self, path: Path) -> int:
        """Take in prefixes of the same weights from a folder and return how many snapshots that are."""
        return self.saved.load_from(path)

    def close(self) -> None:
        """Save what outlives the process."""
        self.saved.close()

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
        own = {f"{name}_tokens": float(count) for name, count in self._tokens.items()}
        own |= {"busy_s": self._time_s, "weight_version": float(self.weight_version)}
        return figures(self.scheduler) | own

    def cache_report(self) -> dict[str, object]:
        """Return what the cache holds and, where it serves nobody, why."""
        sizes = {"page_bytes": self.store.device.page_bytes, "slot_bytes": self.store.device.slot_bytes}
        return {"weight_version": self.weight_version, **sizes, **report(self.manager)}

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
        asked = [self._request(prompt, max_tokens, how, one) for prompt, one in zip(prompts, seeds, strict=True)]
        requests = [replace(one, stop=tuple(stop), stop_ids=tuple(stop_ids)) for one in asked]
        stories = {request.id: Story() for request in requests}
        for update in self._updates(requests):
            stories[update.id].take(update)
        return [story.completion() for story in stories.values()]

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
        request = replace(self._request(prompt, max_tokens, how, seed), stop=tuple(stop), stop_ids=tuple(stop_ids))
        self._check(request)
        return (update.text for update in self._updates([request]) if update.text)

    def _request(self, prompt: Prompt, max_tokens: int, how: Sampling, seed: int) -> Request:
        id_ = f"generate-{next(self._names)}"
        return request_of(id_, prompt, self.tokenizer, self.context, max_tokens, how, seed)

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
