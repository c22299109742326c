"""What a folder of weights holds, as a tree with sizes."""

import re
from collections.abc import Iterator
from typing import NamedTuple

from triax.checkpoint.account import Account, Entry
from triax.checkpoint.forms import num_values
from triax.checkpoint.names import PREFIX
from triax.errors import ConfigError

_LAYER = re.compile(r"^((?:model\.)?layers\.\d+)\.(.+)$")
_BLOCK = re.compile(r"^((?:vision_tower|vision)\..*?(?:blocks|layers))\.\d+\.")
_EXPERT = re.compile(r"\.experts\.\d+\.")


class Branch(NamedTuple):
    """Tensors shown as one line."""

    name: str
    form: str
    """Form of the matrices in it; several are joined by a plus."""
    shape: tuple[int, ...] | None
    """Shape of the weight, where the line stands for one or for equal ones."""
    tensors: int
    nbytes: int
    parameters: int


def tree(ledger: Account, layer: int | None = None) -> list[Branch]:
    """Return the lines of the whole folder, one a layer, or those of one layer, one a weight and one for all experts.

    Raises:
        ConfigError: There is no such layer.
    """
    if layer is not None and not 0 <= layer < ledger.settings.num_layers:
        raise ConfigError(
            f"--layer: must lie between 0 and {ledger.settings.num_layers - 1}; found `{layer}`; correct it"
        )
    groups: dict[str, list[Entry]] = {}
    for entry in ledger.entries.values():
        for name in _line(entry, layer):
            groups.setdefault(name, []).append(entry)
    return [_branch(name, entries) for name, entries in groups.items()]


def _line(entry: Entry, layer: int | None) -> Iterator[str]:
    name = entry.spec.name.removeprefix(PREFIX)
    inside = _LAYER.match(name)
    if layer is None:
        yield inside[1] if inside else _BLOCK.sub(r"\1.*.", name) if name.startswith("vision") else name
    elif inside and int(inside[1].rpartition(".")[2]) == layer:
        yield _EXPERT.sub(".experts.*.", inside[2])


def _branch(name: str, entries: list[Entry]) -> Branch:
    shapes = {entry.spec.shape for entry in entries}
    forms = sorted({entry.form if entry.form != "plain" else entry.parts[0].dtype.lower() for entry in entries})
    stored = [one for entry in entries for one in entry.parts]
    return Branch(
        name,
        "+".join(forms),
        shapes.pop() if len(shapes) == 1 else None,
        len(stored),
        sum(one.nbytes for one in stored),
        sum(num_values(entry.spec) for entry in entries),
    )
