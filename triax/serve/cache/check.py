"""What must be true of the cache at any time between two calls; an engine looks when it is idle."""

from collections import Counter
from collections.abc import Iterator

from triax.serve.cache.manager import Manager
from triax.serve.cache.prefix import Node


def faults(manager: Manager) -> list[str]:
    """Return what is wrong with a manager's books, one sentence each; nothing if all is well."""
    return [*_structure(manager), *_memory(manager), *_orders(manager), *_holdings(manager)]


def _known(manager: Manager) -> set[Node]:
    """Return all nodes, those of forgotten prefixes that running sequences still use included."""
    nodes = set(manager.tree.nodes())
    for holding in manager.holdings.values():
        node = holding.tail or holding.node
        while node.parent is not None:
            nodes.add(node)
            node = node.parent
    return nodes


def _steps(manager: Manager) -> Iterator:
    yield from ((step.moves, step.taken) for step in manager._steps if step is not None)
    yield manager.tiers.moves, manager._taken


def _pins(manager: Manager) -> Counter[Node]:
    pins: Counter[Node] = Counter()

    def hold(node: Node | None) -> None:
        while node is not None:
            pins[node] += 1
            node = node.parent

    for holding in manager.holdings.values():
        hold(holding.tail or holding.node)
    for moves, _ in _steps(manager):
        for snapshot in moves.read:
            hold(snapshot.node)
        for entry, _ in moves.prefetched:
            hold(entry if isinstance(entry, Node) else entry.node)
    return pins


def _structure(manager: Manager) -> Iterator[str]:
    size, pins = manager.page_tokens, _pins(manager)
    for node in _known(manager):
        where, parent = f"node at {node.start}", node.parent
        assert parent is not None
        if node.pins != pins[node]:
            yield f"{where} is pinned {node.pins} times, but {pins[node]} need it"
        if not node.is_alive and not node.is_stale:
            yield f"{where} is removed, but somebody needs it"
        if parent.children.get(node.tokens) is not node:
            yield f"{where} is not its parent's child"
        if sorted(node.children) != node.order:
            yield f"{where} does not keep its children in order"
        if node.start != parent.start + len(parent.tokens) or (parent.parent is not None and len(parent.tokens) < size):
            yield f"{where} does not follow a whole page"
        if node.page is None and node.host is None and not node.is_pending:
            yield f"{where} has no page anywhere"
        if node.page is not None and node.is_pending:
            yield f"{where} has a page on the device and is on its way"
        if node.page is not None and parent.parent is not None and parent.page is None:
            yield f"{where} is on the device, the page before it is not"
        if node.num_device_children != sum(child.page is not None for child in node.children.values()):
            yield f"{where} counts its children on the device wrongly"
        marks = {key: s for child in node.children.values() for key, s in _marks_of(child)}
        if marks != node.marks or Counter(len(key) for key in marks) != Counter(node.lengths):
            yield f"{where} does not find all snapshots in its children"
        if not node.pins and not node.is_pending and not node.is_stale and manager.tiers.is_useless(node):
            yield f"{where} serves nobody"
        for offset, snapshot in node.snapshots.items():
            if snapshot.slot is None and snapshot.host is None and not snapshot.is_pending:
                yield f"snapshot at {snapshot.position} has no slot anywhere"
            if snapshot.node is not node or snapshot.offset != offset or not 0 < offset <= len(node.tokens):
                yield f"snapshot at {snapshot.position} is not where it says"


def _marks_of(child: Node) -> list:
    return [(child.tokens[:offset], snapshot) for offset, snapshot in child.snapshots.items()]


def _memory(manager: Manager) -> Iterator[str]:
    tiers = manager.tiers
    held: dict[str, Counter[int]] = {name: Counter() for name in ("page", "slot", "host page", "host slot")}
    for node in _known(manager):
        held["page"].update([node.page] if node.page is not None else [])
        held["host page"].update([node.host] if node.host is not None else [])
        for snapshot in node.snapshots.values():
            held["slot"].update([snapshot.slot] if snapshot.slot is not None else [])
            held["host slot"].update([snapshot.host] if snapshot.host is not None else [])
    for holding in manager.holdings.values():
        held["page"].update(holding.pages)
        held["slot"].update([holding.slot])
    for moves, taken in _steps(manager):
        held["slot"].update(slot for _, _, slot in taken)
        for entry, index in moves.prefetched:
            held["page" if isinstance(entry, Node) else "slot"].update([index])
        for entry in moves.written:
            if not tiers.is_known(entry) and entry.host is not None:
                held["host page" if isinstance(entry, Node) else "host slot"].update([entry.host])
    pools = {"page": tiers.pages, "slot": tiers.slots, "host page": tiers.host_pages, "host slot": tiers.host_slots}
    for name, pool in pools.items():
        counted = Counter({index: count for index, count in enumerate(pool.holders) if count})
        if counted != held[name]:
            yield f"{name}s are held as {dict(held[name])}, but counted as {dict(counted)}"
        free = pool.free()
        if len(set(free)) != len(free) or {*free, *counted} != set(range(pool.first, pool.size)):
            yield f"some {name}s are lost or free twice"
        if name != "page" and any(count > 1 for count in counted.values()):
            yield f"some {name}s have two owners"


def _orders(manager: Manager) -> Iterator[str]:
    tiers, nodes = manager.tiers, manager.tree.nodes()
    snapshots = [one for node in nodes for one in node.snapshots.values()]
    idle = [node for node in nodes if not node.pins and not node.is_pending]
    still = [one for one in snapshots if not one.pins and not one.is_pending]
    expected = (
        ("pages", tiers.page_order, {n for n in idle if n.page is not None and not n.num_device_children}),
        ("slots", tiers.slot_order, {one for one in still if one.slot is not None}),
        (
            "host pages",
            tiers.host_page_order,
            {n for n in idle if n.host is not None and (n.page is not None or not n.children)},
        ),
        ("host slots", tiers.host_slot_order, {one for one in still if one.host is not None}),
    )
    for name, order, wanted in expected:
        if set(order) != wanted:
            yield f"{len(set(order) ^ wanted)} {name} are evictable and not known as such, or the other way round"
    count = sum(node.page is not None and not node.pins for node in nodes)
    if tiers.idle_pages != count:
        yield f"{tiers.idle_pages} idle pages are counted, but there are {count}"


def _holdings(manager: Manager) -> Iterator[str]:
    size = manager.page_tokens
    for holding in manager.holdings.values():
        where = f"sequence {holding.number}"
        if holding.table != tuple(holding.pages) or len(set(holding.pages)) != len(holding.pages):
            yield f"{where} has a stale page table or one page twice"
        if 0 in holding.pages or not holding.slot:
            yield f"{where} has the memory of padding rows"
        if len(holding.pages) * size < holding.position:
            yield f"{where} has tokens without pages"
        tokens: list[int] = []
        node = holding.node
        while node.parent is not None:
            tokens[:0] = node.tokens
            node = node.parent
        if node.salt != holding.salt or tokens != list(holding.keys[: holding.published * size]):
            yield f"{where} follows a path that is not its own"
        if holding.tail is not None:
            start = holding.published * size
            if tuple(holding.keys[start : start + len(holding.tail.tokens)]) != holding.tail.tokens:
                yield f"{where} fills a page that is not its own"
