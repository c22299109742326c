"""How long virtual machines take to boot, pause, suspend, resume, snapshot and fork, and what they hold.

Run: python -m benchmarks.sandbox --only qemu
"""

import asyncio
import os
import resource
import shutil
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from statistics import median

from triax.sandbox.backend.owned import LABEL, labelled
from triax.sandbox.backend.qemu import QemuBackend
from triax.sandbox.backend.qemu.machine import QemuMachine
from triax.sandbox.protocol import Spec

CHILDREN = 16
SUSPENDED = 40
IDLE_S = 3.0
Row = tuple[str, float | None, float, str, str]
"""What, the bar, our figure, its unit, and the spread or what else there is to know."""


async def timed(work: Callable[[], Awaitable[object]]) -> float:
    """Return the seconds a piece of work took."""
    begun = time.perf_counter()
    await work()
    return time.perf_counter() - begun


def row(name: str, bar: float | None, times: list[float], unit: str = "s", note: str = "") -> Row:
    """Return the median of several runs with its spread."""
    spread = f"{min(times):.4g}-{max(times):.4g} in {len(times)}"
    return name, bar, median(times), unit, f"{spread}{'; ' if note else ''}{note}"


def own_bytes(folder: Path) -> int:
    """Return what a snapshot alone holds on disk: files without another name."""
    return sum(path.stat().st_blocks * 512 for path in folder.iterdir() if path.stat().st_nlink == 1)


def private_mib(machine: QemuMachine) -> float:
    """Return memory of a machine's process that nobody shares."""
    lines = Path(f"/proc/{machine.emulator.process.pid}/smaps_rollup").read_text().splitlines()
    return sum(int(line.split()[1]) for line in lines if line.startswith("Private_")) / 1024


async def rows(repeat: int = 5) -> list[Row]:
    """Measure everything once on machines of 128 MiB and one processor."""
    folder = Path(tempfile.mkdtemp(prefix="triax-bench-"))
    backend = QemuBackend(folder / "machines")
    numbers = iter(range(10**6))
    try:
        return await _measure(backend, folder, repeat, lambda kind: f"{kind}{next(numbers)}")
    finally:
        await backend.reap(frozenset())
        shutil.rmtree(folder, ignore_errors=True)


async def _measure(backend: QemuBackend, folder: Path, repeat: int, new: Callable[[str], str]) -> list[Row]:
    spec = Spec(timeout_s=None)
    found: list[Row] = []

    async def first_exec(machine: QemuMachine) -> None:
        result = await machine.exec(["true"])
        assert result.exit_code == 0, result

    async def booted() -> None:
        machine = await backend.boot(spec, new("boot"))
        await first_exec(machine)
        await machine.kill()

    async def warm() -> None:
        machine = await backend.create(spec, new("warm"))
        await first_exec(machine)
        await machine.kill()

    await backend.template(spec)  # kernel, agent and template are made once a host
    found.append(row("boot to first exec", 2.5, [await timed(booted) for _ in range(repeat)]))
    found.append(row("start from the warm template to first exec", 0.35, [await timed(warm) for _ in range(repeat)]))

    source = await backend.create(spec, new("source"))
    await first_exec(source)
    found.append(row("exec round trip", 0.025, [await timed(lambda: first_exec(source)) for _ in range(100)]))
    pauses, resumes = [], []
    for _ in range(50):
        pauses.append(await timed(source.pause))
        resumes.append(await timed(source.resume))
    found += [row("pause in place", 0.005, pauses), row("resume in place", 0.005, resumes)]

    full, incremental, sizes = [], [], []
    for _ in range(repeat):
        first, second = folder / new("snapshot"), folder / new("snapshot")
        first.mkdir()
        second.mkdir()
        full.append(await timed(lambda at=first: source.snapshot(at)))
        alone = own_bytes(first) / 2**20  # before the next links its pages
        await source.exec("dd if=/dev/urandom of=/dev/shm/a bs=64k count=16 2>/dev/null")
        incremental.append(await timed(lambda at=second, on=first: source.snapshot(at, on)))
        sizes.append((alone, own_bytes(second) / 2**20))
    note = f"{median(size[0] for size in sizes):.1f} MiB of its own"
    found.append(row("full snapshot, durable, source goes on", 0.2, full, note=note))
    note = f"{median(size[1] for size in sizes):.1f} MiB of its own, 1 MiB was written between"
    found.append(row("incremental snapshot, durable", 0.1, incremental, note=note))

    suspends, returns, held = [], [], []
    for _ in range(repeat):
        machine = await backend.create(spec, new("put-away"))
        await first_exec(machine)
        at = folder / new("suspended")
        at.mkdir()
        suspends.append(await timed(lambda machine=machine, at=at: machine.suspend(at)))
        held.append(own_bytes(at) / 2**20)
        again: list[QemuMachine] = []

        async def back(at: Path = at, again: list[QemuMachine] = again) -> None:
            again.append(await backend.restore(at, spec, new("back"), 1))
            await first_exec(again[0])

        returns.append(await timed(back))
        await again[0].kill()
    found.append(row("suspend to disk, durable", 0.4, suspends, note=f"{median(held):.1f} MiB of its own"))
    found.append(row("resume from disk to first exec", 0.6, returns))
    found += await _forks(source, new, repeat, first_exec)
    await source.kill()
    found += await _density(backend, folder, spec, new)
    return found


async def _forks(
    source: QemuMachine, new: Callable[[str], str], repeat: int, first_exec: Callable[[QemuMachine], Awaitable[None]]
) -> list[Row]:
    freezes, running, answered = [], [], []
    for _ in range(repeat):
        begun = time.perf_counter()
        (child,) = await source.fork([new("child")])
        assert isinstance(child, QemuMachine), child
        await first_exec(child)
        # a child begins once its source goes on: the freeze is counted there
        answered.append(time.perf_counter() - begun - source.freeze_s)
        freezes.append(source.freeze_s)
        running.append(child.started_s)
        await child.kill()
    await source.exec("echo before > /dev/shm/mark; echo before > /root/mark")
    begun = time.perf_counter()
    children = [child for child in await source.fork([new("of16-") for _ in range(CHILDREN)])]
    good = [child for child in children if isinstance(child, QemuMachine)]
    assert len(good) == CHILDREN, children
    await asyncio.gather(*(first_exec(child) for child in good))
    together = time.perf_counter() - begun
    await source.exec("echo after > /dev/shm/mark; echo after > /root/mark; sync")
    for child in good:
        seen = await child.exec("cat /dev/shm/mark /root/mark")
        assert seen.stdout == b"before\nbefore\n", seen
    await asyncio.sleep(IDLE_S)
    private = [private_mib(child) for child in good]
    await asyncio.gather(*(child.kill() for child in good))
    return [
        row("fork: freeze of the running source", 0.15, freezes),
        row("fork: child to running", 0.08, running),
        row("fork: child to first exec", 0.35, answered),
        row(
            f"fork: {CHILDREN} children, all at first exec", 4.0, [together], note="none saw the source's later writes"
        ),
        row(f"fork: private memory of an idle child, {CHILDREN} at a time", 60.0, private, "MiB", "aim 20"),
    ]


async def _density(backend: QemuBackend, folder: Path, spec: Spec, new: Callable[[str], str]) -> list[Row]:
    places = []
    for _ in range(SUSPENDED):
        machine = await backend.create(spec, new("dense"))
        await machine.exec("echo $RANDOM > /dev/shm/mark")
        at = folder / new("dense-at")
        at.mkdir()
        await machine.suspend(at)
        places.append(at)
    ours = [pid for pid, label in labelled(LABEL) if label.startswith(str(backend.root))]
    spent = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime
    await asyncio.sleep(1.0)
    spent = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime - spent
    left = len(os.listdir(backend.root))
    disk = sum(own_bytes(at) for at in places) / 2**20 / SUSPENDED
    note = f"{left} machine folders, {spent:.2f} s of processor time in one second, {disk:.1f} MiB of disk each"
    return [(f"density: processes of {SUSPENDED} suspended machines", 0.0, float(len(ours)), "", note)]
