"""From a video in a file to the clips that the vision tower reads."""

from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from PIL import Image
from torch import Tensor

from triax.config.vision import Images, Videos
from triax.data.image import Fit, fit, to_patches
from triax.errors import DataError
from triax.machine import install_command


@dataclass(frozen=True, slots=True)
class Clip:
    """A few frames in a row, which become one block of tokens."""

    patches: Float[Tensor, "N 3 P P"]
    """Frame by frame, row by row, normalised."""
    grid: tuple[int, int, int]
    """Frames, rows, columns."""
    start_s: float
    """When its first frame is shown."""
    num_tokens: int
    """Slots that it fills in a prompt, however many frames it has."""


def chosen_frames(num_frames: int, frames_per_s: float, settings: Videos, name: str = "video") -> list[int]:
    """Return which frames are looked at: evenly spaced, the first and the last among them.

    Args:
        num_frames: Frames of the video.
        frames_per_s: Its own rate.
        settings: The wanted rate and the limit.
        name: How errors call it.

    Raises:
        DataError: There are no frames, no rate, or too many frames would be chosen.

    Source: the video processor released with Kimi-K2.5.
    """
    if num_frames < 1 or frames_per_s <= 0:
        raise DataError(
            f"{name}: has nothing to see; found {num_frames} frames at {frames_per_s:g} a second; give another video"
        )
    count = max(1, round(num_frames * min(settings.frames_per_s, frames_per_s) / frames_per_s))
    if count > settings.max_frames:
        raise DataError(
            f"{name}: too long; found {count} frames to look at, more than max_frames `{settings.max_frames}`; "
            "cut it into pieces or lower frames_per_s"
        )
    return np.linspace(0, num_frames - 1, count).round().astype(int).tolist()


def read_video(source: bytes | str | Path, settings: Videos | None = None, name: str | None = None) -> list[Clip]:
    """Read a video as clips of a few frames each; needs the extra `video`.

    Args:
        source: Content of a file, or its path.
        settings: Rates and limits; K2.5's if not given.
        name: How errors call it; the path, if there is one.

    Raises:
        DataError: PyAV is not installed, or the file is no video, damaged, without frames or too long.
    """
    settings = settings or Videos()
    name = name or ("video" if isinstance(source, bytes) else str(source))
    num_frames, rate = _count(source, name)
    while True:
        chosen = chosen_frames(num_frames, rate, settings, name)
        images = _limits(settings, len(chosen))
        frames, fitted, decoded = _take(source, set(chosen), images, name)
        if len(frames) == len(chosen):
            break
        num_frames = decoded  # files announce more frames than they hold: choose again among those that are there
    grid = (fitted.rows, fitted.columns)
    tokens = fitted.rows // images.merge * (fitted.columns // images.merge)
    clips = []
    for start in range(0, len(frames), settings.clip_frames):
        clip = [to_patches(frame, fitted, images) for frame in frames[start : start + settings.clip_frames]]
        clips.append(Clip(torch.cat(clip), (len(clip), *grid), chosen[start] / rate, tokens))
    return clips


def _limits(settings: Videos, num_frames: int) -> Images:
    limit = settings.frame_patch_limit
    if settings.patch_limit is not None:
        limit = max(1, min(limit, round(settings.patch_limit / num_frames)))
    return settings.images.model_copy(update={"patch_limit": limit})


def _count(source: bytes | str | Path, name: str) -> tuple[int, float]:
    """Return the number of frames, as announced or else as counted, and how many there are in a second."""
    with _stream(source, name) as (container, stream):
        rate = stream.average_rate or stream.guessed_rate
        return stream.frames or sum(1 for _ in container.decode(stream)), float(rate or 0)


def _take(source: bytes | str | Path, wanted: set[int], images: Images, name: str) -> tuple[list[np.ndarray], Fit, int]:
    """Decode up to the last wanted frame.

    Returns:
        The wanted frames that are there, upright and resized, how they lie on tokens, and how many were decoded.
    """
    taken: list[np.ndarray] = []
    fitted = Fit(0, 0, 0, 0)
    number = 0
    with _stream(source, name) as (container, stream):
        for number, frame in enumerate(container.decode(stream), start=1):
            if number - 1 in wanted:
                pixels = np.rot90(frame.to_ndarray(format="rgb24"), round(getattr(frame, "rotation", 0) / 90))
                if not taken:
                    fitted = fit(pixels.shape[1], pixels.shape[0], images, name)
                size = (fitted.width, fitted.height)
                taken.append(np.asarray(Image.fromarray(pixels).resize(size, Image.Resampling.BICUBIC)))
            if len(taken) == len(wanted):
                break
    return taken, fitted, number


@contextmanager
def _stream(source: bytes | str | Path, name: str) -> Generator[tuple[Any, Any]]:
    """Open the first video stream of a file."""
    try:
        av = import_module("av")
    except ImportError as problem:
        raise DataError(
            f"{name}: reading a video needs PyAV; found {problem}; install it with `{install_command('video')}`"
        ) from None
    try:
        with av.open(BytesIO(source) if isinstance(source, bytes) else str(source)) as container:
            if not container.streams.video:
                raise DataError(f"{name}: holds no video; found {len(container.streams)} other streams; give a video")
            yield container, container.streams.video[0]
    except (av.FFmpegError, UnicodeDecodeError) as problem:  # the second where its labels are no text
        raise DataError(
            f"{name}: not a video that can be read; found a problem: {getattr(problem, 'strerror', problem)}; "
            "give a whole file"
        ) from None
