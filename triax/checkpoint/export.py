"""A training run as released weights: what a conversion reads when it is given a run."""

import shutil
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

import torch

from triax.checkpoint.released import save_released
from triax.checkpoint.run import CHECKPOINTS, load_model
from triax.checkpoint.scan import UNFINISHED
from triax.checkpoint.sharded import MANIFEST


@contextmanager
def released_form(source: Path, target: Path) -> Generator[Path]:
    """Give a folder in the released layout: the source itself, or an unrounded export of it while the block lasts.

    The export of a run lies beside the target; an interrupted conversion finds it there again.

    Args:
        source: A folder of weights, a run (its newest checkpoint is taken) or one checkpoint of a run.
        target: Where the conversion goes.

    Raises:
        CheckpointError: The run cannot be read, or there is no room for the export.
    """
    if not ((source / CHECKPOINTS).is_dir() or (source / MANIFEST).is_file()):
        yield source
        return
    export = target.with_name(f"{target.name}.export")
    if export.exists() and not (target / UNFINISHED).exists():
        shutil.rmtree(export)  # of a conversion that ended, or of another step of the run
    if not export.exists():
        model, tokenizer = load_model(source)
        save_released(model, export, dtype=torch.float32, tokenizer=tokenizer)
    yield export
    shutil.rmtree(export)
