"""Validation problems in the reader's words: where, what is wrong, what was found, what to do."""

import difflib
import json
import re
from collections.abc import Callable, Mapping
from typing import Any

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from triax.config.schema import alternatives, chosen, element, kind_name, places, tables
from triax.config.settings import Settings

EXPECTED = {
    "int_type": "must be a whole number",
    "int_parsing": "must be a whole number",
    "int_from_float": "must be a whole number",
    "float_type": "must be a number",
    "float_parsing": "must be a number",
    "finite_number": "must be a finite number",
    "bool_type": "must be true or false",
    "bool_parsing": "must be true or false",
    "string_type": "must be text",
    "path_type": "must be a path",
    "tuple_type": "must be a list",
    "list_type": "must be a list",
    "literal_error": "must be {expected}",
    "greater_than": "must be more than {gt:g}",
    "greater_than_equal": "must be at least {ge:g}",
    "less_than": "must be less than {lt:g}",
    "less_than_equal": "must be at most {le:g}",
    "multiple_of": "must be a multiple of {multiple_of}",
    "too_short": "must have at least {min_length} entries",
    "too_long": "must have at most {max_length} entries",
}


def explain(problem: ValidationError, schema: type[Settings], origin_of: Callable[[str], str]) -> str:
    """Write one line for each problem.

    Args:
        problem: What pydantic found.
        schema: The root of the settings.
        origin_of: The file or override that a path (`optim.lr`) was written in; of several paths with commas between
            them, the uppermost in which any was.
    """
    lines = []
    for error in problem.errors(include_url=False):
        if error["type"] == "too_short" and len(error["input"]) >= error.get("ctx", {}).get("min_length", 0):
            continue  # entries were there but wrong, and each is named in a line of its own
        path, table, annotation = _place(schema, error["loc"])
        text = _sentence(error, path, table, annotation, schema)
        origin = origin_of(
            path if error["type"] != "value_error" else ",".join(_named(text, path, annotation, schema) or [path])
        )
        lines.append(f"{origin}: {text}" if origin else text)
    return "\n".join(dict.fromkeys(lines))


def _named(text: str, path: str, annotation: Any, schema: type[Settings]) -> list[str]:
    """Return the settings that a rule across several of them names: one of those is at fault, not the table."""
    words = set(re.findall(r"[a-z_][\w.]*", text))
    fields = [name for table in (tables(annotation) if path else ()) for name in table.model_fields]
    inner = [f"{path}.{name}" for name in fields if name in words]
    return [place for place in places(schema) if "." in place and place in words] + inner


def _place(schema: type[Settings], location: tuple[int | str, ...]) -> tuple[str, type[Settings] | None, Any]:
    """Turn pydantic's location into our path; give the table that holds its last key and what may stand there."""
    path, table, annotation = "", None, schema
    steps = list(location)
    while steps:
        step = steps.pop(0)
        if isinstance(step, int):
            path, annotation, table = f"{path}[{step}]", element(annotation), None
            continue
        if len(tables(annotation)) > 1 and (kind := chosen(annotation, step)) is not None:
            annotation = kind  # pydantic names the kind it chose: not a key of ours
            continue
        table = chosen(annotation, None)
        field = table.model_fields.get(step) if table else None
        path = f"{path}.{step}" if path else step
        annotation = field.annotation if field is not None else None
    return path, table, annotation


def _sentence(
    error: ErrorDetails, path: str, table: type[Settings] | None, annotation: Any, schema: type[Settings]
) -> str:
    kind, found, context = error["type"], error["input"], error.get("ctx", {})
    if kind == "value_error":
        message = str(context.get("error", error["msg"]))
        return f"{path}: {message}" if path else message
    if kind == "extra_forbidden":
        return _unknown(path, table, schema)
    if kind == "missing":
        return _missing(path, table)
    if kind in ("union_tag_invalid", "union_tag_not_found"):
        kinds = ", ".join(f"`{kind_name(choice)}`" for choice in tables(annotation))
        was = f"; found `{found['kind']}`" if isinstance(found, Mapping) and "kind" in found else ""
        return f"{path}.kind must be one of {kinds}{was}"
    if kind in ("model_type", "model_attributes_type", "dict_type"):
        return f"{path or 'the recipe'} must be a table; found `{_shown(found)}`{_off(annotation)}"
    expected = EXPECTED.get(kind)
    wanted = expected.format(**context) if expected else error["msg"][:1].lower() + error["msg"][1:]
    quoted = isinstance(found, str) and kind not in ("literal_error", "string_type")
    shown = json.dumps(found) if quoted else _shown(found)
    return f"{path} {wanted.replace(chr(39), '`')}; found `{shown}`{_off(annotation)}"


def _unknown(path: str, table: type[Settings] | None, schema: type[Settings]) -> str:
    if table is None:
        return f"{path} is not a setting"
    parent, _, name = path.rpartition(".")
    where = f" of {table.__name__}" if parent else ""
    nearest = difflib.get_close_matches(name, table.model_fields, n=1, cutoff=0.6)
    if nearest:
        return f"{path} is not a setting{where}; nearest is `{parent}.{nearest[0]}`".replace("`.", "`")
    elsewhere = [place for place in places(schema) if place.rpartition(".")[2] == name and place != path]
    if len(elsewhere) == 1:
        return f"{path} is not a setting{where}; did you mean `{elsewhere[0]}`"
    return f"{path} is not a setting{where}; there are {', '.join(f'`{field}`' for field in table.model_fields)}"


def _missing(path: str, table: type[Settings] | None) -> str:
    field = table.model_fields.get(path.rpartition(".")[2]) if table else None
    meaning = f" ({field.description.splitlines()[0].rstrip('.').lower()})" if field and field.description else ""
    what = "the table" if field is not None and tables(field.annotation) else "the setting"
    give = "" if "[" in path else f" or give `{path}=…`"  # no word of the command line reaches into a list
    return f"{what} `{path}`{meaning} is required; none was found; add it to the recipe{give}"


def _off(annotation: Any) -> str:
    return "; write `none` to turn it off" if annotation and type(None) in alternatives(annotation) else ""


def _shown(value: Any) -> str:
    text = str(value).lower() if isinstance(value, bool) else str(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
