"""The CUDA C++ sources beside this file as kernels, and how they are started."""

from ctypes import c_float, c_int, c_longlong
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from triax.kernels import nvrtc

Argument = Tensor | None | int | float | c_longlong
FOLDER = Path(__file__).parent


class Kernel(NamedTuple):
    """One variant of a source file beside this one; its entry has the file's name."""

    name: str
    defines: tuple[tuple[str, str | int], ...]
    shared_bytes: int
    threads: int


def sources(name: str) -> tuple[Path, ...]:
    """Return the files of one kernel: what all share, what its kind shares, then its own."""
    kind = {"scan": "walk", "scan_back": "walk", "prepare": "pairs", "gradients": "pairs"}.get(name)
    files = ("matrix.cuh", *([f"{kind}.cuh"] if kind else []), f"{name}.cu")
    return tuple(FOLDER / file for file in files)


def available(device: torch.device) -> bool:
    """Say whether kernels can be compiled for this device: Hopper, with NVIDIA's Python bindings installed."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] == 9 and nvrtc.is_available()


def binary(name: str, defines: tuple[tuple[str, str | int], ...]) -> bytes:
    """Compile for sm_90a; needs no GPU."""
    return nvrtc.compile("\n".join(path.read_text() for path in sources(name)), dict(defines), "sm_90a")


@lru_cache(maxsize=256)
def _function(kernel: Kernel, device: int) -> Any:
    return nvrtc.load(sources(kernel.name), kernel.name, kernel.defines, kernel.shared_bytes, device)


def launch(kernel: Kernel, blocks: int, device: torch.device, *arguments: Argument) -> None:
    """Start a kernel on the current stream; integers are 32 bits wide unless given as `c_longlong`."""
    if not blocks:
        return
    index = torch.cuda.current_device() if device.index is None else device.index
    function = _function(kernel, index)
    with torch.cuda.device(index):
        nvrtc.launch(function, (blocks,), kernel.threads, kernel.shared_bytes, [_typed(x) for x in arguments])


def _typed(argument: Argument) -> Any:
    if isinstance(argument, int):
        return c_int(argument)
    return c_float(argument) if isinstance(argument, float) else argument
