"""Files of a sandbox as its host reaches them: what is the kernel's own, and what leads out."""

import os
from pathlib import Path

import pytest

from triax.errors import SandboxError
from triax.sandbox.backend.tree import Tree


@pytest.mark.parametrize("path", ["/proc/self/comm", "/proc/thread-self/comm", "/sys/kernel/uevent_seqnum"])
def test_the_kernels_own_files_are_neither_read_nor_written(path):
    before = Path("/proc/self/comm").read_bytes()
    tree = Tree("/")
    for deed in (tree.read, lambda path: tree.write(path, b"evil"), tree.remove):
        with pytest.raises(SandboxError) as caught:
            deed(path)
        assert caught.value.kind == "refused"
        assert "the kernel's own" in str(caught.value) or "circles" in str(caught.value)
    assert Path("/proc/self/comm").read_bytes() == before


def test_nothing_is_moved_into_the_kernels_files_or_made_there(tmp_path):
    (tmp_path / "mine").write_bytes(b"x")
    tree = Tree("/")
    for deed in (
        lambda: tree.rename(str(tmp_path / "mine"), "/proc/mine"),
        lambda: tree.rename("/proc/version", str(tmp_path / "version")),
        lambda: tree.make_directory("/proc/mine"),
        lambda: tree.write("/proc/mine/deep", b"x"),
    ):
        with pytest.raises(SandboxError, match="the kernel's own"):
            deed()
    assert (tmp_path / "mine").read_bytes() == b"x"


def test_a_symlink_leads_to_what_lies_below_the_root_of_the_tree_alone(tmp_path):
    root, outside = tmp_path / "root", tmp_path / "outside"
    root.mkdir()
    outside.write_bytes(b"secret")
    for name, target in {"up": "../outside", "whole": str(outside), "deep": "../../../../../.." + str(outside)}.items():
        (root / name).symlink_to(target)
        tree = Tree(str(root))
        with pytest.raises(SandboxError) as caught:
            tree.read(name)
        assert caught.value.status == 404, "it begins at the tree's own root"
        with pytest.raises(SandboxError):
            tree.write(name + "/x", b"x")
    (root / "folder").symlink_to(tmp_path)
    with pytest.raises(SandboxError):
        tree.list("folder")
    tree.write("made", b"1", 0o640)
    assert (root / "made").stat().st_mode & 0o777 == 0o640
    tree.write("made", b"22")
    assert (root / "made").read_bytes() == b"22"
    assert (root / "made").stat().st_mode & 0o777 == 0o640, "the mode is for a new file"
    tree.remove("up")
    assert not os.path.lexists(root / "up")
    assert outside.read_bytes() == b"secret"
    for path in ("/", ".", "..", "made/.."):
        with pytest.raises(SandboxError, match="the root itself"):
            tree.remove(path)


def test_a_pipe_is_not_opened_and_a_range_is_cut_out(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "file").write_bytes(bytes(range(100)))
    tree = Tree(str(tmp_path))
    for deed in (tree.read, lambda path: tree.write(path, b"x")):
        with pytest.raises(SandboxError, match="no regular file"):
            deed("pipe")
    assert tree.read("file", 10, 5) == bytes(range(10, 15))
    assert tree.read("file", 98, 5) == bytes([98, 99])
    assert tree.read("file", 200) == b""
    assert tree.read("file", 0, 0) == b""
    assert [entry.kind for entry in tree.list("/")] == ["file", "other"]
