"""What one step copies, and what becomes true once that is done."""

from dataclasses import dataclass, field

from triax.serve.cache.prefix import Node, Snapshot
from triax.serve.plan import Copy


@dataclass
class Moves:
    """Copies of one step, and what becomes true once they are done."""

    write_backs: list[Copy] = field(default_factory=list)
    restores: list[Copy] = field(default_factory=list)
    clear: list[int] = field(default_factory=list)
    after: list[Copy] = field(default_factory=list)
    beside: list[Copy] = field(default_factory=list)
    written: list[Node | Snapshot] = field(default_factory=list)
    """What these write-backs take to the host."""
    restored: list[tuple[Node, int]] = field(default_factory=list)
    """Nodes with the device page that each gets."""
    prefetched: list[tuple[Node | Snapshot, int]] = field(default_factory=list)
    """Entries with the page or slot that each gets; pinned until then."""
    read: list[Snapshot] = field(default_factory=list)
    """Snapshots that a restore reads; pinned until then, with their nodes."""

    @property
    def is_empty(self) -> bool:
        """Whether a step without rows would have nothing to do."""
        return not (self.write_backs or self.restores or self.after or self.beside)

    @property
    def is_unused(self) -> bool:
        """Whether nothing at all has been noted here."""
        return self.is_empty and not (self.clear or self.written or self.restored or self.prefetched or self.read)
