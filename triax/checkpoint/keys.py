"""A strict reader of one table of a published config."""

import difflib
from collections.abc import Mapping
from typing import Any

from triax.errors import ConfigError

_KINDS: dict[type, str] = {
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    str: "a text",
    dict: "a table",
    list: "a list",
}


class Keys:
    """The keys of one table; what nobody takes is unknown, and null counts as absent."""

    def __init__(self, table: Mapping[str, Any], where: str) -> None:
        self.table = dict(table)
        self.where = where
        self.taken: set[str] = set()

    def take(self, name: str, kind: type, *default: Any) -> Any:
        """Return the value of a key.

        Raises:
            ConfigError: It is absent and has no default, or it is of another type.
        """
        self.taken.add(name)
        value = self.table.get(name)
        if value is None:
            if default:
                return default[0]
            raise ConfigError(f"{self.where}: `{name}` is missing; the model cannot be built without it; add it")
        if kind is float and type(value) is int:
            value = float(value)
        if type(value) is not kind:
            raise ConfigError(f"{self.where}: `{name}` must be {_KINDS[kind]}; found `{value!r}`; correct it")
        return value

    def expect(self, name: str, allowed: Any) -> None:
        """Refuse any value but this one; an absent key means it."""
        self.taken.add(name)
        value = self.table.get(name, allowed)
        if value is not None and (type(value) is not type(allowed) or value != allowed):
            raise ConfigError(
                f"{self.where}: `{name}` is not supported; found `{value}`; only `{allowed}` can be built"
            )

    def finish(self, silent: frozenset[str] = frozenset()) -> None:
        """Refuse the keys that nobody took and that are not in `silent`."""
        known = sorted(self.taken | silent)
        for name in self.table:
            if name not in known:
                nearest = difflib.get_close_matches(name, known, n=1, cutoff=0.0)[0]
                raise ConfigError(
                    f"{self.where}: `{name}` is not a key of this family; nearest is `{nearest}`; correct or remove it"
                )
