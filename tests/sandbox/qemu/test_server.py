"""What a server over virtual machines says when a disk is full, a snapshot does not fit, or an image does not boot."""

import json
import os
import shutil
import subprocess
import time

import httpx
import pytest
from e2b import CommandExitException, Sandbox

from triax.config.sandbox import Server
from triax.sandbox.backend.qemu import QemuBackend

web = httpx.Client(timeout=200, limits=httpx.Limits(max_keepalive_connections=0))


@pytest.fixture
def narrow(tmp_path):
    """A folder on a file system of its own, and how to set the size of that."""
    folder = tmp_path / "narrow"
    folder.mkdir()

    def resize(mib, how="remount,"):
        words = ["mount", "-t", "tmpfs", "-o", f"{how}size={mib}m", "tmpfs", str(folder)]
        return subprocess.run(words, capture_output=True, text=True, check=False)

    made = resize(16, how="") if os.geteuid() == 0 else None
    if made is None or made.returncode:
        pytest.skip(f"cannot mount a small file system: {made.stderr if made else 'not root'}")
    yield folder, resize
    subprocess.run(["umount", "-l", str(folder)], check=True)


def states(url):
    return {one["sandboxID"]: one["state"] for one in web.get(f"{url}/v2/sandboxes").json()}


def test_a_disk_that_is_full_during_a_snapshot_or_a_pause_is_told_and_the_sandbox_goes_on(narrow, serve, tmp_path):
    state, resize = narrow
    with serve(Server(folder=state, port=0, backend="qemu"), QemuBackend(tmp_path / "machines")) as server:
        sandbox = Sandbox.create(timeout=300, **server.options)
        sandbox.commands.run("echo kept > /dev/shm/mark")
        for what in ("snapshots", "pause"):
            answer = web.post(f"{server.url}/sandboxes/{sandbox.sandbox_id}/{what}", json={})
            assert answer.status_code == 507, answer.text
            assert "No space left" in answer.text
            assert states(server.url) == {sandbox.sandbox_id: "running"}
            assert sandbox.commands.run("cat /dev/shm/mark").stdout == "kept\n"
            assert web.get(f"{server.url}/snapshots").json() == []
        assert resize(512).returncode == 0
        sandbox.pause()
        assert states(server.url) == {sandbox.sandbox_id: "paused"}
        again = Sandbox.connect(sandbox.sandbox_id, **server.options)
        assert again.commands.run("cat /dev/shm/mark").stdout == "kept\n"
        assert again.kill()


def test_a_paused_sandbox_of_another_host_is_refused_and_stays_paused(serve, tmp_path):
    settings = Server(folder=tmp_path / "state", port=0, backend="qemu")
    with serve(settings, QemuBackend(tmp_path / "machines")) as server:
        sandbox = Sandbox.create(timeout=300, **server.options)
        sandbox.commands.run("echo kept > /dev/shm/mark")
        sandbox.pause()
        (held,) = (tmp_path / "state").rglob("qemu.json")
        whole = held.read_text()
        tree = json.loads(whole)
        held.write_text(json.dumps(tree | {"fit": tree["fit"] | {"emulator": "99.0"}}))
        answer = web.post(f"{server.url}/sandboxes/{sandbox.sandbox_id}/connect", json={"timeout": 60})
        assert answer.status_code == 409, answer.text
        assert "made with emulator `99.0`" in answer.text
        assert states(server.url) == {sandbox.sandbox_id: "paused"}
        held.write_text(whole)
        again = Sandbox.connect(sandbox.sandbox_id, **server.options)
        assert again.commands.run("cat /dev/shm/mark").stdout == "kept\n"


def test_an_image_that_does_not_boot_is_told_and_leaves_nothing(serve, tmp_path):
    images = tmp_path / "images"
    for name in ("good", "bad"):
        (images / name / "bin").mkdir(parents=True)
        shutil.copy2(shutil.which("busybox"), images / name / "bin/busybox")
        (images / name / "bin/sh").symlink_to("busybox")
    (images / "bad/dev").write_text("a file where a kernel puts its devices")
    settings = Server(folder=tmp_path / "state", port=0, backend="qemu", images=(images,))
    with serve(settings, QemuBackend(tmp_path / "machines")) as server:
        answer = web.post(f"{server.url}/sandboxes-cold", json={"image": "bad"})
        assert answer.status_code == 500, answer.text
        assert "does not boot" in answer.text
        assert states(server.url) == {}
        assert list((tmp_path / "machines").iterdir()) == []
        assert web.post(f"{server.url}/sandboxes-cold", json={"image": "none"}).status_code == 404
        made = web.post(f"{server.url}/sandboxes-cold", json={"image": "good"})
        assert made.status_code == 201, made.text


def test_a_command_from_before_a_pause_is_listed_and_listened_to_again(serve, tmp_path):
    settings = Server(folder=tmp_path / "state", port=0, backend="qemu")
    with serve(settings, QemuBackend(tmp_path / "machines")) as server:
        sandbox = Sandbox.create(timeout=300, **server.options)
        loop = "i=0; while [ ! -e /tmp/stop ]; do i=$((i+1)); echo tick $i; sleep 0.1; done; echo over; exit 3"
        pid = sandbox.commands.run(loop, background=True).pid
        ended = sandbox.commands.run("sleep 1", background=True)
        ended.kill()
        sandbox.pause()
        again = Sandbox.connect(sandbox.sandbox_id, **server.options)
        listed = again.commands.list()
        assert [one.pid for one in listed] == [pid]
        assert loop in listed[0].args
        seen = []
        process = again.commands.connect(pid)
        for out, _, _ in process:
            seen.append(out)
            if len(seen) == 2:
                again.files.write("/tmp/stop", "")
        with pytest.raises(CommandExitException) as end:
            process.wait()
        assert (end.value.exit_code, "".join(filter(None, seen)).endswith("over\n")) == (3, True)
        other = again.commands.run("sleep 600", background=True).pid
        again.pause()
        again = Sandbox.connect(sandbox.sandbox_id, **server.options)
        assert again.commands.kill(other)
        give_up = time.monotonic() + 120
        while again.commands.list() and time.monotonic() < give_up:
            time.sleep(0.05)
        assert again.commands.list() == []


def test_what_a_sandbox_may_reach_is_settled_when_it_is_made(serve, tmp_path):
    settings = Server(folder=tmp_path / "state", port=0, backend="qemu")
    backend = QemuBackend(tmp_path / "machines")
    assert not backend.capabilities.network_change
    with serve(settings, backend) as server:
        made = {"templateID": "base", "network": {"allowOut": ["192.0.2.1"]}}
        sandbox = web.post(f"{server.url}/v2/sandboxes", json=made).json()["sandboxID"]
        at = f"{server.url}/sandboxes/{sandbox}/network"
        assert web.put(at, json={"allowOut": ["192.0.2.1"]}).status_code == 204
        answer = web.put(at, json={"allowOut": ["192.0.2.2"]})
        assert (answer.status_code, "create another" in answer.text) == (501, True)
