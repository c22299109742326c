"""Everything that can stop a run before its first step, looked at without writing anything."""

import os
from pathlib import Path

from triax.checkpoint import sharded
from triax.checkpoint.run import CHECKPOINTS
from triax.checkpoint.tokenizer import has_tokenizer, load_tokenizer
from triax.config.train import Recipe
from triax.data.corpus import Corpus, read_tokenizer
from triax.errors import ConfigError, DataError
from triax.model.device import device_of
from triax.train import run_folder, text_record
from triax.train.branch import Branch, open_branch
from triax.train.metrics import require
from triax.train.parts import refuse_too_large
from triax.train.rate_change import rate_change


def check(recipe: Recipe, run_dir: Path, *, resume: bool = False, branch: Path | None = None) -> list[str]:
    """Look at the run's folder, checkpoint, device, extras, text and tokenizer as a run would.

    Returns:
        What the run would start from and read, one fact a line.

    Raises:
        ConfigError: As `triax.train.loop.train`.
        DataError: Likewise.
        CheckpointError: Likewise; the tensors of a checkpoint are not read, only their sizes.
    """
    require(recipe.train)
    told = [f"on {device_of(recipe.train.device)}"]
    there = run_folder.inspect(run_dir, resume=resume)
    _refuse_unusable(run_dir)
    found = sharded.steps(run_dir / CHECKPOINTS) if there else []
    opened = None if found else open_branch(branch, recipe)
    if found:
        saved = sharded.settings_of(found[0])
        run_folder.refuse_other_settings(found[0], saved, recipe, run_folder.world_size())
        told.append(f"goes on from {found[0]}")
        told += _rate(recipe, found[0])
    elif opened is not None:
        told.append(_branch_in_words(opened))
        if not opened.is_released and not opened.changed:
            told += _rate(recipe, opened.place)
    corpus = Corpus.read(recipe.data)
    training = sum(len(document.text.encode()) for source in corpus.training for document in source)
    held_out = sum(len(document.text.encode()) for document in corpus.held_out)
    told.append(
        f"text: {training / 1e6:.2f} MB in {sum(map(len, corpus.training)):,} documents to learn from, "
        f"{held_out / 1e6:.2f} MB in {len(corpus.held_out):,} held out"
    )
    told += [f"text: {note}" for note in corpus.notes]
    before = run_dir if found else None if opened is None or opened.is_released else opened.run_dir
    if before is not None and (changes := text_record.changes(before, corpus, recipe.data)):
        told.append(f"warning: the text is not that of {before}: {changes}")
    _check_rows(corpus, recipe)
    _check_tokenizer(recipe, before)
    return told


def _refuse_unusable(run_dir: Path) -> None:
    there = next(place for place in (run_dir, *run_dir.absolute().parents) if place.exists())
    if not os.access(there, os.W_OK | os.X_OK):
        raise ConfigError(f"{run_dir}: cannot be written; Permission denied; choose another run folder")
    if run_dir.exists():
        with run_folder.held(run_dir):
            pass


def _rate(recipe: Recipe, checkpoint: Path) -> list[str]:
    tokens = sharded.load(checkpoint, ["progress"])["progress"]["tokens"]
    change = rate_change(sharded.settings_of(checkpoint), recipe, tokens)
    return [change] if change else []


def _branch_in_words(branch: Branch) -> str:
    if branch.is_released:
        return f"takes over the weights of {branch.place}; the optimiser, the steps and the schedule begin at 0"
    if not branch.changed:
        return f"goes on in the place of {branch.place}"
    return (
        f"takes over the weights of {branch.place}; steps, tokens and the schedule begin at 0; "
        f"{run_folder.in_words(branch.changed)}"
    )


def _check_rows(corpus: Corpus, recipe: Recipe) -> None:
    """Refuse a source that cannot fill a row, whatever the tokenizer: no text has more tokens than bytes."""
    for name, documents in zip(corpus.names, corpus.training, strict=True):
        most = sum(len(document.text.encode()) + 1 for document in documents)
        if most < recipe.data.seq_len:
            raise DataError(
                f"{name}: data.seq_len `{recipe.data.seq_len}` is more than the training text has; found at most "
                f"`{most}` tokens in `{len(documents)}` documents; give more text or a smaller data.seq_len"
            )


def _check_tokenizer(recipe: Recipe, before: Path | None) -> None:
    """Load the tokenizer that the run would take over, if it learns none."""
    settings = recipe.data.tokenizer
    if before is not None and has_tokenizer(before):
        refuse_too_large(load_tokenizer(before), recipe)
    elif settings.path is not None:
        refuse_too_large(read_tokenizer(settings.path.expanduser(), settings.border), recipe)
