"""Grammars of the values that fit a schema: strings, numbers, arrays and objects, as JSON or as K3's arguments."""

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from decimal import Decimal
from itertools import combinations, product
from math import lcm
from typing import Any

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
from triax.serve.json_schema import (
    FORMATS,
    MAX_PATTERNS,
    MAX_TABLE,
    MAX_UNIQUE,
    NOT_ENUM,
    NOT_PATTERN,
    OF_NUMBERS,
    REFUSED_FORMATS,
    TYPES,
    Part,
    Parts,
    Schema,
    SchemaError,
    counts,
    further_parts,
    kinds_of,
    literal,
    prefix_of,
    refusal,
    same,
    taken_of,
    type_of,
    value_parts,
)

CONTROLS: Ranges = ((0, 31),)
QUOTE, BACKSLASH = ord('"'), ord("\\")
OPENERS = ("additionalProperties", "patternProperties", "minProperties", "propertyNames")
Encode = Callable[[Ranges], Node]


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
        is_whole = kind == "number" and any(not kinds["number"] for kinds in allowed)
        values = self.values_of(parts)
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

    def values_of(self, parts: Parts) -> list[Any] | None:
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
            values = self.values_of(one)
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
        values = self.values_of(rules)
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
    while schema.exclusive:
        _check_branches(schema, *schema.exclusive.pop())
    if grammar.is_empty(node):
        raise SchemaError(f"{schema.where}: no value fits it; correct it", schema.where)
    return node


def _check_branches(schema: Schema, part: Part, base: list[Parts], branches: list[list[Parts]]) -> None:
    """Refuse a `oneOf` of which two branches may fit one value."""
    for (n, some), (m, others) in combinations(enumerate(branches), 2):
        for before, one, other in product(base, some, others):
            if not (_excludes(schema, before | one, other) and _excludes(schema, before | other, one)):
                why = f"a value may fit both branch {n} and branch {m}"
                raise refusal(part, "oneOf", why, "use anyOf, or give each branch a type or constant of its own")


def _excludes(schema: Schema, written: Parts, other: Parts) -> bool:
    """Whether nothing that is written for one alternative fits another."""
    names = {name for part in written for name in part.schema.get("properties", {})}
    names |= {name for part in written for name in part.schema.get("required", ())}
    closed: Parts = frozenset()
    if names and not any(key in part.schema for part in written for key in OPENERS):
        tree = {"properties": dict.fromkeys(sorted(names), True), "additionalProperties": False}
        closed = frozenset({Part("", tree)})
    grammar = Grammar()
    try:
        return grammar.is_empty(Writer(schema, grammar, is_open=True).alternative(written | other | closed))
    except SchemaError:
        return False
