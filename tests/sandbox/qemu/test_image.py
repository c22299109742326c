import os
import shutil
import subprocess

import pytest

from triax.errors import SandboxError
from triax.sandbox import image


def run(*words):
    subprocess.run(words, check=True, capture_output=True)


def rootfs(folder):
    (folder / "bin").mkdir(parents=True)
    (folder / "etc").mkdir()
    for name in ("busybox", "sh", "cat", "ls"):
        shutil.copy(shutil.which("busybox"), folder / "bin" / name)
    (folder / "etc/motd").write_text("of my own\n")
    (folder / "bin/odd").symlink_to("cat")
    return folder


def test_a_folder_becomes_the_root_and_is_never_written(in_lab, said):
    async def test(lab):
        folder = rootfs(lab.folder / "root")
        machine = await lab.create(image=str(folder))
        assert await said(machine, "cat /etc/motd") == "of my own"
        await said(machine, "echo changed > /etc/motd")
        assert (folder / "etc/motd").read_text() == "of my own\n"
        other = await lab.create("other", image=str(folder))
        assert await said(other, "cat /etc/motd; test -L /bin/odd && echo link") == "of my own\nlink"

    in_lab(test)


@pytest.mark.skipif(not shutil.which("umoci"), reason="no umoci: run tools/system-packages.sh sandbox")
def test_an_oci_layout_boots_with_all_its_layers(in_lab, said):
    async def test(lab):
        layout, bundle = lab.folder / "layout", lab.folder / "bundle"
        run("umoci", "init", "--layout", layout)
        run("umoci", "new", "--image", f"{layout}:mine")
        run("umoci", "unpack", "--image", f"{layout}:mine", bundle)
        shutil.rmtree(bundle / "rootfs")
        rootfs(bundle / "rootfs")
        run("umoci", "repack", "--image", f"{layout}:mine", bundle)
        (bundle / "rootfs/etc/second").write_text("layer\n")
        shutil.rmtree(bundle)
        run("umoci", "unpack", "--image", f"{layout}:mine", bundle)
        (bundle / "rootfs/etc/second").write_text("layer\n")
        (bundle / "rootfs/bin/odd").unlink()
        run("umoci", "repack", "--image", f"{layout}:mine", bundle)
        machine = await lab.create(image=f"{layout}:mine")
        assert await said(machine, "cat /etc/motd /etc/second; ls /bin") == "of my own\nlayer\nbusybox\ncat\nls\nsh"
        with pytest.raises(SandboxError, match="without an image `other`") as caught:
            await lab.create("other", image=f"{layout}:other")
        assert caught.value.status == 404

    in_lab(test)


def test_images_that_do_not_exist_or_hold_no_system_are_refused(tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("")
    broken = tmp_path / "broken"
    broken.mkdir()
    (broken / "oci-layout").write_text("{}")
    (broken / "index.json").write_text("[]")
    for name, word in [
        (str(tmp_path / "nothing"), "no such folder"),
        (str(tmp_path / "file"), "no such folder"),
        (str(tmp_path / "empty"), "holds no system"),
        (str(broken), "OCI layout without"),
        ("a\0b", "no path"),
        ("", "no path"),
    ]:
        with pytest.raises(SandboxError, match=word) as caught:
            image.tree(name, tmp_path / "cache")
        assert caught.value.kind == "refused"


def test_an_image_without_a_shell_boots_and_says_what_it_lacks(in_lab):
    async def test(lab):
        folder = lab.folder / "bare"
        (folder / "usr").mkdir(parents=True)
        machine = await lab.create(image=str(folder))
        result = await machine.exec("true")
        assert (result.exit_code, result.outcome) == (127, "ok")
        assert b"/bin/sh" in result.stderr
        await machine.write("/file", b"x")
        assert await machine.read("/file") == b"x"

    in_lab(test)


def test_too_little_memory_is_refused_before_anything_starts(in_lab):
    from triax.sandbox.protocol import Resources

    async def test(lab):
        with pytest.raises(SandboxError, match="memory_mib") as caught:
            await lab.create(resources=Resources(memory_mib=32))
        assert caught.value.kind == "refused"
        assert not lab.backend.root.exists() or os.listdir(lab.backend.root) == []

    in_lab(test)
