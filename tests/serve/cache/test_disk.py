"""Prefixes that outlive their process."""

import ast
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from triax.errors import ConfigError
from triax.serve.cache.disk import Disk
from triax.serve.cache.install import install

ROOT = Path(__file__).parents[3]


class Bytes:
    """The simulated machine's memory as bytes."""

    def __init__(self, machine) -> None:
        self.machine = machine

    def read(self, kind, place, index) -> bytes:
        stored = self.machine.pages[place][index] if kind == "page" else self.machine.slots[place][index]
        return repr(stored).encode()

    def write(self, kind, place, index, data) -> None:
        stored = self.machine.pages if kind == "page" else self.machine.slots
        stored[place][index] = ast.literal_eval(data.decode())


def session_with(simulation, **options):
    session = simulation.Session(**{"pages": 60, "slots": 20} | options)
    return session, Bytes(session.machine)


@pytest.fixture
def open_disk():
    """Open disk pools that are closed with the test."""
    disks = []

    def opened(*arguments):
        disks.append(Disk(*arguments))
        return disks[-1]

    yield opened
    for disk in disks:
        disk.close()


def filled(simulation, disk):
    session, memory = session_with(simulation)
    for seed in range(3):
        session.ask([seed] * 21, 5)
    count = disk.save(session.manager, memory)
    return session, memory, count


def test_an_entry_is_on_the_disk_before_it_has_its_name(simulation, open_disk, tmp_path, monkeypatch):
    sync, replace, synced = os.fsync, os.replace, {}

    def watched_sync(handle):
        sync(handle)
        synced[os.readlink(f"/proc/self/fd/{handle}")] = os.fstat(handle).st_size

    def watched_replace(old, new):
        assert synced.pop(str(old)) == os.stat(old).st_size, "renamed before all of it was synced"
        replace(old, new)
        named.append(new)

    named = []
    monkeypatch.setattr(os, "fsync", watched_sync)
    monkeypatch.setattr(os, "replace", watched_replace)
    filled(simulation, open_disk(tmp_path, "model", 1 << 20))
    assert len(named) > 3


@pytest.mark.parametrize("host", [(0, 0), (40, 20)])
def test_a_new_engine_goes_on_with_what_the_old_one_saved(simulation, open_disk, tmp_path, host):
    disk = open_disk(tmp_path, "model", 1 << 20)
    old, _, count = filled(simulation, disk)
    assert count == old.report()["known_snapshots"] > 3
    disk.close()
    new, memory = session_with(simulation, host_pages=host[0], host_slots=host[1])
    disk = open_disk(tmp_path, "model", 1 << 20)
    assert disk.load(new.manager, memory) == count
    new.check()
    for seed in range(3):
        answered = new.ask([seed] * 21, 5)
        assert answered.cached_tokens == 20
    assert list(new.answers.values()) == list(old.answers.values())
    assert disk.load(new.manager, memory) == 0, "nothing is taken in twice"
    new.check()


@pytest.mark.parametrize("host", [(0, 0), (40, 20)])
def test_prefixes_are_taken_in_below_known_ones_in_any_order(simulation, host):
    pages = [(1, 2, 3, 4), (5, 6, 7, 8), (9, 10, 11, 12)]
    for lengths in [(4, 8, 12), (12, 4, 8), (8, 6, 12), (6, 4, 12)]:
        session, _ = session_with(simulation, host_pages=host[0], host_slots=host[1])
        for length in lengths:
            path = [page[: length - 4 * n] for n, page in enumerate(pages) if 4 * n < length]
            _, snapshot = install(session.manager, "", path, len(path[-1]), 4)
            assert snapshot.position == length
            session.check()
            assert install(session.manager, "", path, len(path[-1]), 4) is None, "it is known already"
        assert session.manager.match([*range(1, 13), 13], "", 12).position == 12


def test_a_second_folder_gets_everything_too(simulation, open_disk, tmp_path):
    session, memory, count = filled(simulation, open_disk(tmp_path / "one", "model", 1 << 20))
    other = open_disk(tmp_path / "two", "model", 1 << 20)
    assert other.save(session.manager, memory) == count
    assert other.save(session.manager, memory) == 0


def test_other_weights_find_nothing(simulation, open_disk, tmp_path):
    disk = open_disk(tmp_path, "model", 1 << 20)
    filled(simulation, disk)
    disk.close()
    new, memory = session_with(simulation)
    assert open_disk(tmp_path, "model, one step on", 1 << 20).load(new.manager, memory) == 0
    assert new.ask([1] * 21, 5).matched_tokens == 0


def test_a_damaged_entry_is_removed_and_what_needs_it_is_computed(simulation, open_disk, tmp_path):
    disk = open_disk(tmp_path, "model", 1 << 20)
    *_, count = filled(simulation, disk)
    disk.close()
    files = sorted(path for path in tmp_path.iterdir() if path.suffix in {".page", ".slot"})
    for place, path in enumerate(files):
        content = bytearray(path.read_bytes())
        if place % 3 == 0:
            content[-40] ^= 1  # a bit of its bytes
        elif place % 3 == 1:
            content = content[: len(content) // 2]  # half a file
        path.write_bytes(content)
    new, memory = session_with(simulation)
    disk = open_disk(tmp_path, "model", 1 << 20)
    assert disk.load(new.manager, memory) < count
    assert disk.counts["damaged"] > 0
    new.check()
    for seed in range(3):
        new.ask([seed] * 21, 5)


def test_an_entry_under_another_name_is_not_believed(simulation, open_disk, tmp_path):
    disk = open_disk(tmp_path, "model", 1 << 20)
    filled(simulation, disk)
    disk.close()
    one, other = sorted(tmp_path.glob("*.slot"))[:2]
    content = one.read_bytes()
    one.write_bytes(other.read_bytes())
    other.write_bytes(content)
    new, memory = session_with(simulation)
    disk = open_disk(tmp_path, "model", 1 << 20)
    disk.load(new.manager, memory)
    assert disk.counts["damaged"] == 2
    assert not one.exists()


def test_the_folder_stays_within_its_bound_and_keeps_the_newest(simulation, open_disk, tmp_path):
    session, memory = session_with(simulation)
    disk = open_disk(tmp_path, "model", 12_000)
    for seed in range(12):
        session.ask([seed] * 21, 5)
        disk.save(session.manager, memory)
        assert sum(path.stat().st_size for path in tmp_path.iterdir()) <= 12_000
    assert disk.counts["removed"] > 0
    assert not disk.is_full
    disk.close()
    new, memory = session_with(simulation)
    assert open_disk(tmp_path, "model", 12_000).load(new.manager, memory) > 0
    assert new.ask([11] * 21, 5).cached_tokens > 0


def test_a_full_disk_is_a_warning_and_no_error(simulation, open_disk, tmp_path, caplog):
    disk = open_disk(tmp_path, "model", 100)
    session, memory, _ = filled(simulation, disk)
    assert disk.is_full
    assert disk.save(session.manager, memory) == 0
    assert not list(tmp_path.glob("*.slot"))


def test_two_engines_do_not_share_a_folder(simulation, open_disk, tmp_path):
    disk = open_disk(tmp_path, "model", 1 << 20)
    with pytest.raises(ConfigError, match="another process uses it"):
        open_disk(tmp_path, "model", 1 << 20)
    disk.close()
    open_disk(tmp_path, "model", 1 << 20).close()


def test_a_folder_that_cannot_be_made_is_named(open_disk, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="name a folder that can be written"):
        open_disk(tmp_path / "file" / "pool", "model", 1 << 20)


def test_saving_is_done_in_small_parts(simulation, open_disk, tmp_path):
    session, memory = session_with(simulation)
    session.ask(range(21), 5)
    disk = open_disk(tmp_path, "model", 1 << 20)
    assert [disk.save(session.manager, memory, most=1) for _ in range(3)] == [1, 1, 1]
    assert oct(next(tmp_path.glob("*.slot")).stat().st_mode)[-3:] == "600", "prompts are nobody else's business"


SAVES_FOR_EVER = """
import importlib.util, itertools, sys
def load(name, path):
    spec = importlib.util.spec_from_file_location(name, path)
    sys.modules[name] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
here, folder = sys.argv[1:]
simulation = load("simulation", here + "/simulation.py")
test_disk = load("test_disk", here + "/test_disk.py")
session, memory = test_disk.session_with(simulation)
disk = test_disk.Disk(folder, "model", 1 << 22)
for seed in itertools.count():
    session.ask([seed % 40] * 21, 5)
    disk.save(session.manager, memory)
    print(seed, flush=True)
"""


def test_a_pool_survives_the_death_of_its_process(simulation, tmp_path):
    for delay in (0.0, 0.03):
        words = [sys.executable, "-c", SAVES_FOR_EVER, str(Path(__file__).parent), str(tmp_path)]
        environment = os.environ | {"PYTHONPATH": str(ROOT)}
        with subprocess.Popen(words, cwd=ROOT, stdout=subprocess.PIPE, env=environment) as writer:
            told = [writer.stdout.readline() for _ in range(3)]
            time.sleep(delay)
            writer.kill()
        assert all(told)
        new, memory = session_with(simulation, pages=400, slots=200)
        disk = Disk(tmp_path, "model", 1 << 22)
        assert disk.load(new.manager, memory) > 3
        assert disk.counts["damaged"] == 0
        assert not list(tmp_path.glob("*.part"))
        new.check()
        assert new.ask([1] * 21, 5).cached_tokens == 20
        disk.close()
