"""Control groups whose kernel does not do at once what it is asked."""

import asyncio

import pytest

from triax.errors import SandboxError
from triax.sandbox.backend import group
from triax.sandbox.backend.group import Group, Hierarchies


def stubborn(monkeypatch, tmp_path, deaf):
    """Return a group whose freezer gets stuck in FREEZING the first `deaf` times, and what it was asked for."""
    state, asked = tmp_path / group.FAMILY / "box" / "freezer.state", []
    state.parent.mkdir(parents=True)

    def put(path, word):
        assert path == state
        asked.append(word)
        state.write_text("FREEZING" if word == "FROZEN" and asked.count("FROZEN") <= deaf else word)

    monkeypatch.setattr(group, "_put", put)
    monkeypatch.setattr(group, "AGAIN_S", 0.01)
    return Group(Hierarchies({"freezer": tmp_path}, None), "box"), asked


def test_a_freezer_that_waits_for_one_process_is_asked_anew(monkeypatch, tmp_path):
    box, asked = stubborn(monkeypatch, tmp_path, deaf=2)
    asyncio.run(box.freeze())
    assert asked == ["FROZEN", "THAWED", "FROZEN", "THAWED", "FROZEN"]


def test_a_freezer_that_never_stops_all_says_so_and_lets_them_go_on(monkeypatch, tmp_path):
    monkeypatch.setattr(group, "WAIT_S", 0.05)
    box, asked = stubborn(monkeypatch, tmp_path, deaf=10**6)
    with pytest.raises(SandboxError, match=r"box: its processes did not stop within 0\.05 s"):
        asyncio.run(box.freeze())
    assert asked[-1] == "THAWED"
