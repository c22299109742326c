"""New weights for a running engine: all of them checked, then all of them written, or none."""

import hashlib
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from triax.checkpoint.released import load_released
from triax.checkpoint.run import CHECKPOINTS, load_model
from triax.checkpoint.sharded import MANIFEST
from triax.errors import CheckpointError
from triax.model.decoder import Decoder


@torch.no_grad()
def replace_weights(model: Decoder, source: Path | Mapping[str, Tensor]) -> None:
    """Give a model other weights in place, so that whatever holds their addresses stays true.

    Args:
        model: Changed only if everything fits.
        source: A checkpoint of the same shape, or all tensors of `model.state_dict()` by name.

    Raises:
        CheckpointError: A tensor is missing, unknown, of another shape or not finite; the model is as it was.
    """
    given = source if isinstance(source, Mapping) else _read(source)
    own = dict(model.state_dict())
    missing, unknown = own.keys() - given.keys(), given.keys() - own.keys()
    if missing or unknown:
        raise CheckpointError(
            f"weights: names differ from the model's; found {len(missing)} missing "
            f"({', '.join(sorted(missing)[:3])}) and {len(unknown)} unknown ({', '.join(sorted(unknown)[:3])}); give "
            "every tensor of the model's state"
        )
    for name, tensor in own.items():
        new = given[name]
        if new.shape != tensor.shape:
            raise CheckpointError(
                f"weights: `{name}` has another shape; found {tuple(new.shape)} for {tuple(tensor.shape)}; give "
                "weights of the same model"
            )
        if new.is_floating_point() and not bool(new.isfinite().all()):
            raise CheckpointError(f"weights: `{name}` is damaged; found NaN or infinity; write it again")
    for name, tensor in own.items():
        tensor.copy_(given[name])


def _read(folder: Path) -> Mapping[str, Tensor]:
    if (folder / CHECKPOINTS).is_dir() or (folder / MANIFEST).is_file():
        return load_model(folder, torch.device("cpu"))[0].state_dict()
    return load_released(folder, device=torch.device("cpu")).state_dict()


@torch.no_grad()
def fingerprint(model: Decoder) -> str:
    """Return a name for the shape and the weights of a model; other weights have another one.

    Every weight counts, through sums: hashing every byte of a large model would take minutes.
    """
    digest = hashlib.sha256(model.settings.model_dump_json().encode())
    for name, tensor in model.state_dict().items():
        flat = tensor.detach().flatten()
        sums = [0.0, 0.0]
        for part in flat.split(1 << 26):
            wide = part.double()
            ramp = torch.arange(len(wide), device=wide.device, dtype=torch.float64).cos_()
            sums = [sums[0] + float(wide.sum()), sums[1] + float(wide @ ramp)]
        digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype} {sums[0]!r} {sums[1]!r}".encode())
    return digest.hexdigest()
