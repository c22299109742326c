"""Real machines of the light backends, each held to the same behaviour as far as it claims it."""

import asyncio
import os
import re
import shutil
import signal
import socket
import time
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from triax.errors import SandboxError
from triax.sandbox.backend.choose import make
from triax.sandbox.host import Host
from triax.sandbox.protocol import Network, Resources, Spec

LIGHT = ["process", "namespace", "gvisor"]
KERNELS = ["namespace", "gvisor"]
SMALL = Resources(memory_mib=96, disk_mib=48, processes=64)


def available(name):
    """Return why this machine cannot run a backend; none if it can."""
    if name == "process":
        return None

    async def checked():
        return [check for check in await make(name, Path("/tmp/checks")).checks() if not check.ok]

    missing = asyncio.run(checked())
    return f"{name} needs {missing[0].name}: {missing[0].found}; {missing[0].to_do}" if missing else None


@pytest.fixture(scope="module")
def templates(tmp_path_factory):
    return tmp_path_factory.mktemp("templates")


@pytest.fixture(params=LIGHT)
def light(request):
    if reason := available(request.param):
        pytest.skip(reason)
    return request.param


@pytest.fixture(params=KERNELS)
def kernel(request):
    if reason := available(request.param):
        pytest.skip(reason)
    return request.param


@asynccontextmanager
async def hosting(name, root):
    backend = make(name, root / "machines", unsafe=True)
    host = await Host.open(root, backend)
    try:
        yield host
    finally:
        for sandbox in host.sandboxes():
            await sandbox.kill()
        await host.close()
        assert await backend.reap(frozenset()) == [], "something was left of a machine that was ended"


async def started(host, **more):
    name = host.backend.name
    return await host.create(Spec(resources=SMALL, **more) if name != "process" else Spec(**more))


def test_a_command_gives_its_output_its_code_and_its_end(light, tmp_path):
    async def run():
        async with hosting(light, tmp_path) as host:
            sandbox = await started(host)
            result = await sandbox.exec("echo out; echo err >&2; exit 3")
            assert (result.outcome, result.exit_code, result.stdout, result.stderr) == ("ok", 3, b"out\n", b"err\n")
            result = await sandbox.exec(["cat"], stdin=b"x\0y" * 50000)
            assert result.stdout == b"x\0y" * 50000
            assert result.duration_s > 0
            missing = await sandbox.exec(["no-such-program"])
            assert (missing.outcome, missing.exit_code) == ("ok", 127)
            killed = await sandbox.exec("kill -9 $$")
            assert killed.signal == 9 or killed.exit_code == 137
            told = await sandbox.exec(["env"], env={"GREETING": "hällo wörld"})
            assert "GREETING=hällo wörld" in told.stdout.decode()
            await sandbox.make_directory("/tmp/deep/er") if light != "process" else None
            if light != "process":
                assert (await sandbox.exec("pwd", cwd="/tmp/deep/er")).stdout == b"/tmp/deep/er\n"
            with pytest.raises(SandboxError, match="make") as caught:
                await sandbox.exec("true", cwd="/tmp/nowhere")
            assert caught.value.kind == "refused"

    asyncio.run(run())


def test_a_limit_ends_one_command_with_all_it_started_and_nothing_else(light, tmp_path):
    async def run():
        async with hosting(light, tmp_path) as host:
            sandbox = await started(host)
            await sandbox.exec("sleep 321.0 >/dev/null 2>&1 &")
            begun = time.monotonic()
            result = await sandbox.exec("setsid sleep 654.0 & (sleep 655.0 & ) ; sleep 656.0", timeout_s=0.5)
            assert result.outcome == "timeout"
            assert time.monotonic() - begun < 4
            await asyncio.sleep(0.2)
            found = (await sandbox.exec("cat /proc/[0-9]*/cmdline | tr '\\0' ' '")).stdout.decode()
            assert "sleep 321.0" in found, "what another command left running goes on"
            assert not re.search(r"sleep 65[456]\.0", found), "all that the command started is gone"
            assert sandbox.status == "running"
            assert (await sandbox.exec("echo fine")).stdout == b"fine\n"

    asyncio.run(run())


def test_output_beyond_the_limit_is_dropped_and_told(light, tmp_path):
    async def run():
        async with hosting(light, tmp_path) as host:
            sandbox = await started(host)
            result = await sandbox.exec("head -c 3000000 /dev/zero; echo end >&2", output_limit=1000)
            assert (result.outcome, result.exit_code, len(result.stdout), result.truncated) == ("ok", 0, 1000, True)
            assert result.stderr == b"end\n"
            flood = await sandbox.exec("yes", output_limit=1000, timeout_s=0.5)
            assert (flood.outcome, flood.truncated, len(flood.stdout)) == ("timeout", True, 1000)

    asyncio.run(run())


def test_a_process_streams_both_ways_and_ends_when_told(light, tmp_path):
    async def run():
        async with hosting(light, tmp_path) as host:
            sandbox = await started(host)
            process = await sandbox.start("while read line; do echo got $line; done; echo bye >&2; exit 5")
            await process.write(b"one\n")
            stream = process.output()
            assert await anext(stream) == ("stdout", b"got one\n")
            await process.write(b"two\n")
            assert await anext(stream) == ("stdout", b"got two\n")
            await process.close_stdin()
            assert [piece async for piece in stream] == [("stderr", b"bye\n")]
            assert (await process.wait()).exit_code == 5
            sleeper = await sandbox.start(["sleep", "1000"])
            assert sleeper.pid > 1
            await sleeper.kill(signal.SIGKILL)
            ended = await asyncio.wait_for(sleeper.wait(), 5)
            assert ended.signal == 9 or ended.exit_code == 137

    asyncio.run(run())


@pytest.mark.parametrize("name", ["process", "namespace"])
def test_a_terminal_has_a_size_and_echoes(name, tmp_path):
    if reason := available(name):
        pytest.skip(reason)

    async def run():
        async with hosting(name, tmp_path) as host:
            sandbox = await started(host)
            process = await sandbox.start('tty; stty size; read x; stty size; echo "<$x>"', terminal=(30, 100))
            seen = b""
            async for _, data in process.output():
                seen += data
                if b"30 100" in seen and b"40" not in seen:
                    await process.resize(40, 120)
                    await process.write(b"typed\n")
                    seen += b"[40"
            text = seen.decode().replace("\r\n", "\n")
            assert "/dev/pts/" in text or "not a tty" in text
            assert "40 120" in text
            assert "<typed>" in text

    asyncio.run(run())


def test_files_are_written_read_listed_moved_and_removed(light, tmp_path):
    async def run():
        async with hosting(light, tmp_path) as host:
            sandbox = await started(host)
            top = str(tmp_path / "outside") if light == "process" else "/tmp/top"
            await sandbox.write(f"{top}/a/b.bin", bytes(range(256)), 0o600)
            assert await sandbox.read(f"{top}/a/b.bin") == bytes(range(256))
            assert await sandbox.read(f"{top}/a/b.bin", 250, 3) == bytes([250, 251, 252])
            assert (await sandbox.exec(["wc", "-c", f"{top}/a/b.bin"])).stdout.split()[0] == b"256"
            await sandbox.exec(f"cd {top} && ln -s a/b.bin link && mkfifo pipe && echo x > é && chmod 755 é")
            if light == "gvisor":  # a pipe there is its kernel's own, and no file of the host
                await sandbox.exec(f"rm {top}/pipe")
                await asyncio.to_thread(os.mkfifo, f"{sandbox._life.machine.tree.root}{top}/pipe")
            entries = {os.path.basename(entry.path): entry for entry in await sandbox.list(top)}
            assert {name: entry.kind for name, entry in entries.items()} == {
                "a": "directory", "link": "symlink", "pipe": "other", "é": "file",
            }  # fmt: skip
            assert entries["link"].target == "a/b.bin"
            assert entries["é"].mode == 0o755
            assert abs(entries["é"].modified_s - time.time()) < 60
            assert await sandbox.read(f"{top}/link", 0, 2) == b"\0\1"
            await sandbox.rename(f"{top}/é", f"{top}/a/plain")
            assert (await sandbox.stat(f"{top}/a/plain")).size == 2
            await sandbox.make_directory(f"{top}/x/y/z")
            await sandbox.remove(f"{top}/x")
            for act in (
                sandbox.read(f"{top}/x"),
                sandbox.stat(f"{top}/x"),
                sandbox.list(f"{top}/x"),
                sandbox.remove(f"{top}/x"),
            ):
                with pytest.raises(SandboxError) as caught:
                    await act
                assert (caught.value.kind, caught.value.status) == ("refused", 404)
            with pytest.raises(SandboxError, match="no regular file"):
                await sandbox.read(f"{top}/pipe")
            with pytest.raises(SandboxError, match="folder"):
                await sandbox.read(f"{top}/a")

    asyncio.run(run())


def test_pause_in_place_keeps_memory_and_stops_the_clockwork(light, tmp_path):
    async def run():
        async with hosting(light, tmp_path) as host:
            sandbox = await started(host)
            count = "i=0; while :; do i=$((i+1)); echo $i > count; sleep 0.05; done"
            await sandbox.start(count)
            await asyncio.sleep(0.5)
            for _ in range(20):  # twenty cycles, each command answered in time
                await sandbox.pause()
                await sandbox.resume()
                assert (await asyncio.wait_for(sandbox.exec("true"), 5)).exit_code == 0
            await sandbox.pause()
            machine = sandbox._life.machine
            first = await machine.read("count")
            await asyncio.sleep(0.3)
            assert await machine.read("count") == first
            await sandbox.resume()
            await asyncio.sleep(0.3)
            assert int(await sandbox.read("count") or b"0") > int(first or b"0")

    asyncio.run(run())


def test_files_survive_any_number_of_suspends_and_what_was_not_synced_too(light, tmp_path):
    async def run():
        async with hosting(light, tmp_path) as host:
            sandbox = await started(host)
            id = sandbox.id
            for cycle in range(5):
                await sandbox.exec(
                    f"dd if=/dev/urandom of=data{cycle} bs=64k count=4 2>/dev/null; sha256sum data{cycle} >> sums"
                )
                await sandbox.suspend()
                assert sandbox.status == "suspended"
                usage = await sandbox.usage()
                assert (usage.memory_bytes, usage.processes) == (0, 0)
                await sandbox.resume()
            assert (sandbox.id, sandbox.generation) == (id, 5)
            checked = await sandbox.exec("sha256sum -c sums")
            assert checked.stdout.count(b"OK") == 5
            assert len(host.store.snapshots()) == 1, "only what the present machine stands on is kept"

    asyncio.run(run())


def test_a_time_limit_puts_away_and_a_later_client_finds_the_files(light, tmp_path):
    async def run():
        async with hosting(light, tmp_path) as host:
            sandbox = await started(host, timeout_s=1.0)
            await sandbox.exec("echo precious > file")
            begun = time.monotonic()
            while sandbox.status != "suspended":
                assert time.monotonic() - begun < 10
                await asyncio.sleep(0.05)
            await sandbox.resume()
            assert await sandbox.read("file") == b"precious\n"
            assert sandbox.expires_s is not None
            await sandbox.set_timeout(None)
            ended = await started(host, timeout_s=0.3, on_timeout="kill")
            while ended.status != "dead":
                await asyncio.sleep(0.05)

    asyncio.run(run())


def test_a_time_limit_that_is_prolonged_leaves_the_sandbox_alone(tmp_path):
    async def run():
        async with hosting("process", tmp_path) as host:
            sandbox = await started(host, timeout_s=0.5)
            for _ in range(5):  # an agent and then its verifier, each shorter than the limit
                await asyncio.sleep(0.25)
                await sandbox.set_timeout(0.5)
            assert sandbox.status == "running"

    asyncio.run(run())


def test_copies_have_the_files_and_go_their_own_ways(light, tmp_path):
    async def run():
        async with hosting(light, tmp_path) as host:
            sandbox = await started(host)
            await sandbox.write("shared", b"same")
            writer = (
                "while :; do date +%N >> log; done"
                if light != "gvisor"
                else "while :; do echo x >> log; sleep 0.01; done"
            )
            await sandbox.start(writer)
            copies = await sandbox.fork(2)
            (deeper,) = await copies[0].fork(1)
            family = [sandbox, *copies, deeper]
            assert [one.generation for one in family] == [0, 1, 1, 2]
            for number, one in enumerate(family):
                assert await one.read("shared") == b"same"
                await one.write("own", str(number).encode())
            assert [await one.read("own") for one in family] == [b"0", b"1", b"2", b"3"]
            ask = "head -c 16 /dev/urandom | base64; cat /proc/sys/kernel/random/uuid; hostname; cat /etc/machine-id"
            if light == "process":
                ask = "head -c 16 /dev/urandom | base64; cat /proc/sys/kernel/random/uuid"
            told = [(await one.exec(ask)).stdout.split() for one in family]
            for column in zip(*told, strict=True):
                assert len(set(column)) == 4, f"siblings share {column}"
            await copies[0].kill()
            assert (await copies[1].exec("true")).exit_code == 0

    asyncio.run(run())


def test_a_snapshot_starts_many_and_outlives_its_source(light, tmp_path):
    async def run():
        async with hosting(light, tmp_path) as host:
            sandbox = await started(host)
            await sandbox.write("state", b"before")
            kept = await sandbox.snapshot()
            await sandbox.write("state", b"after")
            first, second = [await host.create(snapshot=kept) for _ in range(2)]
            assert await first.read("state") == await second.read("state") == b"before"
            assert await sandbox.read("state") == b"after"
            await sandbox.kill()
            await host.remove_snapshot(kept)
            assert host.snapshots() == []
            await first.suspend()
            await first.resume()
            assert await first.read("state") == b"before"

    asyncio.run(run())


def test_memory_goes_on_after_suspend_and_in_copies(tmp_path):
    if reason := available("gvisor"):
        pytest.skip(reason)

    async def run():
        async with hosting("gvisor", tmp_path) as host:
            sandbox = await started(host)
            count = "n+=1; open('/tmp/m','w').write(str(n)); os.rename('/tmp/m','/tmp/n'); time.sleep(0.02)"
            loop = f"import os, time\nn=0\nwhile True:\n {count}"
            process = await sandbox.start(["python3", "-c", loop])
            while (await sandbox.exec("test -s /tmp/n")).exit_code != 0:
                await asyncio.sleep(0.1)
            await sandbox.suspend()
            assert (await process.wait()).outcome == "infrastructure", "whoever waited for it is told"
            await sandbox.resume()
            values = []
            for _ in range(2):
                values.append(int((await sandbox.exec("cat /tmp/n; true")).stdout or b"0"))
                await asyncio.sleep(0.5)
            assert 0 < values[0] < values[1]
            assert abs(float((await sandbox.exec("date +%s.%N")).stdout) - time.time()) < 0.5, "its clock was set"
            (copy,) = await sandbox.fork(1)
            there = int((await copy.exec("cat /tmp/n")).stdout)
            assert there >= values[1]
            hosts = {
                (await one.exec("cat /proc/sys/kernel/hostname")).stdout.strip().decode() for one in (sandbox, copy)
            }
            assert hosts == {sandbox.id, copy.id}

    asyncio.run(run())


def test_a_running_command_is_told_that_its_machine_ended(light, tmp_path):
    async def run():
        async with hosting(light, tmp_path) as host:
            sandbox = await started(host)
            going = asyncio.ensure_future(sandbox.exec("sleep 100"))
            await asyncio.sleep(0.3)
            await sandbox.kill()
            (result,) = await asyncio.gather(going, return_exceptions=True)
            outcome = result.kind if isinstance(result, SandboxError) else result.outcome
            assert outcome == "infrastructure", "never told as the command's own failure"

    asyncio.run(run())


def test_a_port_inside_is_reached_from_the_host_alone(tmp_path):
    if reason := available("namespace"):
        pytest.skip(reason)

    async def run():
        async with hosting("namespace", tmp_path) as host:
            sandbox = await started(host)
            await sandbox.write("index.html", b"it is me")
            with socket.socket() as free:
                free.bind(("127.0.0.1", 0))
                inside = free.getsockname()[1]
            await sandbox.start(["python3", "-m", "http.server", str(inside)])
            address, port = await sandbox.expose(inside)
            text = b""
            for _ in range(100):
                try:
                    reader, writer = await asyncio.open_connection(address, port)
                    writer.write(b"GET /index.html HTTP/1.0\r\n\r\n")
                    text = await reader.read()
                    writer.close()
                except OSError:
                    text = b""
                if text:
                    break
                await asyncio.sleep(0.05)
            assert text.endswith(b"it is me")
            with socket.socket() as direct:
                assert direct.connect_ex(("127.0.0.1", inside)) != 0
            await sandbox.suspend()
            with socket.socket() as old:
                assert old.connect_ex((address, port)) != 0, "an address of an older generation leads nowhere"

    asyncio.run(run())


def test_an_image_is_a_folder_that_stays_as_it_is(kernel, tmp_path):
    busybox = shutil.which("busybox")
    if busybox is None:
        pytest.skip("busybox-static is not installed; run `apt-get install busybox-static`")
    image = tmp_path / "image"
    for name in ("bin", "etc", "proc", "dev", "usr/share"):
        (image / name).mkdir(parents=True)
    shutil.copy2(busybox, image / "bin/busybox")
    for name in ("sh", "cat", "ls", "true", "id"):
        (image / "bin" / name).symlink_to("busybox")
    (image / "etc/motto").write_text("of the image")

    async def run():
        async with hosting(kernel, tmp_path) as host:
            sandbox = await host.create(Spec(image=str(image), resources=SMALL))
            assert (await sandbox.exec("cat /etc/motto")).stdout == b"of the image"
            assert (await sandbox.exec("ls /usr")).stdout == b"share\n"
            await sandbox.exec("echo mine > /etc/own; echo other > /etc/new")
            await sandbox.write("/etc/motto2", b"2")
            (copy,) = await sandbox.fork(1)
            assert (await copy.exec("cat /etc/motto /etc/own /etc/motto2")).stdout == b"of the imagemine\n2"
            await sandbox.suspend()
            await sandbox.resume()
            assert (await sandbox.exec("cat /etc/own")).stdout == b"mine\n"
            with pytest.raises(SandboxError, match="no folder") as caught:
                await host.create(Spec(image="/nowhere"))
            assert caught.value.status == 404

    asyncio.run(run())
    assert (image / "etc/motto").read_text() == "of the image"
    assert not (image / "etc/own").exists()


def test_what_cannot_be_run_or_reached_is_refused_before_anything_happens(light, tmp_path):
    async def run():
        async with hosting(light, tmp_path) as host:
            sandbox = await started(host)
            for wrong, word in [
                (sandbox.exec(["echo", "a\0b"]), "NUL"),
                (sandbox.exec(["echo", "x" * 2**20]), "1048576 bytes"),
                (sandbox.exec(["x" * 100000] * 30), "all have"),
                (sandbox.exec([]), "no command"),
                (sandbox.exec("true", env={"A=B": "c"}), "no name"),
                (sandbox.exec("true", timeout_s=0.0), "above 0"),
                (sandbox.read("a\0b"), "no NUL"),
                (sandbox.write("x" * 5000, b""), "5000 bytes"),
                (sandbox.exec("true", user="nobody-here"), "user"),
                (sandbox.fork(0), "1 to"),
            ]:
                with pytest.raises(SandboxError, match=word) as caught:
                    await wrong
                assert caught.value.kind == "refused"
            assert sandbox.status == "running"
            for spec in (
                Spec(resources=Resources(memory_mib=0)),
                Spec(timeout_s=-1.0),
                Spec(network=Network(allow_out=("10.0.0.0/8",))),
            ):
                with pytest.raises(SandboxError) as caught:
                    await host.create(spec)
                assert caught.value.kind == "refused"
            with pytest.raises(SandboxError) as caught:
                host.get("../../etc")
            assert caught.value.status == 404
            with pytest.raises(SandboxError) as caught:
                await host.create(snapshot="../../etc")
            assert caught.value.status == 404

    asyncio.run(run())


def test_a_snapshot_of_another_version_or_backend_is_refused(tmp_path):
    async def run():
        async with hosting("process", tmp_path) as host:
            sandbox = await started(host)
            kept = await sandbox.snapshot()
            manifest = host.store.folder(kept) / "manifest.json"
            text = manifest.read_text()
            manifest.write_text(text.replace('"version": 1', '"version": 99'))
            with pytest.raises(SandboxError, match="99") as caught:
                await host.create(snapshot=kept)
            assert caught.value.status == 409
            manifest.write_text(text.replace('"backend": "process"', '"backend": "qemu"'))
            with pytest.raises(SandboxError, match="qemu"):
                await host.create(snapshot=kept)
            manifest.write_text("{")
            with pytest.raises(SandboxError, match="cannot be read"):
                await host.create(snapshot=kept)

    asyncio.run(run())


def test_the_process_backend_is_never_used_by_chance(tmp_path):
    with pytest.raises(SandboxError, match="without any isolation") as caught:
        make("process", tmp_path)
    assert caught.value.kind == "refused"


def test_a_folder_has_one_owner_at_a_time(tmp_path):
    async def run():
        async with hosting("process", tmp_path):
            with pytest.raises(SandboxError, match=str(os.getpid())) as caught:
                await Host.open(tmp_path, make("process", tmp_path / "machines", unsafe=True))
            assert caught.value.status == 409

    asyncio.run(run())
