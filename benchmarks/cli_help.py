"""How long `triax --help` takes: a fresh process each time, against the bar of 0.3 s.

Run: python -m benchmarks.cli_help
"""

import statistics
import subprocess
import sys
import time

BAR_S = 0.3
RUNS = 11


def seconds(*words: str) -> float:
    """Return the wall time of one fresh process."""
    start = time.perf_counter()
    subprocess.run([sys.executable, *words], check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - start


def main() -> None:
    """Print the median over several runs, and that of a bare interpreter beside it."""
    bare = statistics.median(seconds("-c", "pass") for _ in range(RUNS))
    times = sorted(seconds("-m", "triax", "--help") for _ in range(RUNS))
    median = statistics.median(times)
    print(f"triax --help: median {median:.3f} s of {RUNS} runs ({times[0]:.3f} to {times[-1]:.3f} s)")
    print(f"bare Python:  median {bare:.3f} s")
    print(f"bar {BAR_S} s: {'kept' if median < BAR_S else 'MISSED'}, {median / BAR_S:.2f} of it")


if __name__ == "__main__":
    main()
