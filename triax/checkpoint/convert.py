"""A folder of weights written in another form: tensor by tensor, file by file, and resumable after a kill.

While it goes on the target holds `conversion.json` and whole files only, under their last names; config and index come
last, so that a half-written folder is none that any program would take for whole. The source is only read.
"""

import fcntl
import json
import os
import shutil
import threading
from collections.abc import Callable, Generator, Iterator, Mapping
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import contextmanager
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from triax.checkpoint.forms import BLOCK
from triax.checkpoint.generation import generation_config
from triax.checkpoint.header import DTYPES, SIZES, mapped, write_header
from triax.checkpoint.plan import Output, Piece, Plan, Shard
from triax.checkpoint.scan import INDEX, UNFINISHED
from triax.checkpoint.values import encode, encode_like, read, read_rows
from triax.errors import CheckpointError

COPIED_AT_ONCE = 2**25  # bytes
UNPACKED_AT_ONCE = 2**23  # weights; a few times this many bytes are held by each worker
BESIDE_WEIGHTS = 2**26  # bytes that tokenizer, config and index may need

Report = Callable[[int], None]
"""Told how many bytes were just written."""


def convert(
    plan: Plan,
    target: Path,
    *,
    workers: int = 2,
    report: Report = lambda nbytes: None,
    skip: Report = lambda nbytes: None,
) -> None:
    """Write the planned folder, or what is missing of it.

    Each worker writes one file at a time and holds a few million weights, whatever the size of a tensor.

    Args:
        plan: What to write.
        target: Where; a new or empty folder, or one in which the same conversion was interrupted.
        workers: Files written at a time.
        report: Called from the workers with the bytes of each write.
        skip: Called once with the bytes of files that are already whole.

    Raises:
        CheckpointError: The target is in use, too small or cannot be written, or the source cannot be read; what was
            written stays and the same call goes on from there.
    """
    if target.resolve() == plan.source.resolve():
        raise CheckpointError(f"{target}: is the folder to convert; the source is never changed; choose another")
    _check_target(plan, target)
    target.mkdir(parents=True, exist_ok=True)
    try:
        with _claimed(plan, target):
            missing = [shard for shard in plan.shards if not (target / shard.name).exists()]
            skip(plan.nbytes - sum(shard.nbytes for shard in missing))
            _check_room(target, sum(shard.nbytes for shard in missing))
            for draft in target.glob("*.tmp"):
                draft.unlink()
            _write_all(missing, target, workers, report)
            _finish(plan, target)
    except OSError as problem:
        left = sum(not (target / shard.name).exists() for shard in plan.shards)
        raise CheckpointError(
            f"{target}: could not be written; {problem.strerror or problem}; {len(plan.shards) - left} of "
            f"{len(plan.shards)} files are whole; make room and run the same conversion again"
        ) from problem


def _check_target(plan: Plan, target: Path) -> None:
    marker = target / UNFINISHED
    if marker.is_file():
        try:
            begun = json.loads(marker.read_text(encoding="utf-8"))["fingerprint"]
        except (ValueError, KeyError, TypeError):
            begun = None
        if begun != plan.fingerprint:
            raise CheckpointError(
                f"{target}: another conversion into it was begun and has not ended; found `{UNFINISHED}` of other "
                "weights or options; finish that one, or delete the folder"
            )
    elif target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise CheckpointError(f"{target}: is in use; a conversion writes into a new folder; choose another")


@contextmanager
def _claimed(plan: Plan, target: Path) -> Generator[None]:
    """Hold the target against a second conversion at the same time."""
    marker = target / UNFINISHED
    handle = os.open(marker, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise CheckpointError(
                f"{target}: another process is converting into it right now; wait for it or choose another folder"
            ) from None
        if os.fstat(handle).st_size == 0:
            files = {shard.name: shard.nbytes for shard in plan.shards}
            content = {"format": 1, "to": plan.to, "fingerprint": plan.fingerprint, "files": files}
            os.write(handle, json.dumps(content, indent=1).encode())
            os.fsync(handle)
            _sync(target)
        yield
    finally:
        os.close(handle)


def _check_room(target: Path, needed: int) -> None:
    needed += BESIDE_WEIGHTS
    free = shutil.disk_usage(target).free
    if needed > free:
        if not any(target.glob("*.safetensors")):
            (target / UNFINISHED).unlink()
            target.rmdir()
        raise CheckpointError(
            f"{target}: the disk is too small; found {free:,} bytes free where {needed:,} are needed; "
            "make room or choose another disk"
        )


def _write_all(shards: list[Shard], target: Path, workers: int, report: Report) -> None:
    stop = threading.Event()
    with ThreadPoolExecutor(max_workers=max(1, workers), thread_name_prefix="convert") as pool:
        running = [pool.submit(_write_shard, shard, target, report, stop) for shard in shards]
        try:
            done, _ = wait(running, return_when=FIRST_EXCEPTION)
            for one in done:
                one.result()
        finally:
            stop.set()
            for one in running:
                one.cancel()


def _write_shard(shard: Shard, target: Path, report: Report, stop: threading.Event) -> None:
    table = {part.name: (part.dtype, part.shape) for output in shard.outputs for part in output.parts}
    header, places = write_header(table)
    draft = target / f"{shard.name}.tmp"
    handle = os.open(draft, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o644)
    try:
        _put(handle, header, 0)
        for output in shard.outputs:
            for piece in output.pieces:
                for part, row, content in _contents(output, piece):
                    if stop.is_set():
                        return
                    _put(handle, content, places[part] + row)
                    report(len(content))
        os.fsync(handle)
    finally:
        os.close(handle)
    if os.path.getsize(draft) != len(header) + shard.nbytes:
        raise CheckpointError(f"{draft}: has not the planned size; this is a fault of triax; report it")
    draft.rename(target / shard.name)
    _sync(target)


def _contents(output: Output, piece: Piece) -> Iterator[tuple[str, int, memoryview]]:
    """Give (tensor, first byte in it, bytes) until the piece is written."""
    entry, spec = piece.entry, output.spec
    if entry.form == output.form and _same_bytes(output, piece):
        for part, stored in zip(output.parts, entry.parts, strict=True):
            total = prod(part.shape) * SIZES[part.dtype]
            if len(output.pieces) == 1 and stored.nbytes == total:
                first, last, place = 0, total, 0
            else:
                row = part.shape[-1] * SIZES[part.dtype]
                first, last = piece.source_row * row, (piece.source_row + piece.rows) * row
                place = piece.target_row * row
            for start in range(first, last, COPIED_AT_ONCE):
                with mapped(stored, start, min(last, start + COPIED_AT_ONCE)) as content:
                    yield part.name, place + start - first, content.numpy().data
        return
    if entry.form == "plain" and (len(spec.held) < 2 or entry.spec.shape != entry.spec.held):
        values = read(entry).flatten().to(DTYPES[output.parts[0].dtype])
        values = torch.nn.functional.pad(values, (0, prod(spec.shape) - values.numel()))
        yield output.parts[0].name, 0, _bytes(values)
        return
    columns = spec.shape[-1]
    step = max(BLOCK, UNPACKED_AT_ONCE // columns // BLOCK * BLOCK)
    for start in range(0, piece.rows, step):
        stop = min(piece.rows, start + step)
        values = read_rows(entry, piece.source_row + start, piece.source_row + stop, threads=1)
        if output.like is not None:
            made = encode_like(output.like, values, piece.target_row + start)
        else:
            made = encode(output.form, values, DTYPES[output.parts[0].dtype])
        for part, content in zip(output.parts, made, strict=False):
            row = (piece.target_row + start) // (BLOCK if part.name.endswith("_scale_inv") else 1)
            yield part.name, row * part.shape[-1] * SIZES[part.dtype], _bytes(content)
    if output.form == "int4":
        yield output.parts[2].name, 0, _bytes(torch.tensor(spec.shape, dtype=torch.int32))


def _same_bytes(output: Output, piece: Piece) -> bool:
    """Whether the stored bytes are those to write: the same form, and for plain weights the same numbers in order."""
    if output.form != "plain":
        return True
    stored = piece.entry.parts[0]
    rows = piece.rows * output.spec.shape[-1] if len(output.pieces) > 1 else prod(output.spec.shape)
    is_whole = prod(stored.shape) == rows or len(piece.entry.spec.held) == 3
    return stored.dtype == output.parts[0].dtype and is_whole


def _finish(plan: Plan, target: Path) -> None:
    for path in plan.beside:
        shutil.copyfile(path, target / path.name)
        _sync(target / path.name)
    made = generation_config(plan.config)
    if plan.to != "triax" and made is not None and not (target / "generation_config.json").exists():
        write_text(target / "generation_config.json", made)
    write_text(target / plan.config_name, json.dumps(plan.config, indent=2) + "\n")
    listed = {part.name: shard.name for shard in plan.shards for output in shard.outputs for part in output.parts}
    write_text(target / INDEX, index_text(listed, plan.nbytes))
    (target / UNFINISHED).unlink()
    _sync(target)


def index_text(listed: Mapping[str, str], nbytes: int) -> str:
    """Return the index of a folder: the file of each tensor and the bytes of all."""
    content: dict[str, Any] = {"metadata": {"total_size": nbytes}, "weight_map": dict(listed)}
    return json.dumps(content, indent=1) + "\n"


def write_text(path: Path, text: str) -> None:
    """Write a file so that it is whole under its name or not there."""
    draft = path.with_name(f"{path.name}.tmp")
    draft.write_text(text, encoding="utf-8")
    _sync(draft)
    draft.rename(path)


def _put(handle: int, content: bytes | memoryview, place: int) -> None:
    view = memoryview(content).cast("B")
    while view:
        written = os.pwrite(handle, view, place)
        view, place = view[written:], place + written


def _bytes(tensor: Tensor) -> memoryview:
    return tensor.contiguous().flatten().view(torch.uint8).numpy().data


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
