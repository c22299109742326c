"""Declarations of tools: checked once, in the reader's words, before a model sees them."""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from triax.errors import DataError

NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_.-]{0,63}\Z")  # \Z: `$` would let a newline through

Tool = Mapping[str, Any]


def check_tools(tools: object, where: str = "tools") -> tuple[Tool, ...]:
    """Return the declarations if every one of them can be used.

    Args:
        tools: List of `{"type": "function", "function": {"name", "description", "parameters"}}`.
        where: Name of the list in the messages of errors.

    Raises:
        DataError: A name is not allowed or declared twice, or a schema does not describe an object.
    """
    if tools is None:
        return ()
    if not isinstance(tools, Sequence) or isinstance(tools, str | bytes):
        raise DataError(f"{where}: must be a list of tool declarations; found {_show(tools)}; give a list")
    seen: dict[str, int] = {}
    for number, tool in enumerate(tools):
        name = _check(tool, f"{where}[{number}]")
        if name in seen:
            raise DataError(
                f"{where}[{number}].function.name: declared twice; found `{name}` also in {where}[{seen[name]}]; "
                "give every tool its own name"
            )
        seen[name] = number
    try:
        json.dumps(list(tools), allow_nan=False)
    except (TypeError, ValueError, RecursionError) as problem:
        raise DataError(f"{where}: cannot be written as JSON; found {problem}; use JSON values only") from None
    return tuple(tools)


def tool_name(tool: Tool) -> str:
    """Return the name of a checked declaration."""
    return tool["function"]["name"]


def sort_keys(tree: Any) -> Any:
    """Return a JSON tree with the keys of every object in order, so that equal tools give equal tokens."""
    if isinstance(tree, Mapping):
        return {key: sort_keys(tree[key]) for key in sorted(tree)}
    if isinstance(tree, list | tuple):
        return [sort_keys(item) for item in tree]
    return tree


def compact(tree: Any) -> str:
    """Return JSON without blanks, non-ASCII kept."""
    return json.dumps(tree, ensure_ascii=False, separators=(",", ":"))


def _check(tool: object, where: str) -> str:
    if not isinstance(tool, Mapping) or tool.get("type", "function") != "function":
        raise DataError(f'{where}: must be a function; found {_show(tool)}; give {{"type": "function", "function": …}}')
    function = tool.get("function")
    if not isinstance(function, Mapping):
        raise DataError(f"{where}.function: must be an object; found {_show(function)}; give it a name and parameters")
    name = function.get("name")
    if not isinstance(name, str) or not NAME.match(name):
        raise DataError(
            f"{where}.function.name: not allowed; found {_show(name)}; "
            "use 1 to 64 letters, digits, `_`, `-` or `.` of ASCII, a letter or `_` first"
        )
    if not isinstance(function.get("description") or "", str):
        found = _show(function["description"])
        raise DataError(f"{where}.function.description: must be text; found {found}; describe `{name}` in words")
    _check_schema(function.get("parameters"), f"{where}.function.parameters", name)
    return name


def _check_schema(schema: object, where: str, name: str) -> None:
    if schema is None:
        return
    if not isinstance(schema, Mapping) or schema.get("type", "object") != "object":
        raise DataError(
            f"{where}: must be the JSON schema of an object; found {_show(schema)}; "
            f'give `{name}` {{"type": "object", "properties": …}}'
        )
    properties, required = schema.get("properties"), schema.get("required")
    if properties is not None and not isinstance(properties, Mapping):
        raise DataError(f"{where}.properties: must be an object; found {_show(properties)}; name each argument")
    if required is not None and not (isinstance(required, list | tuple) and all(isinstance(k, str) for k in required)):
        raise DataError(f"{where}.required: must be a list of names; found {_show(required)}; list argument names")


def _show(value: object) -> str:
    shown = repr(value)
    return f"`{shown if len(shown) <= 80 else shown[:77] + '...'}`"
