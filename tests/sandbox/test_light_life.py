"""Real machines of the light backends are stopped, put away, copied and found again, as far as each claims it."""

import asyncio
import os
import shutil
import subprocess
import time

import pytest

from triax.errors import SandboxError
from triax.sandbox.backend.choose import make
from triax.sandbox.host import Host
from triax.sandbox.protocol import Resources, Spec

SMALL = Resources(memory_mib=96, disk_mib=48, processes=64)


def test_pause_in_place_keeps_memory_and_stops_the_clockwork(light, hosting, started, content, until, grows, tmp_path):
    async def run():
        async with hosting(light, tmp_path) as host:
            sandbox = await started(host)
            count = "i=0; while :; do i=$((i+1)); echo $i > count; sleep 0.05; done"
            await sandbox.start(count)
            await until(lambda: content(sandbox, "count"))
            for _ in range(20):  # twenty cycles, each command answered
                await sandbox.pause()
                await sandbox.resume()
                assert (await asyncio.wait_for(sandbox.exec("true"), 60)).exit_code == 0
            await sandbox.pause()
            machine = sandbox._life.machine
            first = await machine.read("count")
            await asyncio.sleep(0.3)
            assert await machine.read("count") == first
            await sandbox.resume()
            while int(await grows(sandbox, "count") or b"0") <= int(first or b"0"):
                pass

    asyncio.run(run())


def test_files_survive_any_number_of_suspends_and_what_was_not_synced_too(light, hosting, started, tmp_path):
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


def test_a_time_limit_puts_away_and_a_later_client_finds_the_files(light, hosting, started, until, tmp_path):
    async def run():
        async with hosting(light, tmp_path) as host:
            sandbox = await started(host, timeout_s=1000.0)
            await sandbox.exec("echo precious > file")
            await sandbox.set_timeout(0.3)
            await until(lambda: sandbox.status == "suspended")
            await sandbox.resume()
            assert await sandbox.read("file") == b"precious\n"
            assert sandbox.expires_s > time.time() + 500, "its time began anew"
            ended = await started(host, timeout_s=0.3, on_timeout="kill")
            await until(lambda: ended.status == "dead")

    asyncio.run(run())


def test_a_time_limit_that_is_prolonged_leaves_the_sandbox_alone(hosting, started, tmp_path):
    async def run():
        async with hosting("process", tmp_path) as host:
            sandbox = await started(host, timeout_s=2.0)
            for _ in range(3):  # an agent and then its verifier, each shorter than the limit
                await asyncio.sleep(0.01)
                await sandbox.set_timeout(1000.0)
            await asyncio.sleep(2.2)
            assert sandbox.status == "running"

    asyncio.run(run())


def test_copies_have_the_files_and_go_their_own_ways(light, hosting, started, tmp_path):
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


def test_a_snapshot_starts_many_and_outlives_its_source(light, hosting, started, tmp_path):
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


def test_memory_goes_on_after_suspend_and_in_copies(available, hosting, started, content, until, grows, tmp_path):
    if reason := available("gvisor"):
        pytest.skip(reason)

    async def run():
        async with hosting("gvisor", tmp_path) as host:
            sandbox = await started(host)
            count = "n+=1; open('/tmp/m','w').write(str(n)); os.rename('/tmp/m','/tmp/n'); time.sleep(0.02)"
            loop = f"import os, time\nn=0\nwhile True:\n {count}"
            process = await sandbox.start(["python3", "-c", loop])
            await until(lambda: content(sandbox, "/tmp/n"))
            await sandbox.suspend()
            assert (await process.wait()).outcome == "infrastructure", "whoever waited for it is told"
            await sandbox.resume()
            values = [int(await content(sandbox, "/tmp/n")), int(await grows(sandbox, "/tmp/n"))]
            assert 0 < values[0] < values[1]
            before = time.time()
            clock = float((await sandbox.exec("date +%s.%N")).stdout)
            assert before - 0.5 < clock < time.time() + 0.5, "its clock was set"
            (copy,) = await sandbox.fork(1)
            there = int((await copy.exec("cat /tmp/n")).stdout)
            assert there >= values[1]
            hosts = {
                (await one.exec("cat /proc/sys/kernel/hostname")).stdout.strip().decode() for one in (sandbox, copy)
            }
            assert hosts == {sandbox.id, copy.id}

    asyncio.run(run())


def test_a_running_command_is_told_that_its_machine_ended(light, hosting, started, content, until, tmp_path):
    async def run():
        async with hosting(light, tmp_path) as host:
            sandbox = await started(host)
            going = asyncio.ensure_future(sandbox.exec("echo x > begun; sleep 1000"))
            await until(lambda: content(sandbox, "begun"))
            await sandbox.kill()
            (result,) = await asyncio.gather(going, return_exceptions=True)
            outcome = result.kind if isinstance(result, SandboxError) else result.outcome
            assert outcome == "infrastructure", "never told as the command's own failure"

    asyncio.run(run())


def small_system(image):
    busybox = shutil.which("busybox")
    if busybox is None:
        pytest.skip("busybox-static is not installed; run `apt-get install busybox-static`")
    for name in ("bin", "etc", "proc", "dev", "usr/share"):
        (image / name).mkdir(parents=True)
    shutil.copy2(busybox, image / "bin/busybox")
    for name in ("sh", "cat", "ls", "true", "id"):
        (image / "bin" / name).symlink_to("busybox")
    (image / "etc/motto").write_text("of the image")


def test_an_image_is_a_folder_that_stays_as_it_is(kernel, hosting, tmp_path):
    image = tmp_path / "image"
    small_system(image)

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
            with pytest.raises(SandboxError, match="no such folder") as caught:
                await host.create(Spec(image="/nowhere"))
            assert caught.value.status == 404

    asyncio.run(run())
    assert (image / "etc/motto").read_text() == "of the image"
    assert not (image / "etc/own").exists()


def test_an_oci_image_is_unpacked_once_and_never_written(kernel, hosting, tmp_path, monkeypatch):
    if shutil.which("umoci") is None:
        pytest.skip("umoci is not installed; run `apt-get install umoci`")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    layout, bundle = tmp_path / "layout", tmp_path / "bundle"
    for words in (["init", "--layout", layout], ["new", "--image", f"{layout}:1"], ["unpack", "--image"], ["repack"]):
        if words[0] == "unpack":
            words += [f"{layout}:1", bundle]
        if words[0] == "repack":
            shutil.rmtree(bundle / "rootfs")
            small_system(bundle / "rootfs")
            words += ["--image", f"{layout}:1", bundle]
        subprocess.run(["umoci", *words], check=True, capture_output=True)

    async def run():
        async with hosting(kernel, tmp_path) as host:
            sandbox = await host.create(Spec(image=f"{layout}:1", resources=SMALL))
            assert (await sandbox.exec("cat /etc/motto; echo own > /etc/own")).stdout == b"of the image"
            await sandbox.suspend()
            shutil.rmtree(layout / "blobs")  # it was unpacked, and is not looked at again
            await sandbox.resume()
            assert (await sandbox.exec("cat /etc/own")).stdout == b"own\n"
            other = await host.create(Spec(image=f"{layout}:1", resources=SMALL))
            assert (await other.exec("cat /etc/motto; cat /etc/own || echo none")).stdout == b"of the imagenone\n"
            with pytest.raises(SandboxError, match="without an image `2`") as caught:
                await host.create(Spec(image=f"{layout}:2", resources=SMALL))
            assert (caught.value.kind, caught.value.status) == ("refused", 404)

    asyncio.run(run())


def test_a_snapshot_of_another_version_or_backend_is_refused(hosting, started, tmp_path):
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


def test_a_folder_has_one_owner_at_a_time(hosting, tmp_path):
    async def run():
        async with hosting("process", tmp_path):
            with pytest.raises(SandboxError, match=str(os.getpid())) as caught:
                await Host.open(tmp_path, make("process", tmp_path / "machines", unsafe=True))
            assert caught.value.status == 409

    asyncio.run(run())
