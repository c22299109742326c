"""Grammars as trees, and the one place where they are written in the grammar library's EBNF.

Nobody edits a grammar's text: what stands in a literal can therefore never be taken for the name of a rule.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass, field

Ranges = tuple[tuple[int, int], ...]
MOST = 0x10FFFF
SURROGATES = (0xD800, 0xDFFF)  # no characters: UTF-8 has none of them
ANY: Ranges = ((0, SURROGATES[0] - 1), (SURROGATES[1] + 1, MOST))
PLAIN = re.compile(r"[ -~]+")


@dataclass(frozen=True)
class Text:
    """Exactly this text."""

    text: str


@dataclass(frozen=True)
class Chars:
    """One character of these ranges."""

    ranges: Ranges


@dataclass(frozen=True)
class Token:
    """One control token."""

    id: int


@dataclass(frozen=True)
class OtherTokens:
    """Any number of tokens but these, whatever their bytes."""

    excluded: tuple[int, ...]


@dataclass(frozen=True)
class Sequence:
    """One part after another."""

    parts: "tuple[Node, ...]"


@dataclass(frozen=True)
class Choice:
    """One of the parts; of none, nothing at all is right."""

    parts: "tuple[Node, ...]"


@dataclass(frozen=True)
class Repeat:
    """A part so many times; `most` None has no end."""

    part: "Node"
    least: int = 0
    most: int | None = None


@dataclass(frozen=True)
class Rule:
    """The rule of this number."""

    number: int


Node = Text | Chars | Token | OtherTokens | Sequence | Choice | Repeat | Rule
EMPTY, NOTHING = Sequence(()), Choice(())


def sequence(*parts: Node) -> Node:
    """Return one part after another."""
    flat: list[Node] = []
    for part in parts:
        if part == NOTHING:
            return NOTHING
        flat += part.parts if isinstance(part, Sequence) else (part,)
    return flat[0] if len(flat) == 1 else Sequence(tuple(flat))


def choice(*parts: Node) -> Node:
    """Return any of the parts."""
    flat: dict[Node, None] = {}
    for part in parts:
        flat |= dict.fromkeys(part.parts if isinstance(part, Choice) else (part,))
    return next(iter(flat)) if len(flat) == 1 else Choice(tuple(flat))


def optional(part: Node) -> Node:
    """Return a part that may be missing."""
    return choice(part, EMPTY)


def repeat(part: Node, least: int = 0, most: int | None = None) -> Node:
    """Return a part so many times."""
    if most is not None and most < least:
        return NOTHING
    if most == 0 or part == EMPTY:
        return EMPTY
    if part == NOTHING:
        return EMPTY if least == 0 else NOTHING
    return part if (least, most) == (1, 1) else Repeat(part, least, most)


@dataclass
class Grammar:
    """Rules that may refer to each other."""

    rules: list[Node] = field(default_factory=list)

    def reserve(self) -> Rule:
        """Return a rule that is defined later."""
        self.rules.append(NOTHING)
        return Rule(len(self.rules) - 1)

    def define(self, rule: Rule, node: Node) -> None:
        """Say what a reserved rule is."""
        self.rules[rule.number] = node

    def rule(self, node: Node) -> Node:
        """Return a rule for a node; a small one stays itself."""
        if isinstance(node, Text | Chars | Token | Rule) or node in (EMPTY, NOTHING):
            return node
        rule = self.reserve()
        self.define(rule, node)
        return rule

    def can_end(self) -> list[bool]:
        """Return which rules have a text at all: one that only leads into itself has none."""
        ends = [False] * len(self.rules)
        changed = True
        while changed:
            changed = False
            for number in range(len(ends) - 1, -1, -1):
                if not ends[number] and _ends(self.rules[number], ends):
                    ends[number] = changed = True
        return ends

    def is_empty(self, node: Node) -> bool:
        """Whether no text fits a node."""
        return not _ends(node, self.can_end())

    def ebnf(self, root: Node) -> str:
        """Return the text of the grammar, without what can never end; an empty one is no grammar."""
        ends = self.can_end()
        lines = [f"root ::= {_written(_pruned(root, ends), top=True)}"]
        waiting, seen = _rules_in(_pruned(root, ends)), set()
        while waiting:
            number = waiting.pop()
            if number not in seen:
                seen.add(number)
                node = _pruned(self.rules[number], ends)
                lines.append(f"r{number} ::= {_written(node, top=True)}")
                waiting += _rules_in(node)
        return "\n".join(lines) + "\n"


def _ends(node: Node, ends: list[bool]) -> bool:
    match node:
        case Rule(number):
            return ends[number]
        case Sequence(parts):
            return all(_ends(part, ends) for part in parts)
        case Choice(parts):
            return any(_ends(part, ends) for part in parts)
        case Repeat(part, least):
            return least == 0 or _ends(part, ends)
        case Chars(ranges):
            return bool(ranges)
    return True


def _pruned(node: Node, ends: list[bool]) -> Node:
    match node:
        case Rule(number):
            return node if ends[number] else NOTHING
        case Sequence(parts):
            return sequence(*(_pruned(part, ends) for part in parts))
        case Choice(parts):
            return choice(*(kept for part in parts if (kept := _pruned(part, ends)) != NOTHING))
        case Repeat(part, least, most):
            return repeat(_pruned(part, ends), least, most)
        case Chars(()):
            return NOTHING
    return node


def _rules_in(node: Node) -> list[int]:
    match node:
        case Rule(number):
            return [number]
        case Sequence(parts) | Choice(parts):
            return [number for part in parts for number in _rules_in(part)]
        case Repeat(part):
            return _rules_in(part)
    return []


def _written(node: Node, *, top: bool = False) -> str:
    match node:
        case Text(text):
            return _literal(text)
        case Chars(ranges):
            return "[" + "".join(_range(*one) for one in ranges) + "]"
        case Token(id):
            return f"Token({id})"
        case OtherTokens(excluded):
            return f"(ExcludeToken({', '.join(map(str, excluded))}))*"
        case Rule(number):
            return f"r{number}"
        case Sequence(()):
            return '""'
        case Sequence(parts):
            words = " ".join(_written(part) for part in parts)
            return words if top else f"({words})"
        case Choice(parts):
            words = " | ".join(_written(part) for part in parts)
            return words if top else f"({words})"
        case Repeat(part, least, most):
            inner = _written(part)
            if most is None and least <= 1:
                return f"({inner}){'+' if least else '*'}"
            return f"({inner}){{{least},{'' if most is None else most}}}"
    raise AssertionError(node)


def _literal(text: str) -> str:
    """Return a text; whatever is not plain ASCII as a set of one character, the one form that is read exactly.

    In a literal the library prints `é` as bytes in hexadecimal, and then takes letters behind it for more digits.
    """
    words: list[str] = []
    place = 0
    while place < len(text):
        if plain := PLAIN.match(text, place):
            words.append('"' + plain[0].replace("\\", "\\\\").replace('"', '\\"') + '"')
            place = plain.end()
        else:
            words.append(f"[{_char(ord(text[place]))}]")
            place += 1
    return words[0] if len(words) == 1 else "(" + " ".join(words or ['""']) + ")"


def _range(first: int, last: int) -> str:
    return _char(first) if first == last else f"{_char(first)}-{_char(last)}"


def _char(code: int) -> str:
    if chr(code).isascii() and chr(code).isalnum():
        return chr(code)
    return f"\\u{code:04x}" if code < 1 << 16 else f"\\U{code:08x}"


# ranges of characters


def union(ranges: Iterable[tuple[int, int]]) -> Ranges:
    """Return sorted ranges that do not touch."""
    merged: list[tuple[int, int]] = []
    for first, last in sorted(ranges):
        if merged and first <= merged[-1][1] + 1:
            merged[-1] = (merged[-1][0], max(last, merged[-1][1]))
        elif first <= last:
            merged.append((first, last))
    return tuple(merged)


def without(ranges: Ranges, taken: Ranges) -> Ranges:
    """Return what of some ranges is in no other ones."""
    kept = list(ranges)
    for first, last in taken:
        kept = [
            part
            for low, high in kept
            for part in ((low, min(high, first - 1)), (max(low, last + 1), high))
            if part[0] <= part[1]
        ]
    return union(kept)


def common(ranges: Ranges, others: Ranges) -> Ranges:
    """Return what two sets of ranges share."""
    return without(ranges, without(ANY, others))
