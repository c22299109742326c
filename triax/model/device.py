"""Where a model lives: a processor or a GPU, named by a setting or an option."""

from collections.abc import Sequence

import torch
from jaxtyping import Shaped
from torch import Tensor

from triax.errors import ConfigError


def device_of(name: str, where: str = "train.device") -> torch.device:
    """Return the device of a name; `auto` is a GPU if there is one.

    Args:
        name: `auto`, `cpu`, `cuda` or `cuda:N`.
        where: The setting or option that holds the name, for errors.

    Raises:
        ConfigError: It names no such device, or one that this machine does not have.
    """
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        device = None
    if device is None or device.type not in ("cpu", "cuda"):
        raise ConfigError(f"{where}: is no device that triax runs on; found `{name}`; use `auto`, `cpu` or `cuda:N`")
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as problem:
        first = str(problem).splitlines()[0]
        raise ConfigError(f"{where}: this machine has no device `{name}`; found {first}; use `auto`") from None
    return device


def on_device(
    numbers: Sequence[int] | Sequence[float], device: torch.device, dtype: torch.dtype = torch.long
) -> Shaped[Tensor, " n"]:
    """Return numbers as a tensor; a GPU gets them in their turn, and nobody waits for what runs there."""
    return sent(torch.tensor(numbers, dtype=dtype), device)


def sent(tensor: Shaped[Tensor, "*shape"], device: torch.device) -> Shaped[Tensor, "*shape"]:
    """Copy from a processor to a device; to a GPU without waiting for what it still computes."""
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)
