"""Weights on disk as a model: all of them or a part, and nothing that was not read unless it is asked for by name."""

import fnmatch
import logging
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from triax.checkpoint.account import Account, account
from triax.checkpoint.cut import cut_settings
from triax.checkpoint.header import DTYPES
from triax.checkpoint.names import TensorSpec
from triax.checkpoint.values import read
from triax.errors import CheckpointError, ConfigError
from triax.model.decoder import Decoder
from triax.model.media import MediaEncoder
from triax.model.precision import check_precision

log = logging.getLogger("triax.checkpoint")

_PER_EXPERT = (".router.weight", ".router.balance_bias")


def load_released(
    folder: Path,
    *,
    dtype: torch.dtype | None = None,
    device: torch.device | str = "cpu",
    towers: Literal["all", "text"] = "all",
    layers: range | None = None,
    experts: Sequence[int] | None = None,
    fresh: Collection[str] = (),
) -> Decoder:
    """Read a decoder, tensor by tensor, from a folder in the released layout or in ours.

    With layers or experts the result is a smaller model of its own, numbered from 0: one that keeps layers `0..b`
    computes what the whole does up to there.

    Args:
        folder: A folder with `config.json` (or `triax.json`) and safetensors files, plain or quantised.
        dtype: Dtype of the decoder; that of the stored embedding if not given, BF16 if it is fresh. Tensors that are
            always float32 stay so.
        device: Where the weights go.
        towers: `text` leaves a vision tower out.
        layers: Keep only these, without a gap.
        experts: Keep only these routed experts in every layer.
        fresh: Names of the decoder's tensors, with `*` for any run of characters, that are drawn anew and not read.

    Raises:
        ConfigError: Its config cannot be used, there are no such layers or experts, or a fresh name fits nothing.
        CheckpointError: A tensor is missing, unexpected, altered or of another form; the message names it.
    """
    folder = Path(folder)
    wanted: Callable[[TensorSpec], bool] | None = None
    if layers is not None or experts is not None or fresh:
        wanted = _Wanted(layers, experts, tuple(fresh))
    ledger = account(folder, towers, wanted)
    _tell(ledger)
    settings = cut_settings(ledger.settings, layers, experts)
    with torch.device("meta"):
        blank = Decoder(settings).state_dict()
    unread = _matching(blank, fresh)
    if dtype is None:
        embedding = next((e for e in ledger.entries.values() if e.spec.ours == "embed.weight"), None)
        is_read = embedding is not None and "embed.weight" not in unread
        dtype = DTYPES[embedding.parts[0].dtype] if is_read else torch.bfloat16
    with torch.device(device if unread else "meta"):
        model = Decoder(settings).to(dtype)
    filled = _fill(model, ledger, layers, experts, unread, torch.device(device))
    model.load_state_dict(filled, assign=True)
    check_precision(model)
    return model


def load_vision(folder: Path, *, dtype: torch.dtype | None = None, device: torch.device | str = "cpu") -> MediaEncoder:
    """Read only the vision tower and its projector.

    Args:
        folder: A folder of weights whose config describes a tower.
        dtype: Dtype of the tower; the stored one if not given.
        device: Where the weights go.

    Raises:
        ConfigError: Its config cannot be used, or describes no tower.
        CheckpointError: A tensor of the tower is missing or of another form.
    """
    ledger = account(Path(folder), "vision", lambda spec: spec.ours.startswith("vision."))
    vision = ledger.settings.vision
    if vision is None:
        raise ConfigError(f"{folder}: its config has no `vision_config`; found a text model; load it as one")
    with torch.device("meta"):
        encoder = MediaEncoder(vision, ledger.settings.width, ledger.settings.init_std)
    state = {}
    for entry in ledger.entries.values():
        values = read(entry)
        state[entry.spec.ours.removeprefix("vision.")] = values.to(device, dtype or values.dtype)
    encoder.load_state_dict(state, assign=True)
    return encoder


class _Wanted:
    """Which weights of the whole model must be in the folder."""

    def __init__(self, layers: range | None, experts: Sequence[int] | None, fresh: tuple[str, ...]) -> None:
        self.layers, self.experts, self.fresh = layers, None if experts is None else set(experts), fresh

    def __call__(self, spec: TensorSpec) -> bool:
        name = renamed(spec.ours, self.layers)
        if name is None or any(fnmatch.fnmatchcase(name, pattern) for pattern in self.fresh):
            return False
        return self.experts is None or spec.index is None or spec.index in self.experts


def renamed(ours: str, layers: range | None) -> str | None:
    """Return the name that a tensor of the whole model has in the cut one; none if it is not in it."""
    if layers is None:
        return ours
    if ours.startswith("multi_token."):
        return None
    head, _, rest = ours.removeprefix("layers.").partition(".")
    if not ours.startswith("layers."):
        return ours
    return f"layers.{int(head) - layers.start}.{rest}" if int(head) in layers else None


def _matching(blank: Collection[str], fresh: Collection[str]) -> set[str]:
    found: set[str] = set()
    for pattern in fresh:
        names = fnmatch.filter(blank, pattern)
        if not names:
            raise ConfigError(
                f"fresh: `{pattern}` fits no tensor of the model; found names such as `{next(iter(blank))}`; correct it"
            )
        found.update(names)
    return found


def _fill(
    model: Decoder,
    ledger: Account,
    layers: range | None,
    experts: Sequence[int] | None,
    unread: set[str],
    device: torch.device,
) -> dict[str, Tensor]:
    blank = model.state_dict()
    filled = {name: blank[name] for name in unread}
    missing = {name: blank[name].shape[0] if ".experts." in name else 1 for name in blank if name not in unread}
    numbers = None if experts is None else {expert: number for number, expert in enumerate(experts)}
    for entry in ledger.entries.values():
        name = renamed(entry.spec.ours, layers)
        if name is None or name in unread:
            continue
        index = entry.spec.index
        if index is not None and numbers is not None:
            if index not in numbers:
                continue
            index = numbers[index]
        if name not in filled:
            filled[name] = torch.empty(blank[name].shape, dtype=blank[name].dtype, device=device)
        values = read(entry)
        if experts is not None and entry.spec.index is None and (".experts." in name or name.endswith(_PER_EXPERT)):
            values = values[list(experts)]
        place = filled[name] if index is None else filled[name][index]
        place.copy_(values)
        missing[name] -= 1 if index is not None or ".experts." not in name else missing[name]
    left = [name for name, count in missing.items() if count]
    if left:
        raise CheckpointError(f"{ledger.folder}: {len(left)} tensors were not read; found `{left[0]}`; report this")
    return filled


def _tell(ledger: Account) -> None:
    for note in ledger.notes:
        log.info("%s: %s", ledger.folder, note)
