"""From a picture in a file to the patches that the vision tower reads."""

import math
import struct
import warnings
import zlib
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import NamedTuple, Protocol, runtime_checkable

import numpy as np
import torch
from jaxtyping import Float
from PIL import Image, ImageOps, UnidentifiedImageError
from torch import Tensor

from triax.config.vision import Chessboard, Images
from triax.errors import DataError

FORMATS = ("PNG", "JPEG", "GIF", "WEBP", "BMP", "TIFF", "PPM", "AVIF")
"""Kinds of files that are read; some of Pillow's other kinds start programs or fetch what a file names."""

# Damaged files make Pillow raise nearly anything.
_DAMAGE = (
    UnidentifiedImageError,
    Image.DecompressionBombError,
    OSError,
    SyntaxError,
    ValueError,
    TypeError,
    IndexError,
    KeyError,
    EOFError,
    OverflowError,
    MemoryError,
    NotImplementedError,
    AttributeError,
    struct.error,
    zlib.error,
)

Source = bytes | str | Path | Image.Image


class Fit(NamedTuple):
    """How a picture is laid onto whole tokens."""

    width: int
    """After resizing, in pixels; padding to whole tokens comes after."""
    height: int
    rows: int
    """Patches from top to bottom, padding included."""
    columns: int


@dataclass(frozen=True, slots=True)
class Picture:
    """A picture as the tower reads it."""

    patches: Float[Tensor, "N 3 P P"]
    """Row by row, normalised."""
    grid: tuple[int, int, int]
    """One frame, rows, columns."""
    width: int
    """Of the original picture, in pixels: as it is stored, or upright where reading is corrected."""
    height: int
    num_tokens: int
    """Slots that it fills in a prompt."""


@runtime_checkable
class HasPatches(Protocol):
    """A picture, or a clip of a video."""

    @property
    def patches(self) -> Tensor:
        """Pixels of each patch."""
        ...

    @property
    def grid(self) -> tuple[int, int, int]:
        """Frames, rows and columns."""
        ...


def lay_out(items: Sequence[HasPatches]) -> tuple[Float[Tensor, "N 3 P P"], tuple[tuple[int, int, int], ...]]:
    """Lay pictures and clips end to end: the patches and the grids that the tower takes."""
    if not items:
        raise DataError("media: a stream of patches needs a picture; found none; leave the media out of a text batch")
    return torch.cat([item.patches for item in items]), tuple(item.grid for item in items)


def fit(width: int, height: int, settings: Images, name: str = "image") -> Fit:
    """Return the size to which a picture is resized, and its patches after padding.

    Args:
        width: Of the picture, in pixels.
        height: Of the picture.
        settings: Limits.
        name: How errors call it.

    Raises:
        DataError: The picture has no pixels.

    Source: the image processor released with Kimi-K3.
    """
    if width < 1 or height < 1:
        raise DataError(f"{name}: has no pixels; found {width}x{height}; give a picture of at least 1x1")
    patch, longest = settings.patch, settings.side_limit * settings.patch
    patches = max(1, width // patch) * max(1, height // patch)
    scale = min(1.0, math.sqrt(settings.patch_limit / patches), longest / width, longest / height)
    new_width, new_height = (min(max(1, int(size * scale)), longest) for size in (width, height))
    token = settings.merge * patch
    return Fit(
        new_width,
        new_height,
        math.ceil(new_height / token) * settings.merge,
        math.ceil(new_width / token) * settings.merge,
    )


def num_tokens(width: int, height: int, settings: Images | None = None) -> int:
    """Return the slots that a picture of this size fills."""
    settings = settings or Images()
    fitted = fit(width, height, settings)
    return fitted.rows // settings.merge * (fitted.columns // settings.merge)


def read_image(source: Source, settings: Images | None = None, name: str | None = None) -> Picture:
    """Read a picture, the first frame of an animation: as the released processor does, or with its faults corrected.

    Args:
        source: Content of a file, its path, or an image that Pillow has opened.
        settings: Limits and normalisation; K3's if not given.
        name: How errors call it; the path, if there is one.

    Raises:
        DataError: It is no picture of a known kind, damaged, empty, or would unpack to too many pixels.
    """
    settings = settings or Images()
    name = name or (str(source) if isinstance(source, str | Path) else "image")
    with _told_as(name):
        image = _open(source, settings, name)
        fitted = fit(*image.size, settings, name)
        flatten = _flatten_as_released if settings.reading == "released" else _flatten
        patches = to_patches(flatten(image, fitted, settings), fitted, settings)
    tokens = fitted.rows // settings.merge * (fitted.columns // settings.merge)
    return Picture(patches, (1, fitted.rows, fitted.columns), *image.size, tokens)


def to_patches(pixels: np.ndarray, fitted: Fit, settings: Images) -> Float[Tensor, "N 3 P P"]:
    """Pad [height, width, 3] bytes with black at the right and the bottom, normalise, and cut into patches."""
    side = settings.patch
    below, beside = fitted.rows * side - pixels.shape[0], fitted.columns * side - pixels.shape[1]
    pixels = np.pad(pixels, ((0, below), (0, beside), (0, 0)))
    cut = pixels.reshape(fitted.rows, side, fitted.columns, side, 3).transpose(0, 2, 4, 1, 3)
    values = ((np.arange(256) / 255).astype(np.float32) - np.float32(settings.mean)) * np.float32(1 / settings.std)
    return torch.from_numpy(values[cut].reshape(-1, 3, side, side))


@contextmanager
def _told_as(name: str) -> Generator[None]:
    """Turn whatever a damaged file makes Pillow raise into one error."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of metadata that nobody reads, and of sizes that are checked here
            yield
    except DataError:
        raise
    except Image.DecompressionBombError:
        raise DataError(
            f"{name}: too large to unpack; found more than twice {Image.MAX_IMAGE_PIXELS:,} pixels; make it smaller"
        ) from None
    except _DAMAGE as problem:
        reason = str(problem).splitlines()[0] if str(problem) else type(problem).__name__
        kinds = ", ".join(FORMATS)
        raise DataError(
            f"{name}: not a picture that can be read; found a problem: {reason}; give a whole file of {kinds}"
        ) from None


def _open(source: Source, settings: Images, name: str) -> Image.Image:
    """Return the first frame; corrected, it is upright and in eight bits a channel."""
    if isinstance(source, Image.Image):
        image = source
    else:
        file = BytesIO(source) if isinstance(source, bytes) else Path(source)
        Image.init()
        image = Image.open(file, formats=[kind for kind in FORMATS if kind in Image.OPEN])
    _check_size(image, settings, name)
    if image.tell() != 0:
        image.seek(0)
    image.load()
    return image if settings.reading == "released" else _to_bytes(ImageOps.exif_transpose(image), name)


def _check_size(image: Image.Image, settings: Images, name: str) -> None:
    width, height = image.size
    if width * height > settings.max_pixels:
        raise DataError(
            f"{name}: too large to unpack; found {width}x{height}, more than {settings.max_pixels:,} pixels; "
            "make it smaller"
        )


def _to_bytes(image: Image.Image, name: str) -> Image.Image:
    """Bring what Pillow would clip (16 bits) or resize without smoothing (palettes, one bit) to eight bits."""
    if image.mode == "F":
        raise DataError(
            f"{name}: pixels are real numbers without a known range; found mode `F`; save it with 8 or 16 bits"
        )
    if image.mode.startswith("I"):
        values = np.asarray(image)
        if values.min(initial=0) < 0 or values.max(initial=0) > 65535:
            raise DataError(
                f"{name}: pixels must have at most 16 bits; found values from {values.min()} to {values.max()}; "
                "save it with 8 or 16 bits"
            )
        grey = Image.fromarray((values >> 8).astype(np.uint8))
        key = image.info.get("transparency")
        if isinstance(key, int):
            return Image.merge("LA", (grey, Image.fromarray(np.where(values == key, 0, 255).astype(np.uint8))))
        return grey
    has_key = "transparency" in image.info
    if image.mode == "1":
        image = image.convert("L")
    if image.mode == "L" and has_key:
        return image.convert("LA")
    if image.mode in ("P", "PA"):
        return image.convert("RGBA" if has_key or image.mode == "PA" else "RGB")
    return image.convert(image.mode.upper()) if image.mode.endswith("a") else image  # premultiplied alpha


def _flatten_as_released(image: Image.Image, fitted: Fit, settings: Images) -> np.ndarray:
    """Resize in the mode of the file, in which Pillow takes the nearest pixel of palettes and of one bit.

    What is transparent is laid on the board; a colour picture whose one colour is transparent counts as opaque.

    Source: the image processors released with Kimi-K3 and Kimi-K2.5, which has no board and brings all to RGB first.
    """
    size = (fitted.width, fitted.height)
    if settings.board is None:
        return np.asarray(image.convert("RGB").resize(size, Image.Resampling.BICUBIC))
    image = image.resize(size, Image.Resampling.BICUBIC)
    has_alpha = "A" in image.getbands() or (image.mode != "RGB" and "transparency" in image.info)
    return _on_board(image, settings.board, fitted) if has_alpha else np.asarray(image.convert("RGB"))


def _flatten(image: Image.Image, fitted: Fit, settings: Images) -> np.ndarray:
    """Resize, then lay what is transparent on the board: [height, width, 3] bytes."""
    if settings.board is None:
        image = image.convert("RGB")
    image = image.resize((fitted.width, fitted.height), Image.Resampling.BICUBIC)
    if "A" not in image.getbands() or settings.board is None:
        return np.asarray(image.convert("RGB"))
    return _on_board(image, settings.board, fitted)


def _on_board(image: Image.Image, board: Chessboard, fitted: Fit) -> np.ndarray:
    pixels = np.asarray(image.convert("RGBA"))
    alpha = pixels[..., 3:].astype(np.float32) / 255
    mixed = alpha * pixels[..., :3] + (1 - alpha) * _board(board, fitted)
    return mixed.astype(np.uint8)


def _board(board: Chessboard, fitted: Fit) -> np.ndarray:
    row, column = np.ogrid[: fitted.height, : fitted.width]
    is_grey = (row // board.square + column // board.square) % 2 == 1
    return np.where(is_grey, board.grey, board.light).astype(np.uint8)[..., None]
