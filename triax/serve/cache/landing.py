"""What a step's copies do to the books: once they are done, or when they were not."""

from triax.serve.cache.moves import Moves
from triax.serve.cache.prefix import Node, Snapshot
from triax.serve.cache.tiers import Tiers


def land(tiers: Tiers, moves: Moves) -> None:
    """Make true what a step's copies have done."""
    for entry in moves.written:
        _arrived(tiers, entry)
    for node, page in moves.restored:
        node.is_pending = False
        tiers.give_page(node, page)
    for entry, index in moves.prefetched:
        entry.is_pending = False
        if isinstance(entry, Node):
            tiers.give_page(entry, index)
            tiers.pages.drop(index)
            tiers.unpin(entry)
        else:
            tiers.give_slot(entry, index)
            tiers.unpin_snapshot(entry)
    for snapshot in moves.read:
        tiers.unpin_snapshot(snapshot)


def undo(tiers: Tiers, moves: Moves) -> None:
    """Forget what a step's copies would have done; what was on its way to the host is lost."""
    for snapshot in moves.read:
        tiers.unpin_snapshot(snapshot)
    for entry, index in moves.prefetched:
        entry.is_pending = False
        if isinstance(entry, Node):
            tiers.pages.drop(index)
            tiers.unpin(entry)
        else:
            tiers.slots.drop(index)
            tiers.unpin_snapshot(entry)
    for node, _ in moves.restored:
        node.is_pending = False
        tiers.review(node)
    for entry in moves.written:
        was_alive = tiers.is_known(entry)
        _arrived(tiers, entry)
        if was_alive and tiers.is_known(entry):
            if isinstance(entry, Node):
                tiers.remove(entry)
            else:
                tiers.drop_snapshot(entry)


def _arrived(tiers: Tiers, entry: Node | Snapshot) -> None:
    entry.is_pending = False
    if not tiers.is_known(entry):  # forgotten while it was on its way
        assert entry.host is not None
        (tiers.host_pages if isinstance(entry, Node) else tiers.host_slots).drop(entry.host)
        entry.host = None
    elif isinstance(entry, Snapshot):
        tiers.review_snapshot(entry)
    elif tiers.is_useless(entry) and not entry.pins:
        tiers.remove(entry)
    else:
        tiers.review(entry)
