"""Compile CUDA C++ at run time and start its kernels: no build step, no toolkit, no headers."""

import ctypes
from functools import lru_cache
from importlib.resources import files
from importlib.util import find_spec
from typing import Any, NamedTuple

import torch
from torch import Tensor

from triax.errors import UnsupportedError

Argument = Tensor | None | int | float | ctypes.c_longlong


class Kernel(NamedTuple):
    """One variant of a source file beside this one; its entry has the file's name."""

    name: str
    defines: tuple[tuple[str, str | int], ...]
    shared_bytes: int
    threads: int


def source(name: str) -> str:
    """Return the text of one kernel: what all share, then its own."""
    shared = ("matrix.cuh", "walk.cuh") if name.startswith("scan") else ("matrix.cuh",)
    folder = files("triax.kernels.kda.hopper")
    return "\n".join((folder / file).read_text() for file in (*shared, f"{name}.cu"))


def available(device: torch.device) -> bool:
    """Say whether kernels can be compiled for this device: Hopper, with NVIDIA's Python bindings installed."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] == 9 and bindings_installed()


@lru_cache(maxsize=1)
def bindings_installed() -> bool:
    """Say whether the `cuda-bindings` distribution is here."""
    return find_spec("cuda") is not None and find_spec("cuda.bindings") is not None


@lru_cache(maxsize=64)
def binary(name: str, defines: tuple[tuple[str, str | int], ...]) -> bytes:
    """Compile for sm_90a; needs no GPU.

    Raises:
        UnsupportedError: The compiler refuses the source, with what it said.
    """
    from cuda.bindings import nvrtc

    options = [
        "--gpu-architecture=sm_90a",
        "-std=c++17",
        "-default-device",
        *(f"-D{key}={value}" for key, value in defines),
    ]
    program = _checked(nvrtc.nvrtcCreateProgram(source(name).encode(), f"{name}.cu".encode(), 0, [], []))
    (status,) = nvrtc.nvrtcCompileProgram(program, len(options), [option.encode() for option in options])
    if status != nvrtc.nvrtcResult.NVRTC_SUCCESS:
        log = bytes(_checked(nvrtc.nvrtcGetProgramLogSize(program)))
        _checked(nvrtc.nvrtcGetProgramLog(program, log))
        said = log.decode().rstrip("\0\n ")
        raise UnsupportedError(
            f"kernels.kda.hopper: the run-time compiler refuses `{name}`; it says `{said}`; install "
            "a newer CUDA, or set TRIAX_KERNELS=reference"
        )
    code = bytes(_checked(nvrtc.nvrtcGetCUBINSize(program)))
    _checked(nvrtc.nvrtcGetCUBIN(program, code))
    _checked(nvrtc.nvrtcDestroyProgram(program))
    return code


@lru_cache(maxsize=256)
def _function(kernel: Kernel, device: int) -> Any:
    from cuda.bindings import driver

    with torch.cuda.device(device):
        torch.cuda.current_stream().synchronize()  # the device's context exists from here on
        module = _checked(driver.cuModuleLoadData(binary(kernel.name, kernel.defines)))
        function = _checked(driver.cuModuleGetFunction(module, kernel.name.encode()))
        limit = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        _checked(driver.cuFuncSetAttribute(function, limit, kernel.shared_bytes))
    return function


def launch(kernel: Kernel, blocks: int, device: torch.device, *arguments: Argument) -> None:
    """Start a kernel on the current stream; integers are 32 bits wide unless given as `c_longlong`."""
    if not blocks:
        return
    from cuda.bindings import driver

    values = tuple(_value(x) for x in arguments)
    types = tuple(_type(x) for x in arguments)
    index = torch.cuda.current_device() if device.index is None else device.index
    function = _function(kernel, index)
    with torch.cuda.device(index):
        stream = torch.cuda.current_stream().cuda_stream
        _checked(
            driver.cuLaunchKernel(
                function, blocks, 1, 1, kernel.threads, 1, 1, kernel.shared_bytes, stream, (values, types), 0
            )
        )


def _value(argument: Argument) -> Any:
    if argument is None:
        return 0
    if isinstance(argument, Tensor):
        return argument.data_ptr()
    return argument.value if isinstance(argument, ctypes.c_longlong) else argument


def _type(argument: Argument) -> Any:
    if argument is None or isinstance(argument, Tensor):
        return ctypes.c_void_p
    if isinstance(argument, float):
        return ctypes.c_float
    return ctypes.c_longlong if isinstance(argument, ctypes.c_longlong) else ctypes.c_int


def _checked(outcome: tuple[Any, ...]) -> Any:
    status, *rest = outcome
    if int(status) != 0:
        raise RuntimeError(f"kernels.kda.hopper: a call of CUDA failed; found `{status}`; see CUDA's documentation")
    return rest[0] if rest else None
