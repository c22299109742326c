"""Checkpoints to resume from: written whole or not at all, and checked before a byte is believed.

A run's `checkpoints/` holds one folder per saved step. `step-N.tmp` is being written (or was, when the power went);
`step-N` is whole: every file was synced to disk before the folder got that name. Inside: `<part>-00000.safetensors`
with the tensors of one part of the state (model, optimizer, …), `state.json` with everything else, `settings.json` with
what a resuming run is compared with, and `manifest.json` with size and SHA-256 of each file.
"""

import hashlib
import json
import os
import re
import shutil
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import Tensor

from triax.checkpoint.tree import join, split
from triax.errors import CheckpointError

SHARD_BYTES = 2**29
FORMAT = 1
MANIFEST, STATE, SETTINGS = "manifest.json", "state.json", "settings.json"


def save(folder: Path, step: int, state: Mapping[str, Any], settings: Mapping[str, Any], *, keep: int) -> Path:
    """Write `state` as `folder/step-N` and drop the oldest checkpoints beyond `keep`.

    Older checkpoints are deleted only after the new one is whole. A whole checkpoint of the same step is left as it is.

    Args:
        folder: The run's `checkpoints` folder; made if absent.
        step: Optimiser steps behind the state.
        state: Parts by name; each a nest of mappings, lists, tuples, numbers, text and tensors.
        settings: What a resuming run is compared with.
        keep: Checkpoints that stay, the new one included.

    Raises:
        CheckpointError: The disk is full or cannot be written; nothing saved before was touched.
    """
    place, draft = folder / f"step-{step}", folder / f"step-{step}.tmp"
    if _whole(place):
        return place
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for leftover in folder.glob("step-*.tmp"):
            shutil.rmtree(leftover)
        draft.mkdir()
        _write_parts(draft, step, state, settings)
        if place.exists():
            shutil.rmtree(place)  # damaged: not whole, see above
        draft.rename(place)
        _sync(folder)
    except OSError as problem:
        shutil.rmtree(draft, ignore_errors=True)
        kept = ", ".join(f"`{path.name}`" for path in whole(folder)) or "none"
        raise CheckpointError(
            f"{place}: the checkpoint could not be written; {problem.strerror or problem}; "
            f"whole checkpoints that remain: {kept}; make room and resume"
        ) from problem
    for old in whole(folder)[keep:]:
        doomed = old.with_name(f"{old.name}.tmp")  # so that a kill in the middle leaves no half of a checkpoint
        old.rename(doomed)
        shutil.rmtree(doomed, ignore_errors=True)
    return place


def newest(folder: Path) -> Path:
    """Return the newest checkpoint of a run, whether it is intact or not: `load` says.

    Raises:
        CheckpointError: There is none.
    """
    found = steps(folder)
    if not found:
        raise CheckpointError(f"{folder}: no checkpoint to resume from; found none; train without resuming")
    return found[0]


def whole(folder: Path) -> list[Path]:
    """Return the checkpoints whose files all have their recorded size, newest first."""
    return [path for path in steps(folder) if _whole(path)]


def verify(checkpoint: Path) -> dict[str, Any]:
    """Hold every file against its recorded size and hash and return the manifest.

    Raises:
        CheckpointError: A file is missing, truncated or altered; names it, and an older checkpoint that is whole.
    """
    manifest = _manifest(checkpoint)
    for name in manifest["files"]:
        _checked(checkpoint, name, manifest)
    return manifest


def load(checkpoint: Path, parts: Collection[str] | None = None) -> dict[str, Any]:
    """Return the saved state, or only some parts of it, from a checkpoint whose files are verified first.

    Raises:
        CheckpointError: As `verify`.
    """
    manifest = _manifest(checkpoint)
    skeleton = json.loads(_checked(checkpoint, STATE, manifest).read_text())
    wanted = skeleton.keys() if parts is None else parts
    tensors: dict[str, Tensor] = {}
    for name in manifest["files"]:
        if name.endswith(".safetensors") and name.rpartition("-")[0] in wanted:
            shard = safetensors.torch.load_file(_checked(checkpoint, name, manifest))
            tensors |= {key: value.clone() for key, value in shard.items()}  # off the mapped file, aligned as fresh
    return {part: join(skeleton[part], tensors) for part in wanted}


def settings_of(checkpoint: Path) -> dict[str, Any]:
    """Return the settings that a checkpoint was saved with, without reading its tensors.

    Raises:
        CheckpointError: As `verify`.
    """
    return json.loads(_checked(checkpoint, SETTINGS, _manifest(checkpoint)).read_text())


def _manifest(checkpoint: Path) -> dict[str, Any]:
    try:
        manifest = json.loads((checkpoint / MANIFEST).read_text())
        found, _ = manifest["format"], manifest["files"].items()
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        raise _damaged(checkpoint, MANIFEST, "is missing or not readable") from None
    if found != FORMAT:
        raise CheckpointError(
            f"checkpoint {checkpoint}: unknown format; found `{found}`, known is `{FORMAT}`; update triax"
        )
    return manifest


def _write_parts(draft: Path, step: int, state: Mapping[str, Any], settings: Mapping[str, Any]) -> None:
    files, skeleton = {}, {}
    for part, tree in state.items():
        skeleton[part], tensors = split(tree, part)
        for number, shard in enumerate(_shards(tensors)):
            name = f"{part}-{number:05d}.safetensors"
            files[name] = _write(draft / name, safetensors.torch.save(shard))
    files[STATE] = _write(draft / STATE, json.dumps(skeleton).encode())
    files[SETTINGS] = _write(draft / SETTINGS, json.dumps(settings, indent=1).encode())
    manifest = {"format": FORMAT, "step": step, "files": files}
    _write(draft / MANIFEST, json.dumps(manifest, indent=1).encode())
    _sync(draft)


def _shards(tensors: Mapping[str, Tensor]) -> Iterator[dict[str, Tensor]]:
    shard: dict[str, Tensor] = {}
    room = SHARD_BYTES
    for name, tensor in tensors.items():
        if shard and tensor.nbytes > room:
            yield shard
            shard, room = {}, SHARD_BYTES
        shard[name] = tensor.detach().cpu().clone(memory_format=torch.contiguous_format)  # views may share storage
        room -= tensor.nbytes
    if shard:
        yield shard


def _write(path: Path, content: bytes) -> dict[str, Any]:
    with path.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    return {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}


def _sync(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _checked(checkpoint: Path, name: str, manifest: Mapping[str, Any]) -> Path:
    path, record = checkpoint / name, manifest["files"].get(name)
    if record is None or not path.is_file():
        raise _damaged(checkpoint, name, "is missing")
    size = path.stat().st_size
    if size != record["bytes"]:
        raise _damaged(checkpoint, name, f"has `{size}` bytes instead of `{record['bytes']}`")
    with path.open("rb") as file:
        if hashlib.file_digest(file, "sha256").hexdigest() != record["sha256"]:
            raise _damaged(checkpoint, name, "does not have its recorded SHA-256: it was altered after it was written")
    return path


def _damaged(checkpoint: Path, name: str, what: str) -> CheckpointError:
    others = [path for path in whole(checkpoint.parent) if path != checkpoint]
    advice = (
        f"move `{checkpoint.name}` away to resume from `{others[0].name}`" if others else "no other checkpoint is whole"
    )
    return CheckpointError(f"checkpoint {checkpoint}: file `{name}` {what}; it cannot be trusted; {advice}")


def steps(folder: Path) -> list[Path]:
    """Return the checkpoints of a run, newest first, whole or damaged; drafts are none."""
    numbered = [(int(m[1]), p) for p in folder.glob("step-*") if (m := re.fullmatch(r"step-(\d+)", p.name))]
    return [path for _, path in sorted(numbered, reverse=True)]


def _whole(checkpoint: Path) -> bool:
    try:
        files = json.loads((checkpoint / MANIFEST).read_text())["files"]
        return all((checkpoint / name).stat().st_size == record["bytes"] for name, record in files.items())
    except (OSError, ValueError, KeyError, TypeError):
        return False
