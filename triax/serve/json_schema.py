"""JSON schemas as grammars: every keyword is held, or refused by its name and place.

A schema is first brought into alternatives without `$ref`, `allOf`, `anyOf`, `oneOf`, `not` and conditions: each is a
set of plain schemas that all hold at once. What is written satisfies one of them. The grammar may allow less than the
schema (no blanks, properties in the order of their declaration, further properties only where they are asked for),
never more.
"""

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, reduce
from itertools import product
from typing import Any
from urllib.parse import unquote

from triax.errors import ConfigError, UnsupportedError

TYPES = ("object", "array", "string", "number", "boolean", "null")
MAX_ALTERNATIVES = 128
MAX_COUNT = 100_000  # of characters, items or properties that a schema may ask for
MAX_TABLE = 64  # items that are counted one by one, beside `contains` or different places
MAX_UNIQUE = 8
MAX_PATTERNS = 3
HELD = {
    "type": "",
    "enum": "values that break another keyword beside it are left out",
    "const": "",
    "properties": "written in the order of their declaration",
    "required": "",
    "additionalProperties": "further properties are written where this asks for them, or where none is declared",
    "patternProperties": f"at most {MAX_PATTERNS} patterns",
    "propertyNames": "conditions on strings",
    "minProperties": "up to one more than the declared properties",
    "maxProperties": "",
    "dependentRequired": "",
    "dependentSchemas": "",
    "dependencies": "",
    "items": "",
    "prefixItems": "",
    "additionalItems": "beside a list of `items`, as drafts up to 2019-09 have it",
    "minItems": "",
    "maxItems": "",
    "uniqueItems": f"where at most one item may stand, or the items have at most {MAX_UNIQUE} values",
    "contains": "",
    "minContains": "",
    "minLength": "",
    "maxLength": "",
    "pattern": "as Python reads it, without looks around, references to groups, flags and borders of words",
    "format": "",
    "minimum": "",
    "maximum": "",
    "exclusiveMinimum": "",
    "exclusiveMaximum": "",
    "multipleOf": "whole numbers; any other where the bounds leave at most 1,000 values",
    "$ref": "pointers (`#`, `#/…`) and anchors within the schema; keywords beside it hold too",
    "allOf": "",
    "anyOf": "",
    "oneOf": "where no value that is written fits two branches",
    "not": "of what can be turned round: `type`, `enum`, `const`, bounds, lengths, `pattern`, `required`, `properties` "
    "and combinations of them",
    "if": "as `not`",
    "then": "",
    "else": "",
}
REFUSED = {
    "maxContains": "",
    "unevaluatedProperties": "unless it is true",
    "unevaluatedItems": "unless it is true",
    "$dynamicRef": "",
    "$recursiveRef": "",
}
ANNOTATIONS = (
    "title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly", "$schema", "$id", "$anchor",
    "$defs", "definitions", "$comment", "contentEncoding", "contentMediaType", "contentSchema",
)  # fmt: skip
"""Keywords that ask nothing of a value; keywords that the standard does not know are taken for such too."""
_HOUR = r"(?:[01]\d|2[0-3]):[0-5]\d:[0-5]\d(?:\.\d{1,6})?(?:Z|[+-](?:[01]\d|2[0-3]):[0-5]\d)"
_DAY = (
    r"[1-9]\d{3}-(?:(?:0[13578]|1[02])-(?:0[1-9]|[12]\d|3[01])|(?:0[469]|11)-(?:0[1-9]|[12]\d|30)"
    r"|02-(?:0[1-9]|1\d|2[0-8]))"
)
_BYTE = r"(?:25[0-5]|2[0-4]\d|1\d\d|[1-9]?\d)"
_LABEL = r"[A-Za-z0-9](?:[A-Za-z0-9-]{0,20}[A-Za-z0-9])?"
_HEX = "[0-9A-Fa-f]"
_PATH = r"(?:[A-Za-z0-9._~!$&'()*+,;=:@/-]|%[0-9A-F][0-9A-F])*"
FORMATS = {
    "date-time": f"^{_DAY}T{_HOUR}$",
    "date": f"^{_DAY}$",
    "time": f"^{_HOUR}$",
    "duration": r"^P(?:\d{1,4}[WYMD]|(?:\d{1,4}D)?T(?:\d{1,4}H(?:\d{1,4}M)?|\d{1,4}[MS]))$",
    "email": rf"^[A-Za-z0-9_+-]+(?:\.[A-Za-z0-9_+-]+)*@{_LABEL}(?:\.{_LABEL})+$",
    "hostname": rf"^{_LABEL}(?:\.{_LABEL}){{0,6}}$",
    "ipv4": rf"^{_BYTE}(?:\.{_BYTE}){{3}}$",
    "ipv6": rf"^(?:{_HEX}{{1,4}}:){{7}}{_HEX}{{1,4}}$|^(?:{_HEX}{{1,4}}:){{1,6}}:{_HEX}{{1,4}}$|^::1?$",
    "uuid": rf"^{_HEX}{{8}}-{_HEX}{{4}}-{_HEX}{{4}}-{_HEX}{{4}}-{_HEX}{{12}}$",
    "uri": rf"^[a-z][a-z0-9+.-]*://{_LABEL}(?:\.{_LABEL})*(?::[1-9]\d{{0,3}})?(?:/{_PATH})?(?:[?#]{_PATH}){{0,1}}$",
    "uri-reference": rf"^/{_PATH}$",
    "json-pointer": r"^(?:/(?:[^~/\x00-\x1f]|~[01])*)*$",
}
REFUSED_FORMATS = (
    "idn-email",
    "idn-hostname",
    "iri",
    "iri-reference",
    "uri-template",
    "relative-json-pointer",
    "regex",
)
NOT_ENUM, NOT_PATTERN = "!enum", "!pattern"  # what `not` asks for; no keyword of a request is called so
OF_NUMBERS = {"int32": 32, "int64": 64}


class SchemaError(ConfigError):
    """A schema that cannot be held to.

    Args:
        message: What is wrong.
        param: The keyword's place in the request.
    """

    def __init__(self, message: str, param: str = "") -> None:
        super().__init__(message)
        self.param = param


@dataclass(frozen=True)
class Part:
    """A schema at its place."""

    where: str
    schema: Any = field(compare=False, hash=False)

    def child(self, *steps: str | int, schema: Any = None) -> "Part":
        """Return a schema below this one."""
        tree = self.schema if schema is None else schema
        if schema is None:
            tree = reduce(lambda one, step: one[step], steps, tree)
        return Part(self.where + "".join(f"[{one}]" if isinstance(one, int) else f".{one}" for one in steps), tree)


Parts = frozenset[Part]


def refusal(part: Part, keyword: str, why: str, advice: str = "change it or leave it out") -> SchemaError:
    """Return the error of a keyword that cannot be held."""
    where = f"{part.where}.{keyword}" if keyword else part.where
    return SchemaError(f"{where}: `{keyword or 'schema'}` cannot be held to: {why}; {advice}", where)


def literal(value: Any) -> str:
    """Return a value as JSON without blanks."""
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    return re.sub("[\ud800-\udfff]", lambda half: f"\\u{ord(half[0]):04x}", text)


def same(one: Any, other: Any) -> bool:
    """Whether two JSON values are equal: true is not 1, and 1.0 is."""
    if isinstance(one, bool) or isinstance(other, bool):
        return one is other
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(same(value, other[key]) for key, value in one.items())
    return one == other


class Schema:
    """One schema, its references and alternatives.

    Args:
        root: The schema.
        where: Its name in messages.

    Raises:
        SchemaError: It is no schema.
        UnsupportedError: The validating library is not installed.
    """

    def __init__(self, root: Any, where: str = "schema") -> None:
        self.root, self.where = root, where
        try:
            import jsonschema
        except ImportError:
            raise UnsupportedError(
                f"{where}: answers of a given form need jsonschema; install it with the extra `grammar`"
            ) from None
        kind = jsonschema.validators.validator_for(root, default=jsonschema.Draft202012Validator)
        try:
            problem = next(iter(sorted(kind(kind.META_SCHEMA).iter_errors(root), key=lambda one: -len(one.path))), None)
        except RecursionError:
            raise SchemaError(f"{where}: is too deep; use fewer levels", where) from None
        if problem is not None:
            place = Part(where, root).child(*problem.absolute_path).where
            raise SchemaError(f"{place}: is no JSON schema: {problem.message[:200]}; correct it", place)
        self._validator = kind(root)
        self._known: dict[Part, list[Parts]] = {}
        self._open: list[Part] = []
        self.exclusive: list[tuple[Part, list[Parts], list[list[Parts]]]] = []
        """Each `oneOf` that was met: its place, what holds beside it, and the alternatives of its branches."""

    @property
    def top(self) -> Parts:
        """The whole schema as what a value must satisfy."""
        return frozenset({Part(self.where, self.root)})

    def allows(self, part: Part, value: Any) -> bool:
        """Whether a value fits one schema.

        Raises:
            SchemaError: That cannot be found out.
        """
        schema = part.schema
        if isinstance(schema, dict) and any(same(value, one) for one in schema.get(NOT_ENUM, ())):
            return False
        if isinstance(schema, dict) and NOT_PATTERN in schema and isinstance(value, str):
            return re.search(schema[NOT_PATTERN], value) is None
        try:
            return self._validator.evolve(schema=part.schema).is_valid(value)
        except Exception as problem:  # the library's own, of references and patterns
            raise refusal(part, "", f"it cannot be tried on a value ({type(problem).__name__})") from None

    # references

    def target(self, part: Part) -> Part:
        """Return what the `$ref` of a schema points to."""
        pointer = part.schema["$ref"]
        if pointer in ("#", "#/") or pointer == self.root_id:
            return Part(self.where, self.root)
        if not pointer.startswith("#"):
            raise refusal(part, "$ref", f"it leads out of the schema to `{pointer[:80]}`", "bring the schema inside")
        if not pointer.startswith("#/"):
            if (found := self._anchors.get(pointer[1:])) is not None:
                return found
            raise refusal(part, "$ref", f"nothing is called `{pointer[:80]}`", "correct it")
        at, place = self.root, Part(self.where, self.root)
        for step in pointer[2:].split("/"):
            step = unquote(step).replace("~1", "/").replace("~0", "~")
            try:
                key: str | int = int(step) if isinstance(at, list) else step
                at = at[key]
            except (KeyError, IndexError, ValueError, TypeError):
                raise refusal(part, "$ref", f"nothing is at `{pointer[:80]}`", "correct it") from None
            place = place.child(key, schema=at) if at is not None else place
        if not isinstance(at, dict | bool):
            raise refusal(part, "$ref", f"`{pointer[:80]}` is no schema", "correct it")
        return place

    @cached_property
    def root_id(self) -> str:
        """The schema's own address."""
        found = self.root.get("$id") if isinstance(self.root, dict) else None
        return found if isinstance(found, str) else "#"

    @cached_property
    def _anchors(self) -> dict[str, Part]:
        found: dict[str, Part] = {}
        waiting = [Part(self.where, self.root)]
        while waiting:
            part = waiting.pop()
            if isinstance(part.schema, dict):
                if isinstance(name := part.schema.get("$anchor"), str):
                    found[name] = part
                waiting += [part.child(key) for key, below in part.schema.items() if isinstance(below, dict | list)]
            elif isinstance(part.schema, list):
                waiting += [part.child(place) for place in range(len(part.schema))]
        return found

    # alternatives

    def alternatives(self, parts: Parts) -> list[Parts]:
        """Return sets of plain schemas, one of which a value must satisfy whole."""
        found: list[Parts] = [frozenset()]
        for part in sorted(parts, key=lambda one: one.where):
            found = self._both(part, "", found, self._of(part))
        return found

    def _both(self, part: Part, keyword: str, some: list[Parts], others: list[Parts]) -> list[Parts]:
        found = list(dict.fromkeys(one | other for one, other in product(some, others)))
        if len(found) > MAX_ALTERNATIVES:
            raise refusal(part, keyword, f"it has more than {MAX_ALTERNATIVES} combinations", "use fewer")
        return found

    def _of(self, part: Part) -> list[Parts]:
        if part.schema is True:
            return [frozenset()]
        if part.schema is False:
            return []
        if part not in self._known:
            if part in self._open:
                raise refusal(part, "", "its references lead nowhere", "correct it")
            self._open.append(part)
            self._known[part] = self._plain(part)
            self._open.pop()
        return self._known[part]

    def _plain(self, part: Part) -> list[Parts]:
        schema = part.schema
        for keyword in REFUSED:
            if keyword in schema and not (keyword.startswith("unevaluated") and schema[keyword] is True):
                raise refusal(part, keyword, "the grammar has no form for it")
        if "$id" in schema and part.where != self.where and "$ref" in json.dumps(schema):
            raise refusal(part, "$id", "references would start from another address here")
        asks = any(name in schema for name in PLAIN)
        found: list[Parts] = [frozenset({part} if asks else ())]
        if "$ref" in schema:
            found = self._both(part, "$ref", found, self._of(self.target(part)))
        for place in range(len(schema.get("allOf", ()))):
            found = self._both(part, "allOf", found, self._of(part.child("allOf", place)))
        if "anyOf" in schema:
            ways = [way for place in range(len(schema["anyOf"])) for way in self._of(part.child("anyOf", place))]
            found = self._both(part, "anyOf", found, list(dict.fromkeys(ways)))
        if "oneOf" in schema:
            found = self._both(part, "oneOf", found, self._one_of(part, found))
        if "not" in schema:
            found = self._both(part, "not", found, self._negation(part.child("not"), part, "not"))
        if "if" in schema and ("then" in schema or "else" in schema):
            met = self._of(part.child("if"))
            met = self._both(part, "if", met, self._of(part.child("then"))) if "then" in schema else met
            unmet = self._negation(part.child("if"), part, "if")
            unmet = self._both(part, "if", unmet, self._of(part.child("else"))) if "else" in schema else unmet
            found = self._both(part, "if", found, list(dict.fromkeys([*met, *unmet])))
        for keyword in ("dependentRequired", "dependentSchemas", "dependencies"):
            for name, needed in schema.get(keyword, {}).items():
                place = part.child(keyword, name)
                absent = _made(place, "absent", {"properties": {name: False}})
                present = _made(place, "present", {"required": [name]})
                if isinstance(needed, list):
                    met = [frozenset({_made(place, "present", {"required": [name, *needed]})})]
                else:
                    met = [frozenset({present}) | way for way in self._of(place)]
                found = self._both(part, keyword, found, [frozenset({absent}), *met])
        return found

    def _one_of(self, part: Part, base: list[Parts]) -> list[Parts]:
        branches = [self._of(part.child("oneOf", place)) for place in range(len(part.schema["oneOf"]))]

        self.exclusive.append((part, base, branches))  # looked at later: what they say may lead back to here
        return list(dict.fromkeys(way for branch in branches for way in branch))

    # turning round

    def _negation(self, part: Part, of: Part, keyword: str) -> list[Parts]:
        """Return the alternatives of what a schema does not allow."""
        schema = part.schema
        if isinstance(schema, bool):
            return [] if schema else [frozenset()]
        ways: list[Parts] = []

        def add(name: str, tree: dict[str, Any]) -> None:
            ways.append(frozenset({_made(part, name, tree)}))

        for name, value in schema.items():
            if name in ANNOTATIONS or (name not in HELD and name not in REFUSED):
                continue
            if name == "type":
                kinds = [value] if isinstance(value, str) else value
                others = [one for one in TYPES if one not in kinds and not (one == "number" and "integer" in kinds)]
                add(name, {"type": others}) if others else None
            elif name in ("enum", "const"):
                add(name, {NOT_ENUM: value if name == "enum" else [value]})
            elif name == "required":
                for one in value:
                    add(f"{name}.{one}", {"type": "object", "properties": {one: False}})
            elif name == "properties":
                for one in value:
                    add(
                        f"{name}.{one}", {"type": "object", "required": [one], "properties": {one: {"not": value[one]}}}
                    )
            elif name in TURNED:
                tree = TURNED[name](value)
                ways += [frozenset({_made(part, name, tree)})] if tree is not None else []
            elif name == "pattern":
                add(name, {"type": "string", NOT_PATTERN: value})
            elif name == "allOf":
                for place in range(len(value)):
                    ways += self._negation(part.child(name, place), of, keyword)
            elif name == "anyOf":
                all_: list[Parts] = [frozenset()]
                for place in range(len(value)):
                    turned = self._negation(part.child(name, place), of, keyword)
                    all_ = self._both(of, keyword, all_, turned)
                ways += all_
            elif name == "not":
                ways += self._of(part.child(name))
            elif name == "$ref":
                target = self.target(part)
                if target in self._open:
                    raise refusal(of, keyword, "it leads back to itself")
                self._open.append(target)
                ways += self._negation(target, of, keyword)
                self._open.pop()
            else:
                raise refusal(of, keyword, f"`{name}` cannot be turned round")
        return list(dict.fromkeys(ways))


def _made(part: Part, name: str, tree: dict[str, Any]) -> Part:
    """Return a schema that stands for what another one means."""
    return Part(f"{part.where}!{name}", tree)


JOINING = (
    "$ref", "allOf", "anyOf", "oneOf", "not", "if", "then", "else", "dependentRequired", "dependentSchemas",
    "dependencies",
)  # fmt: skip
PLAIN = (*(name for name in HELD if name not in JOINING), NOT_ENUM, NOT_PATTERN)
TURNED: dict[str, Callable[[Any], dict[str, Any] | None]] = {
    "minLength": lambda n: {"type": "string", "maxLength": n - 1} if n >= 1 else None,
    "maxLength": lambda n: {"type": "string", "minLength": int(n) + 1},
    "minItems": lambda n: {"type": "array", "maxItems": n - 1} if n >= 1 else None,
    "maxItems": lambda n: {"type": "array", "minItems": int(n) + 1},
    "minProperties": lambda n: {"type": "object", "maxProperties": n - 1} if n >= 1 else None,
    "maxProperties": lambda n: {"type": "object", "minProperties": int(n) + 1},
    "minimum": lambda n: {"type": "number", "exclusiveMaximum": n},
    "maximum": lambda n: {"type": "number", "exclusiveMinimum": n},
    "exclusiveMinimum": lambda n: {"type": "number", "maximum": n},
    "exclusiveMaximum": lambda n: {"type": "number", "minimum": n},
}


def value_parts(name: str, parts: Iterable[Part]) -> Parts:
    """Return what schemas of an object ask of the value of one name."""
    found: set[Part] = set()
    for part in parts:
        schema = part.schema
        is_known = name in schema.get("properties", {})
        if is_known:
            found.add(part.child("properties", name))
        for text in schema.get("patternProperties", {}):
            try:
                is_met = re.search(text, name) is not None
            except re.error as problem:
                raise refusal(part, "patternProperties", f"it is no pattern ({problem})") from None
            if is_met:
                found.add(part.child("patternProperties", text))
                is_known = True
        if not is_known and "additionalProperties" in schema:
            found.add(part.child("additionalProperties"))
    return frozenset(found)


def further_parts(parts: Iterable[Part], patterns: set[str]) -> Parts | None:
    """Return what schemas of an object ask of a value whose name they do not declare and some patterns match."""
    found: set[Part] = set()
    for part in parts:
        met = [text for text in part.schema.get("patternProperties", {}) if text in patterns]
        found |= {part.child("patternProperties", text) for text in met}
        if not met and "additionalProperties" in part.schema:
            found.add(part.child("additionalProperties"))
    return None if any(part.schema is False for part in found) else frozenset(found)


def kinds_of(schema: Mapping[str, Any]) -> dict[str, bool]:
    """Return the types that a schema names, numbers with whether they may have a fraction."""
    given = schema.get("type", TYPES)
    kinds = [given] if isinstance(given, str) else given
    return {("number" if kind == "integer" else kind): kind != "integer" for kind in sorted(kinds)}


def type_of(value: Any) -> str:
    """Return the type of a JSON value."""
    if isinstance(value, bool):
        return "boolean"
    names: Sequence[tuple[Any, str]] = (
        (dict, "object"), (list, "array"), (str, "string"), ((int, float), "number"),
    )  # fmt: skip
    return next((name for kind, name in names if isinstance(value, kind)), "null")


def taken_of(parts: Iterable[Part]) -> list[Any]:
    """Return the values that `not` takes away."""
    return [one for part in parts for one in part.schema.get(NOT_ENUM, ())]


def prefix_of(part: Part) -> list[Part]:
    """Return the schemas of the first items."""
    name = "items" if isinstance(part.schema.get("items"), list) else "prefixItems"
    return [part.child(name, place) for place in range(len(part.schema.get(name, ())))]


def counts(parts: Iterable[Part], least: str, most: str) -> tuple[int, int | None]:
    """Return the bounds of a count.

    Raises:
        SchemaError: One is more than can be counted.
    """
    low, high = 0, None
    for part in parts:
        for name in (least, most):
            if name in part.schema:
                value = int(part.schema[name])
                if name == least and value > MAX_COUNT:
                    raise refusal(part, name, f"it is more than {MAX_COUNT}")
                low = max(low, value) if name == least else low
                high = min(value, MAX_COUNT if high is None else high) if name == most else high
    return low, high
