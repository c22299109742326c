"""Encoding speed of the Kimi tokenizer against tiktoken itself: one text, the tokens compared first.

Run: python -m benchmarks.formats_tokenizer

Takes the released vocabulary from `$TRIAX_DATA/kimi.tiktoken` or from beside the checkout, and without it a small one
learned from the text.
"""

import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import tiktoken

from triax.data.kimi import CHUNK, PIECES, KimiTokenizer

BAR = 1.1
SIZE = 2_000_000  # bytes of text
RUNS = 9
# Beside the project's own prose and code: scripts in which no blank ends a word, and what needs several bytes.
SCRIPTS = "中文字。日本語です、漢字カタカナー 한국어 문장 🙂👩\u200d🚀 naïve Straße, 12345 don't\n"


def tokenizer(runs: int = RUNS) -> dict[str, float]:
    """Take the CPU time of both sides in turn, so that a slow moment of the machine touches both, and print it."""
    text, path = sample(SIZE), vocabulary()
    ours = KimiTokenizer.load(path) if path.is_file() else KimiTokenizer.train([text], 4096)
    ranks = {ours.token_bytes(token): token for token in range(min(ours.control.values()))}
    theirs = tiktoken.Encoding("bare", pat_str=PIECES, mergeable_ranks=ranks, special_tokens=dict(ours.control))
    parts = [text[start : start + CHUNK] for start in range(0, len(text), CHUNK)]  # the published cuts decide tokens
    if ours.encode_ordinary(text) != [token for part in parts for token in theirs.encode_ordinary(part)]:
        raise SystemExit("the tokens differ; nothing was timed")
    sides: dict[str, Callable[[str], list[int]]] = {"ours": ours.encode_ordinary, "theirs": theirs.encode_ordinary}
    times: dict[str, list[float]] = {name: [] for name in sides}
    for _ in range(runs):
        for name, encode in sides.items():
            start = time.process_time()  # both run on one core; what else the machine does is not counted
            encode(text)
            times[name].append(time.process_time() - start)
    size = len(text.encode())
    result = {
        "ranks": len(ranks),
        "bytes": size,
        "our_bytes_per_s": size / statistics.median(times["ours"]),
        "their_bytes_per_s": size / statistics.median(times["theirs"]),
        # of the same moment of the machine, so that its load cancels
        "time_over_tiktoken": statistics.median(
            ours / theirs for ours, theirs in zip(times["ours"], times["theirs"], strict=True)
        ),
        "best_over_best": min(times["ours"]) / min(times["theirs"]),
        "bar": BAR,
    }
    our, their = (result[f"{side}_bytes_per_s"] / 1e6 for side in ("our", "their"))
    print(
        f"tokenizer, {len(ranks):,} ranks, {size / 1e6:.1f} MB: {our:.2f} MB/s (CPU time), tiktoken {their:.2f} MB/s; "
        f"takes {result['time_over_tiktoken']:.3f} of its time (best of each {result['best_over_best']:.3f})"
    )
    print(f"  bar {BAR}: {'kept' if result['time_over_tiktoken'] <= BAR else 'MISSED'}")
    return result


def vocabulary() -> Path:
    """Return where the released vocabulary is expected."""
    folder = os.environ.get("TRIAX_DATA") or Path(__file__).parents[2] / "shared" / "data"
    return Path(folder) / "kimi.tiktoken"


def sample(size: int) -> str:
    """Return prose, code and many scripts, of about so many bytes; no run in it is cut."""
    root = Path(__file__).parents[1]
    files = sorted([*root.glob("triax/**/*.py"), *root.glob("docs/**/*.md"), *root.glob("tests/**/*.py")])
    unit = "".join(path.read_text(encoding="utf-8") + SCRIPTS * 20 for path in files)
    return (unit * (size // len(unit.encode()) + 1))[: size * len(unit) // len(unit.encode())]


if __name__ == "__main__":
    tokenizer()
