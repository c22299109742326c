"""MXFP8: eight bits a number and one power of two for 32 of them, as the inputs of experts with MXFP4 weights are kept.

The scale is 2^(floor(log2 amax) - 8), so the largest of a block lands in [256, 512) and what is above 448 becomes 448.
A rounded number has at most four significant bits: bf16 holds it exactly, and a product with bf16 operands loses
nothing.

Source: OCP Microscaling Formats v1.0 section 6.3; K3 report (arXiv 2607.24653) section 4.1.4.
"""

import torch
from jaxtyping import Float
from torch import Tensor

from triax.kernels.dispatch import mode
from triax.kernels.mx import reference
from triax.kernels.mx.reference import BIAS, E4M3, GROUP


def rounded(rows: Float[Tensor, "*rows C"]) -> Float[Tensor, "*rows C"]:
    """Return each block of 32 numbers of a row as MXFP8 keeps it, to nearest with ties to even, in the rows' format.

    A block that holds something that is not finite is undefined.

    Args:
        rows: Numbers in bf16 or wider, with a multiple of 32 in a row.
    """
    if mode() == "reference":
        return reference.round_mxfp8(rows.detach().cpu()).to(rows.device, rows.dtype)
    blocks = rows.float().unflatten(-1, (-1, GROUP))
    _, exponent = blocks.abs().amax(-1, keepdim=True).frexp()  # the largest lies in [2^(exponent - 1), 2^exponent)
    exponent = (exponent - 1 - 8).clamp(min=-BIAS).masked_fill(blocks.abs().amax(-1, keepdim=True) == 0, 0)
    scaled = torch.ldexp(blocks, -exponent).clamp(-E4M3[-1], E4M3[-1])
    return torch.ldexp(scaled.to(torch.float8_e4m3fn).float(), exponent).flatten(-2).to(rows.dtype)
