"""Settings as text: every value that is not the default, with where it was written."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from triax.config.load import Loaded
from triax.config.schema import differences
from triax.config.settings import Settings


def as_toml(loaded: Loaded[Any]) -> str:
    """Write the non-default values as TOML, the origin of each as a comment; the text is itself a recipe."""
    rows = [(f"{path} = {toml(value)}", origin(loaded.origins, path)) for path, value in differences(loaded.settings)]
    width = min(60, max((len(text) for text, _ in rows), default=0))
    return "\n".join(f"{text:<{width}}  # {source}" for text, source in rows)


def as_json(loaded: Loaded[Any]) -> dict[str, Any]:
    """Return the resolved settings and the origins, in the form of a run's `recipe.json`."""
    return {"recipe": loaded.settings.model_dump(mode="json"), "origins": dict(loaded.origins)}


def origin(origins: Mapping[str, str], path: str) -> str:
    """Return where a value was written: itself, the table around it that was set as a whole, or nowhere."""
    while path:
        if path in origins:
            return origins[path]
        path = path.rpartition(".")[0]
    return "default"


def toml(value: Any) -> str:
    """Write one value as TOML; what is off is the word `none`, which recipes understand."""
    if value is None:
        return '"none"'
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int):
        return f"{value:_}" if abs(value) >= 10_000 else str(value)
    if isinstance(value, str | Path):
        return json.dumps(str(value), ensure_ascii=False)
    if isinstance(value, Settings):
        fields = {name: getattr(value, name) for name in type(value).model_fields}
        return "{ " + ", ".join(f"{name} = {toml(inner)}" for name, inner in fields.items()) + " }"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(toml(entry) for entry in value) + "]"
    return repr(value)
