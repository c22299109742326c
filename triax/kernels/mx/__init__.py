"""Weights in fewer bits, in the forms of the released checkpoints: MXFP4, FP8 blocks and INT4 groups.

One module a form, each with `quantize` and `dequantize`: `mxfp4`, `fp8`, `int4`. They are the only quantisers of the
project, so what is exported is what training saw. Their results are bit for bit those of `reference`. `mxfp8` rounds
what goes into products with MXFP4 weights, and `experts` computes routed experts whose weights stay as they are stored.
"""

from triax.kernels.mx import fp8, int4, mxfp4

__all__ = ["fp8", "int4", "mxfp4"]
