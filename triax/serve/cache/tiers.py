"""Device and host memory under the tree: who gives way, what is written back, and what is still on its way."""

from dataclasses import dataclass

from triax.serve.cache.eviction import Order, recompute_cost
from triax.serve.cache.moves import Moves
from triax.serve.cache.pool import Pool
from triax.serve.cache.prefix import Node, Snapshot, Tree
from triax.serve.plan import Copy


@dataclass(frozen=True)
class Sizes:
    """Pieces of memory that there are, the reserved ones included."""

    pages: int
    slots: int
    host_pages: int = 0
    host_slots: int = 0


class Tiers:
    """Gives memory to holdings and takes it from what nobody needs, keeping the tree true to what exists.

    A node that loses its page in both tiers loses its snapshots with it, and so does everything below it: a state
    never stands without its latents. A page gives way only when nothing below it is on the device.

    Args:
        tree: Known prefixes.
        sizes: Memory of both tiers.
        write_back_tokens: Snapshots that save fewer tokens are not worth a copy to the host.
    """

    def __init__(self, tree: Tree, sizes: Sizes, write_back_tokens: int) -> None:
        self.tree, self.sizes, self.write_back_tokens = tree, sizes, write_back_tokens
        self.pages, self.slots = Pool(sizes.pages, first=1), Pool(sizes.slots, first=1)
        self.host_pages, self.host_slots = Pool(sizes.host_pages), Pool(sizes.host_slots)
        self.page_order: Order[Node] = Order()
        self.slot_order: Order[Snapshot] = Order()
        self.host_page_order: Order[Node] = Order()
        self.host_slot_order: Order[Snapshot] = Order()
        self.idle_pages = 0  # pages on the device that only unpinned nodes hold: all of them can be had
        self.moves = Moves()
        self.counts = {"evicted_pages": 0, "evicted_slots": 0, "written_back": 0, "dropped_snapshots": 0}

    @property
    def available_pages(self) -> int:
        """Pages that are free or can be made so."""
        return self.pages.num_free + self.idle_pages

    @property
    def available_slots(self) -> int:
        """Slots that are free or can be made so."""
        return self.slots.num_free + len(self.slot_order)

    # holding on to entries

    def pin(self, node: Node) -> None:
        """Keep a node and all above it."""
        above: Node | None = node
        while above is not None:
            self.pin_one(above)
            above = above.parent

    def pin_one(self, node: Node) -> None:
        """Keep a node whose ancestors are kept already."""
        node.pins += 1
        if node.pins == 1:
            self.idle_pages -= node.page is not None
            self.review(node)

    def unpin(self, node: Node) -> None:
        """Let go of a node and all above it."""
        below: Node | None = node
        while below is not None:
            above = below.parent
            self.unpin_one(below)
            below = above

    def unpin_one(self, node: Node) -> None:
        """Let go of a node while its ancestors stay kept."""
        node.pins -= 1
        if not node.pins:
            self.idle_pages += node.page is not None
            if self.is_useless(node):
                self.remove(node)
            else:
                self.review(node)

    def pin_snapshot(self, snapshot: Snapshot) -> None:
        """Keep a snapshot and the pages that belong to it."""
        snapshot.pins += 1
        self.review_snapshot(snapshot)
        self.pin(snapshot.node)

    def unpin_snapshot(self, snapshot: Snapshot) -> None:
        """Let go of a snapshot."""
        snapshot.pins -= 1
        self.review_snapshot(snapshot)
        self.unpin(snapshot.node)

    def absorb(self, child: Node) -> None:
        """Let a whole page take over the snapshots of partly filled ones that begin as it does."""
        parent = child.parent
        assert parent is not None
        for length in list(parent.lengths):
            snapshot = parent.marks.get(child.tokens[:length])
            if snapshot is None or snapshot.node is child:
                continue
            partial = snapshot.node
            if partial.pins or partial.is_pending or partial.tokens != child.tokens[: len(partial.tokens)]:
                continue
            if any(one.pins or one.is_pending for one in partial.snapshots.values()):
                continue
            for one in list(partial.snapshots.values()):
                self.tree.move(one, child)
            self.remove(partial)

    # getting memory

    def take_page(self) -> int:
        """Return a page of the device; the caller has looked at `available_pages`."""
        while (index := self.pages.take()) is None:
            node = self.page_order.pop()
            assert node is not None, "a page was asked for though none is available"
            self._evict_page(node)
        return index

    def take_slot(self, worth: float = float("inf")) -> int | None:
        """Return a slot of the device; None if all that could give way is worth more than this."""
        while (index := self.slots.take()) is None:
            lowest = self.slot_order.lowest()
            if lowest is None or lowest > self.slot_order.age + worth:
                return None
            snapshot = self.slot_order.pop()
            assert snapshot is not None
            self._evict_slot(snapshot)
        return index

    def give_page(self, node: Node, page: int) -> None:
        """Let a node hold a page of the device that its caller holds too."""
        node.page = self.pages.share(page)
        if node.parent is not None:
            node.parent.num_device_children += 1
            if not node.parent.pins:  # what is pinned is in no order
                self.review(node.parent)
        if not node.pins:
            self.idle_pages += 1
            self.review(node)

    def give_slot(self, snapshot: Snapshot, slot: int) -> None:
        """Let a snapshot own a slot of the device."""
        snapshot.slot = slot
        self.review_snapshot(snapshot)
        self.review(snapshot.node)

    # losing memory

    def _evict_page(self, node: Node) -> None:
        self.counts["evicted_pages"] += 1
        if not node.children and not node.snapshots:
            return self.remove(node)
        node.is_pending, homes = True, dict[Snapshot, int]()  # whatever gives way on the host for it, it is not itself
        for snapshot in node.snapshots.values():
            snapshot.pins += 1
            self.review_snapshot(snapshot)
        self.review(node)
        for snapshot in node.snapshots.values():
            if snapshot.host is None and (home := self._host_slot(snapshot)) is not None:
                homes[snapshot] = home
        stays = bool(homes or node.children) or any(s.host is not None for s in node.snapshots.values())
        page_home = self._host_page(node) if stays and node.host is None else None
        stays = stays and (node.host is not None or page_home is not None)
        for snapshot in node.snapshots.values():
            snapshot.pins -= 1
        if not stays:
            for home in homes.values():
                self.host_slots.drop(home)
            node.is_pending = False
            self.remove(node)
            return
        for snapshot in list(node.snapshots.values()):
            if snapshot in homes:
                self._write_back(snapshot, homes[snapshot])
            if snapshot.host is None:
                self._drop_snapshot(snapshot)
            else:
                self._leave_slot(snapshot)
        assert node.page is not None
        if page_home is not None:
            self.moves.write_backs.append(Copy("page", "device", node.page, "host", page_home))
            self.moves.written.append(node)
            self.counts["written_back"] += 1
            node.host = page_home
        else:
            node.is_pending = False
        self._leave_page(node)
        if self.is_useless(node):
            self.remove(node)

    def _evict_slot(self, snapshot: Snapshot) -> None:
        self.counts["evicted_slots"] += 1
        snapshot.pins += 1
        home = self._host_slot(snapshot) if snapshot.host is None else None
        snapshot.pins -= 1
        if home is not None:
            self._write_back(snapshot, home)
        if snapshot.host is not None:
            self._leave_slot(snapshot)
            self.review(snapshot.node)
        else:
            self.drop_snapshot(snapshot)

    def _write_back(self, snapshot: Snapshot, home: int) -> None:
        assert snapshot.slot is not None
        self.moves.write_backs.append(Copy("slot", "device", snapshot.slot, "host", home))
        self.moves.written.append(snapshot)
        self.counts["written_back"] += 1
        snapshot.host = home
        snapshot.is_pending = True

    def _leave_slot(self, snapshot: Snapshot) -> None:
        if snapshot.slot is not None:
            self.slots.drop(snapshot.slot)
            snapshot.slot = None
        self.review_snapshot(snapshot)

    def _leave_page(self, node: Node) -> None:
        assert node.page is not None
        self.pages.drop(node.page)
        node.page = None
        self.idle_pages -= not node.pins
        if node.parent is not None:
            node.parent.num_device_children -= 1
            self.review(node.parent)
        self.review(node)

    def remove(self, node: Node) -> None:
        """Forget an unpinned node with everything below it, and what becomes useless above it."""
        for child in list(node.children.values()):
            self._remove_one_below(child)
        parent = node.parent
        self._remove_one(node)
        if parent is not None and not parent.pins and self.is_useless(parent):
            self.remove(parent)

    def forsake(self) -> None:
        """Start with an empty tree; what is pinned goes when its holder lets go."""
        for node in self.tree.nodes():
            node.is_stale = True
            if node.host is not None:
                self.host_pages.drop(node.host)
                node.host = None
        for root in self.tree.roots.values():
            root.is_stale = True
        self.tree.roots.clear()

    def _remove_one_below(self, node: Node) -> None:
        for child in list(node.children.values()):
            self._remove_one_below(child)
        self._remove_one(node)

    def _remove_one(self, node: Node) -> None:
        for snapshot in list(node.snapshots.values()):
            self._drop_snapshot(snapshot)
        parent = node.parent
        if node.page is not None:
            self.pages.drop(node.page)
            node.page = None
            self.idle_pages -= not node.pins
            if parent is not None:
                parent.num_device_children -= 1
        if node.host is not None and not node.is_pending:  # else its number is free once the copy is done
            self.host_pages.drop(node.host)
        self.page_order.discard(node)
        self.host_page_order.discard(node)
        if parent is not None:
            self.tree.remove(node)
            self.review(parent)
        else:
            node.is_alive = False
            if self.tree.roots.get(node.salt) is node:
                del self.tree.roots[node.salt]

    def drop_snapshot(self, snapshot: Snapshot) -> None:
        """Forget a snapshot, and its node if that becomes useless."""
        node = snapshot.node
        self._drop_snapshot(snapshot)
        if not node.pins and not node.is_pending and self.is_useless(node):
            self.remove(node)
        else:
            self.review(node)

    def _drop_snapshot(self, snapshot: Snapshot) -> None:
        self.counts["dropped_snapshots"] += 1
        self.tree.unmark(snapshot)
        if snapshot.slot is not None:
            self.slots.drop(snapshot.slot)
            snapshot.slot = None
        if snapshot.host is not None and not snapshot.is_pending:
            self.host_slots.drop(snapshot.host)
            snapshot.host = None
        self.slot_order.discard(snapshot)
        self.host_slot_order.discard(snapshot)

    # host memory

    def _host_slot(self, snapshot: Snapshot) -> int | None:
        if snapshot.slot is None or snapshot.saved < self.write_back_tokens:
            return None
        worth = self._worth(snapshot)
        while (index := self.host_slots.take()) is None:
            lowest = self.host_slot_order.lowest()
            if lowest is None or lowest > self.host_slot_order.age + worth:
                return None
            victim = self.host_slot_order.pop()
            assert victim is not None
            self._leave_host_slot(victim)
        return index

    def _leave_host_slot(self, snapshot: Snapshot) -> None:
        if snapshot.slot is None:
            self.drop_snapshot(snapshot)
        else:
            assert snapshot.host is not None
            self.host_slots.drop(snapshot.host)
            snapshot.host = None
            self.review_snapshot(snapshot)

    def _host_page(self, node: Node) -> int | None:
        worth = float("inf") if node.children else self._node_worth(node)
        while (index := self.host_pages.take()) is None:
            lowest = self.host_page_order.lowest()
            if lowest is None or lowest > self.host_page_order.age + worth:
                return None
            victim = self.host_page_order.pop()
            assert victim is not None
            if victim.page is None:
                self.remove(victim)
            else:
                assert victim.host is not None
                self.host_pages.drop(victim.host)
                victim.host = None
        return index

    @staticmethod
    def is_known(entry: Node | Snapshot) -> bool:
        """Whether an entry is still in the tree, or in use since before the tree was emptied."""
        return entry.is_alive if isinstance(entry, Node) else entry.node.snapshots.get(entry.offset) is entry

    # what the orders hold

    def is_useless(self, node: Node) -> bool:
        """Whether an unpinned node serves nobody: nothing depends on it, and no later branch can be found by it."""
        if node.children or node.snapshots or node.is_pending or not node.is_alive:
            return False
        return node.is_stale or node.parent is None or node.page is None or len(node.tokens) < self.tree.page_tokens

    @staticmethod
    def _worth(snapshot: Snapshot) -> float:
        return recompute_cost(snapshot.position, snapshot.saved)

    def _node_worth(self, node: Node) -> float:
        return max((self._worth(snapshot) for snapshot in node.snapshots.values()), default=0.0)

    def rescore(self, node: Node) -> None:
        """Count a node as used just now."""
        self.page_order.discard(node)
        self.host_page_order.discard(node)
        self.review(node)

    def rescore_snapshot(self, snapshot: Snapshot) -> None:
        """Count a snapshot as used just now."""
        self.slot_order.discard(snapshot)
        self.host_slot_order.discard(snapshot)
        self.review_snapshot(snapshot)

    def review(self, node: Node) -> None:
        """Put a node into the orders that it belongs to and out of the others."""
        is_free = node.is_alive and not node.pins and not node.is_pending and node.parent is not None
        if is_free and node.page is not None and not node.num_device_children:
            if node not in self.page_order:
                self.page_order.add(node, self._node_worth(node))
        else:
            self.page_order.discard(node)
        if is_free and node.host is not None and (node.page is not None or not node.children):
            if node not in self.host_page_order:
                self.host_page_order.add(node, 0.0 if node.page is not None else self._node_worth(node))
        else:
            self.host_page_order.discard(node)

    def review_snapshot(self, snapshot: Snapshot) -> None:
        """Put a snapshot into the orders that it belongs to and out of the others."""
        is_free = not snapshot.pins and not snapshot.is_pending
        for order, index in ((self.slot_order, snapshot.slot), (self.host_slot_order, snapshot.host)):
            if not is_free or index is None:
                order.discard(snapshot)
            elif snapshot not in order:
                is_double = order is self.host_slot_order and snapshot.slot is not None
                order.add(snapshot, 0.0 if is_double else self._worth(snapshot))
