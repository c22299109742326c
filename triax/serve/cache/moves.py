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
