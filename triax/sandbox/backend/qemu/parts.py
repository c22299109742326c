"""The files that a virtual machine is made of."""

from dataclasses import dataclass, field
from pathlib import Path


@dataclass(slots=True)
class Parts:
    """The files of a machine, all in its own folder.

    Args:
        folder: Where they lie.
        memory: What its memory is mapped from.
        base: The image its disk stands on.
        layers: Layers of the disk, lowest first; the last is the one that is written.
        disk_bytes: Size of the disk.
    """

    folder: Path
    memory: Path
    base: Path
    layers: list[Path] = field(default_factory=list)
    disk_bytes: int = 0

    def new_layer(self) -> Path:
        """Return a name for another layer."""
        return self.folder / f"layer-{len(self.layers)}.qcow2"
