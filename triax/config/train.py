"""One training run as a whole."""

from typing import Literal

from pydantic import Field, NonNegativeInt, PositiveInt, model_validator

from triax.config.data import Data
from triax.config.model import Model
from triax.config.optim import Balance, MuonClip, Optim, Schedule
from triax.config.settings import Settings


class Samples(Settings):
    """Text that the model writes during training, for a person to read."""

    every: PositiveInt = 200
    """Steps between samples."""
    prompts: tuple[str, ...] = Field(("",), min_length=1)
    """Beginnings to go on from; an empty one lets the model begin a document."""
    max_tokens: PositiveInt = 64
    """Most tokens of each."""
    temperature: float = Field(0.7, ge=0)
    """0 takes the likeliest token."""


class Run(Settings):
    """How long, on what, and what is written down."""

    tokens: PositiveInt
    """Tokens to train on; the schedule is a function of this number."""
    batch_tokens: PositiveInt = 4096
    """Tokens in one optimiser step, a multiple of micro_tokens."""
    micro_tokens: PositiveInt = 4096
    """Tokens in one forward and backward, a multiple of data.seq_len."""
    device: str = "auto"
    """`auto`, `cpu`, `cuda` or `cuda:N`."""
    precision: Literal["auto", "fp32", "bf16"] = "auto"
    """Number format of matrix products; `auto` is bf16 on a GPU and fp32 on a CPU, where few processors multiply bf16
    themselves. Weights, optimiser and states stay fp32."""
    seed: int = Field(0, ge=0, lt=2**64)
    """Seed of weights, order and sampling."""
    log_every: PositiveInt = 10
    """Steps between lines of the log; metrics are written every step."""
    eval_every: NonNegativeInt = 0
    """Steps between evaluations on held-out text; 0 evaluates only at the end."""
    eval_bytes: NonNegativeInt = 200_000
    """Held-out bytes of an evaluation during the run; the last one reads all of them."""
    save_every: NonNegativeInt = 200
    """Steps between checkpoints; 0 saves only at the end."""
    keep: PositiveInt = 2
    """Checkpoints that stay on disk."""
    max_skipped: NonNegativeInt = 10
    """Steps with a non-finite loss or gradient that are skipped before the run stops."""
    spike_sigmas: float = Field(0.0, ge=0)
    """Skip a step whose loss is this many standard deviations above the last 128; 0 never does."""
    check_after: NonNegativeInt = 20
    """Steps after which every trainable tensor must have moved beyond weight decay; 0 does not look."""
    samples: Samples | None = None
    """Write samples of text into the log, `samples.jsonl` and the report."""
    baselines: bool = False
    """Compute the byte-model and xz baselines on the same split and print them beside the result."""
    tensorboard: bool = False
    """Also write TensorBoard events (extra `tensorboard`)."""
    wandb: str = ""
    """Also log to this Weights & Biases project (extra `wandb`); empty does not."""


class Recipe(Settings):
    """A training recipe: model, data, optimiser, run."""

    model: Model
    """The network."""
    data: Data = Data()
    """What it reads."""
    optim: Optim = MuonClip()
    """How its weights move."""
    schedule: Schedule = Schedule()
    """The learning rate over tokens."""
    balance: Balance = Balance()
    """How its experts are balanced."""
    train: Run
    """How long, on what, and what is written down."""

    @model_validator(mode="after")
    def _sizes_fit(self) -> "Recipe":
        run, seq_len = self.train, self.data.seq_len
        if run.micro_tokens % seq_len:
            fitting = max(1, run.micro_tokens // seq_len) * seq_len
            raise ValueError(
                f"train.micro_tokens `{run.micro_tokens}` is not a multiple of "
                f"data.seq_len `{seq_len}`; choose {fitting}"
            )
        if run.batch_tokens % run.micro_tokens:
            fitting = max(1, run.batch_tokens // run.micro_tokens) * run.micro_tokens
            raise ValueError(
                f"train.batch_tokens `{run.batch_tokens}` is not a multiple of "
                f"train.micro_tokens `{run.micro_tokens}`; choose {fitting}"
            )
        if self.data.tokenizer.path is None and self.data.tokenizer.vocab_size > self.model.vocab_size:
            raise ValueError(
                f"data.tokenizer.vocab_size `{self.data.tokenizer.vocab_size}` is more than "
                f"model.vocab_size `{self.model.vocab_size}`; raise the latter"
            )
        return self
