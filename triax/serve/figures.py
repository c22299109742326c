"""What an engine tells of itself: figures of the moment, and what its cache holds."""

from triax.serve.cache.manager import Manager
from triax.serve.scheduler import Scheduler


def figures(scheduler: Scheduler) -> dict[str, float]:
    """Return how full an engine is, what its cache served, and what happened so far."""
    manager = scheduler.manager
    counts, sizes = manager.counts, manager.sizes
    prompt = max(1, counts["prompt_tokens"])
    living = scheduler.sequences.values()
    return {
        "running": float(len(scheduler.running)),
        "waiting": float(scheduler.num_waiting),
        **_memory(manager),
        "pages": float(sizes.pages - 1),
        "slots": float(sizes.slots - 1),
        "prefix_hit_share": counts["cached_tokens"] / prompt,
        "prefix_match_share": counts["matched_tokens"] / prompt,
        "drafts_running": float(sum(one.drafted for one in living)),
        "drafts_accepted_running": float(sum(one.accepted for one in living)),
        **{f"{name}_count": float(value) for name, value in (scheduler.counts | counts).items()},
    }


def report(manager: Manager) -> dict[str, object]:
    """Return what a cache holds and, where it serves nobody, why."""
    nodes = manager.tree.nodes()
    snapshots = sum(len(node.snapshots) for node in nodes)
    prompt = max(1, manager.counts["prompt_tokens"])
    off = "cache.prefixes is none" if manager.prefixes is None else ""
    return {
        "page_tokens": manager.page_tokens,
        "pages_known": sum(node.page is not None for node in nodes),
        "pages_on_host": sum(node.host is not None for node in nodes),
        "snapshots": snapshots,
        "why_no_hits": off or ("" if snapshots else "no prompt has left a snapshot yet"),
        **_memory(manager),
        "prefix_hit_share": manager.counts["cached_tokens"] / prompt,
        "prefix_match_share": manager.counts["matched_tokens"] / prompt,
    }


def _memory(manager: Manager) -> dict[str, float]:
    tiers = manager.tiers
    return {"pages_free": float(tiers.pages.num_free), "slots_free": float(tiers.slots.num_free)}
