"""Who may start: a request that fits an empty pool starts, whatever the pool holds."""

from itertools import product

import pytest

from triax.errors import CapacityError

pytestmark = pytest.mark.usefixtures("no_shape_checks")


def test_f11_a_second_turn_starts_though_its_hit_leaves_no_room_for_a_copy(simulation):
    session = simulation.Session(pages=5, slots=8, page_tokens=64, step_tokens=256, mixed_prefill_tokens=256)
    first = session.ask(range(60), 30)
    tokens = [*first.request.tokens, *session.answers[first.request.id]]
    second = [*tokens, *range(250 - len(tokens))]
    session.add(second, 7)
    behind = session.add([3, 1, 4], 2)
    session.run()
    assert session.ended[behind] == "stop"


def test_f11_a_hit_starts_where_the_only_slot_holds_its_snapshot(simulation):
    session = simulation.Session(pages=20, slots=2)
    first = session.ask(range(8), 4)
    again = session.ask([*range(8), *session.answers[first.request.id], 5], 3)
    assert again.cached_tokens == 0, "the slot that holds the snapshot is the only one"


def test_a_hit_is_taken_where_there_is_room_for_its_copies(simulation):
    session = simulation.Session(pages=20, slots=3)
    first = session.ask(range(8), 4)
    again = session.ask([*range(8), *session.answers[first.request.id], 5], 3)
    assert again.cached_tokens > 0


ASKED = [(stem, length, answer) for stem in (0, 1) for length, answer in ((1, 1), (3, 2), (5, 2), (3, 5), (7, 1))]
"""Prompts of two kinds of tokens: equal up to the shorter one's end, or different at once."""


def tried(simulation, pool: dict, asked, depth: int) -> None:
    """Ask one after the other, each at once or once all before it are done, and go on from the last answer."""
    session = simulation.Session(page_tokens=2, step_tokens=3, mixed_prefill_tokens=3, max_running=3, **pool)
    names = []
    for (stem, length, answer), is_calm in asked:
        tokens = [stem] * length
        if is_calm:
            session.run(most=200, depth=depth)
            if names:  # the next turn of the last conversation
                before = session.sequence(names[-1]).request.tokens
                tokens = [*before, *session.answers[names[-1]], *tokens]
        try:
            names.append(session.add(tokens, answer))
        except CapacityError:
            continue
        session.plan()
        if session.open:
            session.commit()
    session.run(most=200, depth=depth)
    assert all(session.ended[name] == "stop" for name in names)


POOLS = [
    {"pages": pages, "slots": slots, "host_pages": host, "host_slots": host}
    for pages, slots, host in product((3, 5), (2, 3), (0, 2))
]


@pytest.mark.parametrize("pool", POOLS, ids=lambda pool: "-".join(map(str, pool.values())))
def test_f11_whatever_fits_an_empty_pool_starts_whatever_the_pool_holds(simulation, pool):
    pairs = list(product(ASKED, (False, True)))
    for number, (one, two) in enumerate(product(pairs[::2], pairs[1::4])):
        tried(simulation, pool, (one, two, pairs[number % len(pairs)]), depth=1 + number % 2)


@pytest.mark.soak
@pytest.mark.parametrize("pool", POOLS, ids=lambda pool: "-".join(map(str, pool.values())))
def test_f11_whatever_fits_an_empty_pool_starts_after_any_three_requests(simulation, pool):
    pairs = list(product(ASKED, (False, True)))
    for number, asked in enumerate(product(pairs, pairs, pairs)):
        tried(simulation, pool, asked, depth=1 + number % 2)
