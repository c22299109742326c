import pytest
from hypothesis import given
from hypothesis import strategies as st

from triax.data.source import Document
from triax.data.split import draw, split
from triax.errors import DataError


def documents(*names):
    return [Document(name, "text") for name in names]


def test_the_draw_of_a_name_never_changes():
    assert draw("argparse.py") == pytest.approx(0.78612742, abs=1e-8)


@given(st.sets(st.text(max_size=5), min_size=2, max_size=40), st.randoms(), st.floats(0.01, 0.99))
def test_every_document_is_on_one_side_whatever_the_order(names, random, share):
    order = sorted(names)
    whole = split([documents(*order)], share)
    random.shuffle(order)
    again = split([documents(*order)], share)
    assert whole.training[0]
    assert whole.held_out
    assert sorted(whole.training[0] + whole.held_out) == sorted(documents(*names))
    assert set(again.held_out) == set(whole.held_out)


def test_about_the_share_is_held_out():
    sides = split([documents(*map(str, range(4000)))], 0.06)
    assert 180 < len(sides.held_out) < 300


def test_a_document_keeps_its_side_when_others_come():
    names = [str(n) for n in range(200)]
    few, many = split([documents(*names[:100])], 0.2), split([documents(*names)], 0.2)
    assert set(few.held_out) < set(many.held_out)
    assert set(few.training[0]) < set(many.training[0])


def test_a_share_of_zero_holds_nothing_out():
    sides = split([documents("a", "b")], 0.0)
    assert sides.held_out == ()
    assert len(sides.training[0]) == 2


def test_a_lone_document_is_learned_from_if_another_source_can_be_held_out():
    sides = split([documents("lone"), documents("a", "b", "c")], 0.01)
    assert sides.training[0] == (Document("lone", "text"),)
    assert len(sides.held_out) == 1


@given(st.text(alphabet="ab \n", min_size=2, max_size=300), st.floats(0.01, 0.99))
def test_f57_the_tail_of_a_lone_document_is_held_out(text, share):
    sides = split([[Document("lone", text)]], share)
    ((head,),), (tail,) = sides.training, sides.held_out
    assert head.text + tail.text == text
    assert head.text
    assert tail.text


def test_f57_the_tail_has_about_the_share_and_begins_at_a_line():
    text = "".join(f"line {n}\n" for n in range(1000))
    sides = split([[Document("a", text)], [Document("b", text)]], 0.06)
    for (head,), tail in zip(sides.training, sides.held_out, strict=True):
        assert len(tail.text) == pytest.approx(0.06 * len(text), abs=9)
        assert head.text.endswith("\n")
        assert tail.name == f"{head.name} (tail)"


def test_one_character_alone_cannot_be_split():
    with pytest.raises(DataError, match="found `1` documents of one character; give more text"):
        split([[Document("lone", "x")]], 0.06)
