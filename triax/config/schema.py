"""What a schema says about a place in a settings tree: its kinds, its fields, whether it may be off."""

import types
from collections.abc import Iterator
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from triax.config.settings import Settings

Tree = dict[str, Any]


def alternatives(annotation: Any) -> tuple[Any, ...]:
    """Return what an annotation admits, with `Annotated` and unions opened: settings classes, plain types, None."""
    origin = get_origin(annotation)
    if origin is Annotated:
        return alternatives(get_args(annotation)[0])
    if origin in (Union, types.UnionType):
        return tuple(kind for member in get_args(annotation) for kind in alternatives(member))
    return (annotation,)


def tables(annotation: Any) -> tuple[type[Settings], ...]:
    """Return the settings classes that may stand at a place."""
    return tuple(kind for kind in alternatives(annotation) if isinstance(kind, type) and issubclass(kind, Settings))


def element(annotation: Any) -> Any:
    """Return what the entries of a list are, or None where the place holds no list."""
    for kind in alternatives(annotation):
        if get_origin(kind) in (tuple, list):
            return get_args(kind)[0]
    return None


def kind_name(table: type[Settings]) -> str | None:
    """Return the `kind` that chooses this table, or None for a table that is never one of several."""
    field = table.model_fields.get("kind")
    return get_args(field.annotation)[0] if field is not None and get_origin(field.annotation) is Literal else None


def default_of(field: FieldInfo) -> Any:
    """Return a field's default, or None for a required one."""
    default = field.get_default(call_default_factory=True)
    return None if default is PydanticUndefined else default


def chosen(annotation: Any, kind: Any) -> type[Settings] | None:
    """Return the settings class at a place: the only one, or the one of this `kind`."""
    choice = tables(annotation)
    if len(choice) == 1:
        return choice[0]
    return next((table for table in choice if kind_name(table) == kind), None)


def places(table: type[Settings], prefix: str = "") -> dict[str, FieldInfo]:
    """Return every field that a recipe may set below a table, by its path; entries of lists are left out."""
    found: dict[str, FieldInfo] = {}
    for name, field in table.model_fields.items():
        found.setdefault(f"{prefix}{name}", field)
        for inner in tables(field.annotation):
            if element(field.annotation) is None:
                found |= places(inner, f"{prefix}{name}.")
    return found


def complete(table: type[Settings], tree: Tree) -> Tree:
    """Fill in what a hand-written tree may leave out, so that validation can be strict.

    A table that is one of several kinds takes the default's `kind`; the word `none` turns off what can be off (TOML
    has no null); a whole number may be written as a float, such as `2e6`.
    """
    done = dict(tree)
    for name, field in table.model_fields.items():
        if name in tree:
            done[name] = _complete_value(field.annotation, tree[name], default_of(field))
    return done


def _complete_value(annotation: Any, value: Any, default: Any) -> Any:
    kinds = alternatives(annotation)
    if value == "none" and type(None) in kinds and str not in kinds:
        return None
    if isinstance(value, dict):
        if "kind" not in value and isinstance(default, Settings) and (kind := kind_name(type(default))):
            value = {"kind": kind} | value
        table = chosen(annotation, value.get("kind"))
        return complete(table, value) if table else value
    if isinstance(value, list) and (inner := element(annotation)) is not None:
        return [_complete_value(inner, entry, None) for entry in value]
    if isinstance(value, float) and value.is_integer() and float not in kinds and any(k is int for k in kinds):
        return int(value)
    return value


def differences(value: Settings, default: Any = None, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield path and value of every field that is required or differs from its default."""
    same_kind = type(value) is type(default)
    for name, field in type(value).model_fields.items():
        inner = getattr(value, name)
        path = f"{prefix}{name}"
        usual = getattr(default, name) if same_kind else default_of(field)
        if isinstance(inner, Settings):
            yield from differences(inner, usual, f"{path}.")
        elif (field.is_required() and not same_kind) or inner != usual or (name == "kind" and not same_kind and prefix):
            yield path, inner
