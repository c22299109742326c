"""Bodies of requests: strict types, every field with its range; unknown fields are refused, as the API's owners do."""

import json
from types import NoneType
from typing import Annotated, Any, Literal, get_args

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, model_validator

MAX_CHOICES = 16
MAX_STOPS = 16
MAX_BIASES = 4096
SEED = 2**63


UNSUPPORTED = {
    "access_programs": "there are none",
    "audio": "answers are text",
    "background_options": "wait for the answer, or stream it",
    "context_management": "send the part of the conversation that the model shall read",
    "function_call": "send tool_choice",
    "functions": "send tools",
    "image": "answers are text",
    "max_tool_calls": "it bounds tools that the server runs, and there are none",
    "moderation": "ask a model for it",
    "prediction": "drafts come from the settings under drafting",
    "prompt": "send the whole input",
    "prompt_cache_options": "prefixes stay as long as there is room",
    "prompt_cache_retention": "prefixes stay as long as there is room",
    "web_search_options": "declare a tool of your own",
}
"""Parameters of the API that are known and not supported, with what to do."""


class Nullable(BaseModel):
    """A table in which null says as much as leaving the name out, as clients in typed languages write it."""

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, tree: Any) -> Any:
        if not isinstance(tree, dict) or None not in tree.values():
            return tree
        return {name: value for name, value in tree.items() if value is not None or not cls._is_absent(name)}

    @classmethod
    def _is_absent(cls, name: str) -> bool:
        if (known := cls.model_fields.get(name)) is None:
            return name in UNSUPPORTED
        return not known.is_required() and NoneType not in get_args(known.annotation)


class Body(Nullable):
    """A table of a request."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, use_attribute_docstrings=True)


class Echoed(Nullable):
    """A table that clients send back as they got it, with fields that mean nothing to us."""

    model_config = ConfigDict(extra="ignore", strict=True, allow_inf_nan=False, use_attribute_docstrings=True)


def _listed(value: object) -> object:
    return [value] if isinstance(value, str) else value


Stop = Annotated[
    list[Annotated[str, Field(min_length=1, max_length=1024)]], BeforeValidator(_listed), Field(max_length=MAX_STOPS)
]
Tree = dict[str, Any]


def _can_be_sent(value: Tree | None) -> Tree | None:
    json.dumps(value, ensure_ascii=False).encode()
    return value


Kept = Annotated[Tree | None, AfterValidator(_can_be_sent)]
"""What an answer tells again: whole characters only."""


class ImageUrl(Echoed):
    """Where a picture is."""

    url: str
    """`data:image/…;base64,…`; addresses of other servers are not fetched."""
    detail: Literal["auto", "low", "high"] | None = None
    """Read and not used: a picture keeps its pixels."""


class Part(Echoed):
    """A piece of a message."""

    type: Literal["text", "image_url"]
    text: str | None = None
    image_url: ImageUrl | str | None = None


class Function(Echoed):
    """A call's function."""

    name: Annotated[str, Field(min_length=1, max_length=256)]
    arguments: str | Tree | None = None


class Call(Echoed):
    """A call that the assistant made."""

    id: str | None = None
    type: Literal["function"] = "function"
    function: Function


class Message(Echoed):
    """One message of a conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[Part] | None = None
    reasoning_content: str | None = None
    """The assistant's thinking, as it was answered; send it back."""
    reasoning: str | None = None
    tool_calls: list[Call] | None = None
    tool_call_id: str | None = None
    name: str | None = None
    tools: list[Tree] | None = None
    """Tools that a system message adds in mid-session (K3)."""
    partial: bool | None = None
    """Of the last message, an assistant's: continue this answer; what comes back is the rest alone."""


class StreamOptions(Body):
    """What a stream carries beside the answer."""

    include_usage: bool = False
    include_obfuscation: bool | None = None


class Common(Body):
    """What all generating endpoints share."""

    model: Annotated[str, Field(max_length=512)]
    stream: bool = False
    stream_options: StreamOptions | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=0, le=2**31 - 1)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    repetition_penalty: Annotated[float, Field(gt=0, le=10)] | None = None
    logit_bias: Annotated[dict[str, Annotated[float, Field(ge=-100, le=100)]], Field(max_length=MAX_BIASES)] | None = (
        None
    )
    """Tokens, written as numbers, with what is added to their logits."""
    seed: Annotated[int, Field(ge=-SEED, lt=SEED)] | None = None
    stop: Stop | None = None
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = None
    user: str | None = None
    """Accepted and not used, as is whatever says nothing about the answer."""
    metadata: Kept = None
    ignore_eos: bool = False
    """Write on past the model's ends, for benchmarks."""
    priority: Annotated[int, Field(ge=-1000, le=1000)] = 0
    """Smaller runs first."""
    cache_salt: Annotated[str, Field(max_length=256)] = ""
    """Cached prefixes are shared only among requests of one salt."""
    return_token_ids: bool = False
    """Tell the tokens beside the text."""


class ChatRequest(Common):
    """`POST /v1/chat/completions`."""

    messages: Annotated[list[Message], Field(min_length=1)]
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    tools: list[Tree] | None = None
    tool_choice: str | Tree | None = None
    parallel_tool_calls: bool | None = None
    """False lets the answer end with its first call."""
    modalities: list[Literal["text"]] | None = None
    response_format: Tree | None = None
    reasoning_effort: str | None = None
    """low, high or max; none switches thinking off."""
    thinking: bool | Tree | None = None
    """`{"type": "enabled" | "disabled", "effort": …, "keep": "all"}`."""
    enable_thinking: bool | None = None
    chat_template_kwargs: Tree | None = None
    """`thinking`, `enable_thinking` and `reasoning_effort`, as other servers take them."""
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    store: bool | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    verbosity: str | None = None


class CompletionRequest(Common):
    """`POST /v1/completions`."""

    prompt: str | list[str] | list[int] | list[list[int]]
    max_tokens: Annotated[int, Field(ge=0)] | None = 16
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    echo: bool | None = None
    best_of: Literal[1] | None = None
    suffix: Literal[""] | None = None


class TokenizeRequest(Body):
    """`POST /tokenize`: a text, or a conversation as the model would get it."""

    model: str | None = None
    text: str | None = None
    messages: Annotated[list[Message], Field(min_length=1)] | None = None
    tools: list[Tree] | None = None
    tool_choice: str | Tree | None = None
    response_format: Tree | None = None
    reasoning_effort: str | None = None
    thinking: bool | Tree | None = None


class DetokenizeRequest(Body):
    """`POST /detokenize`."""

    model: str | None = None
    tokens: list[int]


class PauseRequest(Body):
    """`POST /admin/pause`."""

    mode: Literal["abort", "wait", "keep"] = "abort"
    """End what runs; let it finish; or freeze it and go on after resuming, on the weights of then."""


class UpdateWeightsRequest(Body):
    """`POST /admin/update_weights`; one of both."""

    path: Annotated[str, Field(min_length=1)] | None = None
    """A checkpoint's folder."""
    shared_memory: Annotated[str, Field(min_length=1, max_length=255)] | None = None
    """A segment (a file below /dev/shm) that holds one safetensors file with the model's own names."""
