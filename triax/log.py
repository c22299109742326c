"""Words for a person: one stdlib logger a room, on stderr, in colour only where colour is wanted."""

import logging
import os
import sys
from pathlib import Path
from typing import TextIO

COLOURS = {logging.WARNING: "\033[33m", logging.ERROR: "\033[31m"}
PLAIN = "\033[0m"


def logger(room: str) -> logging.Logger:
    """Return the logger of a room, such as `train`."""
    return logging.getLogger(f"triax.{room}")


def wants_colour(stream: TextIO) -> bool:
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


def configure(stream: TextIO | None = None, file: Path | None = None, *, verbose: bool = False) -> None:
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
    stream = stream or sys.stderr
    spoken = logging.StreamHandler(stream)
    spoken.setFormatter(Plain(colour=wants_colour(stream)))
    root.addHandler(spoken)
    if file is not None:
        kept = logging.FileHandler(file)
        kept.setFormatter(logging.Formatter("%(asctime)s %(name)s %(levelname)s %(message)s"))
        root.addHandler(kept)
    root.setLevel(logging.DEBUG if verbose else logging.INFO)
