"""The forms in which released files store a matrix: plain, or as codes with scales."""

from math import prod
from typing import Literal, NamedTuple, get_args

from triax.checkpoint.names import TensorSpec

Form = Literal["plain", "mxfp4", "fp8", "int4"]
FORMS: tuple[Form, ...] = get_args(Form)

GROUP = 32  # input channels that share a scale of MXFP4 or INT4
BLOCK = 128  # rows and columns that share a scale of FP8


class Part(NamedTuple):
    """One tensor of a file that holds a matrix or a part of it."""

    name: str
    shape: tuple[int, ...]
    dtype: str


def parts(spec: TensorSpec, form: Form) -> tuple[Part, ...]:
    """List the tensors that hold a weight in this form, codes first.

    Source: the tensor lists of Kimi-K3 (`mxfp4-pack-quantized`), Kimi-K2 (FP8 blocks) and Kimi-K2.5 (INT4) as released.
    """
    if form == "plain":
        return (Part(spec.name, spec.shape, spec.dtype),)
    rows, columns = spec.shape
    if form == "mxfp4":
        return (
            Part(f"{spec.name}_packed", (rows, columns // 2), "U8"),
            Part(f"{spec.name}_scale", (rows, -(-columns // GROUP)), "U8"),
        )
    if form == "int4":
        return (
            Part(f"{spec.name}_packed", (rows, -(-columns // 8)), "I32"),
            Part(f"{spec.name}_scale", (rows, -(-columns // GROUP)), "BF16"),
            Part(f"{spec.name}_shape", (2,), "I32"),
        )
    return (
        Part(spec.name, spec.shape, "F8_E4M3"),
        Part(f"{spec.name}_scale_inv", (-(-rows // BLOCK), -(-columns // BLOCK)), "F32"),
    )


def can_be_packed(spec: TensorSpec) -> bool:
    """Whether a file may hold codes and scales in place of this weight: only matrices of products, never the rest."""
    return len(spec.held) == 2 and spec.dtype == "BF16" and spec.name.endswith(".weight") and spec.shape == spec.held


def fits(spec: TensorSpec, form: Form) -> bool:
    """Whether the weight's columns are whole groups of the form."""
    return form in ("plain", "fp8") or spec.shape[1] % GROUP == 0


# What FP8 leaves alone beside embedding, head and router: KDA's gates, whose errors a recurrence compounds.
_FINE = (".beta.weight", ".decay_down.weight", ".decay_up.weight", ".gate_down.weight", ".gate_up.weight")
_OUTER = ("embed.weight", "head.weight", "router.weight")


def is_released_as(spec: TensorSpec, form: Form) -> bool:
    """Whether the released files that use this form hold this weight in it.

    MXFP4 (K3) and INT4 (K2.5) hold the routed experts, FP8 (K2) every matrix but router, embedding and head.
    """
    if form == "plain" or not can_be_packed(spec):
        return False
    if form == "fp8":
        return not spec.ours.endswith((*_FINE, *_OUTER)) and not spec.ours.startswith(("vision.", "multi_token."))
    return spec.index is not None and not spec.ours.startswith("multi_token.")


def num_values(spec: TensorSpec) -> int:
    """Return the weights that the tensor stands for: padding and scales are none."""
    return prod(spec.held)
