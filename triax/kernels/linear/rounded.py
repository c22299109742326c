"""The product of bf16-rounded operands by fp32 units, forwards and backwards."""

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from torch.autograd.function import once_differentiable


def linear(
    hidden: Float[Tensor, "*rows I"], weight: Float[Tensor, "O I"], bias: Float[Tensor, " O"] | None
) -> Float[Tensor, "*rows O"]:
    """Multiply bf16 operands, sum in fp32, return bf16; each gradient has the format of what it belongs to."""
    return _Linear.apply(hidden, weight, bias)


class _Linear(torch.autograd.Function):
    """Keeps the input as bf16, and the weight."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        narrow = hidden.to(torch.bfloat16)
        ctx.save_for_backward(narrow, weight)
        ctx.hidden_dtype, ctx.bias_dtype = hidden.dtype, None if bias is None else bias.dtype
        with torch.autocast(hidden.device.type, enabled=False):
            product = narrow.float() @ _rounded(weight).T
            return (product if bias is None else product.add_(_rounded(bias))).to(torch.bfloat16)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, ...]:
        (grad,) = grads
        narrow, weight = ctx.saved_tensors
        to_hidden = to_weight = to_bias = None
        with torch.autocast(grad.device.type, enabled=False):
            grad = _rounded(grad)
            rows = grad.flatten(0, -2)
            if ctx.needs_input_grad[0]:
                to_hidden = (grad @ _rounded(weight)).to(ctx.hidden_dtype)
            if ctx.needs_input_grad[1]:
                to_weight = (rows.T @ narrow.flatten(0, -2).float()).to(weight.dtype)
            if ctx.needs_input_grad[2]:
                to_bias = rows.sum(0).to(ctx.bias_dtype)
        return to_hidden, to_weight, to_bias


def _rounded(tensor: Tensor) -> Tensor:
    return tensor.to(torch.bfloat16).float()
