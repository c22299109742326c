"""A run in progress: its parts, its position, and where its numbers go."""

import logging
import math
import random
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from triax.checkpoint import sharded
from triax.checkpoint.released import load_released
from triax.checkpoint.run import CHECKPOINTS
from triax.config.train import Recipe
from triax.data.baseline import baselines
from triax.errors import CheckpointError, TrainError, TriaxError
from triax.log import Kept
from triax.optim.schedule import rate
from triax.train import report, run_folder, text_record
from triax.train.branch import Branch
from triax.train.evaluate import Evaluation, evaluate
from triax.train.measure import Measure
from triax.train.metrics import JsonLines, Metrics, Sink, TensorBoard, WeightsAndBiases, require
from triax.train.parts import TOLD_EVERY_S, build, reporter
from triax.train.progress import Progress, duration
from triax.train.rate_change import rate_change
from triax.train.run_folder import LOG, METRICS, RESULT, SAMPLES
from triax.train.samples import Samples
from triax.train.step import Outcome, Step
from triax.train.watch import Movement, Spikes, refuse_unmoved


@dataclass(frozen=True)
class Result:
    """How a run ended."""

    run_dir: str
    """Its folder."""
    steps: int
    """Optimiser steps behind it, skipped ones included."""
    tokens: int
    """Tokens read."""
    loss: float | None
    """Nats per token of the last step; none if it was not finite, or if there was no step."""
    bits_per_byte: float | None = None
    """On held-out text; none if there is none or the run was stopped."""
    baselines: dict[str, float] = field(default_factory=dict)
    """Bits per byte of other predictors on the same text, if asked for."""
    skipped: int = 0
    """Steps that moved nothing."""
    seconds: float = 0.0
    """Time spent in steps and evaluations, over all resumptions."""
    stopped: str = ""
    """Signal that ended the run before its last token; empty if none did."""


class Run:
    """A run in progress: its parts, its position, and where its numbers go."""

    def __init__(self, recipe: Recipe, run_dir: Path) -> None:
        self.recipe, self.run_dir = recipe, run_dir
        self.step = self.tokens = self.skipped = self.position = 0
        self.seconds, self.loss = 0.0, float("nan")
        self.spikes = Spikes()
        self.progress = Progress(recipe.train.tokens, recipe.train.log_every)
        self.sinks: list[Sink] = []
        self.log = logging.getLogger("triax.train.run")  # to the file only: progress speaks to the person
        self.saved_at = self.evaluated_at = -1

    def __enter__(self) -> "Run":
        """Open the log."""
        self.file = Kept(self.run_dir / LOG)
        self.log.propagate = False
        self.log.setLevel(logging.INFO)
        for logger in (self.log, logging.getLogger("triax")):
            logger.addHandler(self.file)
        return self

    def __exit__(self, kind: type[BaseException] | None, problem: BaseException | None, _: object) -> None:
        """Close the log, the sinks and the live line, whatever happened."""
        if isinstance(problem, TriaxError):
            self.log.error("%s", problem)
        elif problem is not None:
            self.log.error("the run broke off", exc_info=problem)
        self.progress.close()
        for sink in self.sinks:
            sink.close()
        for logger in (self.log, logging.getLogger("triax")):
            logger.removeHandler(self.file)
        self.file.close()

    def say(self, text: str) -> None:
        """Tell the person and the log."""
        self.progress.say(text)
        self.log.info("%s", text)

    def prepare(self, start: Path | None, branch: Branch | None = None) -> None:
        """Build everything and take over a checkpoint of this run, or what it branches off from."""
        require(self.recipe.train)
        torch.manual_seed(self.recipe.train.seed)
        self.parts = build(self.recipe, self.run_dir, self.say)
        self.make_step = Step(self.parts.model, self.parts.optimizer, self.recipe)
        self.measure = Measure(self.parts, self.recipe)
        if branch is not None:
            self._branch_off(branch)
        elif start is not None:
            self._resume(start)
        text_record.write(self.run_dir, self.parts.corpus, self.recipe.data)
        self.lines = JsonLines(self.run_dir / METRICS, after_step=self.step, position=self.position)
        self.sinks = [self.lines, *self._more_sinks()]
        self.samples = Samples(self.run_dir / SAMPLES, self.recipe.train, self.parts.tokenizer, after_step=self.step)
        self.movement: Movement | None = None
        if self.recipe.train.check_after:
            self.movement = Movement(self.parts.model, self.measure.is_exempt)

    def _resume(self, start: Path) -> None:
        """Go on from a checkpoint as if the run had never ended."""
        self.load_state_dict(sharded.load(start), start)
        self.saved_at = self.step if start.parent == self.run_dir / CHECKPOINTS else -1
        self.say(f"resumed from {start} at step {self.step}, {self.tokens:,} tokens")
        if change := rate_change(sharded.settings_of(start), self.recipe, self.tokens):
            self.say(change)

    def _branch_off(self, branch: Branch) -> None:
        """Take over another run's place, or only its weights, and say which."""
        if branch.is_released:
            released = load_released(branch.place, dtype=torch.float32)
            self.parts.model.load_state_dict(released.state_dict())
            self.say(f"branch: the weights are those of {branch.place}; the optimiser begins at 0")
            return
        state = sharded.load(branch.place)
        other_text = text_record.changes(branch.run_dir, self.parts.corpus, self.recipe.data)
        is_same_text = not self._data_problem(state["loader"])
        if not branch.changed and is_same_text:
            self._resume(branch.place)
            return
        self._load_model(state["model"], branch.place)
        kept = ["weights"]
        with suppress(CheckpointError):  # another optimiser has other states: it begins with none
            self.parts.optimizer.load_state_dict(state["optimizer"])
            kept.append("optimiser state")
        place = "the text is read from its beginning"
        if is_same_text:
            self.parts.loader.load_state_dict(state["loader"])
            place = "the text goes on where it was left"
        changed = [f"`{key}`" for key in branch.changed or {}] + ([other_text] if other_text else [])
        self.say(
            f"branch: {' and '.join(kept)} of {branch.place}; changed: {', '.join(changed) or 'the text'}; "
            f"steps, tokens and the schedule begin at 0; {place}"
        )

    def _data_problem(self, position: dict[str, Any]) -> CheckpointError | None:
        """Return why the data cannot go on from a position, if so; the loader stays where it is."""
        before = self.parts.loader.state_dict()
        try:
            self.parts.loader.load_state_dict(position)
        except CheckpointError as problem:
            return problem
        self.parts.loader.load_state_dict(before)
        return None

    def _more_sinks(self) -> list[Sink]:
        run = self.recipe.train
        sinks: list[Sink] = []
        if run.tensorboard:
            sinks.append(TensorBoard(self.run_dir / "tensorboard", after_step=self.step))
        if run.wandb:
            sinks.append(WeightsAndBiases(run.wandb, self.run_dir, self.recipe.model_dump(mode="json")))
        return sinks

    def write(self, metrics: Metrics) -> None:
        """Send metrics of the current step to every sink."""
        for sink in self.sinks:
            sink.write(self.step, metrics)

    def advance(self) -> Metrics:
        """Take one step, and evaluate and save where they are due."""
        run, began = self.recipe.train, time.monotonic()
        batches = [next(self.parts.loader) for _ in range(run.batch_tokens // run.micro_tokens)]
        waited = time.monotonic() - began
        share = rate(self.recipe.schedule, min(1.0, (self.tokens + run.batch_tokens / 2) / run.tokens))
        detailed = (self.step + 1) % run.log_every == 0
        self.measure.listen(on=detailed)
        score = 0.0

        def refuse(loss: float) -> str:
            nonlocal score
            score = self.spikes.score(loss)
            if 0 < run.spike_sigmas < score:
                return f"loss {loss:.3f} is {score:.1f} standard deviations above the last {len(self.spikes.losses)}"
            return ""

        outcome = self.make_step(batches, share, refuse)
        self.step, self.tokens, self.loss = self.step + 1, self.tokens + run.batch_tokens, outcome.loss
        took = time.monotonic() - began
        self.seconds += took
        if not outcome.skipped:
            self.spikes.accept(outcome.loss)
        self._count_skipped(outcome)
        metrics = self.measure.step(outcome, self.tokens, share, took, waited) | {
            "train/skipped_steps": self.skipped,
            "train/spike_score": score,
        }
        if detailed:
            metrics |= self.measure.details()
        self.write(metrics)
        self.log.info("%s", self.progress.step(self.step, self.tokens, metrics))
        self._check_movement(outcome, share)
        if self.skipped > run.max_skipped:
            self._stop_for_skips(outcome)
        if run.eval_every and self.step % run.eval_every == 0 and self.tokens < run.tokens:
            self.evaluate(run.eval_bytes)
        if self.samples.is_due(self.step):
            self.sample()
        if run.save_every and self.step % run.save_every == 0:
            self.save()
        return metrics

    def sample(self) -> None:
        """Let the model write, for a person to read."""
        began = time.monotonic()
        for text in self.samples.write(self.parts.model, self.step, self.tokens):
            self.say(f"step {self.step}  sample: {text.replace(chr(10), '⏎')}")
        self.seconds += time.monotonic() - began

    def _count_skipped(self, outcome: Outcome) -> None:
        if outcome.skipped:
            self.skipped += 1
            self.say(f"step {self.step} skipped ({self.skipped} so far): {outcome.skipped}")

    def _stop_for_skips(self, outcome: Outcome) -> None:
        raise TrainError(
            f"step {self.step}: {self.skipped} steps were skipped, more than train.max_skipped "
            f"`{self.recipe.train.max_skipped}`; the last was {outcome.skipped}; lower optim.lr in a new run, "
            "or raise train.max_skipped and resume"
        )

    def _check_movement(self, outcome: Outcome, share: float) -> None:
        if self.movement is None:
            return
        if not outcome.skipped:
            settings = self.recipe.optim
            self.movement.note(settings.lr * share, settings.weight_decay)
            self.measure.note_load()
        if self.movement.steps == self.recipe.train.check_after:
            unmoved = self.movement.unmoved(self.parts.model)
            unmoved += self.movement.unmoved_experts(self.parts.model, self.measure.used_experts())
            refuse_unmoved(unmoved, self.movement.steps)
            self.movement = None

    def evaluate(self, num_bytes: int | None = None) -> Evaluation | None:
        """Measure on held-out text and write it down; on all of it if no number of bytes is given."""
        stream = self.parts.held_out if num_bytes is None else self.parts.held_out.within(num_bytes)
        if not stream.num_tokens:
            return None
        data, run = self.recipe.data, self.recipe.train
        began = time.monotonic()
        every_s = 0.5 if self.progress.live is not None else TOLD_EVERY_S
        told = reporter(self.progress.show, f"step {self.step}  held-out text: {{share}} measured", every_s)
        found = evaluate(self.parts.model, stream, data.seq_len, run.micro_tokens, run.precision, told)
        self.seconds += time.monotonic() - began
        self.write(
            {
                "train/tokens": self.tokens,
                "eval/loss": found.loss,
                "eval/bits_per_byte": found.bits_per_byte,
                "eval/bytes": found.num_bytes,
                "eval/seconds": time.monotonic() - began,
            }
        )
        self.say(f"step {self.step}  held-out {found.bits_per_byte:.4f} bits per byte over {found.num_bytes:,} bytes")
        return found

    def save(self) -> None:
        """Write a checkpoint of this step."""
        if self.saved_at == self.step:
            return
        began = time.monotonic()
        settings = run_folder.fingerprint(self.recipe, run_folder.world_size())
        sharded.save(self.run_dir / CHECKPOINTS, self.step, self.state_dict(), settings, keep=self.recipe.train.keep)
        self.saved_at = self.step
        self.log.info("saved step-%d in %.1f s", self.step, time.monotonic() - began)

    def state_dict(self) -> dict[str, Any]:
        """Return everything that decides how the run goes on."""
        return {
            "model": dict(self.parts.model.state_dict()),
            "optimizer": dict(self.parts.optimizer.state_dict()),
            "loader": self.parts.loader.state_dict(),
            "random": {
                "torch": torch.get_rng_state(),
                "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
                "python": random.getstate(),
            },
            "progress": {
                "step": self.step,
                "tokens": self.tokens,
                "skipped": self.skipped,
                "seconds": self.seconds,
                "loss": self.loss,
                "spikes": self.spikes.state_dict(),
                "position": self.lines.position,
            },
        }

    def load_state_dict(self, state: Mapping[str, Any], source: Path) -> None:
        """Take over what `state_dict` returned.

        Raises:
            CheckpointError: It does not fit this model, optimiser or data.
        """
        if (problem := self._data_problem(state["loader"])) is not None:
            run_dir = source.resolve().parents[1]
            changes = text_record.changes(run_dir, self.parts.corpus, self.recipe.data)
            raise CheckpointError(f"{problem}; {changes}" if changes else str(problem))
        self._load_model(state["model"], source)
        self.parts.optimizer.load_state_dict(state["optimizer"])
        self.parts.loader.load_state_dict(state["loader"])
        torch.set_rng_state(state["random"]["torch"])
        if len(state["random"]["cuda"]) == torch.cuda.device_count() > 0:
            torch.cuda.set_rng_state_all(state["random"]["cuda"])
        random.setstate(state["random"]["python"])
        progress = state["progress"]
        self.step, self.tokens, self.skipped = progress["step"], progress["tokens"], progress["skipped"]
        self.seconds, self.loss = progress["seconds"], progress["loss"]
        self.spikes.load_state_dict(progress["spikes"])
        self.position = progress["position"] if source.parent == self.run_dir / CHECKPOINTS else 0

    def _load_model(self, state: Mapping[str, Any], source: Path) -> None:
        try:
            self.parts.model.load_state_dict(state)
        except RuntimeError as problem:
            raise CheckpointError(
                f"checkpoint {source}: does not fit the model; {problem}; resume with its recipe"
            ) from None

    def end(self, stopped: str) -> Result:
        """Save, and after the last token also measure, compare and report."""
        if self.step:
            self.save()
        result = Result(
            str(self.run_dir),
            self.step,
            self.tokens,
            self.loss if math.isfinite(self.loss) else None,
            skipped=self.skipped,
            seconds=self.seconds,
            stopped=stopped,
        )
        if stopped and self.tokens < self.recipe.train.tokens:
            saved = "saved" if self.step else "there was nothing to save yet"
            self.say(f"stopped by {stopped} at step {self.step}; {saved}; go on with --resume")
            if self.step:
                report.write(self.run_dir, is_running=False)
            return result
        return self._finish(result)

    def _finish(self, result: Result) -> Result:
        found = self.evaluate()
        if found is not None:
            result = replace(result, bits_per_byte=found.bits_per_byte, seconds=self.seconds)
        if self.recipe.train.baselines and found is not None:
            self.say("measuring the byte model and xz on the same text, about 3 s per MB of training text")
            sides = self.parts.texts()
            result = replace(result, baselines=baselines(*sides))
        run_folder.write_json(self.run_dir / RESULT, asdict(result))
        for name, value in {"this model": result.bits_per_byte, **result.baselines}.items():
            if value is not None:
                self.say(f"{name:<12} {value:.4f} bits per byte of held-out text")
        self.say(f"{duration(result.seconds)} of training; report in {report.write(self.run_dir)}")
        return result
