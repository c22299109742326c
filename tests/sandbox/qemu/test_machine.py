import asyncio
import os
import shutil
import signal
import subprocess
import time

import pytest

from triax.errors import SandboxError
from triax.sandbox.backend.qemu import QemuBackend
from triax.sandbox.host import Host
from triax.sandbox.protocol import Resources, Spec


def test_commands_return_their_streams_codes_and_signals(in_lab):
    async def test(lab):
        machine = await lab.create(env={"COLOUR": "blue"}, cwd="/tmp")
        result = await machine.exec("echo out; echo err >&2; exit 3")
        assert (result.outcome, result.exit_code, result.stdout, result.stderr) == ("ok", 3, b"out\n", b"err\n")
        result = await machine.exec("kill -TERM $$")
        assert (result.outcome, result.exit_code, result.signal) == ("ok", None, 15)
        result = await machine.exec(["sh", "-c", "pwd; echo $COLOUR $SHAPE; cat"], stdin=b"in", env={"SHAPE": "round"})
        assert result.stdout == b"/tmp\nblue round\nin"
        assert (await machine.exec(["no-such-program"])).exit_code == 127
        assert (await machine.exec(["/etc/passwd"])).exit_code == 126
        result = await machine.exec(["printf", "%s|", "two words", "", "*"])
        assert result.stdout == b"two words||*|"

    in_lab(test)


def test_large_input_and_output_arrive_whole_and_floods_are_cut(in_lab):
    async def test(lab):
        machine = await lab.create()
        data = bytes(range(256)) * 5000
        result = await machine.exec("cat; echo end >&2", stdin=data)
        assert result.stdout == data
        assert result.stderr == b"end\n"
        assert not result.truncated
        result = await machine.exec("head -c 3000000 /dev/zero; echo last", output_limit=1000)
        assert (len(result.stdout), result.truncated, result.exit_code) == (1000, True, 0)

    in_lab(test)


def test_a_command_over_its_limit_ends_with_all_it_started_and_nothing_else(in_lab, said, grows):
    async def test(lab):
        machine = await lab.create()
        await said(machine, "(while true; do echo x >> /tmp/other; sleep 0.1; done) >/dev/null 2>&1 &")
        result = await machine.exec("(sh -c 'setsid sleep 4700' &) ; sleep 4700", timeout_s=0.5)
        assert (result.outcome, result.signal) == ("timeout", 9)
        assert "sleep 4700" not in await said(machine, "ps")
        await grows(machine, "/tmp/other")

    in_lab(test)


def test_a_background_process_does_not_hold_its_command_up(in_lab, content, until):
    async def test(lab):
        machine = await lab.create()
        behind = "(until [ -e /tmp/go ]; do sleep 0.1; done; echo late; echo x > /tmp/done) &"
        result = await machine.exec(f"echo started; {behind}", timeout_s=120)
        assert (result.outcome, result.stdout) == ("ok", b"started\n")
        assert await content(machine, "/tmp/done") == b""
        await machine.write("/tmp/go", b"")
        await until(lambda: content(machine, "/tmp/done"))

    in_lab(test)


def test_memory_that_runs_out_is_told_and_the_machine_lives(in_lab, said):
    async def test(lab):
        machine = await lab.create()
        result = await machine.exec(["awk", 'BEGIN { s = "x"; while (1) s = s s }'])
        assert result.outcome == "out_of_memory"
        assert result.signal == 9 or result.exit_code == 137
        assert await said(machine, "echo alive") == "alive"

    in_lab(test)


def test_a_fork_bomb_is_held_by_its_quota(in_lab, said):
    async def test(lab):
        machine = await lab.create(resources=Resources(processes=40))
        result = await machine.exec("b() { b | b & }; b; sleep 1", timeout_s=3)
        assert result.outcome in ("ok", "timeout")
        told = ""
        try:
            await machine.exec("killall -9 sh sleep", timeout_s=5)
        except SandboxError as full:  # the bomb may hold every process of the quota
            told = str(full)
        assert told == "" or "no process could be started" in told
        await machine.write("/tmp/still", b"here")
        assert await machine.read("/tmp/still") == b"here"
        assert await machine.is_alive()

    in_lab(test)


def test_a_long_lived_process_streams_reads_and_is_signalled(in_lab):
    async def test(lab):
        machine = await lab.create()
        process = await machine.start("echo ready; while read line; do echo got $line; done; echo bye >&2; exit 5")
        pieces = process.output()
        assert await anext(pieces) == ("stdout", b"ready\n")
        await process.write(b"one\n")
        assert await anext(pieces) == ("stdout", b"got one\n")
        await process.close_stdin()
        assert [piece async for piece in pieces] == [("stderr", b"bye\n")]
        assert (await process.wait()).exit_code == 5
        sleeper = await machine.start(["sleep", "60"])
        assert sleeper.pid > 1
        await sleeper.kill(15)
        assert (await sleeper.wait()).signal == 15

    in_lab(test)


def test_a_terminal_has_a_size_and_echoes(in_lab):
    async def test(lab):
        machine = await lab.create()
        shell = await machine.start(["sh"], terminal=(30, 100))
        await shell.write(b"stty size\n")
        await shell.resize(31, 101)
        await shell.write(b"stty size; exit 4\n")
        seen = b"".join([piece async for _, piece in shell.output()])
        assert b"31 101" in seen
        assert b"stty size" in seen
        assert (await shell.wait()).exit_code == 4

    in_lab(test)


def test_files_are_written_read_listed_moved_and_removed(in_lab, said):
    async def test(lab):
        machine = await lab.create()
        data = bytes(range(256)) * 3000
        await machine.write("/data/deep/file.bin", data, 0o600)
        assert await machine.read("/data/deep/file.bin") == data
        assert await machine.read("/data/deep/file.bin", 1000, 10) == data[1000:1010]
        assert await said(machine, "stat -c %a /data/deep/file.bin") == "600"
        await said(machine, "ln -s file.bin /data/deep/link; printf x > '/data/deep/a\nb \033[2J'")
        entries = {entry.path: entry for entry in await machine.list("/data/deep")}
        assert list(entries) == ["/data/deep/a\nb \033[2J", "/data/deep/file.bin", "/data/deep/link"]
        assert (entries["/data/deep/link"].kind, entries["/data/deep/link"].target) == ("symlink", "file.bin")
        assert entries["/data/deep/file.bin"].size == len(data)
        assert abs(entries["/data/deep/file.bin"].modified_s - time.time()) < 60
        await machine.rename("/data/deep/file.bin", "/data/moved")
        await machine.make_directory("/data/empty/folder")
        assert (await machine.stat("/data/empty/folder")).kind == "directory"
        await machine.remove("/data/deep")
        assert [entry.path for entry in await machine.list("/data")] == ["/data/empty", "/data/moved"]
        before = await machine.list("/etc")
        for root in ("/", "//", "/.", "/data/..", "../.."):
            with pytest.raises(SandboxError, match="the root itself stays where it is"):
                await machine.remove(root)
            with pytest.raises(SandboxError, match="the root itself stays where it is"):
                await machine.rename(root, "/elsewhere")
        assert await machine.list("/etc") == before, "refused, and nothing was removed on the way"

    in_lab(test)


def test_files_that_cannot_be_had_are_refused_with_the_reason(in_lab):
    async def test(lab):
        machine = await lab.create()
        for wrong, status in [
            (machine.read("/nothing"), 404),
            (machine.read("/tmp"), 400),
            (machine.read("/dev/zero"), 400),
            (machine.list("/etc/passwd"), 400),
            (machine.write("/etc/passwd/x", b""), 400),
            (machine.read("/etc/passwd\0"), 400),
            (machine.remove("/nothing"), 404),
            (machine.exec(["true"], cwd="/nowhere"), 404),
            (machine.exec(["true"], user="nobody-here"), 400),
            (machine.exec(["a\0b"]), 400),
            (machine.exec(["x" * 2**20]), 400),
            (machine.expose(0), 400),
        ]:
            with pytest.raises(SandboxError) as caught:
                await wrong
            assert (caught.value.kind, caught.value.status) == ("refused", status), caught.value

    in_lab(test)


def test_a_full_disk_is_refused_and_leaves_the_old_file_whole(in_lab, said):
    async def test(lab):
        machine = await lab.create(resources=Resources(disk_mib=24))
        await machine.write("/root/kept", b"precious")
        await machine.exec("dd if=/dev/zero of=/root/fill bs=1M count=2000 2>/dev/null")
        with pytest.raises(SandboxError) as caught:
            await machine.write("/root/kept", bytes(2**20))
        assert (caught.value.kind, caught.value.status) == ("refused", 507)
        assert await machine.read("/root/kept") == b"precious"
        await said(machine, "rm /root/fill")
        await machine.write("/root/kept", b"new")

    in_lab(test)


def test_commands_run_as_another_user_with_its_home(in_lab, said):
    async def test(lab):
        machine = await lab.create(user="user")
        assert await said(machine, "id -un; pwd; echo $HOME") == "user\n/home/user\n/home/user"
        assert (await machine.exec("echo x > /etc/passwd")).exit_code == 1
        assert await said(machine, "id -un", user="root") == "root"

    in_lab(test)


def test_commands_leave_nothing_of_theirs_to_the_next(in_lab):
    async def test(lab):
        machine = await lab.create()
        clean = (await machine.exec(["env"])).stdout
        assert b"PATH=" in clean
        assert b"HOME=/root\n" in clean
        await machine.exec(["env"], env={"COLOUR": "blue", "HOME": "/tmp"}, cwd="/etc", user="user")
        assert (await machine.exec(["nothing-there"], env={"PATH": "/nowhere", "COLOUR": "red"})).exit_code == 127
        with pytest.raises(SandboxError, match="no such user"):
            await machine.exec(["true"], user="nobody-known")
        assert (await machine.exec("umask; id -u; pwd; trap")).stdout == b"0022\n0\n/root\n"
        assert (await machine.exec(["env"])).stdout == clean
        assert (await machine.exec(["sh", "-c", "id -u"], user="user", env={"PATH": ":/bin"})).stdout == b"1000\n"

    in_lab(test)


def test_an_idle_guest_uses_no_processor(in_lab):
    async def test(lab):
        machine = await lab.create()
        await machine.exec(["true"])
        used = []
        while not used or used[-1] > 0.02:  # at first what the command left for the kernel to do
            assert len(used) < 60, used
            before = machine.emulator.cpu_s()
            await asyncio.sleep(1.0)
            used.append(machine.emulator.cpu_s() - before)

    in_lab(test)


def test_a_pause_stops_time_and_the_clock_is_right_after_it(in_lab, said, content, until, grows):
    async def test(lab):
        machine = await lab.create()
        begun = time.monotonic()
        await said(machine, "(while true; do echo x >> /tmp/ticks; sleep 0.1; done) >/dev/null 2>&1 &")
        await until(lambda: content(machine, "/tmp/ticks"))
        sleeper = await machine.start(["sleep", "1"])
        await machine.pause()
        ran = time.monotonic() - begun
        assert await machine.is_alive()
        await asyncio.sleep(3)
        begun = time.monotonic()
        await machine.resume()
        ticks = len((await machine.read("/tmp/ticks")).split())
        ran += time.monotonic() - begun
        assert 1 <= ticks < 10 * ran + 3, "none of the three seconds was one for the guest"
        before = time.time()
        inside = float(
            await said(machine, "adjtimex | sed -n 's/.*time.tv_sec: *//p'") or await said(machine, "date +%s")
        )
        assert before - 1.2 < inside < time.time() + 0.2
        assert (await asyncio.wait_for(sleeper.wait(), 60)).exit_code == 0
        await grows(machine, "/tmp/ticks")

    in_lab(test)


def test_a_machine_whose_process_was_killed_says_so_and_never_hangs(in_lab, content, until):
    async def test(lab):
        machine = await lab.create()
        running = asyncio.ensure_future(machine.exec("echo x > /tmp/begun; sleep 1000"))
        await until(lambda: content(machine, "/tmp/begun"))
        machine.emulator.process.kill()
        result = await asyncio.wait_for(running, 60)
        assert result.outcome == "infrastructure"
        assert not await machine.is_alive()
        with pytest.raises(SandboxError) as caught:
            await machine.exec(["true"])
        assert caught.value.kind == "infrastructure"
        with pytest.raises(SandboxError):
            await machine.pause()
        await machine.kill()
        await machine.kill()
        assert not machine.parts.folder.exists()

    in_lab(test)


@pytest.mark.parametrize("deed", ["reboot -f", "echo c > /proc/sysrq-trigger", "poweroff -f"])
def test_a_guest_that_reboots_panics_or_turns_itself_off_is_told_as_failed_at_once(in_lab, tmp_path, deed):
    async def test(lab):
        host = await Host.open(tmp_path / "state", lab.backend)
        sandbox = await host.create()
        result = await asyncio.wait_for(sandbox.exec(f"{deed}; sleep 1000"), 20)
        assert result.outcome == "infrastructure"
        assert (sandbox.status, sandbox.reason) == ("failed", "its machine ended by itself")
        await host.close()

    in_lab(test)


def test_a_limit_that_a_stuck_guest_cannot_keep_is_no_fault_of_the_command(in_lab, monkeypatch):
    monkeypatch.setattr("triax.sandbox.guest.process.GRACE_S", 0.3)

    async def test(lab):
        machine = await lab.create()
        emulator = machine.emulator.process.pid
        os.kill(emulator, signal.SIGSTOP)
        result = await machine.exec(["sleep", "1000"], timeout_s=0.2)
        assert result.outcome == "infrastructure"
        assert "gave no answer" in result.detail
        os.kill(emulator, signal.SIGCONT)
        result = await machine.exec(["sleep", "1000"], timeout_s=0.2)
        assert result.outcome == "timeout"

    in_lab(test)


def test_a_caller_that_gives_up_leaves_no_answer_to_the_next(in_lab):
    async def test(lab):
        monitor = (await lab.create()).emulator.monitor
        asked = asyncio.ensure_future(monitor.run("query-version"))
        await asyncio.sleep(0)
        asked.cancel()
        await asyncio.gather(asked, return_exceptions=True)
        assert (await monitor.run("query-status"))["status"] == "running"

    in_lab(test)


@pytest.fixture
def small_disk(tmp_path):
    """A folder on a file system of 320 MiB."""
    folder, image = tmp_path / "small", tmp_path / "small.ext4"
    folder.mkdir()
    with image.open("wb") as file:
        file.truncate(320 * 2**20)
    maker = shutil.which("mkfs.ext4", path=f"{os.defpath}:/usr/sbin:/sbin") or "mkfs.ext4"
    for words in ([maker, "-q", "-m", "0", str(image)], ["mount", "-o", "loop", str(image), str(folder)]):
        done = subprocess.run(words, capture_output=True, text=True, check=False)
        if done.returncode:
            pytest.skip(f"cannot mount a small file system: {done.stderr}")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


def test_a_guest_waits_while_the_hosts_disk_is_full_and_goes_on_with_all_it_has(in_lab, small_disk):
    async def test(lab):
        backend = QemuBackend(small_disk / "machines")
        machine = await backend.create(Spec(), "waiting")
        lab.machines.append(machine)
        left = shutil.disk_usage(small_disk).free - 8 * 2**20
        with (small_disk / "ballast").open("wb") as file:
            os.posix_fallocate(file.fileno(), 0, left)
        writing = await machine.start("dd if=/dev/zero of=/big bs=1M count=24; sync; wc -c < /big")
        async with asyncio.timeout(60):
            while (await machine.emulator.monitor.run("query-status"))["status"] != "io-error":
                await asyncio.sleep(0.1)
        assert await machine.is_alive()
        (small_disk / "ballast").unlink()
        async with asyncio.timeout(60):
            while not await machine.is_alive() or (await machine.exec("true", timeout_s=5)).outcome != "ok":
                await asyncio.sleep(0.1)
        said = b"".join([data async for name, data in writing.output() if name == "stdout"])
        assert int(said) == 24 * 2**20

    in_lab(test)
