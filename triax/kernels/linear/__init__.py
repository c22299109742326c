"""Matrix products of a layer, also on processors that hold bf16 numbers but cannot multiply them.

There torch's own bf16 products run many times slower than fp32, so the operands are rounded to bf16 and multiplied by
the fp32 units: what bf16 units with fp32 accumulation would return.
"""

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from triax import machine
from triax.kernels.linear import rounded


def linear(
    hidden: Float[Tensor, "*rows I"], weight: Float[Tensor, "O I"], bias: Float[Tensor, " O"] | None = None
) -> Float[Tensor, "*rows O"]:
    """Return `hidden weight^T`, plus the bias if any; under autocast in its format.

    Under bf16 autocast on a CPU without bf16 instructions operands and result are rounded to bf16, and the gradient of
    the weight comes in the weight's own format; everywhere else this is torch's own product.
    """
    kind = hidden.device.type
    if (
        kind == "cpu"
        and torch.is_autocast_enabled(kind)
        and hidden.dtype is not torch.float64  # which autocast leaves alone
        and emulates(torch.get_autocast_dtype(kind), kind)
    ):
        return rounded.linear(hidden, weight, bias)
    return F.linear(hidden, weight, bias)


def emulates(dtype: torch.dtype, device: str) -> bool:
    """Return whether this kind of device holds numbers of the format but multiplies them only by slow detours."""
    return device == "cpu" and dtype is torch.bfloat16 and not machine.has_bf16()


def operand(tensor: Float[Tensor, "*shape"], dtype: torch.dtype) -> Float[Tensor, "*shape"]:
    """Round a tensor to a format; where that is emulated, return the rounded numbers in fp32, ready for a product."""
    narrow = tensor.to(dtype)
    return narrow.float() if emulates(dtype, tensor.device.type) else narrow
