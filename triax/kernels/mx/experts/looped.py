"""Routed experts with MXFP4 weights, one expert at a time: its weights are made whole, used and forgotten.

The definition that the kernels are held to; differentiable in tokens and shares.

Source: K3 report (arXiv 2607.24653) sections 2.3 (equation 11) and 4.1.4.
"""

from collections.abc import Callable

import torch
from jaxtyping import Float, Int
from torch import Tensor

from triax.kernels.mx.mxfp4 import Mxfp4, dequantize


def experts(
    hidden: Float[Tensor, "T L"],
    expert: Int[Tensor, "T k"],
    share: Float[Tensor, "T k"],
    gate: Mxfp4,
    up: Mxfp4,
    down: Mxfp4,
    activation: Callable[[Tensor, Tensor], Tensor],
    prepare: Callable[[Tensor], Tensor],
) -> Float[Tensor, "T L"]:
    """See `triax.kernels.mx.experts.experts`; `prepare` changes the rows that go into a product.

    All is computed in fp32 at least; what the activation returns is rounded once to the format of the tokens.
    """
    wide = torch.promote_types(hidden.dtype, torch.float32)
    output = torch.zeros(hidden.shape, dtype=wide, device=hidden.device)
    for one in expert.unique().tolist():
        token, slot = (expert == one).nonzero(as_tuple=True)
        opening, passing, back = (
            dequantize(w.packed[one], w.scale[one], torch.float32).to(wide) for w in (gate, up, down)
        )
        rows = prepare(hidden[token]).to(wide)
        inner = activation(rows @ opening.T, rows @ passing.T).to(hidden.dtype)
        returned = prepare(inner).to(wide) @ back.T
        output = output.index_add(0, token, returned * share[token, slot, None].to(wide))
    return output.to(hidden.dtype)
