"""Pieces of a prompt, kept apart: control tokens are inserted as ids, text is only ever text."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol, runtime_checkable

from triax.errors import DataError


@runtime_checkable
class ChatTokenizer(Protocol):
    """What the chat formats ask of a tokenizer."""

    @property
    def control(self) -> Mapping[str, int]:
        """Token of each control name, such as `<|open|>`."""
        ...

    def encode_ordinary(self, text: str) -> list[int]:
        """Return the tokens of a text; a text that spells a control name is plain text."""
        ...

    def decode_bytes(self, tokens: Iterable[int]) -> bytes:
        """Return the bytes that tokens stand for."""
        ...


@dataclass(frozen=True, slots=True)
class Segment:
    """One piece that is encoded by itself: no token crosses its borders."""

    text: str
    """Plain text, or the name of a control token."""
    control: bool = False
    """Whether `text` names a control token."""
    trained: bool = False
    """Whether the model must produce it: counted by the loss."""
    count: int = 1
    """How often a control token repeats (the slots of an image)."""
    picture: int | None = None
    """Which picture of the conversation fills the slots, where these are slots."""


class Prompt(NamedTuple):
    """A conversation as tokens."""

    ids: list[int]
    trained: list[bool]
    """For each token, whether the loss counts it."""
    num_opener: int = 0
    """Tokens at the end that open the section the model writes in."""
    pictures: tuple[int, ...] = ()
    """The pictures in the order of their slots, each by its place among those of the messages as they were given."""

    @property
    def num_billed(self) -> int:
        """Tokens to report as the prompt's; the last opener is not counted."""
        return len(self.ids) - self.num_opener


def text(words: str) -> list[Segment]:
    """Return plain text as a segment; nothing for an empty one."""
    return [Segment(words)] if words else []


def control(name: str, count: int = 1) -> Segment:
    """Return a control token, repeated `count` times."""
    return Segment(name, control=True, count=count)


def slots(picture: int, count: int) -> Segment:
    """Return the slots of a picture, which the vision tower fills."""
    return Segment("<|media_pad|>", control=True, count=count, picture=picture)


def train(segments: Iterable[Segment]) -> list[Segment]:
    """Return the same pieces, counted by the loss."""
    return [replace(segment, trained=True) for segment in segments]


def spell(segments: Iterable[Segment]) -> str:
    """Return segments as a reader sees them, control names spelled out."""
    return "".join(segment.text * segment.count for segment in segments)


def encode(segments: Sequence[Segment], tokenizer: ChatTokenizer, num_opener: int = 0) -> Prompt:
    """Turn segments into tokens, each by itself.

    Args:
        segments: Pieces in order.
        tokenizer: Vocabulary with the control names of the format.
        num_opener: Segments at the end that open the section the model writes in.

    Raises:
        DataError: The tokenizer lacks a control token of the format, or a text is not valid Unicode.
    """
    ids: list[int] = []
    trained: list[bool] = []
    body = len(segments) - num_opener
    start = 0
    for number, segment in enumerate(segments):
        if number == body:
            start = len(ids)
        if segment.control:
            if (token := tokenizer.control.get(segment.text)) is None:
                raise DataError(
                    f"tokenizer: it has no control token `{segment.text}`; found another family's vocabulary; "
                    "use the tokenizer of the model whose chat format this is"
                )
            piece = [token] * segment.count
        else:
            piece = tokenizer.encode_ordinary(segment.text)
        ids += piece
        trained += [segment.trained] * len(piece)
    pictures = tuple(segment.picture for segment in segments if segment.picture is not None)
    return Prompt(ids, trained, len(ids) - start if num_opener else 0, pictures)
