"""What sandboxes cost: every operation of every backend against its bar.

Run: python -m benchmarks.sandbox [--only qemu|light] [--repeat 5]
"""

import argparse
import asyncio
import importlib.util
import os
import platform

from benchmarks import sandbox_qemu


def show(rows: list[sandbox_qemu.Row]) -> None:
    """Print rows as a table."""
    for name, bar, ours, unit, note in rows:
        held = "" if bar is None else f"{bar:g} {unit}".strip()
        verdict = "" if bar is None else "ok" if ours <= bar else "OVER"
        print(f"| {name} | {held} | {ours:.4g} {unit} | {verdict} | {note} |")


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", choices=["qemu", "light"])
    parser.add_argument("--repeat", type=int, default=5)
    options = parser.parse_args()
    print(f"{platform.platform()}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}\n")
    print("| operation | bar | ours | | spread |\n| --- | --- | --- | --- | --- |")
    if options.only != "light":
        show(asyncio.run(sandbox_qemu.rows(options.repeat)))
    if options.only != "qemu" and importlib.util.find_spec("benchmarks.sandbox_light"):
        importlib.import_module("benchmarks.sandbox_light").main()


if __name__ == "__main__":
    main()
