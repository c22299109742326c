"""Safetensors files by their headers: names, shapes and places of tensors, without reading one of them."""

import json
import mmap
import os
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from triax.errors import CheckpointError

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "U16": torch.uint16,
    "U32": torch.uint32,
    "U64": torch.uint64,
    "BOOL": torch.bool,
}
SIZES = {name: dtype.itemsize for name, dtype in DTYPES.items()}
LONGEST_HEADER = 10**8  # what the format allows


class Stored(NamedTuple):
    """One tensor of a file, as its header tells."""

    path: Path
    name: str
    shape: tuple[int, ...]
    dtype: str
    start: int
    """First byte in the file."""
    nbytes: int


def read_header(path: Path) -> list[Stored]:
    """List the tensors of a safetensors file and hold their places against the size of the file.

    Raises:
        CheckpointError: It is not there, cut short, too long, altered or not such a file.
    """
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if size < 8 or not 2 <= length <= LONGEST_HEADER or length > size - 8:
                raise _damaged(path, size, f"its header would have {length:,} bytes")
            table = json.loads(file.read(length), object_pairs_hook=_without_twins)
    except OSError as problem:
        raise _damaged(path, None, problem.strerror or str(problem)) from None
    except (ValueError, RecursionError) as problem:
        raise _damaged(path, path.stat().st_size, f"its header is damaged: {problem}") from None
    if not isinstance(table, dict):
        raise _damaged(path, size, "its header is no table")
    table.pop("__metadata__", None)
    first = 8 + length
    stored = []
    for name, entry in table.items():
        try:
            (begin, end), shape, dtype = entry["data_offsets"], tuple(entry["shape"]), entry["dtype"]
            if not 0 <= begin <= end or end - begin != prod(shape) * SIZES[dtype] or any(n < 0 for n in shape):
                raise ValueError("bytes and shape differ")
        except (KeyError, TypeError, ValueError):
            raise _damaged(path, size, f"its header is damaged at `{name}`") from None
        stored.append(Stored(path, name, shape, dtype, first + begin, end - begin))
    place = first
    for one in sorted(stored, key=lambda one: (one.start, one.nbytes)):
        if one.start != place:
            raise _damaged(path, size, f"its header is damaged: `{one.name}` does not begin where another ends")
        place += one.nbytes
    if place != size:
        raise _damaged(path, size, f"its header announces {place:,} bytes")
    return stored


@contextmanager
def mapped(stored: Stored, start: int = 0, stop: int | None = None) -> Generator[Tensor]:
    """Give bytes `start` to `stop` of a tensor from the file's memory map, which lasts as long as the block.

    The map is private: whatever is written to the tensor never reaches the file.
    """
    stop = stored.nbytes if stop is None else stop
    if start == stop:
        yield torch.empty(0, dtype=torch.uint8)
        return
    begin = stored.start + start
    page = begin - begin % mmap.ALLOCATIONGRANULARITY
    with stored.path.open("rb") as file:
        if os.fstat(file.fileno()).st_size < stored.start + stop:
            raise _damaged(stored.path, os.fstat(file.fileno()).st_size, "it was longer when its header was read")
        pages = mmap.mmap(file.fileno(), stored.start + stop - page, access=mmap.ACCESS_COPY, offset=page)
    # Unmapped when the last tensor that looks at it goes: closing it here would leave a tensor without memory.
    yield torch.frombuffer(pages, dtype=torch.uint8, offset=begin - page)


def read_tensor(stored: Stored) -> Tensor:
    """Return a copy of a whole tensor."""
    with mapped(stored) as content:
        return content.clone().view(DTYPES[stored.dtype]).view(stored.shape)


def write_header(tensors: Mapping[str, tuple[str, tuple[int, ...]]]) -> tuple[bytes, dict[str, int]]:
    """Return a file's header and the place of each tensor in the file, from dtype and shape by name."""
    table: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    places, end = {}, 0
    for name, (dtype, shape) in tensors.items():
        begin, end = end, end + prod(shape) * SIZES[dtype]
        table[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, end]}
        places[name] = begin
    text = json.dumps(table, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text, {name: 8 + len(text) + place for name, place in places.items()}


def _without_twins(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    table = dict(pairs)
    if len(table) != len(pairs):
        raise ValueError("it names a tensor twice")
    return table


def _damaged(path: Path, size: int | None, why: str) -> CheckpointError:
    found = "no file" if size is None else f"{size:,} bytes"
    return CheckpointError(f"{path}: cut short or not a safetensors file; found {found}, and {why}; copy it again")
