"""The owner and its machines are killed at random moments: nothing is orphaned, nothing is lost without a word."""

import asyncio
import json
import os
import random
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

import pytest

from triax.errors import SandboxError
from triax.sandbox.backend.choose import make
from triax.sandbox.backend.owned import LABEL, labelled

BACKENDS = ["process", "namespace", "gvisor", "qemu"]
# what a status may be found as after its owner was killed, by what was last known and what was in progress
FOUND = {
    ("running", None): {"lost"},
    ("paused", None): {"lost"},
    ("suspended", None): {"suspended"},
    ("failed", None): {"failed", "lost"},
    ("running", "suspend"): {"lost", "suspended"},
    ("paused", "suspend"): {"lost", "suspended"},
    ("suspended", "resume"): {"suspended", "lost"},
    ("absent", "create"): {"absent", "lost"},
    ("running", "kill"): {"absent", "lost"},
    ("paused", "kill"): {"absent", "lost"},
    ("suspended", "kill"): {"absent", "suspended", "lost"},
    ("lost", None): {"lost"},
}

POSSIBLE = {
    "running": ("suspend", "suspend", "pause", "write", "kill"),
    "paused": ("resume", "suspend", "kill"),
    "suspended": ("resume", "resume", "resume", "kill"),
}
AFTER = {
    "create": "running",
    "pause": "paused",
    "suspend": "suspended",
    "resume": "running",
    "write": "running",
    "kill": "absent",
}


class Owner:
    """The process, and the pipe to it."""

    def __init__(self, root, name):
        self.root, self.name = root, name
        script = str(Path(__file__).with_name("owner.py"))
        self.process = subprocess.Popen(
            [sys.executable, script, str(root), name], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        if json.loads(self.process.stdout.readline() or "{}") != {"ready": True}:
            self.kill()
            raise AssertionError("the owner does not get ready")

    def ask(self, what, *, killed_after_s=None, **more):
        """Return the answer; none if the owner was killed before it gave one."""
        self.process.stdin.write(json.dumps({"what": what, **more}) + "\n")
        self.process.stdin.flush()
        timer = None
        if killed_after_s is not None:
            timer = threading.Timer(killed_after_s, self.process.kill)
            timer.start()
        line = self.process.stdout.readline()
        if timer:
            timer.join()
        return json.loads(line) if line else None

    def kill(self):
        self.process.kill()
        self.close()

    def close(self):
        for pipe in (self.process.stdin, self.process.stdout):
            with suppress(BrokenPipeError):
                pipe.close()
        self.process.wait()


def remains(root, name):
    """What of this folder's machines is still on the host: processes, groups, disks in use."""
    backend = make(name, root / "machines", unsafe=True)
    found = [f"process {pid}" for pid, value in labelled(LABEL) if str(root) in value]
    for pid in filter(str.isdecimal, os.listdir("/proc")):
        try:
            words = Path(f"/proc/{pid}/cmdline").read_bytes()
        except OSError:
            continue
        if str(root / "machines").encode() in words:
            found.append(f"process {pid}: {words[:200]!r}")
    if hasattr(backend, "hierarchies"):
        found += [f"group {label}" for label in backend.hierarchies.labels(backend.prefix)]
    for device in Path("/sys/block").glob("loop*/loop/backing_file"):
        if str(root) in device.read_text():
            found.append(f"loop device {device}")
    if (root / "machines").is_dir():
        found += [str(path) for path in (root / "machines").iterdir() if path.name not in ("templates", "state")]
    return found


def machine_processes(root, name):
    backend = make(name, root / "machines", unsafe=True)
    if not hasattr(backend, "hierarchies"):
        return []
    from triax.sandbox.backend.group import Group

    labels = backend.hierarchies.labels(backend.prefix)
    return [(label.removeprefix(backend.prefix), Group(backend.hierarchies, label).pids()) for label in labels]


def trial(root, name, operations, seed):
    """Do operations at random, kill the owner in the middle of some, and hold what is found to what was told."""
    # how often it is killed must not depend on how quick it was when it was killed before
    chance, fate = random.Random(seed), random.Random(f"fate {seed}")
    known, texts, counts = {}, {}, {"kills": 0, "operations": 0, "machine kills": 0, "lost": 0, "resumed": 0}
    memory = asyncio.run(_has_memory(root, name))
    owner = Owner(root, name)
    number = 0
    try:
        while counts["operations"] < operations:
            counts["operations"] += 1
            alive = [id for id, status in known.items() if status in ("running", "paused", "suspended")]
            running = [id for id in alive if known[id] == "running"]
            if len(alive) < 2 or (len(alive) < 4 and chance.random() < 0.3):
                number += 1
                what, id = "create", f"box{seed}x{number}"
                before = "absent"
            elif name in ("namespace", "gvisor") and running and chance.random() < 0.05:
                counts["machine kills"] += 1
                _kill_a_machine(root, name, owner, known, chance)
                continue
            else:
                id = chance.choice(alive)
                before = known[id]
                what = chance.choice(POSSIBLE[before])
            text = f"{id} {counts['operations']}"
            more = {"path": "/tmp/text" if name != "process" else "text", "text": text} if what == "write" else {}
            deadly, moment = fate.random() < 0.3, fate.uniform(0, 0.25)
            answer = owner.ask(what, id=id, killed_after_s=moment if deadly else None, **more)
            if answer is not None and "ok" in answer:
                known[id] = AFTER[what]
                if what == "write":
                    texts[id] = {text}
                if what == "create":
                    texts[id] = set()
                    if memory and not deadly:
                        loop = f"x={id}; while :; do echo $x > /tmp/memory; sleep 0.2; done"
                        owner.ask("start", id=id, command=loop)
                if what == "resume" and not deadly:
                    counts["resumed"] += 1
                    _check(owner, name, id, texts[id], memory)
            elif answer is not None:
                raise AssertionError(f"{what} of {before}: {answer}")
            if deadly:
                counts["kills"] += 1
                owner.close()
                owner = Owner(root, name)
                assert remains(root, name) == [], "an owner that takes over leaves no orphan"
                progress = what if answer is None else None
                told = owner.ask("list")["ok"]
                for one, status in list(known.items()) + ([(id, "absent")] if id not in known else []):
                    now = told.get(one, ["absent", ""])
                    step = progress if one == id else None
                    rule = FOUND.get((before if one == id and step else status, step))
                    if step in ("write", "pause", "resume") and before in ("running", "paused"):
                        rule = {"lost"}
                    if status == "absent" and step is None:
                        rule = {"absent", "dead"}
                    assert now[0] in rule, f"{one}: was {status}, {step} in progress; found {now}"
                    if now[0] == "lost":
                        assert "owner died" in now[1]
                        counts["lost"] += 1
                        assert owner.ask("exec", id=one, command="true")["status"] == 409
                        owner.ask("kill", id=one)
                        now = ["absent"]
                    if step == "write" and what == "write":
                        texts.setdefault(one, set()).add(text)
                    known[one] = now[0]
                owner.ask("gc")
        for id, status in known.items():
            if status == "suspended":
                assert "ok" in owner.ask("resume", id=id)
                _check(owner, name, id, texts.get(id, set()), memory)
            if status not in ("absent",):
                owner.ask("kill", id=id)
        owner.ask("gc")
        assert owner.ask("snapshots")["ok"] == []
        owner.process.stdin.close()
        assert owner.process.wait(120) == 0
        assert remains(root, name) == []
    finally:
        owner.kill()
    return counts


def _check(owner, name, id, texts, memory):
    path = "/tmp/text" if name != "process" else "text"
    if texts:
        assert owner.ask("read", id=id, path=path)["ok"] in texts
    if memory and owner.ask("exec", id=id, command="cat /tmp/memory")["ok"][2].strip() == id:
        owner.ask("exec", id=id, command="rm -f /tmp/memory")
        for _ in range(600):
            found = owner.ask("exec", id=id, command="cat /tmp/memory; true")["ok"]
            if found[2].strip() == id:
                return
            time.sleep(0.1)
        raise AssertionError("the process that ran before does not go on")


def _kill_a_machine(root, name, owner, known, chance):
    candidates = [(id, pids) for id, pids in machine_processes(root, name) if pids and known.get(id) == "running"]
    if not candidates:
        return
    id, pids = chance.choice(candidates)
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, 9)
    answer = owner.ask("exec", id=id, command="echo alive")
    assert "error" in answer or answer["ok"][0] == "infrastructure", f"a dead machine answered {answer}"
    for _ in range(600):
        status = owner.ask("list")["ok"][id][0]
        if status == "failed":
            break
        time.sleep(0.1)
    assert status == "failed"
    owner.ask("kill", id=id)
    known[id] = "absent"


async def _has_memory(root, name):
    return make(name, root / "machines", unsafe=True).capabilities.memory_snapshot


def _skip_unless(name):
    if name != "process":
        try:
            missing = [one for one in asyncio.run(make(name, Path("/tmp/checks")).checks()) if not one.ok]
        except SandboxError as error:
            missing = [error]
        if missing:
            pytest.skip(f"{name} cannot run here: {missing[0]}")


@pytest.mark.parametrize("name", ["process", "namespace"])
def test_an_owner_that_is_killed_now_and_then_loses_nothing_silently(name, tmp_path):
    _skip_unless(name)
    counts = trial(tmp_path, name, 25, seed=3)
    assert counts["kills"] >= 4


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", BACKENDS)
def test_two_hundred_operations_under_random_kills(name, tmp_path):
    _skip_unless(name)
    counts = trial(tmp_path, name, 200, seed=1)
    assert counts["kills"] >= 30


def test_a_snapshot_is_taken_up_by_another_process_after_the_owner_crashed(tmp_path):
    owner = Owner(tmp_path, "process")
    owner.ask("create", id="source")
    owner.ask("write", id="source", path="text", text="kept")
    kept = owner.ask("snapshot", id="source")["ok"]
    owner.kill()
    owner = Owner(tmp_path, "process")
    try:
        assert owner.ask("list")["ok"]["source"][0] == "lost"
        assert owner.ask("from", id="heir", snapshot=kept)["ok"] == "heir"
        assert owner.ask("read", id="heir", path="text")["ok"] == "kept"
        assert owner.ask("kill", id="heir") == {"ok": None}
    finally:
        owner.kill()
