"""How a budget is divided among classes of requests."""

from collections.abc import Mapping


def shared_out(budget: int, demand: Mapping[str, int], shares: Mapping[str, float]) -> dict[str, int]:
    """Divide a budget in proportion to shares; what a class does not need goes to those that want more.

    Args:
        budget: Tokens to divide.
        demand: Tokens that each class could use.
        shares: Weight of each class.

    Returns:
        Tokens for each class: never more than its demand, never more than the budget together, and at least its share
        or its demand, whichever is less (but for rounding down).
    """
    given = dict.fromkeys(demand, 0)
    open_classes = {name for name, wanted in demand.items() if wanted > 0}
    left = budget
    while open_classes and left > 0:
        total = sum(shares[name] for name in open_classes)
        portions = {name: int(left * shares[name] / total) for name in open_classes}
        sated = {name for name in open_classes if demand[name] - given[name] <= portions[name]}
        for name in sated or open_classes:
            part = demand[name] - given[name] if sated else portions[name]
            given[name] += part
            left -= part
        if not sated:
            break
        open_classes -= sated
    return given
