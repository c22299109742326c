"""Matrix products of a layer, also on processors that hold bf16 numbers but cannot multiply them.

There torch's own bf16 products run many times slower than fp32, so the operands are rounded to bf16 and multiplied by
the fp32 units: what bf16 units with fp32 accumulation would return.
"""

from importlib.util import find_spec

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from triax import machine
from triax.kernels.dispatch import mode
from triax.kernels.linear import rounded, tiled


def linear(
    hidden: Float[Tensor, "*rows I"], weight: Float[Tensor, "O I"], bias: Float[Tensor, " O"] | None = None
) -> Float[Tensor, "*rows O"]:
    """Return `hidden weight^T`, plus the bias if any; under autocast in its format.

    Under bf16 autocast on a CPU without bf16 instructions operands and result are rounded to bf16, and the gradient of
    the weight comes in the weight's own format; everywhere else this is torch's own product.
    """
    if mode() == "batch_invariant":
        return tiled.linear(hidden, weight, bias)
    kind = hidden.device.type
    if (
        kind == "cpu"
        and torch.is_autocast_enabled(kind)
        and hidden.dtype is not torch.float64  # which autocast leaves alone
        and emulates(torch.get_autocast_dtype(kind), kind)
    ):
        return rounded.linear(hidden, weight, bias)
    if kind == "cuda" and bias is None and hidden.numel() == weight.shape[1] and not torch.is_grad_enabled():
        found = of_one_row(hidden, weight)
        if found is not None:
            return found
    return F.linear(hidden, weight, bias)


def of_one_row(
    hidden: Float[Tensor, "*rows I"], weight: Float[Tensor, "O I"], dtype: torch.dtype | None = None
) -> Float[Tensor, "*rows O"] | None:
    """Return the product of one row, summed in fp32, where there is a kernel for that; no gradient."""
    if torch.is_autocast_enabled("cuda") or mode() != "fast" or not find_spec("triton"):
        return None
    from triax.kernels.linear import single

    return single.linear(hidden, weight, dtype) if single.unsupported(hidden, weight) is None else None


def linear_fp32(hidden: Float[Tensor, "T I"], weight: Float[Tensor, "O I"]) -> Float[Tensor, "T O"]:
    """Return `hidden weight^T` in fp32 (fp64 for such operands).

    Where nobody learns, a GPU's matrix units add up bf16 products in fp32 and the result is never rounded to bf16;
    elsewhere the operands are made wide first. The caller sees to it that no autocast rounds them.
    """
    is_narrow = hidden.dtype is weight.dtype and hidden.dtype in (torch.bfloat16, torch.float16)
    if hidden.is_cuda and is_narrow and not torch.is_grad_enabled() and mode() != "batch_invariant":
        found = of_one_row(hidden, weight, torch.float32) if len(hidden) == 1 else None
        return torch.mm(hidden, weight.T, out_dtype=torch.float32) if found is None else found
    dtype = torch.promote_types(hidden.dtype, torch.float32)
    return linear(hidden.to(dtype), weight.to(dtype))


def linear_by_head(hidden: Float[Tensor, "T H I"], weight: Float[Tensor, "H O I"]) -> Float[Tensor, "T H O"]:
    """Return `hidden weight^T` of every head, each with a weight of its own."""
    if mode() == "batch_invariant":
        return torch.stack([tiled.linear(hidden[:, h], weight[h]) for h in range(len(weight))], dim=1)
    return torch.einsum("thi,hoi->tho", hidden, weight)


def emulates(dtype: torch.dtype, device: str) -> bool:
    """Return whether this kind of device holds numbers of the format but multiplies them only by slow detours."""
    return device == "cpu" and dtype is torch.bfloat16 and not machine.has_bf16()


def operand(tensor: Float[Tensor, "*shape"], dtype: torch.dtype) -> Float[Tensor, "*shape"]:
    """Round a tensor to a format; where that is emulated, return the rounded numbers in fp32, ready for a product."""
    narrow = tensor.to(dtype)
    return narrow.float() if emulates(dtype, tensor.device.type) else narrow
