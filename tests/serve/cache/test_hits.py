"""What is reused, and the conditions under which other engines went wrong."""

import pytest

from triax.config.serve import Prefixes
from triax.serve.cache.prefix import keys_of
from triax.serve.request import MediaItem


def tokens(count: int, seed: int = 1) -> list[int]:
    return [(seed * 7919 + 31 * place + place * place) % 47 for place in range(count)]


def test_the_example_of_the_report_hits_at_2560(simulation):
    # 2,800 matching tokens and states at multiples of 512: the hit ends at 2,560
    session = simulation.Session(
        pages=200, slots=12, page_tokens=64, prefixes=Prefixes(align=512, first=1024, gap=64), step_tokens=4096,
        mixed_prefill_tokens=4096,
    )  # fmt: skip
    shared = tokens(2800)
    first = session.ask([*shared[:2799], 48], 1)
    second = session.ask([*shared[:2799], 49, *tokens(300, 2)], 1)
    assert (first.cached_tokens, second.cached_tokens, second.matched_tokens) == (0, 2560, 2799)
    third = session.ask([*shared[:2799], 50, *tokens(100, 3)], 1)
    assert third.cached_tokens == 2799, "the second visit has found the branch point and left a snapshot there"


def test_the_same_prompt_twice_is_restored_but_for_its_last_tokens(simulation):
    session = simulation.Session(pages=60)
    prompt = tokens(21)
    assert session.ask(prompt).cached_tokens == 0
    assert session.ask(prompt).cached_tokens == 20
    assert session.answers["r0"] == session.answers["r1"]


def test_a_state_is_never_used_without_its_latents_nor_latents_without_a_state(simulation):
    session = simulation.Session(pages=60)
    prompt = tokens(21)
    session.ask(prompt)
    for node in session.manager.tree.nodes():
        for snapshot in list(node.snapshots.values()):
            session.manager.tiers.drop_snapshot(snapshot)
    session.check()
    again = session.ask(prompt)
    assert (again.matched_tokens, again.cached_tokens) == (21, 0)


@pytest.mark.parametrize(("shared", "hit"), [(127, 0), (128, 128), (129, 128), (130, 128)])
def test_a_hit_needs_no_more_than_one_token_after_the_border(simulation, shared, hit):
    session = simulation.Session(pages=20, page_tokens=64, prefixes=Prefixes(), step_tokens=512)
    session.ask(tokens(130), 1)
    assert session.ask([*tokens(130)[:shared], 48, 48], 1).cached_tokens == hit


def test_a_prompt_as_long_as_a_page_is_reused_when_one_token_follows(simulation):
    for extra in (1, 2):
        session = simulation.Session(pages=20, page_tokens=64, prefixes=Prefixes(), step_tokens=512)
        session.ask(tokens(128), 1)
        assert session.ask([*tokens(128), *range(extra)], 1).cached_tokens == 128


def test_a_prompt_shorter_than_a_page_is_reused(simulation):
    session = simulation.Session(pages=20, page_tokens=64)
    session.ask(tokens(30), 1, borders=(28,))
    assert session.ask([*tokens(28), 49, 49], 1).cached_tokens == 28


def test_the_next_turn_reuses_prompt_and_answer(simulation):
    session = simulation.Session(pages=60)
    first = session.ask(tokens(13), 9)
    again = session.ask([*tokens(13), *session.answers["r0"], 3, 4], 2)
    assert again.cached_tokens == 13 + 9 - 1, "all but the last token drawn, which was never computed"
    assert first.num_generated == 9


def test_a_prompt_of_many_chunks_carries_its_state(simulation):
    for length in (16, 17, 32, 33):
        session = simulation.Session(pages=60, step_tokens=16, mixed_prefill_tokens=16)
        session.ask(tokens(length), 3)
        session.ask(tokens(length, 2), 3)


def test_borders_that_a_request_names_cut_its_chunks(simulation):
    session = simulation.Session(pages=60, step_tokens=64, mixed_prefill_tokens=64)
    session.add(tokens(31), 1, borders=(6, 29))
    ends = []
    while plan := session.plan():
        ends += [row.position + len(row.tokens) for row in plan.rows]
        assert [copy.kind for copy in plan.after] in (["slot"], [])
        session.commit()
    assert {6, 29} <= set(ends)
    assert session.ask([*tokens(31)[:29], 49, 49], 1).cached_tokens == 29
    assert session.ask([*tokens(31)[:6], 49, 49], 1).cached_tokens == 6


def test_what_a_step_writes_is_found_only_after_it(simulation):
    session = simulation.Session(pages=60)
    session.add(tokens(9), 1)
    session.plan()
    match = session.manager.match(tokens(9), "", 8)
    assert (match.matched, match.snapshot) == (0, None)
    session.commit()
    assert session.manager.match(tokens(9), "", 8).position == 8


def test_prompts_that_come_together_compute_their_common_part_once(simulation):
    session = simulation.Session(pages=120, slots=12, step_tokens=256, mixed_prefill_tokens=256)
    for tail in range(8):
        session.add([*tokens(40), tail], 1, borders=(40,))
    session.run()
    assert session.machine.computed == 40 + 8


def test_pictures_are_told_apart_by_content(simulation):
    session = simulation.Session(pages=60)
    prompt = [1, *[5] * 8, 2, 3]
    for digest, hit in (("cat", 0), ("dog", 0), ("cat", 8), ("dog", 8)):
        assert session.ask(prompt, 2, media=(MediaItem(digest, 1, 8),)).cached_tokens == hit
    assert keys_of(prompt, [MediaItem("cat", 1, 8)]) != keys_of(prompt, [MediaItem("dog", 1, 8)])


def test_the_rows_of_a_picture_name_it_wherever_they_are_cut(simulation):
    session = simulation.Session(pages=60, step_tokens=3, mixed_prefill_tokens=3, max_running=3)
    picture = MediaItem("cat", 2, 7)
    session.add([1, 1, *[5] * 7, 2, 3], 1, media=(picture,))
    while plan := session.plan():
        for row in plan.rows:
            is_inside = row.position < 9 and row.position + len(row.tokens) > 2
            assert row.media == ((picture,) if is_inside else ())
        session.commit()


def test_salts_share_nothing(simulation):
    session = simulation.Session(pages=60, slots=20)
    session.ask(tokens(21), cache_salt="one")
    assert session.ask(tokens(21), cache_salt="two").matched_tokens == 0
    assert session.ask(tokens(21), cache_salt="one").cached_tokens == 20


def test_new_weights_find_nothing_and_old_sequences_leave_nothing(simulation):
    session = simulation.Session(pages=60)
    session.ask(tokens(21))
    name = session.add(tokens(17, 2), 9)
    for _ in range(3):
        session.plan()
        session.commit()
    session.manager.reset()  # while it runs: it goes on with the memory it has
    session.check()
    session.run()
    assert len(session.answers[name]) == 9
    assert not session.manager.tree.nodes()
    assert session.ask(tokens(21)).matched_tokens == 0


def test_a_prompt_that_is_scored_reads_no_prefix(simulation):
    session = simulation.Session(pages=60)
    session.ask(tokens(21))
    assert session.ask(tokens(21), score_prompt=True).cached_tokens == 0


def test_without_prefixes_nothing_is_kept(simulation):
    session = simulation.Session(pages=60, prefixes=None)
    session.ask(tokens(21))
    assert session.ask(tokens(21)).matched_tokens == 0
    report = session.report()
    assert report["pages_free"] == report["pages"]
    assert report["slots_free"] == report["slots"]
    assert report["hit_share"] == 0


def test_nothing_goes_to_the_host_while_nothing_is_evicted(simulation):
    session = simulation.Session(pages=100, slots=40, host_pages=100, host_slots=40)
    for seed in range(4):
        session.ask(tokens(21, seed))
    assert session.report()["written_back"] == 0


def test_an_evicted_prefix_comes_back_from_the_host_as_it_was(simulation):
    session = simulation.Session(pages=14, slots=4, host_pages=60, host_slots=20)
    for seed in range(6):
        session.ask(tokens(21, seed))
    report = session.report()
    assert report["written_back"] > 0
    for seed in range(6):
        assert session.ask(tokens(21, seed)).cached_tokens >= 16


def test_a_restore_that_fails_leaves_nothing_behind_and_the_answer_is_right(simulation):
    session = simulation.Session(pages=14, slots=4, host_pages=60, host_slots=20)
    for seed in range(6):
        session.ask(tokens(21, seed))
    name = session.add(tokens(21, 0), 4)
    plan = session.plan()
    assert any(copy.source == "host" for copy in plan.before)
    session.fail()
    session.run()
    assert len(session.answers[name]) == 4
    assert session.sequence(name).failures == 1


def test_a_step_that_always_fails_ends_its_sequence(simulation):
    session = simulation.Session(pages=30)
    name = session.add(tokens(9), 4)
    while not session.ended:
        session.plan()
        session.fail()
    assert session.ended[name] == "error"
    assert not session.scheduler.has_work


def test_a_preempted_sequence_goes_on_from_the_host_where_it_fits(simulation):
    for host, is_restored in (((60, 20), True), ((0, 0), False)):
        session = simulation.Session(14, 4, *host)
        names = [session.add(tokens(17, seed), 12) for seed in range(3)]
        session.run()
        assert session.scheduler.counts["preemptions"] > 0
        assert all(len(session.answers[name]) == 12 for name in names)
        assert (session.report()["written_back"] > 0) == is_restored


def test_invalid_logits_leave_nothing_for_others(simulation):
    session = simulation.Session(pages=60)
    name = session.add(tokens(21), 4)
    plan = session.plan()
    while not plan.rows[-1].samples:
        session.commit()
        plan = session.plan()
    result = session.machine.run(plan, session.sequences)
    spoilt = type(result)((type(result.rows[0])(is_valid=False),))
    session.open.clear()
    ((sequence, row),) = session.scheduler.commit(plan, spoilt)
    assert sequence.request.id == name
    assert not row.is_valid
    assert not session.scheduler.has_work
    assert not session.manager.tree.nodes()
    session.check()


def test_drafts_leave_no_trace_in_what_is_kept(simulation):
    plain, drafted = simulation.Session(pages=60), simulation.Session(pages=60)
    right = simulation.answer
    drafted.propose = lambda one, most: (*right(one.request, one.num_generated + 2)[one.num_generated :][:most], 0, 0)
    for session in (plain, drafted):
        session.ask(tokens(13), 9)
        assert session.ask([*tokens(13), *session.answers["r0"], 3], 2).cached_tokens == 21
    assert plain.answers == drafted.answers
    assert drafted.scheduler.counts["steps"] < plain.scheduler.counts["steps"]


def test_a_verified_window_may_end_on_a_page_border(simulation):
    for length in range(1, 9):
        session = simulation.Session(pages=60)
        session.propose = lambda one, most: (0, 1, 2, 3)[:most]
        session.ask(tokens(length), 12)
