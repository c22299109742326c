"""Words for a person: one stdlib logger a room, on stderr, in colour only where colour is wanted."""

import logging
import os
import sys
from contextlib import suppress
from pathlib import Path
from typing import Protocol, runtime_checkable

COLOURS = {logging.WARNING: "\033[33m", logging.ERROR: "\033[31m"}
PLAIN = "\033[0m"


@runtime_checkable
class Stream(Protocol):
    """Where words go: a file of text that knows whether it is a terminal."""

    def write(self, text: str, /) -> object:
        """Take text."""
        ...

    def flush(self) -> object:
        """Pass on what was written."""
        ...

    def isatty(self) -> bool:
        """Tell whether a person reads along."""
        ...


def logger(room: str) -> logging.Logger:
    """Return the logger of a room, such as `train`."""
    return logging.getLogger(f"triax.{room}")


def wants_colour(stream: Stream) -> bool:
    """Return whether a stream is a terminal whose user did not ask for plain text."""
    return stream.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


class Plain(logging.Formatter):
    """The message alone; warnings and errors say so in front, in words that need no colour."""

    def __init__(self, *, colour: bool) -> None:
        super().__init__()
        self.colour = colour

    def format(self, record: logging.LogRecord) -> str:
        """Write one record, and the traceback if it carries one."""
        text = record.getMessage()
        if record.levelno >= logging.WARNING:
            word = record.levelname.lower()
            start, end = (COLOURS[record.levelno], PLAIN) if self.colour and record.levelno in COLOURS else ("", "")
            text = f"{start}{word}:{end} {text}"
        return f"{text}\n{self.formatException(record.exc_info)}" if record.exc_info else text


class Spoken(logging.StreamHandler[Stream]):
    """Writes to the stderr of the moment, so that a live line that took it over stays below what is said."""

    def __init__(self) -> None:
        super().__init__(sys.stderr)

    def emit(self, record: logging.LogRecord) -> None:
        """Write one record."""
        self.stream = sys.stderr
        super().emit(record)


class Kept(logging.FileHandler):
    """A log that is kept, with time and room in front of each line; on a full disk it falls silent, and only it."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, encoding="utf-8")
        self.setFormatter(logging.Formatter("%(asctime)s %(name)s %(levelname)s %(message)s"))

    def handleError(self, record: logging.LogRecord) -> None:
        """Pass over a line that could not be written: the run itself says what is wrong."""

    def close(self) -> None:
        """Close the file; what no longer fits is lost."""
        with suppress(OSError):
            super().close()


def configure(stream: Stream | None = None, file: Path | None = None, *, verbose: bool = False) -> None:
    """Send all rooms' words to a stream, and to a file if one is given; calling it again replaces what was set.

    Args:
        stream: Where to write; stderr if not given.
        file: A log that is kept, with time and room in front of each line.
        verbose: Also show what helps to find a fault.
    """
    root = logging.getLogger("triax")
    for handler in list(root.handlers):
        root.removeHandler(handler)
        handler.close()
    spoken = logging.StreamHandler(stream) if stream else Spoken()
    spoken.setFormatter(Plain(colour=wants_colour(stream or sys.stderr)))
    root.addHandler(spoken)
    if file is not None:
        root.addHandler(Kept(file))
    root.setLevel(logging.DEBUG if verbose else logging.INFO)
