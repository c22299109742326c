"""The text of a sequence while its tokens arrive: whole characters only, and nothing of a stop string."""

from collections.abc import Sequence

from triax.data.tokenizer import StreamDecoder, Vocabulary


class Stops:
    """Passes text on up to the stop string that is complete first; what may begin one waits until it is one or not."""

    def __init__(self, stop: Sequence[str] = ()) -> None:
        self._stop = [text for text in stop if text]
        self._held = ""
        self.met: str | None = None
        """The stop string that was met."""

    def push(self, new: str) -> str:
        """Return the text that this piece releases."""
        if self.met is not None:
            return ""
        self._held += new
        found = [
            (place + len(text), place, text) for text in self._stop if (place := self._held.find(text)) >= 0
        ]  # first complete, then longest
        if found:
            _, place, self.met = min(found)
            piece, self._held = self._held[:place], ""
            return piece
        waiting = max((_overlap(self._held, text) for text in self._stop), default=0)
        piece, self._held = self._held[: len(self._held) - waiting], self._held[len(self._held) - waiting :]
        return piece

    def flush(self) -> str:
        """Return what waited, at the end of the text."""
        rest, self._held = self._held, ""
        return rest


class Text:
    """Releases text as soon as it can no longer change: pieces joined are the text, however it is read.

    The bytes of an incomplete character wait for the rest, and whatever may begin a stop string waits until it is one
    or is not. The stop string that is complete first ends the text just before itself.
    """

    def __init__(self, tokenizer: Vocabulary, stop: Sequence[str] = ()) -> None:
        self._decoder = StreamDecoder(tokenizer)
        self._stops = Stops(stop)

    @property
    def has_stopped(self) -> bool:
        """Whether a stop string was met."""
        return self._stops.met is not None

    @property
    def stopped_by(self) -> str | None:
        """The stop string that was met."""
        return self._stops.met

    def push(self, token: int) -> str:
        """Return the text that this token releases."""
        return self._stops.push(self._decoder.push(token))

    def flush(self) -> str:
        """Return what was held back, at the end of the sequence."""
        return self._stops.push(self._decoder.flush()) + self._stops.flush()


def _overlap(text: str, stop: str) -> int:
    """Return how many characters at the end of `text` begin `stop`."""
    return next((n for n in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:n])), 0)
