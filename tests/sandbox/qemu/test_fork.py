import asyncio
import time

from triax.sandbox.backend.qemu.saving import join_memory


def test_children_go_on_where_the_source_was_and_never_see_each_other(in_lab, said, content, until, grows):
    async def test(lab):
        machine = await lab.create()
        await said(machine, "echo common > /root/file; echo secret > /dev/shm/memory")
        await machine.start(
            "i=0; while true; do i=$((i+1)); echo $i > /tmp/new; mv /tmp/new /tmp/count; sleep 0.05; done"
        )
        await until(lambda: content(machine, "/tmp/count"))
        children = await lab.fork(machine, "one", "two", "three")
        await said(machine, "echo source > /root/file; echo source > /dev/shm/memory; sync")
        for child in children:
            assert await said(child, "cat /root/file /dev/shm/memory") == "common\nsecret"
            assert child.generation == 1
            await said(child, "hostname > /root/file; hostname > /dev/shm/memory; sync")
        for child in children:
            assert await said(child, "cat /root/file /dev/shm/memory") == f"{child.id}\n{child.id}"
        assert await said(machine, "cat /root/file /dev/shm/memory") == "source\nsource"
        for each in (machine, *children):
            before = int(await said(each, "cat /tmp/count"))
            assert int(await grows(each, "/tmp/count")) > before

    in_lab(test)


def test_sweeping_up_meanwhile_takes_nothing_from_children_on_their_way(in_lab, said):
    async def test(lab):
        machine = await lab.create()
        forking = asyncio.create_task(lab.fork(machine, "one", "two"))
        while not forking.done():
            await lab.backend.reap(frozenset({machine.id, "one", "two"}))
            await asyncio.sleep(0.005)
        for child in await forking:
            assert await said(child, "echo on") == "on"

    in_lab(test)


def test_every_child_has_entropy_names_and_credentials_of_its_own(in_lab, said):
    async def test(lab):
        machine = await lab.create()
        asked = "cat /proc/sys/kernel/random/uuid; head -c 16 /dev/urandom | md5sum; cat /etc/machine-id; hostname; "
        asked += "cat /run/triax/token; echo; cat /etc/hostname; cat /run/triax/generation"
        children = await lab.fork(machine, "one", "two", "three")
        answers = [(await said(each, asked)).split("\n") for each in (machine, *children)]
        for column in list(zip(*answers, strict=True))[:-1]:
            assert len(set(column)) == 4, column
        assert [answer[-1] for answer in answers] == ["0", "1", "1", "1"]
        assert [answer[3] for answer in answers] == ["source", "one", "two", "three"]
        assert [answer[5] for answer in answers] == ["source", "one", "two", "three"]
        assert [answer[4] for answer in answers] == [each.token for each in (machine, *children)]

    in_lab(test)


def test_hooks_run_before_any_process_goes_on(in_lab, said, content, until):
    async def test(lab):
        machine = await lab.create()
        await machine.write(
            "/etc/triax/restore.d/seed",
            b"#!/bin/sh\nsleep 0.3\nprintf %s-$TRIAX_GENERATION $(hostname) > /run/seed\n",
            0o755,
        )
        await said(machine, "(while true; do cat /run/seed >> /tmp/seen; sleep 0.01; done) >/dev/null 2>&1 &")
        (child,) = await lab.fork(machine, "child")
        await until(lambda: content(child, "/tmp/seen"))
        seen = await said(child, "cat /run/seed; echo; cat /tmp/seen | tr -s '\\n'")
        assert seen.startswith("child-1\n")
        # the loop never read between its wake-up and the new seed
        assert set(seen.split("\n")[1].replace("child-1", "x")) <= {"x"}

    in_lab(test)


def test_a_fork_of_a_fork_while_a_process_writes(in_lab, content, until):
    async def test(lab):
        machine = await lab.create()
        await machine.start("i=0; while true; do i=$((i+1)); echo $i >> /root/log; done")

        async def has_written(one):
            return len(await content(one, "/root/log")) > 30

        await until(lambda: has_written(machine))
        (child,) = await lab.fork(machine, "child")
        (grandchild,) = await lab.fork(child, "grandchild")
        for each in (machine, child, grandchild):
            lines = (await each.read("/root/log")).split(b"\n")[:-1]
            assert lines == [b"%d" % number for number in range(1, len(lines) + 1)]
            assert len(lines) > 10
        assert grandchild.generation == 2

    in_lab(test)


def test_copies_of_a_much_changed_source_share_one_memory(in_lab, said):
    async def test(lab):
        machine = await lab.create()
        await said(machine, "dd if=/dev/urandom of=/dev/shm/big bs=1M count=20 2>/dev/null")
        sums = await said(machine, "md5sum /dev/shm/big")
        children = await lab.fork(machine, "one", "two")
        for child in children:
            assert await said(child, "md5sum /dev/shm/big") == sums
        usage = await children[0].usage()
        # twenty of them would be the file's, were they not shared
        assert usage.memory_bytes < 70 * 2**20

    in_lab(test)


def test_joined_memory_is_the_same_memory(in_lab, said):
    async def test(lab):
        machine = await lab.create()
        await said(machine, "dd if=/dev/urandom of=/dev/shm/a bs=1M count=3 2>/dev/null")
        sums = await said(machine, "md5sum /dev/shm/a")
        folder = lab.new_folder("snapshot")
        await machine.snapshot(folder)
        join_memory(folder)
        assert await said(await lab.restore(folder, "copy"), "md5sum /dev/shm/a") == sums

    in_lab(test)


def test_a_child_that_cannot_be_made_is_an_error_in_its_place(in_lab, said):
    async def test(lab):
        machine = await lab.create()
        children = await lab.fork(machine, "source", "other")
        assert children[0].kind == "refused"
        assert await said(children[1], "hostname") == "other"
        assert await said(machine, "hostname") == "source"

    in_lab(test)


def test_the_clock_of_a_child_is_the_hosts(in_lab, said):
    async def test(lab):
        machine = await lab.create()
        folder = lab.new_folder("snapshot")
        await machine.suspend(folder)
        await asyncio.sleep(2.5)
        restored = await lab.restore(folder, "source")
        before = time.time()
        inside = int(await said(restored, "date +%s"))
        assert int(before) - 1 <= inside <= time.time()

    in_lab(test)


def test_f34_live_programs_are_told_of_a_new_machine_unless_a_deterministic_copy_is_asked_for(
    in_lab, renewal, until, said
):
    listens, draws = renewal

    async def drew(machine, *wanted):
        await until(lambda: _are(machine, list(wanted)))

    async def _are(machine, wanted):
        return await draws(machine) == wanted

    async def test(lab):
        machine = await lab.create()
        await listens(machine)
        assert await draws(machine) == [["0"], [], ["first"]]
        one, two = await lab.fork(machine, "one", "two")
        for copy in (one, two):
            await drew(copy, ["1"], ["1"], ["first", "again"])
        alike = await lab.fork(machine, "three", "four", deterministic=True)
        ids = set()
        for copy in alike:
            assert await draws(copy) == [["0"], [], ["first"]]
            ids.add(await said(copy, "cat /proc/sys/kernel/random/uuid /run/triax/token; hostname"))
        assert len(ids) == 2, "secrets and names differ all the same"
        (later,) = await lab.fork(alike[0], "five")
        await drew(later, ["2"], ["2"], ["first", "again"])
        assert await draws(machine) == [["0"], [], ["first"]]

    in_lab(test)
