"""From a folder on disk to an engine that answers: a run, one of its checkpoints, or released weights."""

from pathlib import Path

import torch

from triax.checkpoint.account import OWN
from triax.checkpoint.released import load_released
from triax.checkpoint.run import CHECKPOINTS, load_model
from triax.checkpoint.sharded import MANIFEST
from triax.checkpoint.tokenizer import load_tokenizer
from triax.config.serve import Serve
from triax.data.tokenizer import Language
from triax.errors import CheckpointError, ConfigError
from triax.model.decoder import Decoder
from triax.model.device import device_of
from triax.serve.engine import Engine

CONFIG = "config.json"


def open_engine(folder: Path, device: str = "auto", settings: Serve | None = None) -> Engine:
    """Load weights and tokenizer and return the engine that uses them.

    Args:
        folder: A run (its newest checkpoint is taken), one checkpoint of a run, or a folder in the released layout
            or in ours with its tokenizer's files, in any of the released number formats.
        device: Where the model runs; `auto` is a GPU if there is one.
        settings: Of the engine; if given, weights become the number format that they name, else stay as they are.

    Raises:
        ConfigError: This machine has no such device, or the drafting model of the settings has another tokenizer.
        CheckpointError: The folder is none of these, has no tokenizer, or what it holds is damaged.
        DataError: Its tokenizer's files cannot be used.
    """
    place = device_of(device, "device")
    dtype = None if settings is None else dtype_of(settings, place)
    model, tokenizer = _read(folder, place, dtype)
    drafting = settings.drafting if settings is not None else None
    if drafting is None or drafting.kind != "model" or not drafting.model:
        return Engine(model, tokenizer, settings)
    small, its_own = _read(Path(drafting.model), place, dtype)
    probe = list(range(tokenizer.vocab_size))
    if tokenizer.vocab_size > its_own.vocab_size or any(
        tokenizer.token_bytes(token) != its_own.token_bytes(token) for token in probe
    ):
        raise ConfigError(
            f"drafting.model {drafting.model}: has another tokenizer; found {its_own.vocab_size} tokens for "
            f"{tokenizer.vocab_size}, or others; use a small model with the same one"
        )
    return Engine(model, tokenizer, settings, draft=small)


def _read(folder: Path, place: torch.device, dtype: torch.dtype | None) -> tuple[Decoder, Language]:
    if (folder / CHECKPOINTS).is_dir() or (folder / MANIFEST).is_file():
        model, own = load_model(folder, place)
        return model if dtype is None else model.to(dtype), own
    if (folder / CONFIG).is_file() or (folder / OWN).is_file():
        tokenizer = load_tokenizer(folder)
        return load_released(folder, dtype=dtype, device=place).eval(), tokenizer
    found = "a folder of something else" if folder.is_dir() else "a file" if folder.exists() else "nothing"
    raise CheckpointError(f"{folder}: holds no model; found {found}; name a run folder, such as runs/demo")


def dtype_of(settings: Serve, device: torch.device) -> torch.dtype:
    """Return the number format of weights and latents on a device."""
    by_name = {"fp32": torch.float32, "bf16": torch.bfloat16}
    return by_name.get(settings.precision) or (torch.bfloat16 if device.type == "cuda" else torch.float32)
