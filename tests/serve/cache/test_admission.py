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


def test_a_prompt_waits_for_another_one_only_if_all_before_the_snapshot_is_equal(simulation):
    session = simulation.Session(pages=60, page_tokens=4)
    leader = [*range(30), 7]
    session.add(leader, 2, borders=(24,))
    session.plan()
    session.add([49, *leader[1:]], 2)  # another first token, the same ones before the snapshot
    session.plan()
    assert session.scheduler.admission.num_deferred == 0
    session.commit()
    session.run()
    session = simulation.Session(pages=60, page_tokens=4)
    session.add(leader, 2, borders=(24,))
    session.plan()
    session.add([*leader, 9], 2)
    session.plan()
    assert session.scheduler.admission.num_deferred > 0
    session.commit()
    session.run()


def test_a_prompt_waits_for_none_of_another_salt(simulation):
    session = simulation.Session(pages=60, page_tokens=4)
    session.add(range(31), 2, borders=(24,), cache_salt="one")
    session.plan()
    session.add(range(32), 2, cache_salt="two")
    session.plan()
    assert session.scheduler.admission.num_deferred == 0
    session.commit()
    session.run()


def test_what_becomes_free_is_for_one_that_was_refused_too_often(simulation, monkeypatch):
    from triax.serve import admission

    monkeypatch.setattr(admission, "MOST_REFUSALS", 3)
    session = simulation.Session(pages=9, slots=8, prefixes=None)
    session.add([1] * 4, 12)
    session.plan()
    session.commit()
    large = session.add([2] * 26, 2)
    order = []
    for number in range(12):
        session.add([3 + number] * 3, 4)
        for _ in range(2):
            if session.plan():
                session.commit()
    while session.scheduler.has_work:
        session.plan()
        session.commit()
    order = list(session.ended)
    assert order.index(large) < 8, order
