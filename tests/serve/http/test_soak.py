"""Two hundred clients for ten minutes: no error, no growth, no stutter."""

import pytest

from benchmarks.serve_cpu import measure

pytestmark = pytest.mark.soak


def test_two_hundred_clients_stream_for_ten_minutes():
    tree = measure(200, 600.0)
    assert tree["errors"] == {}
    assert tree["requests"] > 1000
    for name, (value, bar) in tree["bars"].items():
        assert value <= bar, (name, value)
