"""The tree of known prefixes: pages of latents, and snapshots of states at a few of their borders."""

import hashlib
from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass, field

from triax.serve.request import MediaItem

Key = tuple[int, ...]


@dataclass(eq=False, slots=True)
class Snapshot:
    """KDA state and window of a prefix."""

    node: "Node"
    """Node whose page holds the prefix's last tokens."""
    offset: int
    """How many of that node's tokens belong to the prefix."""
    saved: int
    """Tokens back to the snapshot before it, when it was taken."""
    slot: int | None = None
    """Slot on the device."""
    host: int | None = None
    """Slot in host memory."""
    pins: int = 0
    """Copies under way that read it."""
    is_pending: bool = False
    """Whether its bytes are still on their way to host memory or back."""

    @property
    def position(self) -> int:
        """Tokens before it."""
        return self.node.start + self.offset


@dataclass(eq=False, slots=True)
class Node:
    """One page of a prefix; only full pages have children."""

    parent: "Node | None"
    tokens: Key
    start: int
    """Tokens before this page."""
    author: int = 0
    """Number of the holding that published it."""
    page: int | None = None
    """Page on the device; a node has one only if its parent has one or is the root."""
    host: int | None = None
    """Page in host memory."""
    pins: int = 0
    """Holdings and copies that need it or a node below it."""
    is_pending: bool = False
    """Whether its bytes are still on their way to host memory or back; then nobody may match it."""
    is_alive: bool = True
    is_stale: bool = False
    """Whether it belongs to prefixes that were forgotten while a sequence still used it."""
    children: dict[Key, "Node"] = field(default_factory=dict)
    order: list[Key] = field(default_factory=list)
    """Keys of the children, sorted."""
    marks: dict[Key, Snapshot] = field(default_factory=dict)
    """Snapshots inside the children, by the tokens that lead to them from here."""
    lengths: dict[int, int] = field(default_factory=dict)
    """Lengths of the marks, with their number."""
    snapshots: dict[int, Snapshot] = field(default_factory=dict)
    """Snapshots inside this page, by offset."""
    num_device_children: int = 0
    salt: str = ""
    """Of a root: whose prefixes begin here."""


@dataclass(frozen=True, slots=True)
class Match:
    """What is known of a prompt."""

    root: Node
    path: tuple[Node, ...]
    """Nodes of the matching whole pages."""
    matched: int
    """Tokens whose latents are known."""
    snapshot: Snapshot | None = None
    """Deepest one within them; computing starts there."""
    is_pending: bool = False
    """Whether something that the hit needs is still being copied: ask again after the step."""

    @property
    def position(self) -> int:
        """Tokens that need not be computed."""
        return self.snapshot.position if self.snapshot else 0


def media_key(item: MediaItem, offset: int) -> int:
    """Return what stands for a slot token of a picture in keys: negative, so no token is ever equal to it."""
    text = f"{item.digest}|{item.length}|{item.grid}|{offset}".encode()
    return -1 - int.from_bytes(hashlib.blake2b(text, digest_size=15).digest(), "big")


def keys_of(tokens: Sequence[int], media: Sequence[MediaItem]) -> list[int]:
    """Return the tokens with each slot token replaced by what it shows."""
    keys = list(tokens)
    for item in media:
        keys[item.start : item.start + item.length] = [media_key(item, offset) for offset in range(item.length)]
    return keys


class Tree:
    """All prefixes of one weight version, apart by salt."""

    def __init__(self, page_tokens: int) -> None:
        self.page_tokens = page_tokens
        self.roots: dict[str, Node] = {}

    def root(self, salt: str) -> Node:
        """Return the root of a salt, made if it is new."""
        return self.roots.setdefault(salt, Node(None, (), 0, salt=salt))

    def match(self, salt: str, keys: Sequence[int], limit: int) -> Match:
        """Find the longest known prefix, and in it the deepest snapshot after at most `limit` tokens."""
        root = self.roots.get(salt)
        if root is None:
            return Match(Node(None, (), 0), (), 0)
        size = self.page_tokens
        path, node, known = [], root, 0
        while (child := node.children.get(tuple(keys[known : known + size]))) is not None:
            if len(child.tokens) < size:
                break
            path.append(child)
            node, known = child, known + size
        matched = known + _common(node.order, tuple(keys[known : known + size]))
        snapshot = self._deepest(root, path, keys, min(limit, matched))
        if snapshot is None:
            return Match(root, tuple(path), matched)
        needed = path[: snapshot.position // size]
        is_pending = snapshot.is_pending or snapshot.node.is_pending or any(one.is_pending for one in needed)
        return Match(root, tuple(path), matched, snapshot, is_pending)

    def _deepest(self, root: Node, path: list[Node], keys: Sequence[int], limit: int) -> Snapshot | None:
        size = self.page_tokens
        for depth in range(min(len(path), limit // size), -1, -1):
            parent = path[depth - 1] if depth else root
            base = depth * size
            for length in sorted(parent.lengths, reverse=True):
                if base + length <= limit:
                    snapshot = parent.marks.get(tuple(keys[base : base + length]))
                    if snapshot is not None:
                        return snapshot
        return None

    def insert(self, parent: Node, tokens: Key, author: int) -> Node:
        """Add a page below a full one."""
        node = Node(parent, tokens, parent.start + len(parent.tokens), author)
        parent.children[tokens] = node
        if parent.order:
            insort(parent.order, tokens)
        else:
            parent.order.append(tokens)
        return node

    def extend(self, node: Node, tokens: Key) -> None:
        """Let a partly filled page be known with more of its tokens."""
        self._unlink(node)
        node.tokens = tokens
        assert node.parent is not None
        node.parent.children[tokens] = node
        insort(node.parent.order, tokens)

    def remove(self, node: Node) -> None:
        """Take out a node without children and snapshots."""
        assert not node.children
        assert not node.snapshots
        self._unlink(node)
        node.is_alive = False

    def holder(self, parent: Node, tokens: Key) -> Node | None:
        """Return a child whose page begins with these tokens."""
        place = bisect_left(parent.order, tokens)
        if place < len(parent.order) and parent.order[place][: len(tokens)] == tokens:
            return parent.children[parent.order[place]]
        return None

    def mark(self, node: Node, offset: int, saved: int) -> Snapshot:
        """Add a snapshot inside a page."""
        snapshot = Snapshot(node, offset, saved)
        node.snapshots[offset] = snapshot
        parent = node.parent
        assert parent is not None
        parent.marks[node.tokens[:offset]] = snapshot
        parent.lengths[offset] = parent.lengths.get(offset, 0) + 1
        return snapshot

    def unmark(self, snapshot: Snapshot) -> None:
        """Take out a snapshot."""
        node, parent = snapshot.node, snapshot.node.parent
        assert parent is not None
        del node.snapshots[snapshot.offset]
        del parent.marks[node.tokens[: snapshot.offset]]
        parent.lengths[snapshot.offset] -= 1
        if not parent.lengths[snapshot.offset]:
            del parent.lengths[snapshot.offset]

    def move(self, snapshot: Snapshot, node: Node) -> None:
        """Let another page with the same tokens, below the same parent, hold a snapshot."""
        del snapshot.node.snapshots[snapshot.offset]
        snapshot.node = node
        node.snapshots[snapshot.offset] = snapshot

    def nodes(self) -> list[Node]:
        """Return all nodes, parents first, without the roots."""
        found = [child for root in self.roots.values() for child in root.children.values()]
        for node in found:
            found.extend(node.children.values())
        return found

    @staticmethod
    def _unlink(node: Node) -> None:
        parent = node.parent
        assert parent is not None
        del parent.children[node.tokens]
        del parent.order[bisect_left(parent.order, node.tokens) if len(parent.order) > 1 else 0]


def _common(order: list[Key], wanted: Key) -> int:
    """Return how many first tokens some sorted key shares with the wanted one."""
    place = bisect_left(order, wanted)
    return max((_shared(key, wanted) for key in order[max(0, place - 1) : place + 1]), default=0)


def _shared(one: Key, other: Key) -> int:
    count = 0
    for a, b in zip(one, other, strict=False):
        if a != b:
            break
        count += 1
    return count
