"""Who runs next: budgets, order, room, time."""

import pytest

from triax.config.serve import Scheduling
from triax.errors import CapacityError
from triax.serve.plan import PENDING
from triax.serve.request import Structure


def test_decoding_goes_first_and_prompts_share_the_rest_of_the_budget(simulation):
    session = simulation.Session(pages=200, slots=20, step_tokens=10, mixed_prefill_tokens=6, max_running=10)
    for seed in range(3):
        session.add([seed, 1], 30)
    for _ in range(2):
        session.plan()
        session.commit()
    session.add(range(40), 1)
    plan = session.plan()
    assert [row.kind for row in plan.rows] == ["decode"] * 3 + ["prefill"]
    assert (plan.decode_tokens, plan.prefill_tokens) == (3, 6), "a long prompt delays the others by so much only"
    session.commit()
    session.run()


def test_no_step_exceeds_its_budget_and_none_is_wasted(simulation):
    session = simulation.Session(
        pages=400, slots=30, step_tokens=16, mixed_prefill_tokens=16, max_running=16, prefixes=None
    )
    for seed in range(9):
        session.add([seed] * (5 + 7 * seed), 6)
    while plan := session.plan():
        spent = sum(len(row.tokens) for row in plan.rows)
        assert spent == plan.decode_tokens + plan.prefill_tokens <= 16
        if any(one.planned < one.target for one in session.scheduler.running) or session.scheduler.num_waiting:
            assert spent == 16
        session.commit()


def test_any_budget_makes_progress_whatever_the_pages(simulation):
    session = simulation.Session(pages=60, page_tokens=8, step_tokens=3, mixed_prefill_tokens=2, max_running=3)
    for seed in range(4):
        session.add([seed] * 21, 3)
    assert session.run(most=200) < 200


def test_a_request_that_can_never_fit_is_refused_and_leaves_nothing(simulation):
    session = simulation.Session(pages=9)  # eight pages of four tokens
    with pytest.raises(CapacityError, match="can never run; found room for 32 tokens"):
        session.add(range(30), 4)
    assert not session.scheduler.has_work
    session.ask(range(30), 3)


def test_a_queue_has_an_end(simulation):
    session = simulation.Session(max_waiting=2)
    for _ in range(3):
        session.add([1], 1)
    with pytest.raises(CapacityError, match="too many requests wait; found 3"):
        session.add([1], 1)
    session.run()
    session.ask([1], 1)


def test_smaller_priorities_run_first_and_take_memory_back(simulation):
    session = simulation.Session(pages=12, slots=3)
    late = session.add(range(20), 8, priority=5)
    for _ in range(4):
        session.plan()
        session.commit()
    urgent = session.add(range(20, 45), 4, priority=1)
    order = []
    while session.scheduler.has_work:
        session.plan()
        session.commit()
        order += [name for name in session.ended if name not in order]
    assert order == [urgent, late]
    assert session.sequence(late).preemptions == 1


def test_the_next_step_is_planned_before_the_last_tokens_are_known(simulation):
    session = simulation.Session()
    session.add([1, 2, 3], 3, stop_ids=())
    first, second = session.plan(), session.plan()
    assert first.rows[0].tokens == (1, 2, 3)
    assert second.rows[0].tokens == (PENDING,)
    session.commit()
    third = session.plan()
    assert third.rows[0].tokens == (PENDING,)
    assert third.rows[0].position == second.rows[0].position + 1
    session.commit()
    assert session.plan() is None, "its last token is on the way"
    session.run()
    assert len(session.answers["r0"]) == 3


def test_a_sequence_that_ends_while_its_next_step_is_planned_keeps_its_memory_until_then(simulation):
    session = simulation.Session()
    name = session.add([1, 2, 3], 20)
    session.plan()
    session.plan()
    session.abort(name)
    assert session.manager.holdings
    session.commit()
    assert session.manager.holdings
    session.commit()
    assert not session.manager.holdings
    assert not session.scheduler.has_work


def test_structured_answers_wait_for_each_token(simulation):
    session = simulation.Session()
    session.add([1, 2, 3], 3, structure=Structure("json_object"))
    session.plan()
    assert session.plan() is None
    session.run()


def test_a_deadline_ends_what_waits_and_what_runs(simulation):
    session = simulation.Session(slots=2)
    runs, waits = session.add([1, 2], 20, deadline_s=5.0), session.add([3, 4], 20, deadline_s=3.0)
    free = session.add([5, 6], 2)
    for _ in range(3):
        session.plan()
        session.commit()
        session.now += 2.0
    session.run()
    assert session.ended == {waits: "deadline", runs: "deadline", free: "stop"}


def test_a_burst_of_long_prompts_leaves_short_ones_their_share(simulation):
    """Steps cost what their tokens cost; what short requests wait is measured with and without shares."""

    def longest_wait(classes) -> float:
        session = simulation.Session(
            pages=700, slots=40, page_tokens=16, step_tokens=64, mixed_prefill_tokens=64, max_running=12,
            prefixes=None, classes=classes, long_from=128, max_waiting=1000,
        )  # fmt: skip
        for seed in range(20):
            session.add([seed] * 500, 4)
        waits, asked, count = [], {}, 0
        while session.scheduler.has_work:
            if count % 4 == 0 and count < 200:
                asked[session.add([count % 7, 1, 2, 3, 4, 5, 6, 7], 2)] = session.now
            count += 1
            plan = session.plan()
            session.now += 0.002 + 1e-4 * sum(len(row.tokens) for row in plan.rows)
            before = set(session.answers)
            session.commit()
            waits += [session.now - asked[name] for name in set(session.answers) - before if name in asked]
        assert len(waits) == len(asked) > 30
        return sorted(waits)[-2]

    shared = longest_wait({"default": {"share": 0.5}, "long": {"share": 0.5}})
    common = longest_wait({"default": {"share": 1.0}})
    assert shared < 0.05
    assert common > 5 * shared


def test_an_idle_share_is_lent_and_taken_back(simulation):
    session = simulation.Session(
        pages=41, slots=20, step_tokens=64, mixed_prefill_tokens=64, prefixes=None, long_from=12,
        classes={"default": {"share": 0.5}, "long": {"share": 0.5}},
    )  # fmt: skip
    for seed in range(4):
        session.add([seed] * 35, 4)
    for _ in range(3):
        session.plan()
        session.commit()
    running = session.scheduler.running
    assert sum(len(one.holding.pages) for one in running) > 20, "more than its half while nobody else asks"
    session.add([1] * 10, 4)
    for _ in range(2):  # one step is planned already with those that give way
        session.plan()
        session.commit()
    assert any(one.class_name == "default" for one in session.scheduler.running)
    session.run()
    assert len(session.answers) == 5


def test_shares_beyond_the_whole_are_refused():
    with pytest.raises(ValueError, match=r"add up to `1\.5`"):
        Scheduling(classes={"default": {"share": 0.5}, "long": {"share": 1.0}})
    with pytest.raises(ValueError, match="has no `default`"):
        Scheduling(classes={"long": {"share": 1.0}})
    with pytest.raises(ValueError, match="more than step_tokens"):
        Scheduling(step_tokens=4, max_running=5)


def test_a_deadline_passes_at_its_very_second(simulation):
    session = simulation.Session()
    name = session.add([1, 2], 20, deadline_s=3.0)
    session.now = 3.0 - 1e-6
    assert not session.scheduler.is_late
    assert session.scheduler.expired() == []
    session.now = 3.0
    assert session.scheduler.is_late
    assert session.scheduler.expired() == [session.sequence(name).number]
    assert session.scheduler.expired() == [], "it is told once"


def test_equal_priorities_run_in_their_order_and_a_class_within_its_own(simulation):
    session = simulation.Session(pages=12, slots=2, max_running=1)
    names = [session.add([seed] * 6, 2, priority=priority) for seed, priority in enumerate((1, 0, 1, 0))]
    session.run()
    assert list(session.ended) == [names[1], names[3], names[0], names[2]]


def test_the_last_request_that_may_wait_is_taken_and_those_that_run_do_not_count(simulation):
    session = simulation.Session(max_waiting=1, slots=3, max_running=2)
    for seed in range(2):
        session.add([seed, 1], 4)
    session.plan()
    assert session.scheduler.num_waiting == 0
    for seed in range(2):
        session.add([seed, 2], 4)
    with pytest.raises(CapacityError, match="too many requests wait; found 2"):
        session.add([1], 1)
    session.commit()
    session.run()


def test_a_sequence_that_failed_too_often_is_given_up_and_no_sooner(simulation):
    session = simulation.Session()
    name = session.add([1, 2, 3], 4)
    for count in range(3):
        assert session.plan() is not None
        session.fail()
        assert (name in session.ended) == (count == 2)


def test_a_sequence_that_failed_once_goes_on(simulation):
    session = simulation.Session()
    name = session.add([1, 2, 3], 4)
    session.plan()
    session.fail()
    session.run()
    assert session.ended == {name: "stop"}
