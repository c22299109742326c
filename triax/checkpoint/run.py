"""From a run's folder to a model that can be used."""

import json
from pathlib import Path

import torch

from triax.checkpoint import sharded
from triax.checkpoint.tokenizer import load_tokenizer
from triax.config.train import Recipe
from triax.data.kimi import KimiTokenizer
from triax.data.tokenizer import Tokenizer
from triax.errors import CheckpointError
from triax.model.decoder import Decoder

RECIPE, CHECKPOINTS = "recipe.json", "checkpoints"


def load_model(path: Path | str, device: str | torch.device = "cpu") -> tuple[Decoder, Tokenizer | KimiTokenizer]:
    """Return the newest model of a run and its tokenizer, ready to predict.

    Args:
        path: The run's folder, or one `step-N` folder of its checkpoints.
        device: Where the model is to live.

    Raises:
        CheckpointError: This is no run, has no checkpoint, or the checkpoint is damaged or does not fit.
        DataError: Its tokenizer cannot be read.
    """
    path = Path(path)
    is_checkpoint = (path / sharded.MANIFEST).exists()
    run_dir = path.resolve().parents[1] if is_checkpoint else path
    recipe = recipe_of(run_dir)
    checkpoint = path if is_checkpoint else sharded.newest(run_dir / CHECKPOINTS)
    weights = sharded.load(checkpoint, ["model"])["model"]
    with torch.device(device):
        model = Decoder(recipe.model)
    try:
        model.load_state_dict(weights)
    except RuntimeError as problem:
        raise CheckpointError(
            f"checkpoint {checkpoint}: does not fit the run's model; {problem}; was recipe.json edited?"
        ) from None
    return model.eval(), load_tokenizer(run_dir)


def recipe_of(run_dir: Path) -> Recipe:
    """Return the resolved recipe of a run.

    Raises:
        CheckpointError: This is no run's folder, or its recipe cannot be read.
    """
    try:
        return Recipe.model_validate(json.loads((run_dir / RECIPE).read_text())["recipe"])
    except (OSError, ValueError, KeyError, TypeError) as problem:
        raise CheckpointError(
            f"{run_dir}: is not the folder of a run; `{RECIPE}` cannot be read ({problem}); "
            "name a folder that `triax train` wrote"
        ) from None
