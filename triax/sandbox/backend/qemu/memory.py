"""A guest's memory: which pages differ from the file it was mapped from, and how they get out of and into a process.

A machine maps its memory privately from a file that nobody writes. The kernel then knows page by page what the machine
changed: such pages are its own (anonymous), the others still the file's. Reading that map takes a millisecond and needs
neither dirty tracking in the emulator nor a running migration.
"""

import mmap
import os
import struct
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from triax.errors import SandboxError

PAGE = mmap.PAGESIZE
WORDS = PAGE // 8
CHUNK_PAGES = 256
ENTRY = 8
PRESENT, SWAPPED, FILE_PAGE = 63, 62, 61  # bits of an entry of /proc/PID/pagemap
HEAD = struct.Struct("<8sQQI")
MAGIC = b"triaxpg1"


@dataclass(frozen=True, slots=True)
class Region:
    """Where a process has its guest's memory.

    Args:
        pid: The process.
        start: First address.
        size: Bytes.
    """

    pid: int
    start: int
    size: int


def region(pid: int, path: Path) -> Region:
    """Find the memory that a process mapped from a file.

    Raises:
        SandboxError: It has none, as one that died.
    """
    about = path.stat()
    device = f"{os.major(about.st_dev):02x}:{os.minor(about.st_dev):02x}"
    pieces = []
    try:
        with open(f"/proc/{pid}/maps") as lines:
            for line in lines:
                span, _, offset, where, inode, *_ = line.split()
                if where == device and int(inode) == about.st_ino:
                    low, high = (int(part, 16) for part in span.split("-"))
                    pieces.append((low, high, int(offset, 16)))
    except OSError:
        pieces = []
    pieces.sort()
    whole = bool(pieces) and all(low - pieces[0][0] == offset for low, _, offset in pieces)
    if not whole:
        raise SandboxError(f"memory of process {pid}: it has not mapped {path.name}; the machine is gone or starting")
    return Region(pid, pieces[0][0], pieces[-1][1] - pieces[0][0])


def changed(where: Region) -> np.ndarray:
    """Return the numbers of the pages that a machine changed since it mapped its file, in order."""
    try:
        with open(f"/proc/{where.pid}/pagemap", "rb", buffering=0) as file:
            raw = os.pread(file.fileno(), where.size // PAGE * ENTRY, where.start // PAGE * ENTRY)
    except OSError as problem:
        raise SandboxError(f"memory of process {where.pid}: its page map cannot be read; {problem}") from None
    entries = np.frombuffer(raw, "<u8")
    bits = [(entries >> np.uint64(bit)) & np.uint64(1) for bit in (PRESENT, SWAPPED, FILE_PAGE)]
    return np.flatnonzero((bits[0] & (bits[2] ^ np.uint64(1))) | bits[1])


def runs(pages: np.ndarray, longest: int = CHUNK_PAGES) -> list[tuple[int, int]]:
    """Return runs of neighbouring pages as first page and number, none longer than `longest`."""
    if not len(pages):
        return []
    breaks = np.flatnonzero(np.diff(pages) != 1) + 1
    found = []
    for part in np.split(pages, breaks):
        first, left = int(part[0]), len(part)
        while left > 0:
            found.append((first, min(left, longest)))
            first, left = first + longest, left - longest
    return found


def capture(where: Region, path: Path, earlier: "Sequence[Pages]" = ()) -> "Pages":
    """Write the pages that a stopped machine changed into a file.

    Args:
        where: Its memory.
        path: The file to write.
        earlier: Pages of earlier snapshots over the same file, oldest first; what has not changed since is left out.

    Returns:
        What was written.
    """
    data: list[np.ndarray] = []
    empty: list[np.ndarray] = []
    check = 0
    known = [_Known(pages) for pages in reversed(earlier)]
    memory = os.open(f"/proc/{where.pid}/mem", os.O_RDONLY | os.O_CLOEXEC)
    buffer = bytearray(CHUNK_PAGES * PAGE)
    words = np.frombuffer(buffer, "<u8").reshape(-1, WORDS)
    try:
        with path.open("wb", buffering=0) as out:
            for first, count in runs(changed(where)):
                got = os.preadv(memory, [memoryview(buffer)[: count * PAGE]], where.start + first * PAGE)
                if got != count * PAGE:
                    raise SandboxError(f"memory of process {where.pid}: ended at page {first}; the machine is gone")
                numbers = np.arange(first, first + count)
                part = words[:count]
                if known:
                    fresh = _fresh(known, numbers, part)
                    numbers, part = numbers[fresh], part[fresh]
                filled = part.any(axis=1)
                empty.append(numbers[~filled])
                if filled.any():
                    data.append(numbers[filled])
                    kept = part if filled.all() else part[filled]
                    raw = memoryview(kept.tobytes())
                    check = zlib.crc32(raw, check)
                    while raw:
                        raw = raw[out.write(raw) or 0 :]
    except OSError as problem:
        raise SandboxError(f"memory of process {where.pid}: cannot be written to {path}; {problem.strerror}") from None
    finally:
        os.close(memory)
        del words
        for pages in known:
            pages.close()
    return Pages(path, _joined(data), _joined(empty), check)


def _joined(parts: list[np.ndarray]) -> np.ndarray:
    return np.concatenate(parts).astype("<u4") if parts else np.zeros(0, "<u4")


def _fresh(known: "list[_Known]", numbers: np.ndarray, words: np.ndarray) -> np.ndarray:
    """Tell for each page whether the newest earlier snapshot that has it has other bytes, or none has it."""
    fresh = np.ones(len(numbers), bool)
    open_ = np.ones(len(numbers), bool)
    for pages in known:
        held, same = pages.compare(numbers, words)
        fresh[open_ & held & same] = False
        open_ &= ~held
    return fresh


@dataclass(frozen=True, slots=True)
class Pages:
    """Pages of a memory in a file, without their numbers.

    Args:
        path: The file: pages one after another.
        data: Number of each page in the file.
        empty: Numbers of pages that hold only zeros.
        check: CRC-32 of the file.
    """

    path: Path
    data: np.ndarray
    empty: np.ndarray
    check: int

    @property
    def size(self) -> int:
        """Bytes of the file."""
        return len(self.data) * PAGE

    def save_index(self, path: Path) -> None:
        """Write the numbers into a file of their own."""
        body = self.data.tobytes() + self.empty.tobytes()
        path.write_bytes(HEAD.pack(MAGIC, len(self.data), len(self.empty), self.check) + body)

    @classmethod
    def load(cls, path: Path, index: Path) -> "Pages":
        """Read the numbers back, and hold the file against them.

        Raises:
            SandboxError: A file is missing, cut short or altered.
        """
        try:
            raw = index.read_bytes()
            magic, data, empty, check = HEAD.unpack_from(raw)
            if magic != MAGIC or len(raw) != HEAD.size + 4 * (data + empty):
                raise ValueError("its index is damaged")
            numbers = np.frombuffer(raw, "<u4", offset=HEAD.size)
            if path.stat().st_size != data * PAGE:
                raise ValueError(f"it has {path.stat().st_size} bytes instead of {data * PAGE}")
        except (OSError, ValueError, struct.error) as problem:
            raise SandboxError(f"snapshot memory {path}: {problem}; it is damaged, use another snapshot") from None
        return cls(path, numbers[:data], numbers[data:], check)

    def put_into(self, where: Region) -> None:
        """Write the pages into the memory of a machine that has not run yet.

        Raises:
            SandboxError: The file is not what was written, or the machine is gone.
        """
        check = 0
        memory = os.open(f"/proc/{where.pid}/mem", os.O_RDWR | os.O_CLOEXEC)
        try:
            with self.path.open("rb", buffering=0) as file:
                for first, count in runs(self.data):
                    raw = file.read(count * PAGE)
                    check = zlib.crc32(raw, check)
                    os.pwrite(memory, raw, where.start + first * PAGE)
            blank = bytes(CHUNK_PAGES * PAGE)
            for first, count in runs(self.empty):
                os.pwrite(memory, memoryview(blank)[: count * PAGE], where.start + first * PAGE)
        except OSError as problem:
            raise SandboxError(f"memory of process {where.pid}: cannot be filled; {problem.strerror}") from None
        finally:
            os.close(memory)
        if check != self.check:
            raise SandboxError(f"snapshot memory {self.path}: is not what was written; it is damaged, use another")

    def put_into_file(self, file: int) -> None:
        """Write the pages into a file that holds a whole memory; a blank page becomes a hole."""
        with self.path.open("rb", buffering=0) as source:
            for first, count in runs(self.data):
                os.pwrite(file, source.read(count * PAGE), first * PAGE)
        blank = bytes(CHUNK_PAGES * PAGE)
        for first, count in runs(self.empty):
            held = os.lseek(file, first * PAGE, os.SEEK_DATA) if first * PAGE < _end_of_data(file) else -1
            if 0 <= held < (first + count) * PAGE:
                os.pwrite(file, memoryview(blank)[: count * PAGE], first * PAGE)


class _Known:
    """Pages of an earlier snapshot, held against those of now."""

    def __init__(self, pages: Pages) -> None:
        self._file = pages.path.open("rb")
        self._map = mmap.mmap(self._file.fileno(), 0, prot=mmap.PROT_READ) if pages.size else None
        words = np.frombuffer(self._map, "<u8") if self._map is not None else np.zeros(0, "<u8")
        self._words = words.reshape(-1, WORDS)
        self._order = np.argsort(pages.data, kind="stable")
        self._sorted = pages.data[self._order]
        self._empty = np.sort(pages.empty)

    def compare(self, numbers: np.ndarray, words: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Tell for each page whether the snapshot has it, and whether with the same bytes."""
        held = np.zeros(len(numbers), bool)
        same = held.copy()
        if len(self._sorted):
            place = np.minimum(np.searchsorted(self._sorted, numbers), len(self._sorted) - 1)
            held = self._sorted[place] == numbers
            same[held] = (self._words[self._order[place[held]]] == words[held]).all(axis=1)
        blank = np.isin(numbers, self._empty)
        same[blank] = ~words[blank].any(axis=1)
        return held | blank, same

    def close(self) -> None:
        """Let go of the file."""
        del self._words
        if self._map is not None:
            self._map.close()
        self._file.close()


def _end_of_data(file: int) -> int:
    try:
        return os.lseek(file, 0, os.SEEK_END) if os.lseek(file, 0, os.SEEK_DATA) >= 0 else 0
    except OSError:
        return 0
