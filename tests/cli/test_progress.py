"""What is told while a person waits."""

from triax.cli.progress import REQUESTS, Count


def test_a_count_tells_how_much_is_done_and_how_long_the_rest_takes(capsys):
    progress = Count("verify", 4_000_000_000, every=0.0)
    progress.skip(1_000_000_000)
    progress.add(1_000_000_000)
    assert progress.line(progress.start + 10.0) == "verify: 2.0 of 4.0 GB (50%), 0 min 20 s left, 0.10 GB/s  "
    assert capsys.readouterr().err.startswith("verify: 2.0 of 4.0 GB (50%)")
    assert Count("bench", 9, REQUESTS).line(0.0) == "bench: 0 of 9 requests (0%), 0.00 requests/s  "
    unbounded = Count("bench", None, REQUESTS)
    for _ in range(7):
        unbounded.add()
    assert unbounded.line(unbounded.start + 2.0) == "bench: 7 requests, 3.50 requests/s  "
