"""A strict reader of one table of a published config."""

import difflib
from collections.abc import Mapping
from typing import Any

from triax.checkpoint.transformers_keys import DEFAULT_ONLY, NOT_READ, SAMPLING
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
        if value is not None and (isinstance(value, bool) != isinstance(allowed, bool) or value != allowed):
            raise ConfigError(
                f"{self.where}: `{name}` is not supported; found `{value}`; only `{allowed}` can be built"
            )

    def alias(self, name: str, other: str) -> None:
        """Let a key also be written as `other`; a table that has both must mean the same.

        Raises:
            ConfigError: The two differ.
        """
        self.taken.add(other)
        value = self.table.get(other)
        if value is None:
            return
        if self.table.get(name) is None:
            self.table[name] = value
        elif self.table[name] != value:
            raise ConfigError(
                f"{self.where}: `{name}` and `{other}` mean the same; found `{self.table[name]}` and `{value}`; "
                "remove one"
            )

    def finish(self, silent: frozenset[str] = frozenset()) -> None:
        """Refuse the keys that nobody took and that are not in `silent`; null says nothing and passes."""
        known = self.taken | silent
        for name, value in self.table.items():
            if name not in known and value is not None:
                nearest = difflib.get_close_matches(name, sorted(known), n=1, cutoff=0.0)[0]
                raise ConfigError(
                    f"{self.where}: `{name}` is not a key of this family; nearest is `{nearest}`; correct or remove it"
                )

    def finish_config(self, silent: frozenset[str] = frozenset()) -> list[str]:
        """Finish the table of a transformers config, whose common keys pass where they do not change the model.

        Returns:
            What the table asks of a sampler, for a person to read.
        """
        for name, default in DEFAULT_ONLY.items():
            self.expect(name, default)
        self.finish(silent | NOT_READ | frozenset(SAMPLING))
        asked = [
            f"`{name}` {self.table[name]}"
            for name, default in SAMPLING.items()
            if name not in self.taken and self.table.get(name, default) not in (default, None)
        ]
        if not asked:
            return []
        return [f"{self.where} holds sampling settings, which are not read here: {', '.join(asked)}"]
