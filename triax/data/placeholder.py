"""Pictures and clips as text of a prompt: what stands around the slots, and how many slots there are."""

from collections.abc import Iterable
from datetime import UTC, datetime

from triax.data import chat
from triax.data.image import Picture
from triax.data.video import Clip
from triax.errors import DataError

PLACEHOLDER = "<|kimi_image_placeholder|>"
"""Marker that templates put where a picture belongs; it has no token of its own."""


def image_block(picture: Picture) -> str:
    """Return K3's block of a picture: its original size, then one slot a token."""
    return _block(f"image {picture.width}x{picture.height}", picture.num_tokens)


def clip_block(clip: Clip) -> str:
    """Return K2.5's block of a clip: the time of its first frame, then one slot a token."""
    return f"{timestamp(clip.start_s)}{_block('video', clip.num_tokens)}"


def timestamp(seconds: float) -> str:
    """Return a time as `hh:mm:ss.fff`; fractions of a millisecond are cut off."""
    clock = datetime.fromtimestamp(int(seconds), tz=UTC)
    return f"{clock:%H:%M:%S}.{int(seconds % 1 * 1000):03d}"


def expand_placeholders(text: str, blocks: Iterable[str], placeholder: str = PLACEHOLDER) -> str:
    """Put each block in the place of a placeholder, in order.

    The result spells control tokens, so the text must come from a template and never from a user: the chat encoders
    insert the slots as ids instead.

    Args:
        text: A rendered template.
        blocks: From `image_block` or `clip_block`.
        placeholder: The marker.

    Raises:
        DataError: There are more placeholders than blocks, or fewer.
    """
    blocks = list(blocks)
    pieces = text.split(placeholder)
    if len(pieces) - 1 != len(blocks):
        raise DataError(
            f"prompt: each picture needs one placeholder; found {len(pieces) - 1} of `{placeholder}` for {len(blocks)} "
            "pictures; render the template with the pictures that go with it"
        )
    return pieces[0] + "".join(block + piece for block, piece in zip(blocks, pieces[1:], strict=True))


def _block(title: str, slots: int) -> str:
    return f"<|media_begin|>{title}<|media_content|>{'<|media_pad|>' * slots}<|media_end|>"


def image_part(picture: Picture) -> chat.Image:
    """Return what the chat encoders ask about a picture."""
    return chat.Image(picture.width, picture.height, picture.num_tokens)
