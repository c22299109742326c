"""Root filesystems: from a folder or an OCI image to a read-only base, made once and shared by all its machines."""

import fcntl
import hashlib
import json
import os
import shutil
import subprocess
from collections.abc import Generator
from contextlib import contextmanager
from functools import cache as memoized
from pathlib import Path

from triax.errors import SandboxError
from triax.sandbox.guest.build import appearing

SYSTEM_FOLDERS = ("dev", "proc", "sys", "run", "tmp")
ACCOUNTS = (
    "root:x:0:0:root:/root:/bin/sh\nuser:x:1000:1000:user:/home/user:/bin/sh\nnobody:x:65534:65534::/:/bin/false\n"
)
GROUPS = "root:x:0:\ntty:x:5:\nuser:x:1000:\nnogroup:x:65534:\n"


def tree(image: str | None, cache: Path) -> Path:
    """Return a folder with the files of an image.

    Args:
        image: A folder with a root filesystem, an OCI layout (`path` or `path:tag`), or a name that skopeo understands
            such as `docker-archive:file.tar` or `docker://debian:12`; none for a minimal system of one program.
        cache: Where what was unpacked is kept.

    Raises:
        SandboxError: There is no such image, or it holds no system.
    """
    if image is None:
        return _minimal(cache)
    if "\0" in image or not image:
        raise SandboxError(f"image {image[:80]!r}: is no path and no name; give one", "refused", status=404)
    if "://" in image or image.startswith(("docker-archive:", "oci-archive:", "oci:", "docker:")):
        return _copied(image, cache)
    path, _, tag = image.partition(":")
    folder = Path(image if Path(image).exists() else path)
    if not folder.is_dir():
        raise SandboxError(
            f"image {image!r}: there is no such folder; give a root filesystem, an OCI layout or a `docker://` name",
            "refused",
            status=404,
        )
    if (folder / "oci-layout").exists():
        return _unpacked(folder, tag if folder == Path(path) else "", cache)
    if not any((folder / name).exists() or (folder / name).is_symlink() for name in ("bin", "usr", "sbin")):
        raise SandboxError(
            f"image {image!r}: holds no system; found neither `bin` nor `usr`; give a root filesystem", "refused"
        )
    return folder


def base(image: str | None, disk_mib: int, cache: Path) -> Path:
    """Return a read-only ext4 image of an image's files, with `disk_mib` to spare.

    Raises:
        SandboxError: The image cannot be used, or `mkfs.ext4` is missing or failed.
    """
    maker = shutil.which("mkfs.ext4", path=f"{os.defpath}:/usr/sbin:/sbin")
    if maker is None:
        raise SandboxError("image: found no `mkfs.ext4` to make file systems with; run `apt-get install e2fsprogs`")
    folder = tree(image, cache)
    digest, used = _measured_once(folder) if folder.is_relative_to(cache) else _measure(folder)
    size = used + used // 8 + (disk_mib + 8) * 2**20
    path = cache / f"image-{digest}-{size >> 20}.ext4"
    if path.exists():
        return path
    with locked(cache / "images.lock"):
        if path.exists():
            return path
        with appearing(path) as fresh:
            # without a journal, which a snapshot of memory and disk together never needs, and quick to emulate
            options = ["-q", "-O", "^has_journal,^metadata_csum,^resize_inode", "-m", "0", "-L", "triax"]
            command = [
                maker,
                *options,
                "-E",
                "root_owner=0:0,nodiscard",
                "-d",
                str(folder),
                str(fresh),
                f"{size >> 20}M",
            ]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode:
                raise SandboxError(f"image {image!r}: `mkfs.ext4` failed; it said: {done.stderr.strip()[-500:]}")
            fresh.chmod(0o444)
    return path


@contextmanager
def locked(path: Path) -> Generator[None]:
    """Hold a lock file, so that two processes do not make the same thing at once."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


@memoized
def _measured_once(folder: Path) -> tuple[str, int]:
    """Return what `_measure` does, of a tree that we made ourselves and nobody writes; a large one takes a while."""
    return _measure(folder)


def _measure(folder: Path) -> tuple[str, int]:
    """Return a digest of names, sizes, times and modes of a tree, and the bytes it takes."""
    digest, used = hashlib.sha256(), 0
    for place, folders, files in os.walk(folder):
        folders.sort()
        for name in sorted(files) + folders:
            about = os.lstat(os.path.join(place, name))
            line = (os.path.relpath(place, folder), name, about.st_size, about.st_mtime_ns, about.st_mode, about.st_uid)
            digest.update(repr(line).encode(errors="surrogateescape"))
            used += (about.st_size + 4095) // 4096 * 4096 + 256
    return digest.hexdigest()[:16], used


def _minimal(cache: Path) -> Path:
    busybox = shutil.which("busybox")
    if busybox is None:
        raise SandboxError("image: found no `busybox` for the minimal system; run `apt-get install busybox-static`")
    program = Path(busybox).read_bytes()
    folder = cache / f"minimal-{hashlib.sha256(program + ACCOUNTS.encode()).hexdigest()[:16]}"
    if folder.exists():
        return folder
    names = subprocess.run([busybox, "--list"], capture_output=True, text=True, check=True).stdout.split()
    with locked(cache / "images.lock"):
        if folder.exists():
            return folder
        with appearing(folder) as fresh:
            for name in ("bin", "sbin", "usr/bin", "usr/sbin", "etc", "root", "home/user", "var/tmp", *SYSTEM_FOLDERS):
                (fresh / name).mkdir(parents=True)
            (fresh / "bin/busybox").write_bytes(program)
            (fresh / "bin/busybox").chmod(0o755)
            for name in names:
                if name != "busybox":
                    (fresh / "bin" / name).symlink_to("busybox")
            (fresh / "usr/bin/env").symlink_to("../../bin/busybox")
            (fresh / "etc/passwd").write_text(ACCOUNTS)
            (fresh / "etc/group").write_text(GROUPS)
            (fresh / "etc/hosts").write_text("127.0.0.1 localhost\n")
            (fresh / "tmp").chmod(0o1777)
            if os.geteuid() == 0:
                os.chown(fresh / "home/user", 1000, 1000)
    return folder


def _copied(name: str, cache: Path) -> Path:
    copier = shutil.which("skopeo")
    if copier is None:
        raise SandboxError(f"image {name!r}: found no `skopeo` to fetch it with; run `apt-get install skopeo`")
    layout = cache / f"oci-{hashlib.sha256(name.encode()).hexdigest()[:16]}"
    with locked(cache / "images.lock"):
        if not layout.exists():
            with appearing(layout) as fresh:
                command = [copier, "copy", "--quiet", name, f"oci:{fresh}:latest"]
                done = subprocess.run(command, capture_output=True, text=True, check=False)
                if done.returncode:
                    raise SandboxError(
                        f"image {name!r}: cannot be fetched; skopeo said: {done.stderr.strip()[-500:]}",
                        "refused",
                        status=404,
                    )
    return _unpacked(layout, "latest", cache)


def _unpacked(layout: Path, tag: str, cache: Path) -> Path:
    try:
        index = json.loads((layout / "index.json").read_text())
        manifests = index["manifests"]
        names = [entry.get("annotations", {}).get("org.opencontainers.image.ref.name", "") for entry in manifests]
        place = names.index(tag) if tag else 0
        digest = manifests[place]["digest"].split(":")[1]
    except (OSError, ValueError, KeyError, IndexError, AttributeError, TypeError):
        raise SandboxError(
            f"image {layout}: is an OCI layout without an image `{tag or 'at all'}`; name one of its tags",
            "refused",
            status=404,
        ) from None
    unpacker = shutil.which("umoci")
    if unpacker is None:
        raise SandboxError(f"image {layout}: found no `umoci` to unpack it with; run `apt-get install umoci`")
    bundle = cache / f"bundle-{digest[:32]}"
    with locked(cache / "images.lock"):
        if not bundle.exists():
            with appearing(bundle) as fresh:
                rootless = [] if os.geteuid() == 0 else ["--rootless"]
                command = [unpacker, "unpack", *rootless, "--image", f"{layout}:{tag or names[0]}", str(fresh)]
                done = subprocess.run(command, capture_output=True, text=True, check=False)
                if done.returncode:
                    raise SandboxError(
                        f"image {layout}: cannot be unpacked; umoci said: {done.stderr.strip()[-500:]}", "refused"
                    )
    return bundle / "rootfs"
