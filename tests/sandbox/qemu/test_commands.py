"""What commands of a guest find, and what becomes of the next one."""

import pytest

from triax.errors import SandboxError
from triax.sandbox.backend.qemu import QemuBackend
from triax.sandbox.protocol import Resources, Spec


def test_f04_commands_go_on_after_one_was_killed_in_copies_too(in_lab, said):
    async def test(lab):
        machine = await lab.create()
        for round in range(3):
            result = await machine.exec(["sleep", "4701"], timeout_s=0.2)
            assert (result.outcome, result.signal) == ("timeout", 9)
            assert [await said(machine, f"echo {word}") for word in "abc"] == ["a", "b", "c"], round
        process = await machine.start(["sleep", "4702"])
        await process.kill()
        assert (await process.wait()).signal == 9
        assert await said(machine, "echo after") == "after"
        own = "$(sed -n s/^0:://p /proc/self/cgroup)"
        result = await machine.exec(f"echo 1 > /sys/fs/cgroup{own}/cgroup.kill; sleep 4703")
        assert result.signal == 9
        assert await said(machine, "echo after") == "after"
        (copy,) = await lab.fork(machine, "copy")
        assert await said(copy, "echo copy") == "copy"
        # a group that was killed is taken away, not piled up
        held = [await said(machine, "ls -d /sys/fs/cgroup/work/*/ | wc -l")]
        for _ in range(3):
            await machine.exec(["sleep", "4704"], timeout_s=0.05)
        held.append(await said(machine, "ls -d /sys/fs/cgroup/work/*/ | wc -l"))
        assert held[0] == held[1]
        assert "work" in await said(machine, "cat /proc/self/cgroup")

    in_lab(test)


def test_f04_a_kernel_whose_commands_die_after_a_kill_is_refused_with_its_name(in_lab, monkeypatch):
    """The template is looked at before any sandbox is made from it; the fault is brought about in the guest itself."""
    boot = QemuBackend.boot

    async def faulty(self, *args):
        machine = await boot(self, *args)
        command = "while :; do for f in /sys/fs/cgroup/work/*/cgroup.kill; do echo 1 > $f; done; done"
        await machine.exec(f"echo $$ > /sys/fs/cgroup/cgroup.procs; ({command}) >/dev/null 2>&1 &")
        return machine

    monkeypatch.setattr(QemuBackend, "boot", faulty)

    async def test(lab):
        with pytest.raises(SandboxError, match=r"guest kernel \d.*after a command was killed"):
            await lab.create(resources=Resources(memory_mib=97))

    in_lab(test)


def test_f33_what_a_command_or_its_caller_did_is_no_failed_sandbox(in_lab, said):
    async def refused(deed, status):
        with pytest.raises(SandboxError) as caught:
            await deed
        assert (caught.value.kind, caught.value.status) == ("refused", status), caught.value

    async def test(lab):
        machine = await lab.create()
        await said(machine, "mkdir -p a/b full; chmod 700 a; : > full/x; ln -s loop loop")
        await refused(machine.rename("a", "a/b/c"), 400)
        await refused(machine.rename("a", "full"), 409)
        await refused(machine.read("loop"), 400)
        await refused(machine.read("full/x/y"), 400)
        await refused(machine.write("n" * 300, b""), 400)
        await refused(machine.read("full/x", 2**70), 400)
        await refused(machine.exec("true", cwd="full/x"), 400)
        await refused(machine.exec("true", user="user", cwd="/root/a"), 403)
        assert (await machine.exec(["./full/x"])).exit_code == 126
        assert (await machine.exec(["./full/x/y"])).exit_code == 127
        await said(machine, "echo fine")

    in_lab(test)


def test_f31_relative_folders_begin_at_the_home_for_commands_and_files_alike(in_lab, said):
    async def test(lab):
        machine = await lab.create()
        accounts = "odd:x:1001:1001::/srv/odd:/bin/sh\n"
        await said(
            machine, f"mkdir -p /srv/odd/in; chown 1001 /srv/odd /srv/odd/in; printf '{accounts}' >> /etc/passwd"
        )
        for user, home in {"root": "/root", "user": "/home/user", "odd": "/srv/odd", "1001": "/srv/odd"}.items():
            machine.spec, machine._home = Spec(user=user), None
            for cwd in (None, ".", "~"):
                assert await said(machine, "pwd -P", cwd=cwd) == home, (user, cwd)
            await machine.write("deep/note", user.encode())
            assert await said(machine, "cat note; cat ../deep/note", cwd="deep") == user * 2
            assert await said(machine, "cat note", cwd="~/deep") == user
            assert (await machine.stat("deep")).path == f"{home}/deep"
        machine.spec, machine._home = Spec(user="user", cwd="/tmp"), None
        await machine.write("deep/note", b"own")
        assert await said(machine, "cat deep/note") == "own"
        assert (await said(machine, "pwd", cwd="~/deep")).split("/")[1:] == ["home", "user", "deep"]
        with pytest.raises(SandboxError, match="make it first") as caught:
            await machine.exec("true", cwd="nowhere")
        assert caught.value.status == 404
        # a home that is not there leaves the root
        await said(machine, "rm -r /srv/odd", user="root", cwd="/")
        assert await said(machine, "pwd", user="odd", cwd="/") == "/"
        machine.spec = Spec()
        assert await said(machine, "pwd", user="odd") == "/"

    in_lab(test)
