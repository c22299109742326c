"""Grammars of JSON numbers between bounds, digit by digit."""

from collections.abc import Iterable
from decimal import ROUND_CEILING, ROUND_FLOOR, Decimal, localcontext

from triax.serve.ebnf import EMPTY, NOTHING, Chars, Grammar, Node, Text, choice, optional, repeat, sequence

DIGIT, NONZERO = Chars(((48, 57),)), Chars(((49, 57),))
NUM_DIGITS = 18  # of a whole number without bounds: what every reader of JSON keeps
NUM_PLACES = 12  # behind the point of a number with bounds
SMALLEST = Decimal(1).scaleb(-NUM_PLACES)
LARGEST = 10**NUM_DIGITS - 1
MAX_VALUES = 1000
MAX_DIVISOR = 1000

INTEGER = sequence(optional(Text("-")), choice(Text("0"), sequence(NONZERO, repeat(DIGIT, 0, NUM_DIGITS - 1))))
EXPONENT = sequence(Chars(((69, 69), (101, 101))), optional(Chars(((43, 43), (45, 45)))), repeat(DIGIT, 1, 2))
NUMBER = sequence(INTEGER, optional(sequence(Text("."), repeat(DIGIT, 1, 17))), optional(EXPONENT))


def integers(low: int | None, high: int | None) -> Node:
    """Return the grammar of the whole numbers from `low` to `high`; None has no bound."""
    if low is None and high is None:
        return INTEGER
    low, high = _bounds(low, high)
    positive = naturals(max(low, 0), high)
    negative = naturals(max(-high, 1), -low)
    return choice(*(one for one in (positive, sequence(Text("-"), negative)) if one != NOTHING))


def _bounds(low: int | None, high: int | None) -> tuple[int, int]:
    if low is None:
        assert high is not None
        low = min(-LARGEST, -10 * abs(high))
    if high is None:
        high = max(LARGEST, 10 * abs(low))
    return low, high


def naturals(low: int, high: int) -> Node:
    """Return the grammar of the numbers from `low`, at least 0, to `high`."""
    if high < low:
        return NOTHING
    ways: list[Node] = []
    for length in range(len(str(low)), len(str(high)) + 1):
        first, last = max(low, 10 ** (length - 1) if length > 1 else 0), min(high, 10**length - 1)
        ways.append(_between(str(first), str(last)))
    return choice(*ways)


def _between(first: str, last: str) -> Node:
    if first == last:
        return Text(first)
    if set(first) == {"0"} and set(last) == {"9"}:
        return repeat(DIGIT, len(first), len(first))
    if first[0] == last[0]:
        return sequence(Text(first[0]), _between(first[1:], last[1:]))
    low, high, rest = int(first[0]), int(last[0]), len(first) - 1
    if rest == 0:
        return Chars(((48 + low, 48 + high),))
    ways: list[Node] = []
    if set(first[1:]) != {"0"}:
        ways.append(sequence(Text(first[0]), _between(first[1:], "9" * rest)))
        low += 1
    if set(last[1:]) != {"9"}:
        ways.append(sequence(Text(last[0]), _between("0" * rest, last[1:])))
        high -= 1
    if low <= high:
        ways.append(sequence(Chars(((48 + low, 48 + high),)), repeat(DIGIT, rest, rest)))
    return choice(*ways)


def decimals(low: Decimal | None, high: Decimal | None) -> Node:
    """Return the grammar of the numbers from `low` to `high`, written without an exponent; None has no bound."""
    if low is None and high is None:
        return NUMBER
    with localcontext(prec=800):
        if low is None:
            assert high is not None
            low = Decimal(_bounds(None, int(high))[0])
        if high is None:
            high = Decimal(_bounds(int(low), None)[1])
        low, high = low.quantize(SMALLEST, ROUND_CEILING), high.quantize(SMALLEST, ROUND_FLOOR)
        zero = Decimal(0)
        positive = _positive(max(low, zero), high)
        negative = _positive(max(-high, zero), -low) if low < 0 else NOTHING
    return choice(*(one for one in (positive, sequence(Text("-"), negative)) if one != NOTHING))


def above(bound: Decimal) -> Decimal:
    """Return a number that is larger than a bound however it is rounded."""
    with localcontext(prec=800):
        return bound + max(SMALLEST, abs(bound) * Decimal("4e-15"))


def below(bound: Decimal) -> Decimal:
    """Return a number that is smaller than a bound however it is rounded."""
    with localcontext(prec=800):
        return bound - max(SMALLEST, abs(bound) * Decimal("4e-15"))


def _positive(low: Decimal, high: Decimal) -> Node:
    if high < low:
        return NOTHING
    first, last = int(low), int(high)
    places = [f"{one:f}".partition(".")[2].rstrip("0") for one in (low, high)]
    if first == last:
        return sequence(Text(str(first)), _fraction(places[0], places[1]))
    ways = [
        sequence(Text(str(first)), _fraction(places[0], None)),
        sequence(Text(str(last)), _fraction("", places[1])),
    ]
    between = naturals(first + 1, last - 1)
    return choice(*ways, *([sequence(between, _fraction("", None))] if between != NOTHING else []))


def _fraction(low: str, high: str | None) -> Node:
    digits = _digits(low, high, is_first=True)
    ways = [sequence(Text("."), digits)] if digits != NOTHING else []
    return choice(*([] if low else [EMPTY]), *ways)


def _digits(low: str, high: str | None, *, is_first: bool = False) -> Node:
    """Return what may stand behind the point: at least `low`, at most `high`, where None has no bound."""
    if not low and high is None:
        return repeat(DIGIT, int(is_first), NUM_PLACES)
    if high == "":
        return NOTHING if low else repeat(Text("0"), int(is_first), 3)
    bottom, top = int(low[0]) if low else 0, int(high[0]) if high else 9
    ways: list[Node] = [] if low or is_first else [EMPTY]
    for digit in range(bottom, top + 1):
        rest = _digits(low[1:] if digit == bottom else "", high[1:] if high and digit == top else None)
        if rest != NOTHING:
            ways.append(sequence(Text(str(digit)), rest))
    return choice(*ways)


def multiples(grammar: Grammar, divisor: int, low: int | None, high: int | None) -> Node | None:
    """Return the grammar of the multiples of a whole number between bounds; None where it would be too large."""
    if low is not None and high is not None and (high - low) // divisor < MAX_VALUES:
        first = -(-low // divisor) * divisor
        return values(str(one) for one in range(first, high + 1, divisor))
    if divisor > MAX_DIVISOR:
        return None
    if low is not None and high is not None:
        return None
    if low is not None and low > 1:
        return _multiples_from(grammar, divisor, low)
    if high is not None and high < -1:
        beyond = _multiples_from(grammar, divisor, -high)
        return None if beyond is None else sequence(Text("-"), beyond)
    if (low is not None and low < 0) or (high is not None and high > 0):
        first, last = (low, -1) if low is not None else (1, high)
        assert first is not None
        assert last is not None
        near = multiples(grammar, divisor, first, last)
        far = multiples(grammar, divisor, 0 if low is not None else None, None if low is not None else 0)
        return None if near is None or far is None else choice(near, far)
    rests = _rests(grammar, divisor, 0)[0]
    nonzero = choice(*(sequence(Text(str(digit)), rests[digit % divisor]) for digit in range(1, 10)))
    ways: list[Node] = [nonzero] if high is None else []
    ways += [sequence(Text("-"), nonzero)] if low is None else []
    ways += [Text("0")] if (low is None or low <= 0) and (high is None or high >= 0) else []
    return choice(*ways)


def _multiples_from(grammar: Grammar, divisor: int, low: int) -> Node | None:
    """Return the multiples from a bound above 0 on: those with as many digits one by one, and all longer ones."""
    num = len(str(low))
    first = -(-low // divisor) * divisor
    near = range(first, 10**num, divisor)
    if len(near) > MAX_VALUES or num * divisor > 10 * MAX_DIVISOR:
        return None
    rests = _rests(grammar, divisor, num)[num]
    return choice(
        *(Text(str(one)) for one in near),
        *(sequence(Text(str(digit)), rests[digit % divisor]) for digit in range(1, 10)),
    )


def _rests(grammar: Grammar, divisor: int, num: int) -> list[list[Node]]:
    """Return rules by the digits that must follow, up to `num`, and the rest of the digits before."""
    table: list[list[Node]] = []
    for left in range(num + 1):
        rules = [grammar.reserve() for _ in range(divisor)]
        following = rules if left == 0 else table[left - 1]
        for rest, rule in enumerate(rules):
            ways = [sequence(Text(str(digit)), following[(10 * rest + digit) % divisor]) for digit in range(10)]
            grammar.define(rule, choice(*ways, *([EMPTY] if rest == 0 and left == 0 else [])))
        table.append(list(rules))
    return table


def values(texts: Iterable[str]) -> Node:
    """Return the grammar of any of some texts."""
    return choice(*map(Text, texts))
