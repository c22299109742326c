"""What sandboxes cost on namespaces and on gVisor, against their bars.

Run: python -m benchmarks.sandbox_light [--repeat 9]
"""

import argparse
import asyncio
import statistics
import tempfile
import time
from collections.abc import Awaitable
from pathlib import Path
from typing import TypeVar

from triax.sandbox.backend.choose import make
from triax.sandbox.host import Host
from triax.sandbox.protocol import Resources, Spec

T = TypeVar("T")
BARS_S = {
    "namespace": {"start": 0.050, "exec `true`": 0.020, "pause": 0.005, "resume in place": 0.005},
    "gvisor": {"start": 0.35, "checkpoint": 0.3, "restore": 0.4, "pause": 0.005, "resume in place": 0.005},
}


class Times:
    """Seconds by operation, each measured several times."""

    def __init__(self) -> None:
        self.of: dict[str, list[float]] = {}

    async def take(self, name: str, step: Awaitable[T]) -> T:
        """Wait for a step and note how long it took."""
        begun = time.perf_counter()
        answer = await step
        self.of.setdefault(name, []).append(time.perf_counter() - begun)
        return answer


async def measured(name: str, root: Path, repeat: int) -> tuple[Times, int]:
    """Return times of a backend's operations, and the bytes of one suspended sandbox."""
    host = await Host.open(root, make(name, root / "machines"))
    times = Times()
    spec = Spec(resources=Resources(memory_mib=128, disk_mib=512))
    await (await host.create(spec)).kill()  # what is made once: the empty disk, the compiled programs
    away, back = ("checkpoint", "restore") if name == "gvisor" else ("suspend", "resume from disk")
    kept_bytes = 0
    for _ in range(repeat):
        sandbox = await times.take("start", host.create(spec))
        await times.take("first exec", sandbox.exec(["true"]))
        for _ in range(5):
            await times.take("exec `true`", sandbox.exec(["true"]))
        await times.take("pause", sandbox.pause())
        await times.take("resume in place", sandbox.resume())
        kept = await times.take("snapshot, source goes on", sandbox.snapshot())
        await times.take("fork into 4", sandbox.fork(4))
        await times.take(away, sandbox.suspend())
        kept_bytes = host.snapshot(sandbox.snapshot_id or kept).size_bytes
        await times.take(back, sandbox.resume())
        await times.take("exec after it", sandbox.exec(["true"]))
        for one in host.sandboxes():
            await times.take("kill", one.kill())
        await host.remove_snapshot(kept)
    await host.close()
    return times, kept_bytes


def show(name: str, times: Times, kept_bytes: int) -> None:
    """Print a backend's times as rows of a table."""
    for operation, taken in times.of.items():
        bar = BARS_S[name].get(operation)
        middle = statistics.median(taken)
        verdict = "" if bar is None else "ok" if middle <= bar else "OVER"
        held = "" if bar is None else f"{bar * 1e3:g} ms"
        spread = f"{min(taken) * 1e3:.1f} to {max(taken) * 1e3:.1f} ms of {len(taken)}"
        print(f"| {name}: {operation} | {held} | {middle * 1e3:.1f} ms | {verdict} | {spread} |")
    print(f"| {name}: one suspended sandbox on disk | | {kept_bytes / 2**20:.2f} MiB | | |")


def main(repeat: int = 9) -> None:
    """Measure what this host can run, and print."""
    for name in BARS_S:
        missing = [check for check in asyncio.run(make(name, Path("/tmp")).checks()) if not check.ok]
        if missing:
            print(f"| {name}: not measured | | | | needs {missing[0].name}; {missing[0].to_do} |")
            continue
        with tempfile.TemporaryDirectory(prefix="sandbox-bench-") as root:
            show(name, *asyncio.run(measured(name, Path(root), repeat)))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeat", type=int, default=9)
    main(parser.parse_args().repeat)
