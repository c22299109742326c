"""What can go wrong, named after the boundary that was crossed.

TriaxError
├── ConfigError        a recipe, an override or a published config that cannot be used
├── DataError          a source that cannot be read or turned into tokens
├── CheckpointError    a folder of weights or a saved run that cannot be trusted
├── UnsupportedError   this device or shape has no such path; names what would run instead
└── TrainError         a run that stopped by one of its own rules

Message form: where: what is wrong; what was found; what to do. Lower case, no full stop, values in backticks.
"""


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


class TrainError(TriaxError):
    """A run that stopped by one of its own rules, such as too many skipped steps."""
