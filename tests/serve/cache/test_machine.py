"""Random lives of an engine on a machine that notices every wrong byte, and the faults that it must notice."""

import random

import pytest
from hypothesis import HealthCheck, Phase, assume, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test

from triax.errors import CapacityError
from triax.serve.cache.manager import Manager
from triax.serve.cache.tiers import Tiers
from triax.serve.request import MediaItem

STEMS = (
    (7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7),
    (1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17),
    (1, 2, 3, 9),
)
few = st.integers(0, 2)
pytestmark = pytest.mark.usefixtures("no_shape_checks")


def life(simulation, manager=Manager):
    """Return a state machine: its rules are what can happen to an engine, in any order."""

    class Life(RuleBasedStateMachine):
        @initialize(
            pages=st.sampled_from([4, 9, 14, 30]),
            slots=st.sampled_from([2, 3, 4, 8]),
            host=st.sampled_from([(0, 0), (6, 2), (30, 8)]),
            budget=st.sampled_from([3, 8, 32]),
            gap=st.sampled_from([1, 3]),
        )
        def begin(self, pages, slots, host, budget, gap):
            self.session = simulation.Session(
                pages, slots, *host, step_tokens=budget, mixed_prefill_tokens=budget, max_running=min(budget, 8),
                prefixes=simulation.CLOSE.model_copy(update={"gap": gap}), manager=manager,
                classes={"default": {"share": 0.5}, "long": {"share": 0.5}}, long_from=12,
            )  # fmt: skip
            self.names: list[str] = []

        @rule(
            stem=st.sampled_from(STEMS),
            length=st.integers(1, 17),
            tail=st.lists(few, max_size=3),
            max_tokens=st.integers(1, 7),
            priority=few,
            borders=st.lists(st.integers(1, 18), max_size=3),
            salt=st.sampled_from(["", "other"]),
            stop_ids=st.sampled_from([(), (), (3, 17, 31)]),
        )
        def ask(self, stem, length, tail, max_tokens, **options):
            options["borders"] = tuple(options["borders"])
            salt = options.pop("salt")
            try:
                tokens = [*stem[:length], *tail]
                self.names.append(self.session.add(tokens, max_tokens, cache_salt=salt, **options))
            except CapacityError:
                assume(False)

        @rule(which=st.integers(0, 10), tail=st.lists(few, max_size=3))
        def ask_again(self, which, tail):
            """The next turn of a conversation: the old prompt, its answer, and more."""
            assume(self.names)
            name = self.names[which % len(self.names)]
            tokens = [*self.session.sequence(name).request.tokens, *self.session.answers.get(name, ()), *tail]
            try:
                self.names.append(self.session.add(tokens, 3))
            except CapacityError:
                assume(False)

        @rule(start=st.integers(0, 3), length=st.integers(1, 9), digest=st.sampled_from(["cat", "dog"]))
        def show(self, start, length, digest):
            picture = MediaItem(digest, start, length)
            try:
                self.names.append(self.session.add([5] * (start + length + 2), 3, media=(picture,)))
            except CapacityError:
                assume(False)

        @precondition(lambda self: len(self.session.open) < 2)
        @rule()
        def plan(self):
            self.session.plan()

        @precondition(lambda self: self.session.open)
        @rule()
        def commit(self):
            self.session.commit()

        @rule(count=st.integers(1, 6))
        def go_on(self, count):
            for _ in range(count):
                if len(self.session.open) < 2:
                    self.session.plan()
                if self.session.open:
                    self.session.commit()

        @rule(which=st.integers(0, 10))
        def abort(self, which):
            live = list(self.session.scheduler.sequences.values())
            assume(live)
            self.session.abort(live[which % len(live)].request.id)
            self.session.check()

        @precondition(lambda self: self.session.open)
        @rule()
        def fail(self):
            self.session.fail()

        @rule()
        def update_weights(self):
            self.session.update()

        @rule()
        def reset(self):
            while self.session.open:
                self.session.commit()
            self.session.manager.reset()
            self.session.check()

        @rule(kind=st.sampled_from(["none", "wrong", "half"]))
        def draft(self, kind):
            def half(sequence, most):
                done = sequence.num_generated
                right = simulation.answer(sequence.request, done + 2, self.session.machine.weights)[done:]
                return (*right[:most], 1, 1)

            self.session.propose = {"none": None, "wrong": lambda sequence, most: (49,) * most, "half": half}[kind]

        def teardown(self):
            if hasattr(self, "session"):
                self.session.run(depth=2)
                assert not self.session.manager.holdings
                counts = self.session.report()
                assert counts["pages_free"] + counts["pages_idle"] == counts["pages"], "pages are held by nobody"
                assert counts["slots_free"] + counts["slots_idle"] == counts["slots"], "slots are held by nobody"

    return Life


def lived(simulation, examples: int, manager=Manager, steps: int = 12, phases=tuple(Phase)) -> None:
    quiet = settings(
        max_examples=examples,
        stateful_step_count=steps,
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=list(HealthCheck),
        print_blob=True,
        phases=phases,
    )
    run_state_machine_as_test(life(simulation, manager), settings=quiet)


def test_no_operation_lets_a_request_see_what_is_not_its_own(simulation):
    lived(simulation, 200)


@pytest.mark.soak
@pytest.mark.timeout(7200)
def test_no_operation_lets_a_request_see_what_is_not_its_own_in_many_lives(simulation):
    lived(simulation, 4000, steps=50)


@given(seed=st.integers(0, 2**32 - 1), page_tokens=st.sampled_from([1, 3, 8]))
def test_warm_equals_cold_for_any_lengths_chunks_and_interleavings(simulation, seed, page_tokens):
    noise = random.Random(seed)
    session = simulation.Session(
        60, 6, 20, 4, page_tokens=page_tokens, step_tokens=noise.choice([5, 17]), max_running=4
    )
    known = [[noise.randrange(3) for _ in range(20)]]
    for _ in range(12):
        tokens = [*noise.choice(known)[: noise.randrange(1, 30)], noise.randrange(3)]
        name = session.add(tokens, noise.randrange(1, 6))
        for _ in range(noise.randrange(3)):
            if session.plan():
                session.commit()
        known.append([*tokens, *session.answers.get(name, ())])
    session.run(depth=noise.choice([1, 2]))


NOTICED = (
    "another prefix's|warm differs|no plan|not there any more|pinned|held|counted|has no|is not|lost or free|"
    "evictable|serves nobody"
)

# one planted fault a rule of the report, and the classics of other engines; each must be found


class AllocatesBeforePinning(Manager):
    """Rule one broken: the pages of a hit may be given away to the sequence that hit them."""

    def admit(self, number, keys, salt, match, length, **options):
        pin, unpin = self.tiers.pin_snapshot, self.tiers.unpin_snapshot
        self.tiers.pin_snapshot = self.tiers.unpin_snapshot = lambda snapshot: None
        try:
            return super().admit(number, keys, salt, match, length, **options)
        finally:
            self.tiers.pin_snapshot, self.tiers.unpin_snapshot = pin, unpin


class MatchesBeforeLanding(Manager):
    """Rule two broken: what a step writes can be found while it still runs."""

    def take_snapshot(self, holding, position):
        super().take_snapshot(holding, position)
        if self._taken and self._taken[-1][0] is holding and holding.epoch == self.epoch:
            before, self.unsaved = holding.position, type(self.unsaved)()
            holding.position = position
            self._publish(holding)
            _, _, slot = self._taken.pop()
            if not self._mark(holding, slot):
                self.tiers.slots.drop(slot)
            holding.position = before


class KeepsStatesWithoutPages(Tiers):
    """Rule three broken: a page goes, and the snapshots that need it stay."""

    def _remove_one(self, node):
        kept = dict(node.snapshots)
        super()._remove_one(node)
        if node.parent is not None and node.parent.is_alive and kept and node.parent.parent is not None:
            for offset, snapshot in kept.items():
                self.tree.insert(node.parent, node.tokens, 0).page = 1
                copy = self.tree.mark(node.parent.children[node.tokens], offset, snapshot.saved)
                copy.slot = self.slots.take()


class KeepsStates(Manager):
    """A manager over such tiers."""

    def __init__(self, sizes, page_tokens, prefixes):
        super().__init__(sizes, page_tokens, prefixes)
        self.tiers.__class__ = KeepsStatesWithoutPages


class ForgetsToClear(Manager):
    """A fresh sequence inherits the state of its slot's last tenant."""

    def admit(self, *arguments, **options):
        holding = super().admit(*arguments, **options)
        self.tiers.moves.clear.clear()
        return holding


class WritesIntoSharedPages(Manager):
    """A hit inside a page goes on in that very page."""

    def _restore(self, snapshot, slot, pages):
        super()._restore(snapshot, slot, pages)
        moves = self.tiers.moves
        if snapshot.offset < self.page_tokens and moves.restores[-1].kind == "page":
            moves.restores.pop()
            if snapshot.node.page is not None:
                index = snapshot.node.start // self.page_tokens
                self.tiers.pages.drop(pages[index])
                pages[index] = self.tiers.pages.share(snapshot.node.page)


class HitsWithoutState(Manager):
    """The hit is as long as the latents reach, whether there is a state or not."""

    def admit(self, number, keys, salt, match, length, **options):
        holding = super().admit(number, keys, salt, match, length, **options)
        if holding is not None and match.path and not match.snapshot:
            holding.position = self.page_tokens
        return holding


class SurvivesNewWeights(Manager):
    """Prefixes outlive the weights that made them."""

    def reset(self):
        pass


class PublishesFailedSteps(Manager):
    """A step that did not run leaves its snapshots behind."""

    def fail(self):
        for step in filter(None, self._steps):
            for holding, position, slot in step.taken:
                holding.position = position
                self._publish(holding)
                if self._mark(holding, slot):
                    self.tiers.slots.share(slot)
        super().fail()


class PublishesOneTokenTooFar(Manager):
    """A sequence's last token was drawn, but never computed; its snapshot says otherwise."""

    def release(self, holding, *, keep):
        if keep and not holding.is_void and holding.position < min(len(holding.keys), 4 * len(holding.pages)):
            holding.position += 1
        super().release(holding, keep=keep)


class LosesASlot(Manager):
    """An abort forgets to give the slot back."""

    def release(self, holding, *, keep):
        if not keep or holding.is_void:
            self.tiers.slots.share(holding.slot)
        super().release(holding, keep=keep)


class IgnoresPictures(Manager):
    """All pictures look the same in the tree."""

    def match(self, keys, salt, limit):
        return super().match([5 if key < 0 else key for key in keys], salt, limit)

    def admit(self, number, keys, *arguments, **options):
        return super().admit(number, [5 if key < 0 else key for key in keys], *arguments, **options)


class MixesSalts(Manager):
    """Everybody shares with everybody; no content is wrong, but the tree shows it."""

    def match(self, keys, salt, limit):
        return super().match(keys, "", limit)


@pytest.mark.parametrize(
    "fault",
    [
        AllocatesBeforePinning,
        MatchesBeforeLanding,
        KeepsStates,
        ForgetsToClear,
        WritesIntoSharedPages,
        HitsWithoutState,
        SurvivesNewWeights,
        PublishesFailedSteps,
        PublishesOneTokenTooFar,
        LosesASlot,
        IgnoresPictures,
        MixesSalts,
    ],
)
def test_a_planted_fault_is_found(simulation, fault):
    with pytest.raises(AssertionError, match=NOTICED):
        lived(simulation, 400, fault, steps=12, phases=(Phase.generate,))
