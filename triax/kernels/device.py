"""What kernels of several operations share: how they are launched, and functions that run inside them.

`no_type_check` keeps the tests' shape hook off: wrapped by it, interpreted kernels do not find each other.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, no_type_check

import triton
import triton.language as tl


@contextmanager
def assembler() -> Iterator[None]:
    """Assemble with ptxas 12.9, which Triton's wheel carries too.

    Its 12.8 makes code of some kernels that reads a uniform register before writing it: a matrix product then takes
    its operand from anywhere in shared memory, and the kernel faults or, worse, does not.
    """
    tools: Any = triton.knobs.nvidia
    with tools.scope():
        tools.ptxas = tools.ptxas_blackwell.path
        yield


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
def tanh(x):
    """Hyperbolic tangent in fp32, to a few units in the last place, near zero too."""
    e = tl.exp(-2.0 * tl.abs(x))
    size = (1.0 - e) / (1.0 + e)
    square = x * x
    near = x * (1.0 - square * (1 / 3 - square * (2 / 15 - square * (17 / 315 - square * (62 / 2835)))))
    return tl.where(square < 0.0625, near, tl.where(x < 0.0, -size, size))


@triton.jit
@no_type_check
def capped(x, CAP: tl.constexpr):
    """Return `cap tanh(x / cap)`, or x without a cap."""
    if CAP is not None:
        x = CAP * tanh(x / CAP)
    return x


@triton.jit
@no_type_check
def glu(gate, up, GATE_CAP: tl.constexpr, UP_CAP: tl.constexpr):
    """SiTU-GLU of fp32 numbers; SwiGLU without caps."""
    return capped(gate, GATE_CAP) * tl.sigmoid(gate) * capped(up, UP_CAP)


@triton.jit
@no_type_check
def steepness(x, CAP: tl.constexpr):
    """Return the derivative of `capped`, exact where it is nearly flat."""
    e = tl.exp(-2.0 * tl.abs(x / CAP))
    return 4.0 * e / ((1.0 + e) * (1.0 + e))


@triton.jit
@no_type_check
def glu_gradient(upstream, gate, up, GATE_CAP: tl.constexpr, UP_CAP: tl.constexpr):
    """Return the value again and the gradients of gate and up, all fp32."""
    openness = tl.sigmoid(gate)
    opened = capped(gate, GATE_CAP) * openness
    slope = openness
    if GATE_CAP is not None:
        slope *= steepness(gate, GATE_CAP)
    slope += opened * (1.0 - openness)
    passing = capped(up, UP_CAP)
    to_up = upstream * opened
    if UP_CAP is not None:
        to_up *= steepness(up, UP_CAP)
    return opened * passing, upstream * slope * passing, to_up
