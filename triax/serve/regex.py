"""Strings that satisfy several conditions at once: patterns, lengths and forbidden words, joined as automata.

A pattern is read by Python's own reader and means what it means to `re.search`, or less: shorthands for digits,
words and blanks mean what the standard's dialect and Python's agree on.
"""

import importlib
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import cache, lru_cache
from itertools import pairwise
from typing import Any

from triax.serve.ebnf import ANY, EMPTY, MOST, Grammar, Node, Ranges, choice, common, repeat, sequence, union, without

MAX_PLACES = 20_000  # of one pattern, its counted repeats written out
MAX_STATES = 4_000
AGREED: Ranges = ((0, 27), (32, 127))  # where the standard's shorthands and Python's mean the same
LINE_ENDS: Ranges = ((10, 10), (13, 13), (0x2028, 0x2029))
DIGITS: Ranges = ((48, 57),)
WORDS: Ranges = ((48, 57), (65, 90), (95, 95), (97, 122))
SPACES: Ranges = ((9, 13), (32, 32))
CATEGORIES = {"DIGIT": DIGITS, "WORD": WORDS, "SPACE": SPACES}
START, END = "start", "end"  # edges that are open only there


class PatternError(ValueError):
    """A pattern that cannot be held to."""


@dataclass
class Places:
    """A pattern as an automaton with free edges."""

    steps: list[list[tuple[Ranges, int]]] = field(default_factory=list)
    has_shorthand: bool = False
    free: list[list[tuple[str, int]]] = field(default_factory=list)

    def place(self) -> int:
        """Return a new place."""
        if len(self.steps) == MAX_PLACES:
            raise PatternError("it is too large")
        self.steps.append([])
        self.free.append([])
        return len(self.steps) - 1

    def closure(self, places: Iterable[int], *open_edges: str) -> frozenset[int]:
        """Return all places that free edges lead to."""
        found, waiting = set(places), list(places)
        while waiting:
            for kind, to in self.free[waiting.pop()]:
                if to not in found and (not kind or kind in open_edges):
                    found.add(to)
                    waiting.append(to)
        return frozenset(found)


@dataclass(frozen=True)
class Matcher:
    """What one condition says of a string, character by character.

    Args:
        start: State before the first character.
        edges: From a state to ranges, each with the next state; other characters lead to `lost`.
        accepts: Whether the string may end in a state.
        lost: State that nothing leads out of.
    """

    start: Any
    edges: Callable[[Any], list[tuple[Ranges, Any]]]
    accepts: Callable[[Any], bool]
    lost: Any = None


@lru_cache(256)
def pattern(text: str, *, negated: bool = False) -> tuple[Matcher, ...]:
    """Return the conditions that a pattern is found in a string, or that it is not.

    Raises:
        PatternError: It has what cannot be held to.
    """
    places = Places()
    before, behind = places.place(), places.place()
    places.steps[before].append((ANY, before))
    places.steps[behind].append((ANY, behind))
    places.free[_read(places, _parsed(text), before)].append(("", behind))
    first = places.closure((before,), START)

    @lru_cache(4096)
    def edges(state: frozenset[int]) -> list[tuple[Ranges, frozenset[int]]]:
        return _joined(
            [(ranges, to) for place in state for ranges, to in places.steps[place]],
            lambda targets: places.closure(targets),
        )

    @lru_cache(4096)
    def accepts(state: frozenset[int]) -> bool:
        return (behind in places.closure(state, END, *([START] if state == first else []))) != negated

    one = Matcher(first, edges, accepts, frozenset() if negated else None)
    if negated and places.has_shorthand:
        return one, Matcher(0, lambda _: [(AGREED, 0)], lambda _: True)
    return (one,)


def _joined(
    edges: list[tuple[Ranges, int]], state_of: Callable[[frozenset[int]], frozenset[int]]
) -> list[tuple[Ranges, frozenset[int]]]:
    """Return edges that do not overlap, each to all places that its characters lead to."""
    cuts = sorted({cut for ranges, _ in edges for first, last in ranges for cut in (first, last + 1)})
    found: dict[frozenset[int], list[tuple[int, int]]] = {}
    for first, end in pairwise(cuts):
        targets = frozenset(to for ranges, to in edges if any(low <= first <= high for low, high in ranges))
        if targets:
            found.setdefault(targets, []).append((first, end - 1))
    joined: dict[frozenset[int], list[tuple[int, int]]] = {}
    for targets, ranges in found.items():
        joined.setdefault(state_of(targets), []).extend(ranges)
    return [(union(ranges), state) for state, ranges in joined.items()]


def length(least: int, most: int | None) -> Matcher:
    """Return the condition that a string has so many characters."""
    last = least if most is None else most

    def edges(state: int) -> list[tuple[Ranges, int]]:
        if state < last:
            return [(ANY, state + 1)]
        return [(ANY, state)] if most is None else []

    return Matcher(0, edges, lambda state: state is not None and state >= least)


def other_than(words: Iterable[str]) -> Matcher:
    """Return the condition that a string is none of some words."""
    tree: list[dict[str, int]] = [{}]
    ends: set[int] = set()
    for word in words:
        at = 0
        for letter in word:
            if letter not in tree[at]:
                tree[at][letter] = len(tree)
                tree.append({})
            at = tree[at][letter]
        ends.add(at)

    def edges(state: int) -> list[tuple[Ranges, int]]:
        return [] if state < 0 else [(((ord(letter), ord(letter)),), to) for letter, to in tree[state].items()]

    return Matcher(0, edges, lambda state: state not in ends, -1)


def strings(grammar: Grammar, conditions: list[Matcher], alphabet: Ranges, encode: Callable[[Ranges], Node]) -> Node:
    """Return the grammar of the strings that meet all conditions.

    Args:
        grammar: Gets the rules.
        conditions: All of them hold.
        alphabet: Characters that strings are made of.
        encode: How one character of some ranges is written.

    Raises:
        PatternError: The conditions together are too large.
    """
    start = tuple(one.start for one in conditions)
    numbers = {start: 0}
    steps: list[dict[int, list[tuple[int, int]]]] = []
    waiting = [start]
    while waiting:
        state = waiting.pop()
        while len(steps) <= numbers[state]:
            steps.append({})
        for ranges, to in _product(conditions, state, alphabet):
            if to not in numbers:
                if len(numbers) == MAX_STATES:
                    raise PatternError("it is too large beside the other conditions on its string")
                numbers[to] = len(numbers)
                waiting.append(to)
            steps[numbers[state]].setdefault(numbers[to], []).extend(ranges)
    steps += [{} for _ in range(len(numbers) - len(steps))]
    ends = {
        n for state, n in numbers.items() if all(one.accepts(part) for one, part in zip(conditions, state, strict=True))
    }
    live = _leading(steps, ends)
    rules = {n: grammar.reserve() for n in live}
    for n, rule in rules.items():
        ways = [sequence(encode(union(ranges)), rules[to]) for to, ranges in steps[n].items() if to in live and to != n]
        tail = choice(*ways, *([EMPTY] if n in ends else []))
        grammar.define(rule, sequence(repeat(encode(union(steps[n][n]))), tail) if n in steps[n] else tail)
    return rules[0] if 0 in rules else choice()


def _product(
    conditions: list[Matcher], state: tuple[Any, ...], alphabet: Ranges
) -> list[tuple[Ranges, tuple[Any, ...]]]:
    found: list[tuple[Ranges, tuple[Any, ...]]] = [(alphabet, ())]
    for one, part in zip(conditions, state, strict=True):
        edges = one.edges(part)
        rest = without(ANY, union(pair for ranges, _ in edges for pair in ranges))
        edges = [*edges, *([(rest, one.lost)] if rest and one.lost is not None else [])]
        found = [
            (shared, (*before, to))
            for ranges, before in found
            for more, to in edges
            if (shared := common(ranges, more))
        ]
    return found


def _leading(steps: list[dict[int, list[tuple[int, int]]]], ends: set[int]) -> set[int]:
    """Return the states from which a string can still end."""
    before: dict[int, list[int]] = {}
    for n, ways in enumerate(steps):
        for to in ways:
            before.setdefault(to, []).append(n)
    live, waiting = set(ends), list(ends)
    while waiting:
        for n in before.get(waiting.pop(), ()):
            if n not in live:
                live.add(n)
                waiting.append(n)
    return live


# reading patterns


def _parsed(text: str) -> Any:
    reader = importlib.import_module("re._parser")
    try:
        tree = reader.parse(text)
    except (re.error, OverflowError, RecursionError) as problem:
        raise PatternError(f"it is no pattern ({problem})") from None
    if tree.state.flags & ~re.UNICODE:
        raise PatternError("it has flags")
    return tree


def _read(places: Places, tree: Any, start: int) -> int:
    """Add a part of a pattern behind a place; returns the place at its end."""
    at = start
    for op, argument in tree:
        at = _one(places, str(op), argument, at)
    return at


def _one(places: Places, op: str, argument: Any, at: int) -> int:
    if op in ("LITERAL", "NOT_LITERAL", "ANY", "IN"):
        to = places.place()
        places.steps[at].append((_ranges(places, op, argument), to))
        return to
    if op == "SUBPATTERN":
        if argument[1] or argument[2]:
            raise PatternError("it has flags")
        return _read(places, argument[3], at)
    if op == "BRANCH":
        end = places.place()
        for branch in argument[1]:
            places.free[_read(places, branch, _from(places, at))].append(("", end))
        return end
    if op in ("MAX_REPEAT", "MIN_REPEAT", "POSSESSIVE_REPEAT"):
        least, most, part = argument
        if op.startswith("POSS"):
            raise PatternError("it has a possessive repeat")
        return _repeated(places, part, int(least), None if str(most) == "MAXREPEAT" else int(most), at)
    if op == "AT" and str(argument) in ("AT_BEGINNING", "AT_BEGINNING_STRING", "AT_END", "AT_END_STRING"):
        to = places.place()
        places.free[at].append((START if "BEGINNING" in str(argument) else END, to))
        return to
    names = {"AT": "a border of words", "GROUPREF": "a reference to a group", "ASSERT": "a look around",
             "ASSERT_NOT": "a look around", "ATOMIC_GROUP": "an atomic group"}  # fmt: skip
    raise PatternError(f"it has {names.get(op, op.lower())}")


def _from(places: Places, at: int) -> int:
    to = places.place()
    places.free[at].append(("", to))
    return to


def _repeated(places: Places, part: Any, least: int, most: int | None, at: int) -> int:
    if max(least, most or 0) > MAX_PLACES:
        raise PatternError("it is too large")
    for _ in range(least):
        at = _read(places, part, at)
    if most is None:
        loop = _from(places, at)
        places.free[_read(places, part, loop)].append(("", loop))
        return _from(places, loop)
    end = places.place()
    for _ in range(most - least):
        places.free[at].append(("", end))
        at = _read(places, part, _from(places, at))
    places.free[at].append(("", end))
    return end


def _ranges(places: Places, op: str, argument: Any) -> Ranges:
    if op == "LITERAL":
        return ((argument, argument),)
    if op == "NOT_LITERAL":
        return without(ANY, ((argument, argument),))
    if op == "ANY":
        return without(ANY, LINE_ENDS)
    kinds = [(str(kind), value) for kind, value in argument]
    negated = ("NEGATE", None) in kinds
    found: list[tuple[int, int]] = []
    for kind, value in kinds:
        if kind == "LITERAL":
            found.append((value, value))
        elif kind == "RANGE":
            found.append((value[0], min(value[1], MOST)))
        elif kind == "CATEGORY":
            places.has_shorthand = True
            found += _shorthand(str(value).removeprefix("CATEGORY_"), is_wide=negated)
    names = {str(value) for kind, value in kinds if kind == "CATEGORY"}
    if any(name.replace("_NOT_", "_") in names for name in names if "_NOT_" in name):
        found = list(ANY)  # `[\\s\\S]`
    return without(ANY, union(found)) if negated else common(union(found), ANY)


def _shorthand(name: str, *, is_wide: bool) -> Ranges:
    """Return the characters of a shorthand: those on which the dialects agree, or all that any counts among them."""
    base = name.removeprefix("NOT_")
    if base == name:
        return _wide(base) if is_wide else CATEGORIES[base]
    return without(ANY, CATEGORIES[base] if is_wide else _wide(base))


@cache
def _wide(base: str) -> Ranges:
    tests = {"DIGIT": str.isdecimal, "WORD": str.isalnum, "SPACE": str.isspace}
    found = [(code, code) for code in range(MOST + 1) if tests[base](chr(code))]
    return union([*found, *CATEGORIES[base], *([(0xFEFF, 0xFEFF)] if base == "SPACE" else [])])
