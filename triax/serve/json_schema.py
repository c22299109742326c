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
from decimal import Decimal
from functools import cached_property, reduce
from itertools import combinations, product
from math import lcm
from typing import Any
from urllib.parse import unquote

from triax.errors import ConfigError, UnsupportedError
from triax.serve import number, regex
from triax.serve.ebnf import (  # fmt: skip
    ANY,
    EMPTY,
    NOTHING,
    Chars,
    Grammar,
    Node,
    Ranges,
    Text,
    choice,
    common,
    optional,
    repeat,
    sequence,
    without,
)

TYPES = ("object", "array", "string", "number", "boolean", "null")
MAX_ALTERNATIVES = 128
MAX_COUNT = 100_000  # of characters, items or properties that a schema may ask for
MAX_TABLE = 64  # items that are counted one by one, beside `contains` or different places
MAX_UNIQUE = 8
MAX_PATTERNS = 3
CONTROLS: Ranges = ((0, 31),)
QUOTE, BACKSLASH = ord('"'), ord("\\")

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
    "not": "of what can be turned round: `type`, `enum`, `const`, bounds, lengths, `pattern`, `required`, `properties`, "
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
    "uri": rf"^[a-z][a-z0-9+.-]*://{_LABEL}(?:\.{_LABEL})*(?::[1-9]\d{{0,3}})?(?:/{_PATH})?(?:\?{_PATH})?(?:#{_PATH})?$",
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
Encode = Callable[[Ranges], Node]


def refusal(part: Part, keyword: str, why: str, advice: str = "change it or leave it out") -> SchemaError:
    """Return the error of a keyword that cannot be held."""
    where = f"{part.where}.{keyword}" if keyword else part.where
    return SchemaError(f"{where}: `{keyword or 'schema'}` cannot be held to: {why}; {advice}", where)


# characters


def in_json(ranges: Ranges) -> Node:
    """Return how one character of these stands in a JSON string."""
    plain = without(common(ranges, ANY), (*CONTROLS, (QUOTE, QUOTE), (BACKSLASH, BACKSLASH)))
    escaped = common(ranges, (*CONTROLS, (QUOTE, QUOTE), (BACKSLASH, BACKSLASH)))
    ways: list[Node] = [Chars(plain)] if plain else []
    ways += [Text(json.dumps(chr(code))[1:-1]) for first, last in escaped for code in range(first, last + 1)]
    return choice(*ways)


def in_attribute(ranges: Ranges) -> Node:
    """Return how one character of these stands in an attribute of K3's tags."""
    special = {ord('"'): "&quot;", ord("&"): "&amp;"}
    taken = tuple((code, code) for code in special)
    plain = without(common(ranges, ANY), taken)
    ways: list[Node] = [Chars(plain)] if plain else []
    ways += [Text(word) for code, word in special.items() if common(ranges, ((code, code),))]
    return choice(*ways)


def as_it_is(ranges: Ranges) -> Node:
    """Return one character of these."""
    return Chars(common(ranges, ANY))


def _hex(*ranges: tuple[str, str]) -> Chars:
    return Chars(tuple((ord(first), ord(last)) for first, last in ranges))


_ANY_HEX = _hex(("0", "9"), ("A", "F"), ("a", "f"))
_UNIT = choice(
    sequence(_hex(("0", "9"), ("A", "C"), ("E", "F"), ("a", "c"), ("e", "f")), repeat(_ANY_HEX, 3, 3)),
    sequence(_hex(("D", "D"), ("d", "d")), _hex(("0", "7")), repeat(_ANY_HEX, 2, 2)),
)
_PAIR = sequence(
    _hex(("D", "D"), ("d", "d")), _hex(("8", "9"), ("A", "B"), ("a", "b")), repeat(_ANY_HEX, 2, 2), Text("\\u"),
    _hex(("D", "D"), ("d", "d")), _hex(("C", "F"), ("c", "f")), repeat(_ANY_HEX, 2, 2),
)  # fmt: skip
FREE = choice(
    Chars(without(ANY, (*CONTROLS, (QUOTE, QUOTE), (BACKSLASH, BACKSLASH)))),
    sequence(
        Text("\\"),
        choice(Chars(tuple((ord(one), ord(one)) for one in '"/\\bfnrt')), sequence(Text("u"), choice(_UNIT, _PAIR))),
    ),
)
"""One character of a JSON string, in any way that it can be written."""


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
        self._checks: list[Callable[[], None]] = []

    def check(self) -> None:
        """Look whether the branches of each `oneOf` that was met exclude each other.

        Raises:
            SchemaError: Some do not.
        """
        while self._checks:
            self._checks.pop()()

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

        def check() -> None:
            for (n, some), (m, others) in combinations(enumerate(branches), 2):
                for before, one, other in product(base, some, others):
                    if not (self._excludes(before | one, other) and self._excludes(before | other, one)):
                        why = f"a value may fit both branch {n} and branch {m}"
                        raise refusal(
                            part, "oneOf", why, "use anyOf, or give each branch a type or constant of its own"
                        )

        self._checks.append(check)  # later: what it looks at may lead back to here
        return list(dict.fromkeys(way for branch in branches for way in branch))

    def _excludes(self, written: Parts, other: Parts) -> bool:
        """Whether nothing that is written for one alternative fits another."""
        names = sorted({name for part in written for name in part.schema.get("properties", {})})
        closed: Parts = frozenset()
        if names and not any(key in part.schema for part in written for key in OPENERS):
            closed = frozenset({Part("", {"properties": dict.fromkeys(names, True), "additionalProperties": False})})
        try:
            grammar = Grammar()
            return grammar.is_empty(Writer(self, grammar, is_open=True).alternative(written | other | closed))
        except (SchemaError, RecursionError):
            return False

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
OPENERS = ("additionalProperties", "patternProperties", "minProperties", "propertyNames")
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


class Writer:
    """Writes the grammar of values that fit a schema.

    Args:
        schema: The schema.
        grammar: Gets the rules.
        is_open: Whether objects may have properties that nobody asked for: to find out what excludes what.
    """

    def __init__(self, schema: Schema, grammar: Grammar, *, is_open: bool = False) -> None:
        self.schema, self.grammar, self.is_open = schema, grammar, is_open
        self._values: dict[Parts, Node] = {}

    def value(self, parts: Parts) -> Node:
        """Return the grammar of a JSON value that satisfies all of some schemas."""
        if parts not in self._values:
            self._values[parts] = rule = self.grammar.reserve()
            ways = [self.alternative(one) for one in self.schema.alternatives(parts)]
            self.grammar.define(rule, choice(*ways))
        return self._values[parts]

    def alternative(self, parts: Parts) -> Node:
        """Return the grammar of a JSON value that satisfies all of some plain schemas."""
        return choice(*(self.of_type(parts, kind) for kind in TYPES))

    def bare_kinds(self, parts: Parts) -> dict[str, Node]:
        """Return the grammars of a value's types, strings without quotes and as they are: for K3's arguments."""
        found: dict[str, list[Node]] = {}
        for one in self.schema.alternatives(parts):
            for kind in TYPES:
                node = self.of_type(one, kind, is_bare=True)
                if node != NOTHING:
                    found.setdefault(kind, []).append(node)
        return {kind: choice(*nodes) for kind, nodes in found.items()}

    def of_type(self, parts: Parts, kind: str, *, is_bare: bool = False) -> Node:
        """Return the grammar of the values of one type that satisfy some plain schemas."""
        allowed = [kinds_of(part.schema) for part in parts]
        if any(kind not in kinds for kinds in allowed):
            return NOTHING
        is_whole = any("number" in kinds and not kinds["number"] for kinds in allowed)
        values = self._values_of(parts)
        if values is not None:
            fitting = [one for one in values if type_of(one) == kind and (not is_whole or one == int(one))]
            if is_bare and kind == "string":
                return choice(*(self._bare(one, parts) for one in fitting))
            return choice(*(Text(literal(one)) for one in fitting))
        if kind == "string":
            return self.string(parts, as_it_is) if is_bare else sequence(Text('"'), self.string(parts), Text('"'))
        if kind == "number":
            return self._number(parts, is_whole=is_whole)
        if kind == "boolean":
            taken = taken_of(parts)
            return choice(*(Text(literal(one)) for one in (True, False) if not any(same(one, x) for x in taken)))
        if kind == "null":
            return NOTHING if None in taken_of(parts) else Text("null")
        self._refuse_taken(parts, kind)
        return self._array(parts) if kind == "array" else self.object(parts, JSON_MEMBERS)

    def _refuse_taken(self, parts: Parts, kind: str) -> None:
        for part in parts:
            if any(type_of(one) == kind for one in part.schema.get(NOT_ENUM, ())):
                where = Part(part.where.partition("!")[0], True)
                raise refusal(where, "", f"an {kind} that is not this one has no form")

    def _bare(self, value: str, parts: Parts) -> Node:
        if re.search("[\ud800-\udfff]", value):
            raise refusal(min(parts, key=lambda one: one.where), "enum", "half of a character cannot be written")
        return Text(value)

    def _values_of(self, parts: Parts) -> list[Any] | None:
        """Return the values that `enum` and `const` leave, None where there is neither."""
        for part in sorted(parts, key=lambda one: one.where):
            schema = part.schema
            if "enum" in schema or "const" in schema:
                values = [schema["const"]] if "const" in schema else schema["enum"]
                kept = [one for one in values if all(self.schema.allows(part, one) for part in parts)]
                return list({literal(one): one for one in kept}.values())
        return None

    # strings

    def string(self, parts: Parts, encode: Encode = in_json) -> Node:
        """Return the grammar of a string's characters."""
        least, most = counts(parts, "minLength", "maxLength")
        conditions = self._conditions(parts)
        if not conditions:
            char = FREE if encode is in_json else encode(ANY)
            return repeat(self.grammar.rule(char) if encode is in_json else char, least, most)
        if least or most is not None:
            conditions.append(regex.length(least, most))
        return self._joined(conditions, parts, encode)

    def _conditions(self, parts: Parts) -> list[regex.Matcher]:
        found: list[regex.Matcher] = []
        seen: set[tuple[str, bool]] = set()
        for part in sorted(parts, key=lambda one: one.where):
            schema = part.schema
            wanted = [("pattern", schema.get("pattern"), False), (NOT_PATTERN, schema.get(NOT_PATTERN), True)]
            if (name := schema.get("format")) is not None and not self.is_open:
                if name in REFUSED_FORMATS:
                    raise refusal(part, "format", f"the grammar has no form for `{name}`")
                wanted.append(("format", FORMATS.get(name), False))
            for keyword, text, negated in wanted:
                if text is not None and (text, negated) not in seen:
                    seen.add((text, negated))
                    try:
                        found += regex.pattern(text, negated=negated)
                    except regex.PatternError as problem:
                        where = Part(part.where.partition("!")[0], True)
                        raise refusal(where, keyword.strip("!"), str(problem)) from None
        words = [one for one in taken_of(parts) if isinstance(one, str)]
        return [*found, *([regex.other_than(words)] if words else [])]

    def _joined(self, conditions: list[regex.Matcher], parts: Parts, encode: Encode) -> Node:
        try:
            return regex.strings(self.grammar, conditions, ANY, encode)
        except regex.PatternError as problem:
            part = next((one for one in parts if "pattern" in one.schema), min(parts, key=lambda one: one.where))
            raise refusal(part, "pattern" if "pattern" in part.schema else "", str(problem)) from None

    # numbers

    def _number(self, parts: Parts, *, is_whole: bool) -> Node:
        lows: list[Decimal] = []
        highs: list[Decimal] = []
        steps: list[tuple[Part, Decimal]] = []
        for part in sorted(parts, key=lambda one: one.where):
            schema = part.schema
            lows += [Decimal(repr(schema["minimum"]))] if "minimum" in schema else []
            highs += [Decimal(repr(schema["maximum"]))] if "maximum" in schema else []
            for name, bounds, beyond in (
                ("exclusiveMinimum", lows, number.above),
                ("exclusiveMaximum", highs, number.below),
            ):
                if name in schema and isinstance(schema[name], bool):
                    raise refusal(part, name, "it must be a number; as a truth it belongs to an old draft")
                if name in schema:
                    bounds.append(beyond(Decimal(repr(schema[name]))))
            steps += [(part, Decimal(repr(schema["multipleOf"])))] if "multipleOf" in schema else []
            if (bits := OF_NUMBERS.get(schema.get("format", ""))) is not None:
                lows.append(Decimal(-(2 ** (bits - 1))))
                highs.append(Decimal(2 ** (bits - 1) - 1))
        low, high = max(lows, default=None), min(highs, default=None)
        if max((abs(one) for one in (low, high) if one is not None), default=0) >= Decimal("1e300"):
            low, high = (None if one is not None and abs(one) >= Decimal("1e300") else one for one in (low, high))
        first = None if low is None else -int((-low) // 1) if low < 0 else int(low) + (low != int(low))
        last = None if high is None else int(high) if high >= 0 else -(int(-high) + (high != int(high)))
        taken = [one for one in taken_of(parts) if type_of(one) == "number"]
        if steps:
            return self._multiples(steps, parts, low, high, first, last)
        if taken:
            if any(one != int(one) for one in taken) or not (is_whole or self.is_open):
                where = Part(min(parts, key=lambda one: one.where).where.partition("!")[0], True)
                if not is_whole and not self.is_open:
                    raise refusal(where, "", "a number that is not this one has no form; integers have")
            if not self.is_open:
                return self._other_integers(first, last, [int(one) for one in taken if one == int(one)])
        return number.integers(first, last) if is_whole else number.decimals(low, high)

    def _other_integers(self, first: int | None, last: int | None, taken: list[int]) -> Node:
        """Return the whole numbers between bounds without some of them."""
        ways: list[Node] = []
        start = first
        for one in sorted(set(taken)):
            if (first is None or one >= first) and (last is None or one <= last):
                if start is None or start <= one - 1:
                    ways.append(number.integers(start, one - 1))
                start = one + 1
        if last is None or start is None or start <= last:
            ways.append(number.integers(start, last))
        return choice(*ways)

    def _multiples(
        self,
        steps: list[tuple[Part, Decimal]],
        parts: Parts,
        low: Decimal | None,
        high: Decimal | None,
        first: int | None,
        last: int | None,
    ) -> Node:
        part = steps[0][0]
        if all(step == int(step) for _, step in steps) and not any(type_of(x) == "number" for x in taken_of(parts)):
            node = number.multiples(self.grammar, lcm(*(int(step) for _, step in steps)), first, last)
            if node is not None:
                return node
        step = max(step for _, step in steps)
        if low is None or high is None or (high - low) / step > number.MAX_VALUES:
            raise refusal(
                part, "multipleOf", f"beside these bounds it leaves more than {number.MAX_VALUES} values to tell apart"
            )
        start = -((-low) // step) if low < 0 else (low + step - Decimal("1e-18")) // step
        several = [step * n for n in range(int(start), int(high // step) + 1)]
        texts = [f"{one:f}" for one in several]
        kept = [text for text in texts if all(self.schema.allows(part, json.loads(text)) for part in parts)]
        return number.values(kept)

    # arrays

    def _array(self, parts: Parts) -> Node:
        least, most = counts(parts, "minItems", "maxItems")
        wanted = [
            (part, part.child("contains"), part.schema.get("minContains", 1))
            for part in parts
            if "contains" in part.schema
        ]
        wanted = [one for one in wanted if one[2] > 0]
        num_first = max((len(prefix_of(part)) for part in parts), default=0)
        places = [self._item_parts(parts, place) for place in range(num_first)]
        rest = self._item_parts(parts, num_first)
        unique = next((part for part in parts if part.schema.get("uniqueItems")), None)
        if unique is not None and (most is None or most > 1):
            return self._unique(unique, places, rest, least, most, has_more=bool(wanted))
        if wanted:
            return self._containing(wanted, places, rest, least, most)
        firsts = [self.value(one) for one in places]
        return self._items(firsts, self.value(rest), least, most)

    def _items(self, firsts: list[Node], rest: Node, least: int, most: int | None) -> Node:
        """Return an array whose first items have forms of their own."""
        num = len(firsts) if most is None else min(len(firsts), most)
        comma = Text(",")
        if most is not None and most < least:
            return NOTHING
        left = None if most is None else most - num
        more = repeat(sequence(comma, rest), max(0, least - num), left) if num else None
        if more is None:
            if most == 0:
                return Text("[]")
            tail = sequence(rest, repeat(sequence(comma, rest), max(0, least - 1), None if most is None else most - 1))
            return sequence(Text("["), tail if least else optional(tail), Text("]"))
        for place in range(num - 1, -1, -1):
            more = sequence(*([comma] if place else []), firsts[place], more)
            more = self.grammar.rule(more if place < least else optional(more))
        return sequence(Text("["), more, Text("]"))

    def _item_parts(self, parts: Parts, place: int) -> Parts:
        found: set[Part] = set()
        for part in parts:
            schema = part.schema
            prefix = prefix_of(part)
            if place < len(prefix):
                found.add(prefix[place])
            elif isinstance(schema.get("items"), list):
                found |= {part.child("additionalItems")} if "additionalItems" in schema else set()
            elif "items" in schema:
                found.add(part.child("items"))
        return frozenset(found)

    def _containing(
        self, wanted: list[tuple[Part, Part, int]], places: list[Parts], rest: Parts, least: int, most: int | None
    ) -> Node:
        part, inner, times = wanted[0]
        if len(wanted) > 1:
            raise refusal(part, "contains", "it stands beside another one")
        last = max(least, len(places), times) if most is None else most
        if last > MAX_TABLE:
            raise refusal(part, "contains", f"it stands beside a count of more than {MAX_TABLE}")
        known: dict[tuple[int, int], Node] = {}

        def tail(place: int, met: int) -> Node:
            at = min(place, last) if most is None else place
            key = (at, met)
            if key not in known:
                known[key] = rule = self.grammar.reserve()
                ways: list[Node] = [Text("]")] if place >= least and met >= times else []
                if most is None or place < most:
                    item = places[place] if place < len(places) else rest
                    comma = [Text(",")] if place else []
                    ways.append(sequence(*comma, self.value(item), tail(place + 1, met)))
                    if met < times:
                        ways.append(sequence(*comma, self.value(item | {inner}), tail(place + 1, met + 1)))
                self.grammar.define(rule, choice(*ways))
            return known[key]

        return sequence(Text("["), tail(0, 0))

    def _unique(
        self, part: Part, places: list[Parts], rest: Parts, least: int, most: int | None, *, has_more: bool
    ) -> Node:
        values = self._finite(rest) if not places and not has_more else None
        if values is None or len(values) > MAX_UNIQUE:
            why = f"it holds where items have at most {MAX_UNIQUE} values, or at most one may stand"
            raise refusal(part, "uniqueItems", why)
        if self.is_open:
            return self._items([], self.value(rest), least, most)
        known: dict[frozenset[int], Node] = {}

        def tail(left: frozenset[int]) -> Node:
            if left not in known:
                known[left] = rule = self.grammar.reserve()
                num = len(values) - len(left)
                ways: list[Node] = [Text("]")] if num >= least else []
                if most is None or num < most:
                    comma = [Text(",")] if num else []
                    ways += [sequence(*comma, Text(values[one]), tail(left - {one})) for one in sorted(left)]
                self.grammar.define(rule, choice(*ways))
            return known[left]

        return sequence(Text("["), tail(frozenset(range(len(values)))))

    def _finite(self, parts: Parts) -> list[str] | None:
        """Return all values of some schemas as JSON, equal ones once; None where there are too many."""
        found: list[Any] = []
        for one in self.schema.alternatives(parts):
            values = self._values_of(one)
            if values is None:
                plain: list[Any] = [True, False, None]
                values = [x for x in plain if all(self.schema.allows(part, x) for part in one)]
                kinds = [kind for kind in TYPES if all(kind in kinds_of(part.schema) for part in one)]
                if any(kind not in ("boolean", "null") for kind in kinds):
                    return None
            found += [value for value in values if not any(same(value, other) for other in found)]
        return [literal(one) for one in found]

    # objects

    def object(self, parts: Parts, members: "Members") -> Node:
        """Return the grammar of an object, between whatever stands around its members."""
        ordered = sorted(parts, key=lambda one: one.where)
        required = list(dict.fromkeys(name for part in ordered for name in part.schema.get("required", ())))
        names = list(dict.fromkeys(name for part in ordered for name in part.schema.get("properties", {})))
        names += [name for name in required if name not in names]
        least, most = counts(parts, "minProperties", "maxProperties")
        named: list[tuple[str, Node, bool]] = []
        for name in names:
            node = self._member(name, ordered, members)
            if node != NOTHING or name in required:
                named.append((name, node, name in required))
        if any(is_needed and node == NOTHING for _, node, is_needed in named):
            return NOTHING
        further = self._further(ordered, names, members, is_asked=least > len(named))
        return self._table(ordered, named, further, least, most, members)

    def _member(self, name: str, parts: list[Part], members: "Members") -> Node:
        for part in parts:
            if "propertyNames" in part.schema and not self.schema.allows(part.child("propertyNames"), name):
                return NOTHING
        if re.search("[\ud800-\udfff]", name) and members is not JSON_MEMBERS:
            raise refusal(parts[0], "properties", "half of a character cannot be written in a name")
        return members.member(self, Text(members.key(name)), value_parts(name, parts))

    def _further(self, parts: list[Part], names: list[str], members: "Members", *, is_asked: bool) -> Node:
        """Return a member that nobody declared."""
        patterns = list(dict.fromkeys(text for part in parts for text in part.schema.get("patternProperties", {})))
        if len(patterns) > MAX_PATTERNS:
            part = next(one for one in parts if "patternProperties" in one.schema)
            raise refusal(part, "patternProperties", f"it has more than {MAX_PATTERNS} patterns")
        has_form = any(part.schema.get("additionalProperties") not in (None, False) for part in parts)
        is_free = self.is_open or has_form or is_asked or not (names or patterns)
        owned = frozenset(part.child("propertyNames") for part in parts if "propertyNames" in part.schema)
        ways: list[Node] = []
        for chosen in product((True, False), repeat=len(patterns)):
            if not (any(chosen) or is_free):
                continue
            some = {text for text, is_met in zip(patterns, chosen, strict=True) if is_met}
            wanted = further_parts(parts, some)
            if wanted is None:
                continue
            for rules in self.schema.alternatives(owned):
                if any("string" not in kinds_of(part.schema) for part in rules):
                    continue
                key = self._key(parts, rules, names, dict(zip(patterns, chosen, strict=True)), members)
                if key != NOTHING:
                    ways.append(members.member(self, key, wanted))
        return choice(*(way for way in ways if way != NOTHING))

    def _key(
        self, parts: list[Part], rules: Parts, names: list[str], patterns: Mapping[str, bool], members: "Members"
    ) -> Node:
        values = self._values_of(rules)
        if values is not None:
            texts = [
                one
                for one in values
                if isinstance(one, str)
                and one not in names
                and all((re.search(text, one) is not None) == is_met for text, is_met in patterns.items())
            ]
            return choice(*(Text(members.key(one)) for one in texts))
        conditions = self._conditions(rules)
        for text, is_met in patterns.items():
            try:
                conditions += regex.pattern(text, negated=not is_met)
            except regex.PatternError as problem:
                part = next(one for one in parts if text in one.schema.get("patternProperties", {}))
                raise refusal(part, "patternProperties", str(problem)) from None
        least, most = counts(rules, "minLength", "maxLength")
        conditions += [regex.length(least, most)] if least or most is not None else []
        conditions += [regex.other_than(names)] if names else []
        alphabet = without(ANY, CONTROLS)
        if not conditions:
            return repeat(members.encode(alphabet))
        try:
            return regex.strings(self.grammar, conditions, alphabet, members.encode)
        except regex.PatternError as problem:
            raise refusal(parts[0], "propertyNames", str(problem)) from None

    def _table(
        self,
        parts: list[Part],
        named: list[tuple[str, Node, bool]],
        further: Node,
        least: int,
        most: int | None,
        members: "Members",
    ) -> Node:
        """Return members in their order, with as many as there must be.

        A further member counts once only: two of them may have one name.
        """
        reach = len(named) + (further != NOTHING)
        if least > reach:
            if further != NOTHING:
                part = next(one for one in parts if "minProperties" in one.schema)
                raise refusal(part, "minProperties", f"it is more than the {len(named)} declared properties and one")
            return NOTHING
        further = self.grammar.rule(further)
        cap = reach if most is not None and most < reach else max(least, 1)
        known: dict[tuple[int, int], Node] = {}

        def tail(place: int, count: int) -> Node:
            key = (place, min(count, cap))
            if key in known:
                return known[key]
            known[key] = rule = self.grammar.reserve()
            comma = [Text(members.comma)] if count and members.comma else []
            has_room = most is None or count < most
            ways: list[Node] = []
            if place == len(named):
                ways += [EMPTY] if count >= least else []
                if further != NOTHING and has_room:
                    more = sequence(Text(members.comma), further) if members.comma else further
                    left = None if most is None else most - count - 1
                    if count + 1 >= least:
                        ways.append(sequence(*comma, further, repeat(more, 0, left)))
            else:
                _, node, is_needed = named[place]
                if has_room:
                    ways.append(sequence(*comma, node, tail(place + 1, count + 1)))
                if not is_needed:
                    ways.append(tail(place + 1, count))
            self.grammar.define(rule, choice(*ways))
            return rule

        return sequence(Text(members.opening), tail(0, 0), Text(members.closing))


@dataclass(frozen=True)
class Members:
    """How an object's members are written."""

    opening: str
    closing: str
    comma: str
    encode: Encode
    """How a character of a key is written."""
    key: Callable[[str], str]
    member: Callable[[Writer, Node, Parts], Node]
    """Writes a key and its value."""


def _json_member(writer: Writer, key: Node, parts: Parts) -> Node:
    if any(part.schema is False for part in parts):
        return NOTHING
    return sequence(Text('"'), key, Text('":'), writer.value(parts))


JSON_MEMBERS = Members("{", "}", ",", in_json, lambda name: literal(name)[1:-1], _json_member)


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


def json_form(grammar: Grammar, tree: Any, where: str = "schema") -> Node:
    """Return the grammar of JSON that fits a schema.

    Raises:
        SchemaError: A keyword cannot be held, or nothing fits.
    """
    schema = Schema(tree, where)
    return checked(grammar, schema, Writer(schema, grammar).value(schema.top))


def checked(grammar: Grammar, schema: Schema, node: Node) -> Node:
    """Return the grammar of a schema if something fits it.

    Raises:
        SchemaError: Nothing does, or branches of a `oneOf` overlap.
    """
    schema.check()
    if grammar.is_empty(node):
        raise SchemaError(f"{schema.where}: no value fits it; correct it", schema.where)
    return node
