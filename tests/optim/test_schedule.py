import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from pydantic import ValidationError

from triax.config.optim import Schedule, Segment
from triax.optim import branch, rate

K3 = Schedule()
WSD = Schedule(
    segments=(
        Segment(shape="linear", until=0.01, to=1.0),
        Segment(shape="constant", until=0.8, to=1.0),
        Segment(shape="1-sqrt", until=1.0, to=0.0),
    )
)


@st.composite
def schedules(draw):
    borders = draw(st.lists(st.integers(1, 99), max_size=4, unique=True).map(sorted))
    segments, before = [], 0.0
    for border in [*borders, 100]:
        shape = draw(st.sampled_from(["constant", "linear", "cosine", "1-sqrt"]))
        before = before if shape == "constant" else draw(st.floats(0, 2))
        segments.append(Segment(shape=shape, until=border / 100, to=before))
    assume(any(segment.to for segment in segments))  # a rate that never leaves 0 is refused
    return Schedule(segments=tuple(segments))


@given(settings=schedules(), share=st.floats(0, 1))
def test_the_rate_stays_between_the_ends_of_its_segment(settings, share):
    before = 0.0
    for segment in settings.segments:
        if share <= segment.until:
            low, high = sorted((before, segment.to))
            assert low - 1e-12 <= rate(settings, share) <= high + 1e-12
            return
        before = segment.to


@given(settings=schedules())
def test_the_rate_is_continuous_and_exact_at_borders(settings):
    assert rate(settings, 0.0) == 0.0
    for segment in settings.segments:
        assert rate(settings, segment.until) == segment.to
        for side in (-1e-12, 1e-12):
            assert rate(settings, segment.until + side) == pytest.approx(segment.to, abs=1e-4)


@given(hundredth=st.integers(1, 10**12))
def test_k3_s_warm_up_ends_at_exactly_one_percent_of_the_tokens(hundredth):
    planned = 100 * hundredth
    assert rate(K3, hundredth / planned) == 1.0
    if hundredth > 1:
        assert rate(K3, (hundredth - 1) / planned) < 1.0
    assert rate(K3, (hundredth + 1) / planned) <= 1.0


def test_the_shapes_are_what_their_names_say():
    def half(shape, to):
        start = Segment(shape="constant", until=0.5, to=1.0)
        return rate(Schedule(segments=(start, Segment(shape=shape, until=1.0, to=to))), 0.625)

    assert half("linear", 0.2) == pytest.approx(1 - 0.25 * 0.8)
    assert half("cosine", 0.2) == pytest.approx(0.2 + 0.8 * (1 + 2**-0.5) / 2)
    assert half("1-sqrt", 0.2) == pytest.approx(0.2 + 0.8 * (1 - 0.25**0.5))
    assert half("constant", 0.7) == 0.7


def test_past_the_plan_the_last_rate_stays():
    assert rate(K3, 1.7) == 0.1


@given(settings=schedules(), at=st.integers(1, 100), more=st.floats(0.05, 3), share=st.floats(0, 1))
def test_a_branch_agrees_with_its_trunk_at_the_checkpoint_and_decays_from_there(settings, at, more, share):
    at /= 100
    assume(rate(settings, at) > 0)
    branched, longer = branch(settings, at, more, to=0.0)
    assert longer == pytest.approx(at + more)
    assert rate(branched, at / longer) == pytest.approx(rate(settings, at), abs=1e-9)
    assert rate(branched, 1.0) == 0.0
    if all(segment.shape in ("linear", "constant") for segment in settings.segments):
        assert rate(branched, share * at / longer) == pytest.approx(rate(settings, share * at), abs=1e-6)


def test_the_constant_phase_can_be_left_early_and_late():
    for at in (0.3, 0.8):
        branched, longer = branch(WSD, at, 0.1)
        for share in (0.002, 0.01, 0.1, at):
            assert rate(branched, share / longer) == pytest.approx(rate(WSD, share), abs=1e-12)
        assert [segment.shape for segment in branched.segments] == ["linear", "constant", "1-sqrt"]
        assert rate(branched, (at + 0.025) / longer) == pytest.approx(0.5)


def test_a_branch_without_tokens_is_refused():
    with pytest.raises(ValidationError, match="rising shares"):
        branch(WSD, 0.5, 0.0)


def test_a_segment_that_ends_where_a_branch_begins_keeps_its_shape():
    settings = Schedule(
        segments=(Segment(shape="cosine", until=0.5, to=0.2), Segment(shape="constant", until=1, to=0.2))
    )
    fresh, total = branch(settings, at=0.5, more=0.1)
    assert [segment.shape for segment in fresh.segments] == ["cosine", "1-sqrt"]
    assert rate(fresh, 0.25 / total) == pytest.approx(rate(settings, 0.25))
