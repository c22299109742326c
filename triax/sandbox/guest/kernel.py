"""The guest's kernel: Debian's for cloud machines, fetched by the package manager and unpacked."""

import ctypes
import lzma
import re
import shutil
import struct
import subprocess
import tarfile
import zlib
from dataclasses import dataclass
from pathlib import Path

from triax.errors import SandboxError
from triax.sandbox.guest.build import appearing

PACKAGE = "linux-image-cloud-amd64"
MODULES = ("virtio_ring", "virtio", "virtio_mmio", "virtio_blk", "virtio_console")
LZ4_BLOCK = 8 * 2**20  # of the format that kernels are packed in


@dataclass(frozen=True, slots=True)
class Kernel:
    """A kernel, ready to boot.

    Args:
        version: As the package names it, such as `6.1.0-57-cloud-amd64`.
        image: The kernel: unpacked where its form is known, since unpacking in an emulated guest takes seconds.
        modules: What its drivers need, by name.
    """

    version: str
    image: Path
    modules: dict[str, Path]


def kernel(cache: Path, package: Path | None = None) -> Kernel:
    """Return a kernel, fetching its package unless that was done before.

    Args:
        cache: Where packages and what was unpacked are kept.
        package: A Debian package of a kernel; none for the newest cloud kernel that the package manager offers.

    Raises:
        SandboxError: It cannot be fetched or is no kernel package.
    """
    folders = sorted(cache.glob("kernel-*"), key=lambda folder: _age(folder.name)) if package is None else []
    if not folders:
        folders = [_unpack(package or _fetch(cache), cache)]
    folder = folders[-1]
    modules = {name: folder / f"{name}.ko" for name in MODULES if (folder / f"{name}.ko").exists()}
    return Kernel(folder.name.removeprefix("kernel-"), folder / "vmlinux", modules)


def _age(version: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", version)]


def _fetch(cache: Path) -> Path:
    if shutil.which("apt-get") is None:
        raise SandboxError(
            "guest kernel: this host has no `apt-get` to fetch it with; give the path of a Debian `linux-image` package"
        )
    name = PACKAGE
    listed = subprocess.run(["apt-cache", "depends", PACKAGE], capture_output=True, text=True, check=False).stdout
    for line in listed.splitlines():
        if "Depends: linux-image-" in line:
            name = line.split()[-1]
    folder = cache / "packages"
    folder.mkdir(parents=True, exist_ok=True)
    done = subprocess.run(
        ["apt-get", "download", "-qq", name], cwd=folder, capture_output=True, text=True, check=False, timeout=600
    )
    found = sorted(folder.glob(f"{name}_*.deb"), key=lambda path: _age(path.name))
    if done.returncode or not found:
        raise SandboxError(
            f"guest kernel: `apt-get download {name}` failed; it said: {done.stderr.strip()[-500:]}; "
            "run `apt-get update`, or give the path of a Debian `linux-image` package"
        )
    return found[-1]


def _unpack(package: Path, cache: Path) -> Path:
    unpacking = subprocess.Popen(["dpkg-deb", "--fsys-tarfile", str(package)], stdout=subprocess.PIPE)
    image, modules, version = b"", {}, ""
    try:
        with tarfile.open(fileobj=unpacking.stdout, mode="r|") as files:
            for entry in files:
                name = entry.name.rsplit("/", 1)[-1]
                content = files.extractfile(entry) if entry.isfile() else None
                if content is not None and name.startswith("vmlinuz-"):
                    image, version = content.read(), name.removeprefix("vmlinuz-")
                elif content is not None and name.split(".ko")[0] in MODULES and ".ko" in name:
                    data = content.read()
                    modules[name.split(".ko")[0]] = lzma.decompress(data) if name.endswith(".xz") else data
    except tarfile.TarError as problem:
        raise SandboxError(f"guest kernel: {package} is no Debian package; {problem}; give another") from None
    finally:
        unpacking.communicate()
    if not image or "virtio_blk" not in modules:
        raise SandboxError(f"guest kernel: {package} has no kernel with virtio modules; give a `linux-image` package")
    folder = cache / f"kernel-{version}"
    if not folder.exists():
        with appearing(folder) as fresh:
            fresh.mkdir()
            (fresh / "vmlinux").write_bytes(unpacked(image))
            for name, data in modules.items():
                (fresh / f"{name}.ko").write_bytes(data)
    return folder


def unpacked(image: bytes) -> bytes:
    """Return the kernel inside a boot image, or the image itself if its form is not known."""
    if image[0x1FE:0x200] != b"\x55\xaa" or image[0x202:0x206] != b"HdrS":
        return image
    start, size = struct.unpack_from("<II", image, 0x248)
    start += ((image[0x1F1] or 4) + 1) * 512
    payload = image[start : start + size - 4]  # the last four bytes tell the unpacked size
    try:
        if payload.startswith(b"\x02\x21\x4c\x18"):
            return _lz4(payload)
        if payload.startswith(b"\xfd7zXZ"):
            return lzma.decompress(payload)
        if payload.startswith(b"\x1f\x8b"):
            return zlib.decompress(payload, wbits=31)
    except (OSError, ValueError, lzma.LZMAError, zlib.error):
        return image
    return image


def _lz4(payload: bytes) -> bytes:
    library = ctypes.CDLL("liblz4.so.1")
    block = ctypes.create_string_buffer(LZ4_BLOCK)
    parts, at = [], 4
    while at + 4 <= len(payload):
        (size,) = struct.unpack_from("<I", payload, at)
        at += 4
        if payload[at - 4 : at] == b"\x02\x21\x4c\x18":
            continue
        got = library.LZ4_decompress_safe(payload[at : at + size], block, size, LZ4_BLOCK)
        if got < 0:
            raise ValueError("a block that is not lz4")
        parts.append(block.raw[:got])
        at += size
    return b"".join(parts)
