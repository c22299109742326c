"""Taking in prefixes that were computed elsewhere."""

from triax.serve.cache.manager import Manager
from triax.serve.cache.prefix import Key, Node, Snapshot


def install(
    manager: Manager, salt: str, pages: list[Key], offset: int, saved: int
) -> tuple[list[Node], Snapshot] | None:
    """Take in a prefix from outside, into memory that is free; for use between steps, before others can match it.

    Args:
        manager: Who takes it in.
        salt: Whose prefixes it belongs to.
        pages: Its keys, page by page; only the last page may be partly filled.
        offset: Keys of the last page that the snapshot covers.
        saved: Tokens back to the snapshot before it.

    Returns:
        The nodes that are new and the snapshot: the caller fills their memory, on the host where there is a host
        pool, else on the device. None if it is known already or does not fit.
    """
    tiers, tree, on_host = manager.tiers, manager.tree, manager.sizes.host_pages > 0
    node: Node | None = tree.roots.get(salt)
    known = 0
    while node is not None and known < len(pages) and (child := node.children.get(pages[known])) is not None:
        if child.is_pending:
            return None
        node, known = child, known + 1
    if node is not None and known >= len(pages) - 1:
        parent = node.parent if known == len(pages) else node
        if parent is not None and pages[-1][:offset] in parent.marks:
            return None
    free = (tiers.host_pages, tiers.host_slots) if on_host else (tiers.pages, tiers.slots)
    if free[0].num_free < len(pages) - known or not free[1].num_free:
        return None
    if not on_host and node is not None and node.parent is not None and node.page is None:
        return None
    above = node = node or tree.root(salt)
    added: list[Node] = []
    for tokens in pages[known:]:
        node = tree.insert(node, tokens, 0)
        if on_host:
            node.host = tiers.host_pages.take()
        else:
            page = tiers.take_page()
            tiers.give_page(node, page)
            tiers.pages.drop(page)
        added.append(node)
    snapshot = tree.mark(node, offset, saved)
    if on_host:
        snapshot.host = tiers.host_slots.take()
    else:
        snapshot.slot = tiers.slots.take()
    tiers.rescore_snapshot(snapshot)
    for one in added or [node]:
        tiers.rescore(one)
    if above.parent is not None:
        tiers.review(above)  # it has something below it now
    return added, snapshot
