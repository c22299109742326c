"""From a folder on disk to an engine that answers: a run, one of its checkpoints, or released weights."""

from pathlib import Path

from triax.checkpoint.released import load_released
from triax.checkpoint.run import CHECKPOINTS, TOKENIZER, load_model
from triax.checkpoint.sharded import MANIFEST
from triax.data.tokenizer import Tokenizer
from triax.errors import CheckpointError
from triax.model.device import device_of
from triax.serve.engine import Engine

CONFIG = "config.json"


def open_engine(folder: Path, device: str = "auto") -> Engine:
    """Load weights and tokenizer and return the engine that uses them.

    Args:
        folder: A run (its newest checkpoint is taken), one checkpoint of a run, or a folder in the released layout
            that has a `tokenizer.json`.
        device: Where the model runs; `auto` is a GPU if there is one.

    Raises:
        ConfigError: This machine has no such device.
        CheckpointError: The folder is none of these, or what it holds is damaged.
    """
    place = device_of(device, "device")
    if (folder / CHECKPOINTS).is_dir() or (folder / MANIFEST).is_file():
        return Engine(*load_model(folder, place))
    if (folder / CONFIG).is_file():
        if not (folder / TOKENIZER).is_file():
            raise CheckpointError(f"{folder}: has no `{TOKENIZER}`; found none; put the one of its training beside it")
        return Engine(load_released(folder, device=place).eval(), Tokenizer.load(folder / TOKENIZER))
    found = "a folder of something else" if folder.is_dir() else "a file" if folder.exists() else "nothing"
    raise CheckpointError(f"{folder}: holds no model; found {found}; name a run folder, such as runs/tiny")
