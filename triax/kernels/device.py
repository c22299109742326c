"""What kernels of several operations share: how they are launched, and functions that run inside them.

`no_type_check` keeps the tests' shape hook off: wrapped by it, interpreted kernels do not find each other.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Any, no_type_check

import triton
import triton.language as tl


@contextmanager
def assembler() -> Iterator[None]:
    """Assemble with ptxas 12.9, which Triton's wheel carries too.

    Its 12.8 makes code of some kernels that reads a uniform register before writing it: a matrix product then takes
    its operand from anywhere in shared memory, and the kernel faults or, worse, does not.
    """
    # Triton's own `scope` copies the environment: 40 us at every launch
    settings = triton.knobs.nvidia.__dict__
    before = settings.get("ptxas")
    settings["ptxas"] = _newer_ptxas()
    try:
        yield
    finally:
        if before is None:
            del settings["ptxas"]
        else:
            settings["ptxas"] = before


@lru_cache
def _newer_ptxas() -> str:
    tools: Any = triton.knobs.nvidia
    return tools.ptxas_blackwell.path


def launch(kernel: Any, grid: tuple[int, ...], *arguments: Any, **options: Any) -> None:
    """Run a kernel unless there is nothing to do.

    Args:
        kernel: The kernel.
        grid: Programs along each axis.
        arguments: Its arguments in order.
        options: Its constants by name, `num_warps`, `num_stages`, `maxnreg`.
    """
    if all(grid):
        with assembler():
            kernel[grid](*arguments, **options)


@triton.jit
@no_type_check
def tanh(x, FAST: tl.constexpr):
    """Hyperbolic tangent in fp32, to a few units in the last place, near zero too.

    FAST is one instruction that is within 2^-11 of the value, a quarter of what rounding to bf16 costs.
    """
    if FAST:
        result = tl.inline_asm_elementwise(
            "tanh.approx.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )
    else:
        e = tl.exp(-2.0 * tl.abs(x))
        size = (1.0 - e) / (1.0 + e)
        square = x * x
        near = x * (1.0 - square * (1 / 3 - square * (2 / 15 - square * (17 / 315 - square * (62 / 2835)))))
        result = tl.where(square < 0.0625, near, tl.where(x < 0.0, -size, size))
    return result


@triton.jit
@no_type_check
def sigmoid(x, FAST: tl.constexpr):
    """Logistic function in fp32; FAST as in `tanh`."""
    if FAST:
        return 0.5 + 0.5 * tanh(0.5 * x, True)
    return tl.sigmoid(x)


@triton.jit
@no_type_check
def capped(x, CAP: tl.constexpr, FAST: tl.constexpr):
    """Return `cap tanh(x / cap)`, or x without a cap."""
    if CAP is not None:
        x = CAP * tanh(x * (1.0 / CAP), FAST)
    return x


@triton.jit
@no_type_check
def glu(gate, up, GATE_CAP: tl.constexpr, UP_CAP: tl.constexpr, FAST: tl.constexpr = False):
    """SiTU-GLU of fp32 numbers; SwiGLU without caps; FAST is for results that are rounded to bf16."""
    return capped(gate, GATE_CAP, FAST) * sigmoid(gate, FAST) * capped(up, UP_CAP, FAST)


@triton.jit
@no_type_check
def steepness(x, bent, CAP: tl.constexpr, FAST: tl.constexpr):
    """Return the derivative of `capped`, whose value is `bent`; without FAST exact where it is nearly flat."""
    if FAST:
        return 1.0 - (bent * (1.0 / CAP)) * (bent * (1.0 / CAP))
    e = tl.exp(-2.0 * tl.abs(x / CAP))
    return 4.0 * e / ((1.0 + e) * (1.0 + e))


@triton.jit
@no_type_check
def glu_gradient(upstream, gate, up, GATE_CAP: tl.constexpr, UP_CAP: tl.constexpr, FAST: tl.constexpr = False):
    """Return the value again and the gradients of gate and up, all fp32."""
    openness = sigmoid(gate, FAST)
    bent = capped(gate, GATE_CAP, FAST)
    opened = bent * openness
    slope = openness
    if GATE_CAP is not None:
        slope *= steepness(gate, bent, GATE_CAP, FAST)
    slope += opened * (1.0 - openness)
    passing = capped(up, UP_CAP, FAST)
    to_up = upstream * opened
    if UP_CAP is not None:
        to_up *= steepness(up, passing, UP_CAP, FAST)
    return opened * passing, upstream * slope * passing, to_up
