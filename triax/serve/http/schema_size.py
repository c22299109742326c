"""How large a schema may be that an answer is held to: its grammar is made while others wait for their next token."""

from collections.abc import Iterable, Mapping
from typing import Any

from triax.serve.http.fault import refuse

MAX_DEPTH = 128  # of JSON: an object's property lies two levels below it
MAX_PROPERTIES = 1000  # in all; optional ones of one object cost time by their square
MAX_WIDTH = 128  # of one object
MAX_VALUES = 1000  # in all enumerations


def check_size(schema: Mapping[str, Any], where: str) -> None:
    """Refuse a schema whose grammar would take long to make.

    Args:
        schema: JSON schema.
        where: What the message calls it.

    Raises:
        Fault: It is too deep, or names too many properties or values.
    """
    counts = {"properties of one object": 0, "properties": 0, "values": 0, "levels": 0}
    level: list[Any] = [schema]
    while level:
        counts["levels"] += 1
        below: list[Any] = []
        for tree in level:
            if isinstance(tree, Mapping):
                named, values = tree.get("properties"), tree.get("enum")
                width = len(named) if isinstance(named, Mapping) else 0
                counts["properties of one object"] = max(width, counts["properties of one object"])
                counts["properties"] += width
                counts["values"] += len(values) if isinstance(values, list) else 0
            inner: Iterable[Any] = tree.values() if isinstance(tree, Mapping) else tree
            below += [one for one in inner if isinstance(one, Mapping | list)]
        level = below if counts["levels"] <= MAX_DEPTH else []
    limits = dict(zip(counts, (MAX_WIDTH, MAX_PROPERTIES, MAX_VALUES, MAX_DEPTH), strict=True))
    for name, most in limits.items():
        if counts[name] > most:
            raise refuse(f"{where}: is too large; found {counts[name]} {name}; use at most {most}")
