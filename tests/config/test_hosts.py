"""Names that a server on this machine answers to."""

import pytest

from triax.config.hosts import is_allowed, is_loopback

LOCAL = [
    "localhost",
    "LOCALHOST.:80",
    "127.0.0.1:8000",
    "127.8.8.8",
    "[::1]:1",
    "::1",
    "49983-a.localhost:1",
    "10.0.0.7:80",
]
FOREIGN = ["evil.example", "evil.example:8000", "localhost.evil.example", "127.0.0.1.evil.example", "evillocalhost", ""]


@pytest.mark.parametrize("listens_on", ["127.0.0.1", "::1", "localhost", "127.0.0.2"])
def test_f35_a_server_on_loopback_answers_to_local_names_and_addresses_alone(listens_on):
    assert is_loopback(listens_on)
    assert [name for name in LOCAL if not is_allowed(name, listens_on)] == []
    assert [name for name in FOREIGN if is_allowed(name, listens_on)] == []


def test_f35_names_are_added_one_by_one_below_another_or_all():
    assert is_allowed("box.example.org:8000", "127.0.0.1", ["box.example.org"])
    assert is_allowed("Box.Example.Org.", "127.0.0.1", ["box.example.org:80"])
    assert not is_allowed("a.box.example.org", "127.0.0.1", ["box.example.org"])
    assert is_allowed("a.b.example.org", "127.0.0.1", ["*.example.org"])
    assert not is_allowed("example.org", "127.0.0.1", ["*.example.org"])
    assert not is_allowed("evilexample.org", "127.0.0.1", ["*.example.org"])
    assert is_allowed("anything", "127.0.0.1", ["*"])


def test_f35_a_server_that_others_reach_takes_every_name_until_it_is_given_some():
    assert not is_loopback("0.0.0.0")
    assert not is_loopback("example.org")
    assert is_allowed("evil.example", "0.0.0.0")
    assert not is_allowed("evil.example", "0.0.0.0", ["box.example.org"])
    assert is_allowed("box.example.org", "0.0.0.0", ["box.example.org"])
