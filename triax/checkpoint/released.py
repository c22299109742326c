"""Weights in the released layout: one tensor an expert, published names, sharded safetensors and a config.json."""

import json
import logging
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from math import prod
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from triax.checkpoint.account import INDEX, account, open_file
from triax.checkpoint.compose import compose
from triax.checkpoint.names import TensorSpec, inventory
from triax.checkpoint.published import Family, family_of
from triax.config.model import MultiToken
from triax.errors import CheckpointError
from triax.model.decoder import Decoder
from triax.model.precision import check_precision

log = logging.getLogger("triax.checkpoint")

SHARD_BYTES = 5 * 10**9
_DTYPES = {"BF16": torch.bfloat16, "F32": torch.float32}


def save_released(
    model: Decoder,
    folder: Path,
    *,
    dtype: torch.dtype = torch.bfloat16,
    family: Family | None = None,
    multi_token: bool = False,
    token_ids: Mapping[str, int | None] | None = None,
    shard_bytes: int = SHARD_BYTES,
) -> None:
    """Write the weights so that code written for the released checkpoints reads them.

    The folder appears whole or not at all.

    Args:
        model: The decoder.
        folder: Where to write; must not exist or be empty.
        dtype: `bfloat16` for the dtypes of the released files, `float32` to lose nothing.
        family: Published form; the plainest that fits if not given.
        multi_token: Write the extra prediction layer too, under names of our own.
        token_ids: `bos_token_id`, `eos_token_id` and `pad_token_id` for the config.
        shard_bytes: Size of a file above which the next tensor goes to a new one.

    Raises:
        ConfigError: The family cannot express the model.
        CheckpointError: The folder is in use or cannot be written.
    """
    settings = model.settings
    family = family or family_of(settings)
    # The published form has no word for the extra layer's loss weight, which only training reads.
    kept = MultiToken() if multi_token and settings.multi_token else None
    settings = settings.model_copy(update={"multi_token": kept})
    name = {torch.bfloat16: "bfloat16", torch.float32: "float32"}.get(dtype)
    if name is None:
        raise CheckpointError(f"{folder}: released files hold bfloat16 or float32; found `{dtype}`; choose one of them")
    config = compose(settings, family, dtype=name, token_ids=token_ids)
    folder = Path(folder)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise CheckpointError(
            f"{folder}: is in use; a released checkpoint is written into a new folder; choose another"
        )
    draft = folder.with_name(f"{folder.name}.tmp")
    try:
        shutil.rmtree(draft, ignore_errors=True)
        draft.mkdir(parents=True)
        _write_weights(model, draft, list(inventory(settings, family, multi_token=multi_token)), dtype, shard_bytes)
        _write_json(draft / "config.json", config)
        _sync(draft)
        if folder.exists():
            folder.rmdir()
        draft.rename(folder)
        _sync(folder.parent)
    except (OSError, SafetensorError) as problem:
        shutil.rmtree(draft, ignore_errors=True)
        raise CheckpointError(
            f"{folder}: could not be written; {problem}; nothing was left there; make room"
        ) from problem


def load_released(folder: Path, *, dtype: torch.dtype | None = None, device: torch.device | str = "cpu") -> Decoder:
    """Read a decoder, tensor by tensor, from a folder in the released layout.

    Args:
        folder: A folder with `config.json` and safetensors files.
        dtype: Dtype of the decoder; that of the stored embedding if not given. Tensors that are always float32 stay so.
        device: Where the weights go.

    Raises:
        ConfigError: Its config cannot be used.
        CheckpointError: A tensor is missing, unexpected, altered or of another form; the message names it.
    """
    ledger = account(Path(folder))
    for note in ledger.notes:
        log.info("%s: %s", folder, note)
    with torch.device("meta"):
        model = Decoder(ledger.published.settings)
    if dtype is None:
        embedding = next(spec for spec in ledger.specs if spec.ours == "embed.weight")
        dtype = _DTYPES[ledger.stored[embedding.name].dtype]
    model = model.to(dtype)
    blank = model.state_dict()
    filled: dict[str, Tensor] = {}
    with ExitStack() as stack:
        files = {path: open_file(path, stack) for path in {one.path for one in ledger.stored.values()}}
        for spec in ledger.specs:
            stored = ledger.stored[spec.name]
            if spec.ours not in filled:
                filled[spec.ours] = torch.empty(blank[spec.ours].shape, dtype=blank[spec.ours].dtype, device=device)
            place = filled[spec.ours] if spec.index is None else filled[spec.ours][spec.index]
            place.copy_(_to_ours(spec, files[stored.path].get_tensor(stored.name), stored.path))
    model.load_state_dict(filled, assign=True)
    check_precision(model)
    return model


def _to_ours(spec: TensorSpec, tensor: Tensor, path: Path) -> Tensor:
    """Take singleton axes and padding off; what is cut away must be zero."""
    flat = tensor.flatten()
    kept, tail = flat[: prod(spec.held)], flat[prod(spec.held) :]
    if bool((tail != 0).any()):
        raise CheckpointError(
            f"{path}: {spec.name}: the padding after its {prod(spec.held)} heads must be exactly 0; "
            f"found `{tail[tail != 0][0].item()}`; this file was made for another number of heads or is damaged"
        )
    return kept.view(spec.held)


def _to_file(spec: TensorSpec, tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Put padding and singleton axes on, in the dtype of the file."""
    wanted = torch.float32 if spec.dtype == "F32" else dtype
    if spec.ours.endswith(".balance_bias") and not torch.equal(tensor.to(wanted).float(), tensor.float()):
        wanted = torch.float32  # rounding would let other experts be chosen
    flat = tensor.detach().to("cpu", wanted, copy=True).flatten()
    padding = prod(spec.shape) - flat.numel()
    return torch.nn.functional.pad(flat, (0, padding)).view(spec.shape)


def _write_weights(model: Decoder, folder: Path, specs: list[TensorSpec], dtype: torch.dtype, shard_bytes: int) -> None:
    state = model.state_dict()
    known = {spec.ours for spec in specs}
    unknown = [
        name for name, _ in model.named_parameters() if name not in known and not name.startswith("multi_token.")
    ]
    assert not unknown, f"the inventory does not list {unknown}"
    shards = list(_shards(specs, dtype, shard_bytes))
    listed: dict[str, str] = {}
    total = 0
    for number, shard in enumerate(shards, start=1):
        name = f"model-{number:05d}-of-{len(shards):05d}.safetensors" if len(shards) > 1 else "model.safetensors"
        tensors = {}
        for spec in shard:
            ours = state[spec.ours] if spec.index is None else state[spec.ours][spec.index]
            tensors[spec.name] = _to_file(spec, ours, dtype)
        save_file(tensors, folder / name, metadata={"format": "pt"})
        _sync(folder / name)
        listed |= dict.fromkeys(tensors, name)
        total += sum(tensor.nbytes for tensor in tensors.values())
    if len(shards) > 1:
        _write_json(folder / INDEX, {"metadata": {"total_size": total}, "weight_map": listed})


def _shards(specs: list[TensorSpec], dtype: torch.dtype, shard_bytes: int) -> Iterator[list[TensorSpec]]:
    shard: list[TensorSpec] = []
    room = shard_bytes
    for spec in specs:
        size = prod(spec.shape) * (4 if spec.dtype == "F32" else dtype.itemsize)
        if shard and size > room:
            yield shard
            shard, room = [], shard_bytes
        shard.append(spec)
        room -= size
    yield shard


def _write_json(path: Path, content: Any) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    _sync(path)


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
