"""Messages between the API process and the engine process: msgspec structs over one pair of sockets."""

from typing import Any, Literal

import msgspec

from triax.serve.request import Request, Update

Task = Literal["pause", "resume", "update_weights", "metrics", "cache"]
"""What the engine can be asked beside requests."""


class Facts(msgspec.Struct, frozen=True):
    """What the API process must know about the model to check requests."""

    vocab_size: int
    context: int
    """Most tokens of prompt and answer together."""
    weight_version: int = 0
    slot_token: int | None = None
    """Token of a picture's slots; None is a model that does not see."""
    patch: int = 14
    """Side of a square patch, in pixels."""
    merge: int = 2
    """Side of the square of patches that becomes one token."""


class Open(msgspec.Struct, frozen=True, tag=True):
    """Load this model."""

    source: str
    """Folder of the weights."""
    settings: str
    """`config.serve.Serve` as JSON."""
    maker: str
    """What makes the engine: `module:name` or `file.py:name`."""


class Add(msgspec.Struct, frozen=True, tag=True):
    """Begin a request."""

    request: Request


class Abort(msgspec.Struct, frozen=True, tag=True):
    """End a request that nobody waits for."""

    id: str


class Ask(msgspec.Struct, frozen=True, tag=True):
    """Do something and answer."""

    number: int
    task: Task
    arguments: dict[str, str] = {}


class Stop(msgspec.Struct, frozen=True, tag=True):
    """Save what outlives the process and end."""


class Loading(msgspec.Struct, frozen=True, tag=True):
    """How far loading is."""

    stage: str
    share: float
    """Of the whole, in [0, 1]."""


class Ready(msgspec.Struct, frozen=True, tag=True):
    """The engine takes requests."""

    facts: Facts


class News(msgspec.Struct, frozen=True, tag=True):
    """Updates of one step."""

    updates: list[Update]


class Refused(msgspec.Struct, frozen=True, tag=True):
    """A request that the engine does not take; nothing of it is left."""

    id: str
    kind: str
    """Name of the error's class."""
    message: str


class Answer(msgspec.Struct, frozen=True, tag=True):
    """What came of a task; `kind` and `message` only if it failed."""

    number: int
    value: Any = None
    kind: str = ""
    message: str = ""


class Broken(msgspec.Struct, frozen=True, tag=True):
    """The model cannot be loaded; the process ends."""

    kind: str
    message: str


Down = Open | Add | Abort | Ask | Stop
Up = Loading | Ready | News | Refused | Answer | Broken

encode = msgspec.msgpack.Encoder().encode
decode_down = msgspec.msgpack.Decoder(Down).decode
decode_up = msgspec.msgpack.Decoder(Up).decode
