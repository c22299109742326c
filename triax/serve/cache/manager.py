"""The one owner of pages, slots, positions and the weight version of every sequence."""

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from triax.config.serve import Prefixes
from triax.errors import CapacityError
from triax.serve.cache.eviction import recompute_cost
from triax.serve.cache.holding import Holding
from triax.serve.cache.landing import land, undo
from triax.serve.cache.moves import Moves
from triax.serve.cache.places import snapshot_places
from triax.serve.cache.prefix import Match, Node, Snapshot, Tree
from triax.serve.cache.tiers import Sizes, Tiers
from triax.serve.plan import Copy

MOST_UNSAVED = 4096  # snapshots that are remembered for the disk; older ones have been evicted anyway


@dataclass
class _Step:
    moves: Moves
    taken: list[tuple[Holding, int, int]]
    """Snapshots under way: whose, after how many tokens, into which slot."""


class Manager:
    """Gives sequences their memory, knows what of it others may reuse, and says what to copy.

    Changes belong to a step: `close` ends the making of one and returns its copies, `land` says that it has run,
    `fail` that it has not. Several may be closed and not landed; they land in order. What a step writes can be
    matched only once it has landed.

    Args:
        sizes: Memory of device and host, in pages and slots.
        page_tokens: Tokens a page.
        prefixes: What to keep for reuse; None keeps nothing.
    """

    def __init__(self, sizes: Sizes, page_tokens: int, prefixes: Prefixes | None) -> None:
        self.sizes, self.page_tokens, self.prefixes = sizes, page_tokens, prefixes
        self.tiers = Tiers(Tree(page_tokens), sizes, prefixes.write_back_tokens if prefixes else 0)
        self.epoch = 0
        self.holdings: dict[int, Holding] = {}
        self._taken: list[tuple[Holding, int, int]] = []
        self._steps: deque[_Step | None] = deque()
        """Closed and not landed; None for one that copies nothing."""
        self.unsaved: deque[Snapshot] = deque(maxlen=MOST_UNSAVED)
        """Snapshots since a disk pool last took them over, oldest first."""
        self.counts = dict.fromkeys(
            ("prompts", "prompt_tokens", "matched_tokens", "cached_tokens", "snapshots", "skipped_snapshots"), 0
        )

    @property
    def tree(self) -> Tree:
        """All prefixes that are known."""
        return self.tiers.tree

    @property
    def capacity_tokens(self) -> int:
        """Tokens of the longest sequence that fits when it is alone."""
        return (self.sizes.pages - 1) * self.page_tokens

    def check_fit(self, num_tokens: int) -> None:
        """Refuse a sequence that can never fit.

        Raises:
            CapacityError: It needs more pages than there are, or there is no slot at all.
        """
        if num_tokens > self.capacity_tokens or self.sizes.slots < 2:
            raise CapacityError(
                f"cache: a sequence of {num_tokens} tokens can never run; found room for {self.capacity_tokens} tokens "
                f"and {max(0, self.sizes.slots - 1)} states; shorten prompt or max_tokens, or raise cache.pages"
            )

    def match(self, keys: Sequence[int], salt: str, limit: int) -> Match:
        """Find what is known of a prompt, using at most `limit` of its tokens."""
        if self.prefixes is None or limit < 1:
            return Match(Node(None, (), 0), (), 0)
        return self.tree.match(salt, keys, limit)

    def admit(
        self,
        number: int,
        keys: list[int],
        salt: str,
        match: Match,
        length: int,
        *,
        spare: int = 0,
        borders: Iterable[int] = (),
    ) -> Holding | None:
        """Give a sequence a slot and pages, with what was found of its prefix restored into them.

        Args:
            number: Number of the sequence.
            keys: Its tokens as keys.
            salt: Whose prefixes it shares.
            match: What `match` found, just now.
            length: Tokens that the pages must hold.
            spare: Pages that must stay available for others.
            borders: Where the request wishes snapshots.

        Returns:
            None if there is no room; then nothing has changed.
        """
        tiers, size, snapshot = self.tiers, self.page_tokens, match.snapshot
        path = match.path[: match.position // size]
        root = self.tree.root(salt)
        anchor = path[-1] if path else root
        tiers.pin(anchor)  # before anything is allocated, or the hit might give way to itself
        if snapshot is not None:
            tiers.pin_snapshot(snapshot)
        total = -(-length // size)
        if tiers.available_slots < 1 or tiers.available_pages < total - sum(n.page is not None for n in path) + spare:
            if snapshot is not None:
                tiers.unpin_snapshot(snapshot)
            tiers.unpin(anchor)
            return None
        slot = tiers.take_slot()
        assert slot is not None
        pages = [self._restored_page(node) for node in path]
        pages += [tiers.take_page() for _ in range(total - len(pages))]
        if snapshot is None:
            tiers.moves.clear.append(slot)
        else:
            self._restore(snapshot, slot, pages)
        holding = Holding(
            number, keys, salt, self.epoch, slot, pages, anchor, len(path), match.position, match.position,
            match.matched, match.position,
        )  # fmt: skip
        if self.prefixes is not None:
            branch = min(match.matched, len(keys) - 1)
            holding.places = snapshot_places(self.prefixes, match.position, len(keys), borders, branch)
        self.holdings[number] = holding
        return holding

    def _restored_page(self, node: Node) -> int:
        tiers = self.tiers
        if node.page is not None:
            return tiers.pages.share(node.page)
        assert node.host is not None, "a page of the hit is not there any more"
        page = tiers.take_page()
        tiers.moves.restores.append(Copy("page", "host", node.host, "device", page))
        tiers.moves.restored.append((node, page))
        node.is_pending = True
        return page

    def _restore(self, snapshot: Snapshot, slot: int, pages: list[int]) -> None:
        moves = self.tiers.moves
        moves.read.append(snapshot)
        if snapshot.slot is not None:
            moves.restores.append(Copy("slot", "device", snapshot.slot, "device", slot))
        else:
            assert snapshot.host is not None, "the snapshot of the hit is not there any more"
            moves.restores.append(Copy("slot", "host", snapshot.host, "device", slot))
        if snapshot.offset < self.page_tokens:  # the page goes on differently: write to a copy
            node, target = snapshot.node, pages[snapshot.node.start // self.page_tokens]
            if node.page is not None:
                moves.restores.append(Copy("page", "device", node.page, "device", target))
            else:
                assert node.host is not None, "the last page of the hit is not there any more"
                moves.restores.append(Copy("page", "host", node.host, "device", target))

    def grow(self, holding: Holding, length: int) -> bool:
        """Let the pages hold so many tokens; False if there is no room, then nothing has changed."""
        missing = -(-length // self.page_tokens) - len(holding.pages)
        if missing > 0:
            if self.tiers.available_pages < missing:
                return False
            holding.extend([self.tiers.take_page() for _ in range(missing)])
        return True

    def take_snapshot(self, holding: Holding, position: int) -> None:
        """Copy the state after this step, in which the sequence reaches a position; skipped if memory is too short."""
        assert self.prefixes is not None
        if holding.epoch != self.epoch:
            return
        slot = self.tiers.take_slot(recompute_cost(position, position - holding.deepest))
        if slot is None:
            self.counts["skipped_snapshots"] += 1
            return
        self.tiers.moves.after.append(Copy("slot", "device", holding.slot, "device", slot))
        self._taken.append((holding, position, slot))

    def prefetch(self, match: Match, spare: int = 0) -> None:
        """Bring what a waiting sequence will need to the device, as far as memory is free."""
        tiers, snapshot = self.tiers, match.snapshot
        if snapshot is None or match.is_pending:
            return
        for node in match.path[: match.position // self.page_tokens]:
            if node.page is None:
                if tiers.pages.num_free <= spare:
                    return
                page = tiers.take_page()
                assert node.host is not None
                tiers.moves.beside.append(Copy("page", "host", node.host, "device", page))
                tiers.moves.prefetched.append((node, page))
                node.is_pending = True
                tiers.pin(node)
        if snapshot.slot is None and tiers.slots.num_free > 1:
            slot = tiers.take_slot()
            assert slot is not None
            assert snapshot.host is not None
            tiers.moves.beside.append(Copy("slot", "host", snapshot.host, "device", slot))
            tiers.moves.prefetched.append((snapshot, slot))
            snapshot.is_pending = True
            tiers.pin_snapshot(snapshot)

    def close(self) -> Moves | None:
        """End the making of a step and return what it copies, if anything; one without copies or rows never lands."""
        moves = self.tiers.moves
        if moves.is_unused and not self._taken:  # as most steps that only decode
            self._steps.append(None)
            return None
        self.tiers.moves = Moves()
        self._steps.append(_Step(moves, self._taken))
        self._taken = []
        return moves

    def land(self, advances: Iterable[tuple[Holding, int]]) -> None:
        """Make true what the oldest closed step has done.

        Args:
            advances: Holdings with the position that each has now.
        """
        step = self._steps.popleft()
        if step is not None:
            land(self.tiers, step.moves)
        for holding, position in advances:
            holding.position = position
            if position // self.page_tokens > holding.published:
                self._publish(holding)
        for holding, position, slot in step.taken if step is not None else ():
            if holding.is_void or holding.position != position or not self._mark(holding, slot):
                self.tiers.slots.drop(slot)

    def fail(self) -> None:
        """Undo all closed steps; holdings that had a part in them must be released as void."""
        for step in filter(None, reversed(self._steps)):
            for _, _, slot in step.taken:
                self.tiers.slots.drop(slot)
            undo(self.tiers, step.moves)
        self._steps.clear()

    def release(self, holding: Holding, *, keep: bool) -> None:
        """Take a sequence's memory back.

        Args:
            holding: It has no part in a step that has not landed.
            keep: Leave what it computed for others; else what it published is forgotten too, where nobody else
                needs it.
        """
        tiers = self.tiers
        del self.holdings[holding.number]
        is_kept = False
        if keep and not holding.is_void and self.prefixes is not None and holding.epoch == self.epoch:
            self._publish(holding)
            if holding.position - holding.deepest >= self.prefixes.gap:
                is_kept = self._mark(holding, holding.slot)
        if not is_kept:
            tiers.slots.drop(holding.slot)
        deepest = holding.tail or holding.node
        if holding.tail is not None:  # pinned once for itself; the node above is pinned on its own
            tiers.unpin(holding.tail)
        else:
            tiers.unpin(holding.node)
        for page in holding.pages:
            tiers.pages.drop(page)
        holding.pages = []
        if not keep:
            self._forget(deepest, holding.number)

    def _forget(self, node: Node | None, author: int) -> None:
        while node is not None and node.parent is not None:
            above = node.parent
            if node.is_alive and not node.pins and not node.is_pending and node.author == author:
                self.tiers.remove(node)
            node = above

    def reset(self) -> None:
        """Forget all prefixes; running sequences go on with the memory they have, which nobody else will see.

        Closed steps must have landed.
        """
        assert not self._steps, "prefixes can be forgotten only between steps"
        self.epoch += 1
        for node in reversed(self.tree.nodes()):
            for snapshot in list(node.snapshots.values()):
                self.tiers.drop_snapshot(snapshot)
            if node.is_alive and not node.pins:
                self.tiers.remove(node)
        self.tiers.forsake()

    # publishing

    def _publish(self, holding: Holding) -> None:
        """Let others find the whole pages that have landed."""
        if self.prefixes is None or holding.is_void or holding.epoch != self.epoch:
            return
        size, tiers, tree = self.page_tokens, self.tiers, self.tree
        while (holding.published + 1) * size <= holding.position:
            index = holding.published
            tokens = tuple(holding.keys[index * size : (index + 1) * size])
            parent, page = holding.node, holding.pages[index]
            if parent.is_pending:
                return
            child, tail = parent.children.get(tokens), holding.tail
            if child is not None and child.is_pending:
                return
            if child is None and tail is not None:
                tree.extend(tail, tokens)
                child, holding.tail = tail, None
            else:
                if child is None:
                    child = tree.insert(parent, tokens, holding.number)
                tiers.pin_one(child)
                if tail is not None:  # pinned on its own, not through the child
                    holding.tail = None
                    tiers.unpin_one(tail)
            if child.page is None:
                tiers.give_page(child, page)
            elif child.page != page:  # somebody else computed the same
                holding.set_page(index, tiers.pages.share(child.page))
                tiers.pages.drop(page)
            tiers.absorb(child)
            holding.node, holding.published = child, index + 1

    def _mark(self, holding: Holding, slot: int) -> bool:
        """Publish a state at the holding's position; False if it is not wanted, and the slot stays the caller's."""
        size, tiers, tree = self.page_tokens, self.tiers, self.tree
        if self.prefixes is None or holding.epoch != self.epoch or holding.is_void or not holding.position:
            return False
        if holding.position // size != holding.published or holding.node.is_pending:
            return False
        offset = holding.position % size
        if not offset:
            node, offset = holding.node, size
        else:
            node = self._tail(holding, offset)
        if node is None or node.parent is None or node.is_pending:
            return False
        known = node.parent.marks.get(node.tokens[:offset])
        if known is not None and (known.slot is not None or known.is_pending or known.node.is_pending):
            holding.deepest = holding.position
            tiers.rescore_snapshot(known)
            return False
        if known is None:
            known = tree.mark(node, offset, holding.position - holding.deepest)
        tiers.give_slot(known, slot)
        holding.deepest = holding.position
        self.counts["snapshots"] += 1
        self.unsaved.append(known)
        return True

    def _tail(self, holding: Holding, offset: int) -> Node | None:
        """Return a node for the first tokens of the page that is being filled."""
        start = holding.published * self.page_tokens
        tokens = tuple(holding.keys[start : start + offset])
        if holding.tail is not None:
            if holding.tail.tokens != tokens:
                if tokens in holding.node.children:
                    return holding.node.children[tokens]
                self.tree.extend(holding.tail, tokens)
            return holding.tail
        node = self.tree.holder(holding.node, tokens)
        if node is None:
            node = self.tree.insert(holding.node, tokens, holding.number)
            self.tiers.pin_one(node)
            holding.tail = node
            self.tiers.give_page(node, holding.pages[holding.published])
        return node
