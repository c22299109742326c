"""CUDA C++ compiled when it is first needed, with the compiler that torch's CUDA builds bring; no build step."""

from collections.abc import Mapping, Sequence
from ctypes import addressof, c_void_p
from functools import lru_cache
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from triax.errors import UnsupportedError

DEFAULT_SHARED = 48 * 1024
"""Bytes of shared memory that a block gets without asking."""


def is_available() -> bool:
    """Return whether this installation can compile and load CUDA C++."""
    return find_spec("cuda") is not None and find_spec("cuda.bindings") is not None


@lru_cache  # every launch asks
def driver() -> Any:
    """Return the bindings of CUDA's driver."""
    return import_module("cuda.bindings.driver")


def compile(source: str, defines: Mapping[str, str | int], architecture: str) -> bytes:
    """Return machine code.

    Args:
        source: CUDA C++ without includes.
        defines: Macros.
        architecture: Such as `sm_90a`.

    Raises:
        UnsupportedError: The compiler is absent or refuses the source; the message ends in its own words.
    """
    try:
        nvrtc: Any = import_module("cuda.bindings.nvrtc")
    except ImportError:
        raise UnsupportedError(
            "kernels.nvrtc: the package `cuda-bindings` is missing; found no `cuda.bindings`; install it, or set "
            "TRIAX_KERNELS=reference"
        ) from None
    _, program = nvrtc.nvrtcCreateProgram(source.encode(), b"kernel.cu", 0, [], [])
    macros = [f"-D{name}={value}".encode() for name, value in defines.items()]
    options = [f"--gpu-architecture={architecture}".encode(), b"-std=c++17", *macros]
    (problem,) = nvrtc.nvrtcCompileProgram(program, len(options), options)
    if int(problem):
        _, length = nvrtc.nvrtcGetProgramLogSize(program)
        log = b" " * length
        nvrtc.nvrtcGetProgramLog(program, log)
        raise UnsupportedError(
            f"kernels.nvrtc: the compiler refuses a kernel; found {log.decode(errors='replace').strip(chr(0))}"
        )
    _, length = nvrtc.nvrtcGetCUBINSize(program)
    code = b" " * length
    nvrtc.nvrtcGetCUBIN(program, code)
    nvrtc.nvrtcDestroyProgram(program)
    return code


@lru_cache(maxsize=256)
def load(
    paths: tuple[Path, ...],
    name: str,
    defines: tuple[tuple[str, str | int], ...],
    shared: int,
    device: int,
    before: str = "",
) -> Any:
    """Compile source files as one text and load one of its kernels.

    Args:
        paths: The source, in order.
        name: The kernel, declared `extern "C"`.
        defines: Macros, name by name.
        shared: Bytes of dynamic shared memory that a block will ask for.
        device: Number of the GPU.
        before: Source that stands before the files.

    Raises:
        UnsupportedError: The source does not compile, or this GPU cannot load it.
    """
    cuda = driver()
    with torch.cuda.device(device):
        major, minor = torch.cuda.get_device_capability(device)
        torch.cuda.current_stream().synchronize()  # the device's context exists from here on
        text = "\n".join((before, *(path.read_text() for path in paths)))
        code = compile(text, dict(defines), f"sm_{major}{minor}{'a' if major >= 9 else ''}")
        module = _checked(cuda.cuModuleLoadData(code))
        function = _checked(cuda.cuModuleGetFunction(module, name.encode()))
        if shared > DEFAULT_SHARED:
            attribute = cuda.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
            _checked(cuda.cuFuncSetAttribute(function, attribute, shared))
    return function


def launch(function: Any, blocks: tuple[int, ...], threads: int, shared: int, arguments: Sequence[Any]) -> None:
    """Start a loaded kernel on torch's current stream.

    Args:
        function: What `load` returned.
        blocks: Blocks of the grid along one to three axes.
        threads: Threads a block.
        shared: Bytes of dynamic shared memory a block.
        arguments: The kernel's arguments in order: tensors, none for a null pointer, or values of `ctypes`.
    """
    values = [
        c_void_p(0 if x is None else x.data_ptr()) if x is None or isinstance(x, Tensor) else x for x in arguments
    ]
    places = (c_void_p * len(values))(*(addressof(value) for value in values))
    stream = torch.cuda.current_stream().cuda_stream
    grid = (*blocks, 1, 1)[:3]
    _checked(driver().cuLaunchKernel(function, *grid, threads, 1, 1, shared, stream, addressof(places), 0))


def _checked(outcome: tuple[Any, ...]) -> Any:
    problem, *rest = outcome
    if int(problem):
        raise UnsupportedError(f"kernels.nvrtc: the driver refuses a kernel; found `{problem}`; use another form")
    return rest[0] if rest else None
