"""The small parts of the cache: pools, orders, places."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from triax.config.serve import Prefixes
from triax.serve.cache.eviction import Order, recompute_cost
from triax.serve.cache.places import snapshot_places
from triax.serve.cache.pool import Pool
from triax.serve.cache.prefix import Tree
from triax.serve.shares import shared_out


def test_a_piece_is_free_when_its_last_holder_drops_it():
    pool = Pool(3, first=1)
    one, other = pool.take(), pool.take()
    assert {one, other} == {1, 2}
    assert pool.take() is None
    pool.share(one)
    pool.drop(one)
    assert pool.num_free == 0
    pool.drop(one)
    assert (pool.num_free, pool.num_used, pool.free()) == (1, 1, [one])
    with pytest.raises(AssertionError, match="is free"):
        pool.drop(one)


def test_the_cheapest_goes_first_and_age_makes_the_dear_ones_cheap():
    order: Order[str] = Order()
    order.add("dear", 10.0)
    order.add("cheap", 1.0)
    assert order.pop() == "cheap"
    for visit in range(12):
        order.add(f"visitor {visit}", 1.0)
        if order.pop() == "dear":
            break
    assert "dear" not in order
    assert order.age >= 10.0
    assert 8 <= visit <= 11, "each eviction ages the order by one"


def test_an_entry_that_is_in_use_is_never_evicted():
    order: Order[str] = Order()
    for name in "abc":
        order.add(name, 1.0)
    order.discard("a")
    assert [order.pop(), order.pop(), order.pop()] == ["b", "c", None]
    assert order.lowest() is None


@given(st.lists(st.tuples(st.sampled_from("abcdefgh"), st.floats(0, 9), st.booleans()), max_size=300))
def test_an_order_pops_each_entry_once_whatever_was_added_and_taken_out(operations):
    order, known = Order(), set()
    for name, worth, is_added in operations:
        if is_added:
            order.add(name, worth)
            known.add(name)
        else:
            order.discard(name)
            known.discard(name)
        assert set(order) == known
        assert len(order._heap) <= 4 * len(known) + 64
    assert {order.pop() for _ in range(len(order))} == known


def test_deep_snapshots_cost_more_than_shallow_ones_of_the_same_reach():
    assert recompute_cost(100_000, 1000) > 2 * recompute_cost(1000, 1000)
    assert recompute_cost(2000, 2000) > recompute_cost(2000, 1000)


def test_snapshots_lie_at_borders_branches_and_ever_wider_steps():
    settings = Prefixes(align=64, first=1024, gap=64)
    places = snapshot_places(settings, 0, 10_000, [300, 4000, 7000, 9_950], 2800)
    assert places == [300, 1024, 2048, 2800, 4096, 7000, 8192, 9_950]
    assert snapshot_places(settings, 2560, 3000, [], 2800) == [2800, 2944]
    assert snapshot_places(settings, 0, 40, [], 0) == []
    assert snapshot_places(settings, 0, 128, [], 0) == [64]


@given(
    start=st.integers(0, 300),
    length=st.integers(1, 3000),
    borders=st.lists(st.integers(0, 4000), max_size=9),
    branch=st.integers(0, 3000),
    gap=st.integers(1, 200),
)
def test_snapshots_of_a_prompt_keep_their_distance(start, length, borders, branch, gap):
    places = snapshot_places(Prefixes(align=64, first=256, gap=gap), start, length, borders, branch)
    assert places == sorted(set(places))
    assert all(start < place <= length for place in places)
    steps = zip([start, *places] if start else places, places if start else places[1:], strict=False)
    assert all(after - before >= gap for before, after in steps)


def test_a_page_is_found_by_any_beginning_of_it():
    tree = Tree(4)
    root = tree.root("")
    for key in ((1, 2, 3, 4), (1, 2, 9, 9), (1, 3), (7, 7, 7, 7)):
        tree.insert(root, key, 0).page = 1
    tree.mark(root.children[1, 2, 9, 9], 3, 3)
    assert tree.match("", [1, 2, 9, 5, 5], 9).matched == 3
    assert tree.match("", [1, 2, 9, 5, 5], 9).position == 3
    assert tree.match("", [1, 2, 9, 5, 5], 2).position == 0
    assert tree.match("", [1, 2, 3, 4, 1], 9).matched == 4
    assert tree.match("", [1, 3], 9).matched == 2
    assert tree.match("", [8], 9).matched == 0
    assert tree.match("other", [1, 2, 3, 4], 9).matched == 0
    assert tree.holder(root, (1, 2, 9)) is root.children[1, 2, 9, 9]
    assert tree.holder(root, (1, 2, 4)) is None


@given(
    st.integers(0, 5000),
    st.dictionaries(st.sampled_from("abcd"), st.tuples(st.integers(0, 3000), st.floats(0.05, 1)), min_size=1),
)
def test_a_budget_is_spent_and_nobody_gets_less_than_its_share(budget, classes):
    demand = {name: wanted for name, (wanted, _) in classes.items()}
    shares = {name: share for name, (_, share) in classes.items()}
    given_out = shared_out(budget, demand, shares)
    total = sum(shares.values())
    assert all(given_out[name] <= demand[name] for name in demand)
    assert sum(given_out.values()) <= budget
    assert sum(given_out.values()) >= min(budget, sum(demand.values())) - len(classes)
    for name, share in shares.items():
        assert given_out[name] >= min(demand[name], int(budget * share / total)) - 1
