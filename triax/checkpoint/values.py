"""The values of a stored weight, whatever the form in which its file holds them."""

from collections.abc import Generator
from contextlib import contextmanager
from math import prod

import torch
from torch import Tensor

from triax.checkpoint.account import Entry
from triax.checkpoint.forms import BLOCK, GROUP, Form
from triax.checkpoint.header import DTYPES, SIZES, Stored, mapped, read_tensor
from triax.checkpoint.names import TensorSpec
from triax.errors import CheckpointError
from triax.kernels.mx import fp8, int4, mxfp4

ROWS_OF = 2**23  # weights that are looked at together


def read(entry: Entry) -> Tensor:
    """Return a weight as we hold it: unpacked, without padding and singleton axes.

    Raises:
        CheckpointError: Its padding is not zero, or its codes and scales cannot be those of weights.
    """
    spec = entry.spec
    if entry.form != "plain":
        return read_rows(entry, 0, spec.shape[0])
    (stored,) = entry.parts
    with mapped(stored) as content:
        return without_padding(spec, typed(content, stored.dtype), stored).clone()


def read_rows(entry: Entry, start: int, stop: int, *, threads: int | None = None) -> Tensor:
    """Return some rows of a matrix: BF16 from codes and scales, in the stored dtype otherwise.

    Args:
        entry: The weight.
        start: First row; a multiple of 128 for FP8.
        stop: Row after the last.
        threads: How many unpack; as many as torch uses if not given.

    Raises:
        CheckpointError: Its codes and scales cannot be those of weights.
    """
    rows = prod(entry.spec.shape[:-1])
    if entry.form == "plain":
        (stored,) = entry.parts
        with mapped(stored, *_span(stored, start, stop, rows)) as content:
            return typed(content, stored.dtype).view(stop - start, -1).clone()
    where = f"{entry.parts[0].path}: {entry.spec.name}, rows {start} to {stop}"
    with _codes(entry, start, stop) as (code, scale):
        if entry.form == "fp8":
            return fp8.dequantize(code, scale, name=where, threads=threads)
        if entry.form == "int4":
            _check_shape(entry, where)
            return int4.dequantize(code, scale, name=where, threads=threads)
        if mxfp4.is_blank(code, scale):
            raise CheckpointError(f"{where}: every scale is zero under codes that are not; copy the file again")
        return mxfp4.dequantize(code, scale, name=where, threads=threads)


@contextmanager
def _codes(entry: Entry, start: int, stop: int) -> Generator[tuple[Tensor, Tensor]]:
    """Give codes and scales of some rows, as they lie in the file."""
    codes, scales = entry.parts[:2]
    first, last = (start // BLOCK, -(-stop // BLOCK)) if entry.form == "fp8" else (start, stop)
    with (
        mapped(codes, *_span(codes, start, stop, entry.spec.shape[0])) as code_bytes,
        mapped(scales, *_span(scales, first, last, scales.shape[0])) as scale_bytes,
    ):
        yield (
            typed(code_bytes, codes.dtype).view(stop - start, -1),
            typed(scale_bytes, scales.dtype).view(last - first, -1),
        )


def encode(form: Form, values: Tensor, dtype: torch.dtype = torch.bfloat16) -> tuple[Tensor, ...]:
    """Return what a file holds of some rows: the values in `dtype`, or codes and scales."""
    if form == "plain":
        return (values.to(dtype),)
    if form == "mxfp4":
        return mxfp4.quantize(values, threads=1)
    if form == "fp8":
        return fp8.quantize(values, threads=1)
    return int4.quantize(values, threads=1)[:2]


def encode_like(entry: Entry, values: Tensor, start: int) -> tuple[Tensor, ...]:
    """Return codes and scales of some rows: those of `entry` where its values are these, fresh ones elsewhere.

    Which scale a release chose cannot be told from its values: a group of 0, 2 and 4 under one scale is 0, 1 and 2
    under twice that scale. So what did not change keeps the pair that it had, group by group.

    Args:
        entry: The packed weight of the release.
        values: Rows of the weight to store.
        start: Number of the first row; a multiple of 128 for FP8.

    Raises:
        CheckpointError: The codes and scales of `entry` cannot be those of weights.
    """
    stop, columns = start + values.shape[0], values.shape[1]
    differs = read_rows(entry, start, stop, threads=1).float().view(torch.int32) != values.float().view(torch.int32)
    across, down = (BLOCK, BLOCK) if entry.form == "fp8" else (GROUP, 1)
    padded = torch.nn.functional.pad(differs, (0, -columns % across, 0, -differs.shape[0] % down))
    changed = padded.unflatten(1, (-1, across)).unflatten(0, (-1, down)).any(dim=(1, 3))
    with _codes(entry, start, stop) as (code, scale):
        if not bool(changed.any()):
            return code.clone(), scale.clone()
        fresh_code, fresh_scale = encode(entry.form, values)
        of_code = changed.repeat_interleave(down, 0).repeat_interleave(across * code.shape[1] // columns, 1)
        of_code = of_code[: code.shape[0], : code.shape[1]]
        if entry.form == "fp8":  # torch chooses between numbers of this type only as bytes
            mixed = torch.where(of_code, fresh_code.view(torch.uint8), code.view(torch.uint8)).view(code.dtype)
        else:
            mixed = torch.where(of_code, fresh_code, code)
        return mixed, torch.where(changed, fresh_scale, scale)


def check_codes(entry: Entry) -> None:
    """Refuse codes and scales that stand for no numbers; MXFP4, whose codes all are numbers, is not unpacked for it.

    Raises:
        CheckpointError: It names the first place.
    """
    rows, columns = entry.spec.shape
    step = max(BLOCK, ROWS_OF // columns // BLOCK * BLOCK)
    for start in range(0, rows, step):
        stop = min(rows, start + step)
        if entry.form != "mxfp4":
            read_rows(entry, start, stop, threads=1)
            continue
        where = f"{entry.parts[0].path}: {entry.spec.name}, rows {start} to {stop}"
        with _codes(entry, start, stop) as (code, scale):
            mxfp4.check_scale(code, scale, name=where)
            if mxfp4.is_blank(code, scale):
                raise CheckpointError(f"{where}: every scale is zero under codes that are not; copy the file again")


def _check_shape(entry: Entry, where: str) -> None:
    told = read_tensor(entry.parts[2]).tolist()
    if told != list(entry.spec.shape):
        raise CheckpointError(
            f"{where}: weight_shape says {told}; the config says {list(entry.spec.shape)}; copy the file again"
        )


def without_padding(spec: TensorSpec, tensor: Tensor, stored: Stored) -> Tensor:
    """Take singleton axes and padding off; what is cut away must be zero."""
    flat = tensor.flatten()
    kept, tail = flat[: prod(spec.held)], flat[prod(spec.held) :]
    if bool((tail != 0).any()):
        raise CheckpointError(
            f"{stored.path}: {spec.name}: the padding after its {prod(spec.held)} heads must be exactly 0; "
            f"found `{tail[tail != 0][0].item()}`; this file was made for another number of heads or is damaged"
        )
    return kept.view(spec.held)


def typed(content: Tensor, dtype: str) -> Tensor:
    """View bytes as numbers; copied where they do not lie on whole numbers."""
    if content.data_ptr() % SIZES[dtype]:
        content = content.clone()
    return content.view(DTYPES[dtype])


def _span(stored: Stored, start: int, stop: int, rows: int) -> tuple[int, int]:
    row = stored.nbytes // max(1, rows)
    return start * row, stop * row
