"""The pieces that need no machine: pages, layers, frames, archives."""

import asyncio
import json
import mmap
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from triax.errors import SandboxError
from triax.sandbox.backend.qemu import disk
from triax.sandbox.backend.qemu.memory import PAGE, Pages, Region, capture, changed, region, runs
from triax.sandbox.guest.build import archive, unsigned
from triax.sandbox.guest.channel import Channel
from triax.sandbox.guest.kernel import kernel, unpacked
from triax.sandbox.guest.wire import HEAD, Kind, frame, number


class Mapped:
    """A private mapping of a file in this process, as a machine has one."""

    def __init__(self, path, pages):
        path.write_bytes(b"\1" * PAGE * pages)
        self.path = path
        with path.open("r+b") as file:
            self.map = mmap.mmap(file.fileno(), 0, flags=mmap.MAP_PRIVATE)
        self.region = region(os.getpid(), path)

    def page(self, place):
        return self.map[place * PAGE : (place + 1) * PAGE]

    def set(self, place, byte):
        self.map[place * PAGE : (place + 1) * PAGE] = bytes([byte]) * PAGE


@given(
    first=st.dictionaries(st.integers(0, 63), st.integers(0, 3), max_size=20),
    second=st.dictionaries(st.integers(0, 63), st.integers(0, 3), max_size=20),
)
def test_what_was_captured_over_two_snapshots_is_what_the_memory_was(tmp_path_factory, first, second):
    folder = tmp_path_factory.mktemp("memory")
    source = Mapped(folder / "base", 64)
    for place, byte in first.items():
        source.set(place, byte)
    one = capture(source.region, folder / "one")
    for place, byte in second.items():
        source.set(place, byte)
    two = capture(source.region, folder / "two", [one])
    assert set(changed(source.region)) == set(first) | set(second)
    # the second holds no page that the first has already
    really = {place for place, byte in second.items() if first.get(place, None) != byte}
    assert set(two.data.tolist()) | set(two.empty.tolist()) == really
    one.save_index(folder / "one.index")
    two.save_index(folder / "two.index")
    target = Mapped(folder / "again", 64)
    for name in ("one", "two"):
        Pages.load(folder / name, folder / f"{name}.index").put_into(target.region)
    assert target.map[:] == source.map[:]
    shutil.copy(folder / "base", folder / "flat")
    with (folder / "flat").open("r+b") as file:
        for pages in (one, two):
            pages.put_into_file(file.fileno())
    assert (folder / "flat").read_bytes() == source.map[:]


def test_altered_pages_are_noticed(tmp_path):
    source = Mapped(tmp_path / "base", 8)
    source.set(3, 7)
    pages = capture(source.region, tmp_path / "pages")
    pages.path.write_bytes(b"\0" * PAGE)
    with pytest.raises(SandboxError, match="damaged"):
        pages.put_into(source.region)


def test_memory_of_a_process_that_is_gone_is_an_error(tmp_path):
    (tmp_path / "base").write_bytes(bytes(PAGE))
    with pytest.raises(SandboxError, match="gone"):
        region(2**22 - 1, tmp_path / "base")
    with pytest.raises(SandboxError):
        changed(Region(2**22 - 1, 0, PAGE))


def test_runs_cover_every_page_once_and_are_never_too_long():
    pages = np.array([0, 1, 2, 3, 9, 10, 12])
    assert runs(pages, 3) == [(0, 3), (3, 1), (9, 2), (12, 1)]
    assert runs(np.array([], int)) == []


@pytest.mark.skipif(not shutil.which("qemu-img"), reason="no qemu-img: run tools/system-packages.sh sandbox")
@pytest.mark.parametrize("size", [2**20, 523 * 2**20, 40 * 2**30])
def test_a_layer_is_what_qemu_takes_for_one(tmp_path, size):
    disk.make_layer(tmp_path / "layer", size)
    check = subprocess.run(["qemu-img", "check", tmp_path / "layer"], capture_output=True, text=True, check=False)
    assert check.returncode == 0, check
    told = subprocess.run(["qemu-img", "info", tmp_path / "layer"], capture_output=True, text=True, check=True).stdout
    assert f"({size} bytes)" in told
    with pytest.raises(FileExistsError):
        disk.make_layer(tmp_path / "layer", size)


def test_holes_stay_holes_in_a_copy(tmp_path):
    with (tmp_path / "old").open("wb") as file:
        file.truncate(64 * 2**20)
        file.seek(2**20)
        file.write(b"data" * 1000)
    disk.copy_sparse(tmp_path / "old", tmp_path / "new")
    assert (tmp_path / "new").read_bytes() == (tmp_path / "old").read_bytes()
    assert (tmp_path / "new").stat().st_blocks * 512 < 2**20
    with tempfile.TemporaryDirectory(dir="/dev/shm") as elsewhere:  # most often another file system
        disk.link(tmp_path / "old", Path(elsewhere) / "new")
        assert (Path(elsewhere) / "new").read_bytes() == (tmp_path / "old").read_bytes()


@pytest.mark.parametrize(
    "sent",
    [
        HEAD.pack(2**31, Kind.OUT, 1),
        HEAD.pack(0, 999, 1),
        frame(Kind.OPEN, 5),
        frame(Kind.EXIT, 1, b"short"),
        frame(Kind.OUT, 1, b"x" * 300_000),
        frame(Kind.HELLO, 1),
        frame(Kind.CREDIT, 1, b""),
    ],
)
def test_a_guest_that_breaks_the_protocol_ends_its_channel_and_nothing_else(sent):
    async def test():
        channel = Channel()
        stream = channel.open_stream(Kind.RUN, b"")
        channel.data_received(sent)
        with pytest.raises(SandboxError, match="out of step"):
            await asyncio.wait_for(stream.ended, 5)
        with pytest.raises(SandboxError):
            channel.check()

    asyncio.run(test())


@given(
    bodies=st.lists(st.binary(max_size=50), max_size=5),
    cuts=st.lists(st.integers(0, 400), max_size=5).map(sorted),
)
def test_frames_arrive_whole_however_they_are_cut(bodies, cuts):
    async def test():
        channel = Channel()
        stream = channel.open_stream(Kind.RUN, b"")
        ending = frame(Kind.EXIT, 1, number(3) + number(0) + number(0))
        whole = b"".join(frame(Kind.OUT, 1, body) for body in bodies) + ending
        for start, end in zip([0, *cuts], [*cuts, 10**6], strict=True):
            channel.data_received(whole[start:end])
        got = []
        while (piece := await stream.next()) is not None:
            got.append(piece[1])
        assert got == bodies
        assert stream.ended.result() == (3, 0, False)

    asyncio.run(test())


def test_an_archive_is_what_a_kernel_unpacks(tmp_path):
    whole = archive({"init": b"#!", "modules/a.ko": b"module" * 100})
    assert whole.count(b"070701") == 6
    busybox = shutil.which("busybox")
    if busybox:
        subprocess.run([busybox, "cpio", "-id"], input=whole, cwd=tmp_path, capture_output=True, check=False)
        assert (tmp_path / "modules/a.ko").read_bytes() == b"module" * 100


def test_a_module_loses_its_signature_and_nothing_else():
    code = bytes(range(200))
    signature = b"signature" * 40
    about = b"\0\0\2\0\0\0\0\0" + len(signature).to_bytes(4, "big")
    assert unsigned(code + signature + about + b"~Module signature appended~\n") == code
    assert unsigned(code) == code


def test_what_is_no_packed_kernel_is_left_as_it_is():
    assert unpacked(b"") == b""
    assert unpacked(b"ELF" * 1000) == b"ELF" * 1000


@pytest.mark.skipif(not shutil.which("qemu-io"), reason="no qemu-io: run tools/system-packages.sh sandbox")
def test_joined_layers_are_the_same_disk_zeros_over_data_among_it(tmp_path):
    size = 4 * 2**20
    base = tmp_path / "base"
    base.write_bytes(b"b" * size)
    layers = [tmp_path / f"layer{place}" for place in range(3)]
    for place, layer in enumerate(layers):
        disk.make_layer(layer, size)
        whole = "json:" + json.dumps(disk.plain(disk.chain(base, layers[: place + 1])))
        writes = [f"write -P {place + 1} {place * 70}k 100k", f"write -z {place * 512 + 1024}k 64k"]
        subprocess.run(
            ["qemu-io", *(word for one in writes for word in ("-c", one)), whole], check=True, stdout=subprocess.DEVNULL
        )
    disk.flatten(layers, base, size, tmp_path / "flat")
    raws = []
    for chain in (layers, [tmp_path / "flat"]):
        raws.append(tmp_path / f"raw{len(raws)}")
        source = "json:" + json.dumps(disk.plain(disk.chain(base, chain)))
        subprocess.run(["qemu-img", "convert", "-O", "raw", source, raws[-1]], check=True)
    assert raws[0].read_bytes() == raws[1].read_bytes()
    assert raws[0].read_bytes()[1024 * 1024] == 0
    assert raws[0].read_bytes()[3 * 2**20] == ord("b")


def test_f04_the_newest_of_several_kernels_is_taken_by_its_numbers(tmp_path):
    for version in ("6.1.0-9-cloud-amd64", "6.1.0-50-cloud-amd64", "6.1.0-5-cloud-amd64"):
        (tmp_path / f"kernel-{version}").mkdir()
    assert kernel(tmp_path).version == "6.1.0-50-cloud-amd64"
