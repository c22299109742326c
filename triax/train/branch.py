"""Where a new run takes its weights from: another run, one of its checkpoints, or a folder of released weights."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from triax.checkpoint import sharded
from triax.checkpoint.account import OWN
from triax.checkpoint.published import read_config
from triax.checkpoint.run import CHECKPOINTS
from triax.checkpoint.tokenizer import TOKENIZER, has_tokenizer, save_tokenizer
from triax.config.train import Recipe
from triax.data.corpus import read_tokenizer
from triax.data.kimi import KimiTokenizer
from triax.data.tokenizer import Tokenizer
from triax.errors import CheckpointError, ConfigError
from triax.train import run_folder

CONFIG = "config.json"

WITHOUT_WEIGHTS = ("model.context_len", "model.multi_token.loss_weight")
"""Settings of the model that no weight depends on, so that a branch may change them."""


@dataclass(frozen=True)
class Branch:
    """Where a new run takes its weights from."""

    place: Path
    """A checkpoint of a run, or a folder of released weights."""
    is_released: bool = False
    """Whether it is the latter."""
    changed: Mapping[str, tuple[Any, Any]] | None = None
    """Settings, before and now, that make the branch a new run on the same weights, with its own count of steps and
    tokens; empty where it goes on in the other run's place, with another length, rate or device at most."""

    @property
    def run_dir(self) -> Path:
        """Folder of the run that the checkpoint belongs to."""
        return self.place.resolve().parents[1]


def trunk(branch: Path | None) -> Path | None:
    """Return the checkpoint to branch off from: the one that is named, or the newest of a run.

    Raises:
        CheckpointError: The path is neither.
    """
    if branch is None or (branch / sharded.MANIFEST).exists():
        return branch
    if (branch / CHECKPOINTS).is_dir():
        return sharded.newest(branch / CHECKPOINTS)
    found = "a folder of something else" if branch.is_dir() else "a file" if branch.exists() else "nothing"
    raise CheckpointError(
        f"{branch}: no checkpoint to branch off from; found {found}; name a run folder, one of its checkpoints, "
        "or a folder of released weights"
    )


def open_branch(path: Path | None, recipe: Recipe) -> Branch | None:
    """Find what a run is to start from, and hold its settings against the recipe.

    Raises:
        CheckpointError: There are no weights at the path, or they are those of another model.
        ConfigError: The recipe names another tokenizer than the one that the weights were trained with.
    """
    if path is None:
        return None
    if is_released(path):
        model = {"model": read_config(path).settings.model_dump(mode="json")}
        found = Branch(path, is_released=True)
        differing = run_folder.differences(model, recipe, 1)
        differing = {key: pair for key, pair in differing.items() if key.startswith("model.")}
    else:
        place = trunk(path)
        assert place is not None
        saved = sharded.settings_of(place)
        differing = run_folder.differences(saved, recipe, run_folder.world_size())
        changed = {key: pair for key, pair in differing.items() if not key.startswith("data.tokenizer.")}
        found = Branch(place, changed=changed)
    refused = {k: v for k, v in differing.items() if k.startswith("model.") and k not in WITHOUT_WEIGHTS}
    if refused:
        raise CheckpointError(
            f"{found.place}: holds weights of another model; {run_folder.in_words(refused)}; set them back: a branch "
            "may change the text, the optimiser, the batch, the length and the rate"
        )
    _check_tokenizer(found, recipe)
    return found


def is_released(path: Path) -> bool:
    """Return whether a folder holds released weights, or weights in our own exported layout."""
    return not (path / CHECKPOINTS).is_dir() and any((path / name).is_file() for name in (CONFIG, OWN))


def _tokenizer_of(branch: Branch, recipe: Recipe) -> Tokenizer | KimiTokenizer | None:
    folder = branch.place if branch.is_released else branch.run_dir
    border = recipe.data.tokenizer.border if branch.is_released else ""
    return read_tokenizer(folder, border) if has_tokenizer(folder) else None


def _check_tokenizer(branch: Branch, recipe: Recipe) -> None:
    """Refuse a tokenizer that gives tokens another meaning than the weights learned."""
    own, asked = _tokenizer_of(branch, recipe), recipe.data.tokenizer.path
    if asked is None or own is None:
        return
    if not _same(own, read_tokenizer(asked.expanduser(), recipe.data.tokenizer.border)):
        raise ConfigError(
            f"data.tokenizer.path: `{asked}` is another tokenizer than that of {branch.place}, whose weights would "
            "mean nothing with it; leave data.tokenizer.path out: the branch takes over the other run's"
        )


def _same(one: Tokenizer | KimiTokenizer, other: Tokenizer | KimiTokenizer) -> bool:
    if (one.vocab_size, one.opening) != (other.vocab_size, other.opening):
        return False
    return all(one.token_bytes(token) == other.token_bytes(token) for token in range(one.vocab_size))


def take_tokenizer(branch: Branch, recipe: Recipe, run_dir: Path) -> None:
    """Give a new run the tokenizer that the weights were trained with, unless it has one.

    Raises:
        ConfigError: None lies beside the weights, and the recipe names none.
    """
    if has_tokenizer(run_dir):
        return
    own = _tokenizer_of(branch, recipe)
    if own is not None:
        save_tokenizer(own, run_dir)
    elif recipe.data.tokenizer.path is None and (branch.is_released or branch.changed):
        raise ConfigError(
            f"{branch.place}: no `{TOKENIZER}` lies where its weights are, and one learned from other text would give "
            "tokens another meaning; set data.tokenizer.path to the one that they were trained with"
        )
