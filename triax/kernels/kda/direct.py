"""The gradient of KDA's operations on a GPU, for compiled graphs and, much cheaper, outside of them.

`torch.library.custom_op` hides an operation from `torch.compile`, and costs more than half a millisecond of Python for
a forward and a backward: in a training step that is as much as the kernels take.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


class Pass(NamedTuple):
    """A forward or backward pass."""

    plain: Callable[..., tuple[Tensor, ...]]
    """The function."""
    opaque: Any
    """The same as a custom operation."""


def with_gradient(forward: Pass, backward: Pass, num_streams: int) -> Callable[..., tuple[Tensor, ...]]:
    """Return the forward pass with its gradient, as it runs where it is called.

    Args:
        forward: Takes streams, the first states or none, and numbers; returns what was read, two kinds of states, and
            two tensors for the backward pass.
        backward: Takes the streams, these two, three gradients, and the numbers but the last; returns a gradient for
            each stream and for the first states.
        num_streams: Number of streams.
    """
    save = partial(_save, num_streams)
    forward.opaque.register_autograd(partial(_backward, backward.opaque), setup_context=save)

    class Direct(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *inputs: Any) -> tuple[Tensor, ...]:
            outputs = forward.plain(*inputs)
            save(ctx, inputs, outputs)
            return outputs

        @staticmethod
        @once_differentiable
        def backward(ctx: Any, *gradients: Any) -> tuple[Any, ...]:
            return _backward(backward.plain, ctx, *gradients)

    def run(*inputs: Any) -> tuple[Tensor, ...]:
        return forward.opaque(*inputs) if torch.compiler.is_compiling() else Direct.apply(*inputs)

    return run


def _save(num_streams: int, ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.save_for_backward(*inputs[:num_streams], *output[3:])
    ctx.mark_non_differentiable(*output[3:])
    ctx.set_materialize_grads(False)  # or what is kept of all chunks would get gradients of zeros as large
    state = inputs[num_streams]
    ctx.of_state = None if state is None else state.dtype
    ctx.memories = [(x.shape, x.dtype) for x in output[1:3]]
    ctx.numbers = inputs[num_streams + 1 : -1]


def _backward(operation: Callable[..., Any], ctx: Any, *gradients: Tensor | None) -> tuple[Any, ...]:
    saved = ctx.saved_tensors  # read once: under recomputation a second look finds nothing
    value = saved[2]
    d_read = torch.zeros_like(value) if gradients[0] is None else gradients[0]
    d_memories = [
        value.new_zeros(shape, dtype=dtype) if given is None else given
        for given, (shape, dtype) in zip(gradients[1:3], ctx.memories, strict=True)
    ]
    *streams, d_state = operation(*saved, d_read, *d_memories, *ctx.numbers)
    of_numbers = (None for _ in range(len(ctx.numbers) + 1))
    return *streams, None if ctx.of_state is None else d_state.to(ctx.of_state), *of_numbers
