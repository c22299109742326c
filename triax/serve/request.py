"""What crosses the border of the engine: a request goes in, updates come out; plain data, without torch."""

from array import array
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from triax.errors import ConfigError

FinishReason = Literal["stop", "length", "invalid", "abort", "deadline", "error"]
"""A stop token or string; the limit of tokens; logits that were no distribution; asked for; too late; a fault."""


@dataclass(frozen=True)
class Sampling:
    """How tokens are drawn: penalties and bias, then the temperature, then the filters in the order given here."""

    temperature: float = 0.0
    """Divides the logits; 0 takes the likeliest token."""
    top_k: int = 0
    """Keep this many of the likeliest tokens; 0 keeps all."""
    top_p: float = 1.0
    """Keep the fewest likeliest tokens that hold this share of the probability."""
    min_p: float = 0.0
    """Drop tokens less likely than this share of the likeliest one."""
    presence_penalty: float = 0.0
    """Taken from the logit of every token that the answer already has, in [-2, 2]."""
    frequency_penalty: float = 0.0
    """Taken from a token's logit once for each time that the answer has it, in [-2, 2]."""
    repetition_penalty: float = 1.0
    """Divides positive and multiplies negative logits of tokens in prompt or answer; above 0."""
    bias: tuple[tuple[int, float], ...] = ()
    """Tokens with what is added to their logits, in [-100, 100]."""

    @cached_property
    def bias_columns(self) -> tuple[array, array]:
        """The biased tokens and what is added to each, side by side: made once, since every step reads them."""
        return array("q", (token for token, _ in self.bias)), array("d", (value for _, value in self.bias))

    def __post_init__(self) -> None:
        bounds = {
            "temperature": (0 <= self.temperature < float("inf"), "a finite number from 0 on"),
            "top_k": (self.top_k >= 0, "0 or a number of tokens"),
            "top_p": (0 < self.top_p <= 1, "a share above 0 and up to 1"),
            "min_p": (0 <= self.min_p <= 1, "a share from 0 to 1"),
            "presence_penalty": (-2 <= self.presence_penalty <= 2, "a number from -2 to 2"),
            "frequency_penalty": (-2 <= self.frequency_penalty <= 2, "a number from -2 to 2"),
            "repetition_penalty": (0 < self.repetition_penalty < float("inf"), "a finite number above 0"),
            "bias": (all(-100 <= value <= 100 for _, value in self.bias), "numbers from -100 to 100"),
        }
        for name, (fits, meaning) in bounds.items():
            if not fits:
                raise ConfigError(f"sampling: {name} is out of range; found `{getattr(self, name)}`; give {meaning}")


@dataclass(frozen=True)
class Structure:
    """A form that the answer must have."""

    kind: Literal["json_object", "json_schema", "tools", "auto", "grammar"]
    """Any JSON object; one that fits a schema; tool calls in the model's own format; free text and calls, of which
    those of strict tools fit their schema; an EBNF grammar."""
    text: str = ""
    """The JSON schema, the grammar, or the JSON list of tool declarations."""
    thinking: Literal["", "open", "may"] = ""
    """Where the answer begins: in the form, inside thinking, or where the model may open its thinking."""
    tools: str = ""
    """The JSON list of tools that may be called instead of an answer in a JSON form."""
    is_single: bool = False
    """Whether at most one call may be made."""


@dataclass(frozen=True)
class MediaItem:
    """One picture or clip of a prompt."""

    digest: str
    """Hash of its content: equal pictures hit the same cached prefix, others never do."""
    start: int
    """Place of its first slot token in the prompt."""
    length: int
    """Number of its slot tokens."""
    pixels: bytes = b""
    """Preprocessed patches, fp32, as the vision tower reads them."""
    grid: tuple[int, int, int] = (0, 0, 0)
    """Frames, rows and columns of patches."""


@dataclass(frozen=True)
class Request:
    """One prompt and how to continue it."""

    id: str
    tokens: tuple[int, ...]
    """The whole prompt; at least one token."""
    max_tokens: int = 128
    """Most tokens to generate."""
    sampling: Sampling = Sampling()
    seed: int = 0
    """Decides the draws together with the token's place in the answer, whatever runs beside it; 0 … 2^64 - 1."""
    stop: tuple[str, ...] = ()
    """Strings that end the answer just before themselves."""
    stop_ids: tuple[int, ...] = ()
    """Tokens that end the answer beside the tokenizer's own ends."""
    ignore_ends: bool = False
    """Go on past the tokenizer's ends, as benchmarks do."""
    top_logprobs: int | None = None
    """Alternatives to report for each token, 0 … 20; None reports no logprobs."""
    score_prompt: bool = False
    """Report the logprob of each prompt token too; such a request reads no cached prefix."""
    structure: Structure | None = None
    media: tuple[MediaItem, ...] = ()
    borders: tuple[int, ...] = ()
    """Numbers of prompt tokens after which a snapshot is worth keeping: end of system and tools, end of each turn."""
    priority: int = 0
    """Smaller runs first."""
    request_class: str = "default"
    """Whose budget it draws on."""
    deadline_s: float | None = None
    """Seconds from arrival after which it is ended."""
    cache_salt: str = ""
    """Requests share cached prefixes only with requests of the same salt."""


@dataclass(frozen=True)
class TokenInfo:
    """One token and how likely it was."""

    token: int
    logprob: float
    """Natural log-probability under the plain logits, before penalties, temperature and filters."""
    top: tuple[tuple[int, float], ...] = ()
    """The likeliest tokens with theirs, likeliest first."""


@dataclass(frozen=True)
class Usage:
    """What a request cost."""

    prompt_tokens: int
    cached_tokens: int
    """Prompt tokens that were restored and not computed."""
    matched_tokens: int
    """Longest cached prefix of latents; what exceeds `cached_tokens` had no snapshot to go with it."""
    completion_tokens: int
    draft_tokens: int = 0
    accepted_tokens: int = 0


@dataclass(frozen=True)
class Update:
    """News of one request after a step."""

    id: str
    text: str = ""
    """Text that can no longer change."""
    tokens: tuple[TokenInfo, ...] = ()
    """New tokens, without a stop token."""
    prompt: tuple[TokenInfo, ...] = ()
    """With `score_prompt`, in the first update: every prompt token after the first."""
    finish_reason: FinishReason | None = None
    """Set in the last update of a request."""
    stopped_by: str | int | None = None
    """The stop string or token that ended it."""
    usage: Usage | None = None
    """Set in the last update, and in the first one with the completion still at 0."""
    error: str | None = None
    """What went wrong, with `finish_reason` `error` or `invalid`."""
