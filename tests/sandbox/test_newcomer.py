"""What a newcomer meets who keeps all defaults: a folder that is named from here, and a server that was killed."""

import asyncio
import io
import os
import re
import signal
import subprocess
import sys
import time
from contextlib import chdir, contextmanager, redirect_stderr, redirect_stdout, suppress
from pathlib import Path

import pytest
from e2b import InvalidArgumentException, Sandbox, SandboxException

from triax.cli.app import main
from triax.errors import SandboxError
from triax.sandbox.backend.choose import make
from triax.sandbox.backend.process import ProcessBackend
from triax.sandbox.host import Host
from triax.sandbox.protocol import Resources, Spec

TRIAX = str(Path(sys.executable).parent / "triax")


def triax(folder, *words):
    """Run a command in a folder, in this process: starting another costs more than the command."""
    out, err = (io.TextIOWrapper(io.BytesIO(), "utf-8", write_through=True) for _ in range(2))
    status = 0
    with chdir(folder), redirect_stdout(out), redirect_stderr(err):
        try:
            main(["sandbox", *words])
        except SystemExit as end:
            status = end.code or 0
    said = [stream.buffer.getvalue().decode() for stream in (out, err)]
    return subprocess.CompletedProcess(words, status, *said)


@contextmanager
def served(folder):
    words = [TRIAX, "sandbox", "serve", "port=0", "backend=process", "unsafe=true"]
    with subprocess.Popen(words, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as server:
        try:
            yield server, re.search(r"http://\S+", server.stdout.readline())[0]
        finally:
            server.kill()


@pytest.mark.parametrize("name", ["process", "namespace", "gvisor", "qemu"])
def test_a_folder_named_from_here_keeps_what_is_put_away(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    async def life():
        backend = make(name, Path("runs/machines"), unsafe=True)
        missing = [check for check in await backend.checks() if not check.ok]
        if missing:
            pytest.skip(f"{name} cannot run here: {missing[0]}")
        host = await Host.open(Path("runs/state"), backend)
        try:
            limits = None if name == "process" else Spec(resources=Resources(memory_mib=96, disk_mib=32, processes=64))
            sandbox = await host.create(limits)
            await sandbox.write("kept", b"kept")
            heir = await host.create(snapshot=await sandbox.snapshot())
            await sandbox.suspend()
            await sandbox.resume()
            return await sandbox.read("kept"), await heir.read("kept")
        finally:
            await host.close(keep=False)

    assert asyncio.run(life()) == (b"kept", b"kept")


def is_running(pid):
    """Whether a process lives; one that ended may still be listed, as long as nobody asked how."""
    with suppress(OSError):
        return bool(Path("/proc", pid, "cmdline").read_bytes())
    return False


def test_gc_tells_what_a_killed_server_left_without_being_told_its_backend(tmp_path):
    with served(tmp_path) as (server, url):
        id = triax(tmp_path, "create", "--url", url).stdout.strip()
        told = triax(tmp_path, "exec", "--url", url, id, "sh", "-c", "sleep 600 > /dev/null 2>&1 & echo $!")
        assert told.returncode == 0, told.stderr
        server.send_signal(signal.SIGKILL)
        server.wait(30)
    freed = triax(tmp_path, "gc")
    assert freed.returncode == 0, freed.stderr
    assert id in freed.stdout
    while is_running(told.stdout.strip()):  # it is told to end, and not waited for
        time.sleep(0.05)


def test_a_sandbox_that_was_lost_is_listed_as_lost_with_the_reason(tmp_path):
    with served(tmp_path) as (_, url):
        id = triax(tmp_path, "create", "--url", url).stdout.strip()
    with served(tmp_path) as (_, url):
        listed = triax(tmp_path, "list", "--url", url).stdout.splitlines()
        assert [line for line in listed if line.startswith(f"{id}  lost ")], listed
        assert "owner died" in "".join(listed)
        assert triax(tmp_path, "kill", id, "--url", url).returncode == 0
        assert len(triax(tmp_path, "list", "--url", url).stdout.splitlines()) == 1


def test_a_sandbox_made_from_a_snapshot_is_listed_in_columns(tmp_path):
    with served(tmp_path) as (_, url):
        id = triax(tmp_path, "create", "--url", url).stdout.strip()
        kept = triax(tmp_path, "snapshot", id, "--url", url).stdout.strip()
        heir = triax(tmp_path, "create", kept, "--url", url).stdout.strip()
        line = next(one for one in triax(tmp_path, "list", "--url", url).stdout.splitlines() if one.startswith(heir))
        triax(tmp_path, "pause", id, "--url", url)
        refused = triax(tmp_path, "exec", "--url", url, id, "true")
    assert line.split()[:3] == [heir, "running", kept]
    assert (refused.returncode, refused.stderr.count(id)) == (1, 1)
    assert "it is paused; connect to it first" in refused.stderr


@pytest.mark.parametrize(
    ("command", "said"), [("true", b""), ("exec <&-; sleep 0.3; echo over", b"over\n"), ("wc -c", b"3000000\n")]
)
def test_input_is_passed_on_as_far_as_the_command_reads_it(tmp_path, command, said):
    words = [
        "sandbox",
        "run",
        "--backend",
        "process",
        "--unsafe",
        "-i",
        "--folder",
        tmp_path,
        "--",
        "sh",
        "-c",
        command,
    ]
    done = subprocess.run([TRIAX, *words], input=bytes(3_000_000), capture_output=True, timeout=200)
    assert (done.returncode, done.stdout, done.stderr) == (0, said, b"")


def test_a_terminal_where_nothing_is_typed_holds_no_command_up(tmp_path):
    words = ["sandbox", "run", "--backend", "process", "--unsafe", "-i", "--folder", tmp_path, "--", "echo", "done"]
    silent, speaking = os.pipe()
    try:
        done = subprocess.run([TRIAX, *words], stdin=silent, capture_output=True, timeout=200)
    finally:
        os.close(silent)
        os.close(speaking)
    assert (done.returncode, done.stdout, done.stderr) == (0, b"done\n", b"")


def test_what_cannot_be_meant_is_told_before_anything_is_done(tmp_path):
    told = triax(tmp_path, "gc", "--folder", "typo")
    assert told.returncode == 1
    assert "there is no such folder" in told.stderr
    assert not (tmp_path / "typo").exists()
    assert "is no address of a service" in triax(tmp_path, "list", "--url", "localhost:49980").stderr


def test_a_folder_of_another_backend_is_refused_and_left_as_it_was(tmp_path):
    class Other(ProcessBackend):
        name = "other"

    async def lives():
        host = await Host.open(tmp_path / "state", make("process", tmp_path / "machines", unsafe=True))
        sandbox = await host.create(Spec(timeout_s=None))
        await sandbox.write("kept", b"kept")
        await sandbox.suspend()
        await host.close()
        with pytest.raises(SandboxError, match="hold sandboxes of the backend `process`; found `other`"):
            await Host.open(tmp_path / "state", Other(tmp_path / "machines", unsafe=True))
        host = await Host.open(tmp_path / "state", make("process", tmp_path / "machines", unsafe=True))
        again = host.get(sandbox.id)
        await again.resume()
        read = await again.read("kept")
        await host.close(keep=False)
        return read

    assert asyncio.run(lives()) == b"kept"


def test_a_form_whose_file_name_is_too_long_is_a_bad_request_and_no_failure(server):
    with Sandbox.create(**server.options) as sandbox:
        with pytest.raises(InvalidArgumentException, match="form"):
            sandbox.files.write("a/" * 3000 + "x", b"x")
        assert sandbox.commands.run("echo on").stdout == "on\n"


def test_an_unknown_template_is_named_as_what_was_asked_for(server):
    with pytest.raises(SandboxException, match="template or snapshot 'nosuch': there is none"):
        Sandbox.create("nosuch", **server.options)
    with pytest.raises(SandboxException, match="there is none"):
        Sandbox.create("x" * 4000, **server.options)


def test_an_answer_does_not_repeat_escape_sequences_of_names(server):
    with pytest.raises(SandboxException) as refused:
        Sandbox.create(metadata={"\x1b[31mred": "x"}, **server.options)
    assert str(refused.value).isprintable()


def test_the_cache_is_emptied_by_a_verb_but_for_what_is_used_or_needed_later(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    folder = tmp_path / "triax/sandbox"
    for name in ("template-a/memory", "minimal-b/bin/sh", "relay-c.shown/relay", "kernel-d/vmlinux", "bundle-e/x"):
        (folder / name).parent.mkdir(parents=True)
        (folder / name).write_bytes(b"x" * 5000)
    (folder / "image-f.ext4").write_bytes(b"x")
    (folder / "images.lock").touch()
    (folder / ".half-built").touch()
    (tmp_path / "mine").write_bytes(b"stays")
    (folder / "link").symlink_to(tmp_path)
    user = subprocess.Popen(["/bin/sh", "-c", "read x", str(folder / "bundle-e")], stdin=subprocess.PIPE)
    try:
        said = triax(tmp_path, "gc", "--cache").stdout
        assert sorted(path.name for path in folder.iterdir()) == [
            ".half-built",
            "bundle-e",
            "images.lock",
            "kernel-d",
            "relay-c.shown",
        ]
        assert said.count("\n") == 4
        assert "template-a" in said
        assert (tmp_path / "mine").read_bytes() == b"stays"
    finally:
        user.communicate(b"\n")
    assert "bundle-e" in triax(tmp_path, "gc", "--cache").stdout
    assert "nothing was left" in triax(tmp_path, "gc", "--cache").stdout
