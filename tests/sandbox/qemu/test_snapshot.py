import asyncio
import json
import os

import pytest

from triax.errors import SandboxError
from triax.sandbox.backend.qemu import disk


def test_a_suspended_machine_leaves_no_process_and_resumes_with_memory_and_files(in_lab, said, content, until, grows):
    async def test(lab):
        machine = await lab.create()
        await said(machine, "echo kept > /root/file")
        counter = await machine.start(
            "i=0; while true; do i=$((i+1)); echo $i > /tmp/new; mv /tmp/new /tmp/count; sleep 0.05; done"
        )
        await until(lambda: content(machine, "/tmp/count"))
        pid = machine.emulator.process.pid
        folder = lab.new_folder("suspended")
        await machine.suspend(folder)
        assert not os.path.exists(f"/proc/{pid}")
        assert os.listdir(lab.backend.root) == []
        assert (await counter.wait()).outcome == "infrastructure"
        at_rest = int((await (again := await lab.restore(folder, "source")).read("/tmp/count")).split()[0])
        assert await said(again, "cat /root/file") == "kept"
        assert int((await grows(again, "/tmp/count")).split()[0]) > at_rest
        assert counter.pid in await again.processes()
        listener = await again.attach(counter.pid)
        await listener.kill(9)
        assert (await listener.wait()).signal == 9

    in_lab(test)


def test_five_cycles_keep_every_file_the_id_and_unsynced_data(in_lab, said):
    async def test(lab):
        machine = await lab.create()
        for cycle in range(5):
            await said(machine, f"echo {cycle} > /root/{cycle}; dd if=/dev/urandom of=/root/big{cycle} bs=64k count=4")
            sums = await said(machine, "cat /root/* | md5sum")
            folder = lab.new_folder(f"cycle{cycle}")
            await machine.suspend(folder)
            machine = await lab.restore(folder, "source", cycle + 1)
            assert await said(machine, "cat /root/* | md5sum") == sums
            assert await said(machine, "hostname; cat /run/triax/generation") == f"source\n{cycle + 1}"
        assert (await said(machine, "ls /root")).split() == [*"01234", *(f"big{cycle}" for cycle in range(5))]

    in_lab(test)


def test_a_disk_of_many_layers_is_joined_and_stays_the_same(in_lab, said, monkeypatch):
    monkeypatch.setattr(disk, "MOST_LAYERS", 2)

    async def test(lab):
        machine = await lab.create()
        for cycle in range(4):
            await said(
                machine, f"dd if=/dev/urandom of=/root/{cycle} bs=64k count=3 2>/dev/null; rm -f /root/{cycle - 2}"
            )
            sums = await said(machine, "sync; md5sum /root/*")
            folder = lab.new_folder(f"cycle{cycle}")
            await machine.suspend(folder)
            machine = await lab.restore(folder, "source", cycle + 1)
            assert len(machine.parts.layers) <= 3
            assert await said(machine, "echo 3 > /proc/sys/vm/drop_caches; md5sum /root/*") == sums

    in_lab(test)


def test_twenty_pauses_and_resumes_keep_a_connection_alive(in_lab, said):
    async def test(lab):
        machine = await lab.create()
        for _ in range(20):
            await machine.pause()
            await machine.resume()
            assert await asyncio.wait_for(said(machine, "echo on"), 60) == "on"

    in_lab(test)


def test_a_snapshot_can_start_many_while_its_source_goes_on(in_lab, said):
    async def test(lab):
        machine = await lab.create()
        await said(machine, "echo before > /root/file")
        folder = lab.new_folder("snapshot")
        await machine.snapshot(folder)
        await said(machine, "echo after > /root/file; echo more > /root/other")
        first, second = await asyncio.gather(lab.restore(folder, "first"), lab.restore(folder, "second"))
        assert await said(first, "cat /root/*") == "before"
        await said(first, "echo first > /root/file")
        assert await said(second, "cat /root/*") == "before"
        assert await said(machine, "cat /root/file") == "after"

    in_lab(test)


def test_a_paused_machine_stays_paused_through_a_snapshot(in_lab, said):
    async def test(lab):
        machine = await lab.create()
        await said(machine, "(while true; do echo x >> /tmp/ticks; sleep 0.02; done) >/dev/null 2>&1 &")
        await machine.pause()
        await machine.snapshot(lab.new_folder("snapshot"))
        assert machine.paused
        status = await machine.emulator.monitor.run("query-status")
        assert status["status"] == "paused"
        await machine.resume()
        assert await said(machine, "echo on") == "on"
        restored = await lab.restore(lab.folder / "snapshot", "copy")
        assert await said(restored, "test -s /tmp/ticks && echo on") == "on"

    in_lab(test)


def test_an_incremental_snapshot_holds_what_changed_and_restores_to_the_same(in_lab, said):
    async def test(lab):
        machine = await lab.create()
        await said(machine, "dd if=/dev/urandom of=/dev/shm/a bs=1M count=8 2>/dev/null")
        first, second, third = (lab.new_folder(name) for name in ("first", "second", "third"))
        await machine.snapshot(first)
        await said(machine, "dd if=/dev/urandom of=/dev/shm/b bs=1M count=1 2>/dev/null; rm -f /dev/shm/nothing")
        await machine.snapshot(second, first)
        await said(machine, "dd if=/dev/zero of=/dev/shm/a bs=1M count=4 conv=notrunc 2>/dev/null")
        sums = await said(machine, "md5sum /dev/shm/*")
        await machine.snapshot(third, second)
        own = [folder / f"pages-{place}.bin" for place, folder in enumerate((first, second, third))]
        sizes = [path.stat().st_size for path in own]
        assert sizes[0] > 8 * 2**20 > 5 * 2**20 > sizes[1] > 2**20
        assert sizes[2] < 3 * 2**20  # four million zeros are only told
        assert os.path.samefile(first / "pages-0.bin", third / "pages-0.bin")
        for folder in (first, second):
            for path in folder.iterdir():
                path.unlink()  # what a later one needs of them it holds itself
        restored = await lab.restore(third, "copy")
        assert await said(restored, "md5sum /dev/shm/*") == sums

    in_lab(test)


def test_a_snapshot_of_other_hardware_or_layout_is_refused_in_words(in_lab):
    async def test(lab):
        machine = await lab.create()
        folder = lab.new_folder("snapshot")
        await machine.suspend(folder)
        tree = json.loads((folder / "qemu.json").read_text())
        changes = [
            ({"layout": 99}, "layout"),
            ({"fit": tree["fit"] | {"emulator": "99.0"}}, "emulator"),
            ({"fit": tree["fit"] | {"accelerator": "other"}}, "accelerator"),
            ({"fit": tree["fit"] | {"clock_khz": 10}}, "clock"),
        ]
        for change, word in changes:
            (folder / "qemu.json").write_text(json.dumps(tree | change))
            with pytest.raises(SandboxError, match=word) as caught:
                await lab.restore(folder, "copy")
            assert (caught.value.kind, caught.value.status) == ("refused", 409)
        (folder / "qemu.json").write_text(json.dumps(tree))
        await lab.restore(folder, "copy")

    in_lab(test)


@pytest.mark.parametrize("damage", ["state", "pages-0.bin", "pages-0.index", "qemu.json", "memory", "layer-0.qcow2"])
def test_a_damaged_snapshot_is_refused_and_leaves_nothing_behind(in_lab, damage):
    async def test(lab):
        machine = await lab.create()
        folder = lab.new_folder("snapshot")
        await machine.suspend(folder)
        whole = (folder / damage).read_bytes()
        (folder / damage).unlink()
        if damage == "layer-0.qcow2":
            whole = b"not a layer" + whole[11:]
        (folder / damage).write_bytes(whole[: len(whole) // 2])
        with pytest.raises(SandboxError) as caught:
            await asyncio.wait_for(lab.restore(folder, "copy"), 120)
        assert caught.value.kind == "infrastructure"
        assert os.listdir(lab.backend.root) == []

    in_lab(test)


def test_a_snapshot_that_cannot_be_written_leaves_the_machine_running(in_lab, said, grows):
    async def test(lab):
        machine = await lab.create()
        await said(machine, "(while true; do echo x >> /tmp/ticks; sleep 0.02; done) >/dev/null 2>&1 &")
        with pytest.raises(SandboxError):
            await machine.snapshot(lab.folder / "nowhere")
        with pytest.raises(SandboxError):
            await machine.suspend(lab.folder / "nowhere")
        small = lab.new_folder("small")
        await grows(machine, "/tmp/ticks")
        await machine.snapshot(small)
        assert await said(await lab.restore(small, "copy"), "echo on") == "on"

    in_lab(test)


def test_reaping_ends_machines_that_nobody_owns_and_no_other(in_lab, said):
    async def test(lab):
        orphan, kept = await lab.create("orphan"), await lab.create("kept")
        (lab.backend.root / ".fork-old").mkdir()
        ended = await lab.backend.reap(frozenset({"kept"}))
        assert len(ended) == 1
        assert "orphan" in ended[0]
        assert sorted(os.listdir(lab.backend.root)) == ["kept"]
        orphan.emulator.process.wait(60)
        assert not await orphan.is_alive()
        assert await said(kept, "echo on") == "on"

    in_lab(test)
