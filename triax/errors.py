"""What can go wrong, named after the boundary that was crossed.

TriaxError
├── ConfigError        a recipe, an override or a published config that cannot be used
├── DataError          a source that cannot be read or turned into tokens
├── CheckpointError    a folder of weights or a saved run that cannot be trusted
├── UnsupportedError   this device or shape has no such path; names what would run instead
├── CapacityError      a request that can never fit, or one too many
├── TrainError         a run that stopped by one of its own rules
└── SandboxError       a computer for an agent that cannot do what was asked; `kind` says whose fault it is

Message form: where: what is wrong; what was found; what to do. Lower case, no full stop, values in backticks.
"""

from typing import Literal


class TriaxError(Exception):
    """Any failure that a user can act on; the command line prints it without a traceback."""

    exit_status = 1


class ConfigError(TriaxError, ValueError):
    """Settings that cannot be used; nothing has run yet."""

    exit_status = 2


class DataError(TriaxError, ValueError):
    """Text or files that cannot be read or turned into tokens."""


class CheckpointError(TriaxError):
    """Weights or a saved run that are incomplete, altered or made for something else."""


class UnsupportedError(TriaxError):
    """A path that does not exist for this device or shape; the message names the one that does."""


class CapacityError(TriaxError):
    """A request that can never fit in memory, or one that comes while too many wait."""


class TrainError(TriaxError):
    """A run that stopped by one of its own rules, such as too many skipped steps."""


class SandboxError(TriaxError):
    """A sandbox that cannot do what was asked.

    Args:
        message: What is wrong, in the four parts that every message has.
        kind: `refused` if the caller asked for what cannot be (an illegal state, a bad argument, a missing feature),
            `timeout` and `out_of_memory` for a limit that was hit, `infrastructure` if the sandbox itself failed, which
            is never the fault of the task that ran in it.
        status: An HTTP status that tells the same to a client, such as 404 for an unknown id and 409 for a state.
    """

    def __init__(
        self,
        message: str,
        kind: Literal["timeout", "out_of_memory", "infrastructure", "refused"] = "infrastructure",
        *,
        status: int | None = None,
    ) -> None:
        super().__init__(message)
        self.kind = kind
        self.status = status if status is not None else STATUS_OF_KIND[kind]


STATUS_OF_KIND = {"refused": 400, "timeout": 504, "out_of_memory": 507, "infrastructure": 500}
