"""How an engine schedules, caches, drafts and answers over HTTP."""

from typing import Literal

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, model_validator

from triax.config.settings import Settings


class RequestClass(Settings):
    """A kind of request with a share of its own."""

    share: float = Field(gt=0, le=1)
    """Share of step tokens, slots and pages that nobody can take from it; what it leaves idle is lent to others."""


class Scheduling(Settings):
    """What runs in a step."""

    step_tokens: PositiveInt = 8192
    """Tokens computed in one step; decoding goes first, prefill gets the rest."""
    mixed_prefill_tokens: PositiveInt = 2048
    """Prefill tokens in a step that also decodes: what a long prompt may delay the others."""
    max_running: PositiveInt = 256
    """Sequences that run at once; at most `step_tokens`."""
    max_waiting: NonNegativeInt = 1024
    """Sequences that may wait; more are refused."""
    classes: dict[str, RequestClass] = Field(
        default_factory=lambda: {"default": RequestClass(share=0.5), "long": RequestClass(share=0.5)}
    )
    """Shares by name of the class; requests of an unknown class count as `default`."""
    long_from: PositiveInt = 8192
    """Requests of class `default` with so many prompt tokens count as `long` where there is such a class."""

    @model_validator(mode="after")
    def _shares_fit(self) -> "Scheduling":
        if "default" not in self.classes:
            raise ValueError("classes has no `default`; name the class of requests that name none")
        total = sum(one.share for one in self.classes.values())
        if total > 1 + 1e-9:
            raise ValueError(f"shares of classes add up to `{total:g}`; choose shares that sum to at most 1")
        if self.max_running > self.step_tokens:
            raise ValueError(
                f"max_running `{self.max_running}` is more than step_tokens `{self.step_tokens}`; "
                "every running sequence decodes a token a step, so raise step_tokens"
            )
        return self


class Prefixes(Settings):
    """Which prefixes are kept for reuse."""

    align: PositiveInt = 64
    """A prompt leaves a snapshot at its last multiple of this many tokens."""
    first: PositiveInt = 1024
    """A long prompt also leaves snapshots at this many tokens, twice, four times … as many."""
    gap: PositiveInt = 64
    """Fewest tokens between two snapshots of a prefix; borders that a request names win over other places."""
    write_back_tokens: NonNegativeInt = 256
    """A snapshot that saves fewer tokens than this is dropped when evicted, not copied to host memory."""


class HostPool(Settings):
    """Host memory to which evicted prefixes go."""

    memory_bytes: PositiveInt
    """Bytes of pinned memory."""
    slot_share: float = Field(0.5, gt=0, lt=1)
    """Share of them for slots; the rest holds pages."""


class DiskPool(Settings):
    """A folder in which prefixes outlive the process."""

    path: str
    """Folder, made if it is not there; only an engine with the same weights reuses what it finds."""
    memory_bytes: PositiveInt = 64 << 30
    """Bytes that it may grow to."""
    save_s: PositiveFloat = 5.0
    """Seconds after which a busy engine writes the next snapshot; an idle one writes all that are left."""


class Caching(Settings):
    """Memory for states and latents."""

    page_tokens: PositiveInt = 64
    """Tokens whose latents make one page."""
    pages: NonNegativeInt = 0
    """Pages on the device; 0 takes what `memory_share` leaves after the slots."""
    slots: NonNegativeInt = 0
    """State slots on the device; 0 takes `slot_share` of the memory."""
    memory_share: float = Field(0.9, gt=0, lt=1)
    """Share of the device's memory for weights, scratch and cache together."""
    slot_share: float = Field(0.5, gt=0, lt=1)
    """Share of the cache's memory that goes to slots where `slots` is 0."""
    prefixes: Prefixes | None = Prefixes()
    """Reuse of prefixes; without it every prompt is computed from its first token."""
    host: HostPool | None = None
    """Where evicted prefixes and preempted sequences go; without it they are recomputed."""
    disk: DiskPool | None = None
    """Where prefixes outlive the process."""


class Drafting(Settings):
    """Speculation: drafts that one step verifies together."""

    kind: Literal["ngram", "model"] = "ngram"
    """Copied from the sequence's own text, or by a small model."""
    model: str = ""
    """Folder of the small model (kind `model`), as of any other; it needs the same tokenizer."""
    max_drafts: int = Field(4, ge=1, le=16)
    """Most drafts a step."""
    ngram: PositiveInt = 3
    """Longest run of tokens that must recur (kind `ngram`)."""
    is_adaptive: bool = True
    """Fewer drafts while few are accepted, none where they cost more than they save."""


class Http(Settings):
    """The server's face."""

    host: str = "127.0.0.1"
    """Address to listen on; others can connect only if it is not a loopback one."""
    port: int = Field(8000, ge=0, le=65535)
    """Port; 0 lets the system choose."""
    model_name: str = ""
    """Name of the model in answers; empty takes the folder's."""
    api_keys: tuple[str, ...] = ()
    """Keys that clients send as bearer tokens; without any, everybody is served."""
    admin_keys: tuple[str, ...] = ()
    """Keys of the admin endpoints; without any, these endpoints are closed."""
    requests_per_minute: NonNegativeFloat = 0.0
    """Requests a minute for each key or, without keys, each address; 0 does not limit."""
    max_queue: PositiveInt = 256
    """Requests that may wait for the engine; more get status 429."""
    max_body_bytes: PositiveInt = 32 << 20
    """Largest body of a request."""
    allowed_hosts: tuple[str, ...] = ()
    """Names by which clients reach the server, such as `*.example.org`, besides `localhost` and plain addresses.
    Without any, a server on a loopback address refuses other names, and one that others can reach takes every name."""
    cors_origins: tuple[str, ...] = ()
    """Origins of pages that may call the server from a browser."""
    has_fixed_sampling: bool = False
    """Refuse sampling options other than the model's own; a temperature from 0 to 1 is taken."""
    thinking: Literal["auto", "off"] = "auto"
    """Whether the model may think before it answers; `auto` asks its tokenizer, `off` is for one that never learned."""
    drain_s: PositiveFloat = 30.0
    """Seconds that running requests get when the server is told to stop."""
    deadline_s: PositiveFloat = 3600.0
    """Seconds after which any request is ended."""


class Serve(Settings):
    """An engine and its server."""

    device: str = "auto"
    """`auto`, `cpu`, `cuda` or `cuda:N`."""
    precision: Literal["auto", "fp32", "bf16"] = "auto"
    """Number format of weights and latents; `auto` is bf16 on a GPU and fp32 on a CPU. KDA states are fp32."""
    context: NonNegativeInt = 0
    """Most tokens of prompt and answer together; 0 takes what the model was made for."""
    image_reading: Literal["released", "corrected"] = "released"
    """Read pictures as the released processor does, or corrected: upright, smooth, 8 bits a channel."""
    is_deterministic: bool = False
    """A request's tokens and logprobs depend on the request alone, whatever runs beside it and whatever was cached."""
    has_graphs: bool = True
    """Capture decode steps as CUDA graphs."""
    is_debugging: bool = False
    """Poison scratch memory and freed slots, and check all invariants after each step."""
    scheduling: Scheduling = Scheduling()
    """What runs in a step."""
    cache: Caching = Caching()
    """Memory for states and latents."""
    drafting: Drafting | None = None
    """Speculation; without it every step gives one token a sequence."""
    http: Http = Http()
    """The server's face."""
