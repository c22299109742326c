"""Commands, processes and files in real machines of the light backends, each held to the same behaviour."""

import asyncio
import os
import re
import signal
import socket
import time

import pytest

from triax.errors import SandboxError
from triax.sandbox.backend.choose import make
from triax.sandbox.protocol import Network, Resources, Spec


def test_a_command_gives_its_output_its_code_and_its_end(light, hosting, started, tmp_path):
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


def test_a_limit_ends_one_command_with_all_it_started_and_nothing_else(light, hosting, started, until, tmp_path):
    async def run():
        async with hosting(light, tmp_path) as host:
            sandbox = await started(host)
            await sandbox.exec("sleep 321.0 >/dev/null 2>&1 &")

            async def found(words):
                told = await sandbox.exec("cat /proc/[0-9]*/cmdline | tr '\\0' ' '")
                return re.search(words, told.stdout.decode())

            await until(lambda: found(r"sleep 321\.0"))
            result = await sandbox.exec("setsid sleep 654.0 & (sleep 655.0 & ) ; sleep 656.0", timeout_s=0.5)
            assert result.outcome == "timeout"
            while await found(r"sleep 65[456]\.0"):  # they end within a moment, and not after eleven minutes
                await asyncio.sleep(0.05)
            assert await found(r"sleep 321\.0"), "what another command left running goes on"
            assert sandbox.status == "running"
            assert (await sandbox.exec("echo fine")).stdout == b"fine\n"

    asyncio.run(run())


def test_output_beyond_the_limit_is_dropped_and_told(light, hosting, started, tmp_path):
    async def run():
        async with hosting(light, tmp_path) as host:
            sandbox = await started(host)
            result = await sandbox.exec("head -c 3000000 /dev/zero; echo end >&2", output_limit=1000)
            assert (result.outcome, result.exit_code, len(result.stdout), result.truncated) == ("ok", 0, 1000, True)
            assert result.stderr == b"end\n"
            for limit_s in (0.5, 2.0, 8.0, 30.0):  # a busy host may not even have started it by the first
                flood = await sandbox.exec("yes", output_limit=1000, timeout_s=limit_s)
                if flood.truncated:
                    break
            assert (flood.outcome, flood.truncated, len(flood.stdout)) == ("timeout", True, 1000)

    asyncio.run(run())


def test_a_process_streams_both_ways_and_ends_when_told(light, hosting, started, tmp_path):
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
            ended = await asyncio.wait_for(sleeper.wait(), 60)
            assert ended.signal == 9 or ended.exit_code == 137

    asyncio.run(run())


@pytest.mark.parametrize("name", ["process", "namespace"])
def test_a_terminal_has_a_size_and_echoes(name, available, hosting, started, tmp_path):
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


def test_files_are_written_read_listed_moved_and_removed(light, hosting, started, tmp_path):
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
            await sandbox.rename(f"{top}/a/plain", f"{top}/new/above/plain")
            assert (await sandbox.stat(f"{top}/new/above/plain")).size == 2
            await sandbox.make_directory(f"{top}/x/y/z")
            await sandbox.remove(f"{top}/x")
            for act in (
                sandbox.read(f"{top}/x"),
                sandbox.stat(f"{top}/x"),
                sandbox.list(f"{top}/x"),
                sandbox.remove(f"{top}/x"),
                sandbox.rename(f"{top}/x", f"{top}/never/x"),
            ):
                with pytest.raises(SandboxError) as caught:
                    await act
                assert (caught.value.kind, caught.value.status) == ("refused", 404)
            with pytest.raises(SandboxError, match="no regular file"):
                await sandbox.read(f"{top}/pipe")
            with pytest.raises(SandboxError, match="folder"):
                await sandbox.read(f"{top}/a")

    asyncio.run(run())


def test_a_port_inside_is_reached_from_the_host_alone(available, hosting, started, until, tmp_path):
    if reason := available("namespace"):
        pytest.skip(reason)

    async def run():
        async with hosting("namespace", tmp_path) as host:
            sandbox = await started(host)
            await sandbox.write("index.html", b"it is me")
            with socket.socket() as taken:  # on the host nobody else can listen there meanwhile
                taken.bind(("127.0.0.1", 0))
                inside = taken.getsockname()[1]
                await sandbox.start(["python3", "-m", "http.server", str(inside)])
                address, port = await sandbox.expose(inside)

                async def fetched():
                    try:
                        reader, writer = await asyncio.open_connection(address, port)
                    except OSError:
                        return b""
                    try:
                        writer.write(b"GET /index.html HTTP/1.0\r\n\r\n")
                        return await reader.read()
                    except OSError:
                        return b""
                    finally:
                        writer.close()

                assert (await until(fetched)).endswith(b"it is me")
                with socket.socket() as direct:
                    assert direct.connect_ex(("127.0.0.1", inside)) != 0
            await sandbox.suspend()
            with socket.socket() as old:
                assert old.connect_ex((address, port)) != 0, "an address of an older generation leads nowhere"

    asyncio.run(run())


def test_what_cannot_be_run_or_reached_is_refused_before_anything_happens(light, hosting, started, tmp_path):
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


def test_the_process_backend_is_never_used_by_chance(tmp_path):
    with pytest.raises(SandboxError, match="without any isolation") as caught:
        make("process", tmp_path)
    assert caught.value.kind == "refused"


def test_f31_relative_folders_begin_at_the_home_for_commands_and_files_alike(light, hosting, started, tmp_path):
    async def run():
        async with hosting(light, tmp_path) as host:
            sandbox = await started(host)
            home = (await sandbox.exec('cd; pwd; printf %s "$HOME" >&2')).stdout.decode().strip()
            assert home != "/"
            await sandbox.write("deep/er/note", b"here\n")
            for cwd, where in {
                ".": home,
                "~": home,
                "~/": home,
                "deep": f"{home}/deep",
                "~/deep/er": f"{home}/deep/er",
            }.items():
                told = await sandbox.exec('cd "$(pwd -P)"; pwd', cwd=cwd)
                assert told.stdout.decode().strip() == where, cwd
            assert (await sandbox.exec("cat deep/er/note")).stdout == b"here\n"
            assert (await sandbox.exec("cat note", cwd="deep/er")).stdout == b"here\n"
            process = await sandbox.start("cat note > ../copy", cwd="deep/er")
            await process.wait()
            assert await sandbox.read("deep/copy") == b"here\n"
            with pytest.raises(SandboxError, match="make") as caught:
                await sandbox.exec("true", cwd="nowhere/at/all")
            assert caught.value.status == 404

    asyncio.run(run())


def test_f31_a_sandbox_with_a_folder_of_its_own_begins_there(kernel, hosting, started, tmp_path):
    async def run():
        async with hosting(kernel, tmp_path) as host:
            sandbox = await started(host, cwd="/tmp")
            home = (await sandbox.exec('printf %s "$HOME"')).stdout.decode()
            await sandbox.write("in/note", b"here")
            for cwd, where in {None: "/tmp", ".": "/tmp/.", "in": "/tmp/in", "~": home, "/": "/"}.items():
                told = (await sandbox.exec("pwd", cwd=cwd)).stdout.decode().strip()
                assert os.path.normpath(told) == os.path.normpath(where), cwd
            assert (await sandbox.exec("cat in/note")).stdout == b"here"
            at_home = await started(host, cwd="~")
            assert (await at_home.exec("pwd")).stdout.decode().strip() == home

    asyncio.run(run())
