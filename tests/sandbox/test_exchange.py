"""What is carried into a sandbox and out of it; symlinks are the ways out."""

import asyncio
import os
import posixpath

import pytest

from triax.errors import SandboxError
from triax.sandbox.exchange import _leads_out, download, upload
from triax.sandbox.protocol import Entry

INSIDE = [("link", "x"), ("link", "./x"), ("a/link", "../x"), ("a/b/link", "../../x"), ("a/link", ".."), ("link", ".")]
OUTSIDE = [
    ("link", ".."), ("link", "../x"), ("a/link", "../../x"), ("a/b/link", "../../../x"), ("link", "/etc/passwd"),
    ("link", "//x"), ("link", "x/../../y"), ("a/link", "./../../x"), ("a/link", "b/.."), ("link", "./.."),
]  # fmt: skip


@pytest.mark.parametrize(("place", "target"), INSIDE)
def test_a_symlink_that_stays_below_its_folder_is_kept(place, target):
    assert not _leads_out(place, target)
    assert not posixpath.normpath(posixpath.join(posixpath.dirname(place), target)).startswith("..")


@pytest.mark.parametrize(("place", "target"), OUTSIDE)
def test_a_symlink_that_leads_or_may_lead_out_is_refused_both_ways(place, target, hosting, started, tmp_path):
    assert _leads_out(place, target)

    async def run():
        async with hosting("process", tmp_path / "host") as host:
            sandbox = await started(host)
            here = tmp_path / "here"
            (here / place).parent.mkdir(parents=True)
            (here / place).symlink_to(target)
            with pytest.raises(SandboxError, match="symlink leads out") as caught:
                await upload(sandbox, here, "there")
            assert caught.value.kind == "refused"
            with pytest.raises(SandboxError):
                await sandbox.stat("there")
            await sandbox.make_directory(f"src/{posixpath.dirname(place)}")
            await sandbox.exec(["ln", "-s", target, f"src/{place}"])
            with pytest.raises(SandboxError, match="symlink leads out") as caught:
                await download(sandbox, "src", tmp_path / "back")
            assert caught.value.kind == "refused"
            assert not os.path.lexists(tmp_path / "back"), "nothing of a refused folder stays"
            assert not list(tmp_path.glob(".download-*"))

    asyncio.run(run())


def test_a_folder_comes_back_as_it_was_sent(hosting, started, tmp_path):
    async def run():
        async with hosting("process", tmp_path / "host") as host:
            sandbox = await started(host)
            here = tmp_path / "here"
            (here / "a/empty").mkdir(parents=True)
            (here / "a/run").write_bytes(b"#!/bin/sh\n")
            (here / "a/run").chmod(0o755)
            (here / "plain").write_bytes(bytes(range(256)) * 100)
            (here / "a/up").symlink_to("../plain")
            assert await upload(sandbox, here, "there") == 3
            assert await download(sandbox, "there", tmp_path / "back") == 3
            back = tmp_path / "back"
            assert sorted(path.relative_to(back).as_posix() for path in back.rglob("*")) == [
                "a", "a/empty", "a/run", "a/up", "plain",
            ]  # fmt: skip
            assert (back / "plain").read_bytes() == (here / "plain").read_bytes()
            assert os.readlink(back / "a/up") == "../plain"
            assert (back / "a/run").stat().st_mode & 0o777 == 0o755
            assert (back / "plain").stat().st_mode & 0o777 == 0o644
            with pytest.raises(SandboxError, match="most_bytes"):
                await download(sandbox, "there", tmp_path / "small", most_bytes=25_600)
            assert await download(sandbox, "there/plain", tmp_path / "one", most_bytes=25_600) == 1
            with pytest.raises(SandboxError, match="most_bytes"):
                await download(sandbox, "there/plain", tmp_path / "two", most_bytes=25_599)

    asyncio.run(run())


@pytest.mark.parametrize("path", ["src/..", "src/.", "src/", "", "..", "src/a\0b"])
def test_what_a_sandbox_calls_its_files_leads_nowhere_on_the_host(path, brittle, tmp_path):
    async def run():
        host, backend, sandbox = await brittle.in_status(tmp_path / "host", "running")
        machine = backend.machines[sandbox.id]

        async def stat(asked):
            return Entry(asked, "directory", 0, 0o755, 0.0)

        async def named(asked):
            return [Entry(path, "directory", 0, 0o755, 0.0)]

        machine.stat, machine.list = stat, named
        with pytest.raises(SandboxError, match="is no name of a file") as caught:
            await download(sandbox, "src", tmp_path / "back")
        assert caught.value.kind == "refused"
        assert [one.name for one in tmp_path.iterdir()] == ["host"]
        await host.close()

    asyncio.run(run())
