"""The text of a sequence while its tokens arrive: whole characters only, and nothing of a stop string."""

from collections.abc import Sequence

from triax.data.tokenizer import StreamDecoder, Vocabulary


class Text:
    """Releases text as soon as it can no longer change: pieces joined are the text, however it is read.

    The bytes of an incomplete character wait for the rest, and whatever may begin a stop string waits until it is one
    or is not. The stop string that is complete first ends the text just before itself.
    """

    def __init__(self, tokenizer: Vocabulary, stop: Sequence[str] = ()) -> None:
        self._decoder = StreamDecoder(tokenizer)
        self._stop = [text for text in stop if text]
        self._held = ""
        self.has_stopped = False
        """Whether a stop string was met."""

    def push(self, token: int) -> str:
        """Return the text that this token releases."""
        return self._release(self._decoder.push(token))

    def flush(self) -> str:
        """Return what was held back, at the end of the sequence."""
        piece = self._release(self._decoder.flush())
        rest, self._held = self._held, ""
        return piece + rest

    def _release(self, new: str) -> str:
        if self.has_stopped:
            return ""
        self._held += new
        found = [
            (place + len(text), place) for text in self._stop if (place := self._held.find(text)) >= 0
        ]  # first complete, then longest
        if found:
            self.has_stopped = True
            piece, self._held = self._held[: min(found)[1]], ""
            return piece
        waiting = max((_overlap(self._held, text) for text in self._stop), default=0)
        piece, self._held = self._held[: len(self._held) - waiting], self._held[len(self._held) - waiting :]
        return piece


def _overlap(text: str, stop: str) -> int:
    """Return how many characters at the end of `text` begin `stop`."""
    return next((n for n in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:n])), 0)
