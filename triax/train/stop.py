"""A polite end: the first SIGTERM or Ctrl-C lets the step finish and saves, the second ends at once."""

import os
import signal
import threading
from types import FrameType
from typing import Any

SIGNALS = (signal.SIGTERM, signal.SIGINT)


class Stop:
    """While entered, notes the first signal in `asked` and gives both signals back their usual meaning."""

    def __init__(self) -> None:
        self.asked = ""
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> "Stop":
        """Take over the signals, in the main thread only: elsewhere Python does not allow it."""
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._note) for number in SIGNALS}
        return self

    def __exit__(self, *_: object) -> None:
        """Give the signals back to whoever had them."""
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.asked = signal.Signals(number).name
        os.write(2, f"\n{self.asked}: the step ends, then the run is saved; a second signal ends it at once\n".encode())
        for each in SIGNALS:
            signal.signal(each, signal.SIG_DFL)
