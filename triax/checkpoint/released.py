"""Weights in the released layout: one tensor an expert, published names, sharded safetensors and a config.json."""

import json
import os
import shutil
from collections.abc import Iterator, Mapping
from math import prod
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from triax.checkpoint.account import INDEX
from triax.checkpoint.compose import compose
from triax.checkpoint.generation import generation_config
from triax.checkpoint.load import load_released
from triax.checkpoint.names import TensorSpec, inventory
from triax.checkpoint.published import Family, family_of
from triax.checkpoint.tokenizer import save_tokenizer, special_ids
from triax.config.model import Model, MultiToken
from triax.data.kimi import KimiTokenizer
from triax.data.tokenizer import Tokenizer
from triax.errors import CheckpointError
from triax.model.count import weights
from triax.model.decoder import Decoder

__all__ = ["load_released", "save_released"]

SHARD_BYTES = 5 * 10**9


def save_released(
    model: Decoder,
    folder: Path,
    *,
    dtype: torch.dtype = torch.bfloat16,
    family: Family | None = None,
    multi_token: bool = False,
    tokenizer: Tokenizer | KimiTokenizer | None = None,
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
        tokenizer: Written beside the weights.
        token_ids: `bos_token_id`, `eos_token_id` and `pad_token_id` for the config; the tokenizer's if not given.
        shard_bytes: Size of a file above which the next tensor goes to a new one.

    Raises:
        ConfigError: The family cannot express the model.
        CheckpointError: The folder is in use or cannot be written, or the model has layers of its own.
    """
    settings = model.settings
    family = family or family_of(settings)
    # The published form has no word for the extra layer's loss weight, which only training reads.
    kept = MultiToken() if multi_token and settings.multi_token else None
    settings = settings.model_copy(update={"multi_token": kept})
    name = {torch.bfloat16: "bfloat16", torch.float32: "float32"}.get(dtype)
    if name is None:
        raise CheckpointError(f"{folder}: released files hold bfloat16 or float32; found `{dtype}`; choose one of them")
    config = compose(settings, family, dtype=name, token_ids=token_ids or special_ids(tokenizer))
    folder = Path(folder)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise CheckpointError(
            f"{folder}: is in use; a released checkpoint is written into a new folder; choose another"
        )
    _refuse_other_layers(model, settings, folder)
    draft = folder.with_name(f"{folder.name}.tmp")
    try:
        shutil.rmtree(draft, ignore_errors=True)
        draft.mkdir(parents=True)
        _write_weights(model, draft, list(inventory(settings, family, multi_token=multi_token)), dtype, shard_bytes)
        _write_json(draft / "config.json", config)
        generation = generation_config(config)
        if generation is not None:
            (draft / "generation_config.json").write_text(generation, encoding="utf-8")
        if tokenizer is not None:
            save_tokenizer(tokenizer, draft)
        for path in draft.iterdir():
            _sync(path)
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


def _refuse_other_layers(model: Decoder, settings: Model, folder: Path) -> None:
    expected = {weight.name: tuple(weight.shape) for weight in weights(settings)}
    extra = "multi_token."  # may be left out, and then it is not among the expected
    found = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    other = [name for name in found if name not in expected and not name.startswith(extra)]
    other += [name for name, shape in expected.items() if found.get(name) != shape]
    if other:
        shown = ", ".join(f"`{name}`" for name in other[:8]) + (", …" if len(other) > 8 else "")
        raise CheckpointError(
            f"{folder}: the released layout has no name, or another shape, for {shown}; keep a model with layers of "
            "its own as a run's checkpoint (`triax.checkpoint.sharded.save`), or leave the layer out"
        )


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
