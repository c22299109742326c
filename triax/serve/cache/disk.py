"""Prefixes in a folder, so that a new engine with the same weights need not compute them again.

Each page and each snapshot is a file of its own, named after all tokens before its end. It is written beside its
place, forced to disk and moved there, so whatever kills the process, a file is whole or absent; its checksum says so.
Bytes are those of the host pool.
"""

import fcntl
import hashlib
import json
import os
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, runtime_checkable

from triax.errors import CheckpointError, ConfigError
from triax.log import logger
from triax.serve.cache.install import install
from triax.serve.cache.manager import Manager
from triax.serve.cache.prefix import Key, Node, Snapshot
from triax.serve.plan import Kind, Place

FORMAT = b"triax prefix 1\n"
LOCK = "in-use"


@runtime_checkable
class Bytes(Protocol):
    """Memory whose pages and slots can be read and written from outside."""

    def read(self, kind: Kind, place: Place, index: int) -> bytes:
        """Return all bytes of a page or slot."""
        ...

    def write(self, kind: Kind, place: Place, index: int, data: bytes) -> None:
        """Fill a page or slot."""
        ...


@dataclass(frozen=True)
class _Entry:
    """What stands in a file before its bytes."""

    identity: str
    salt: str
    kind: Kind
    parent: str
    """Name of the page before; empty for the first."""
    tokens: Key
    """Keys in this page, or those of it that a snapshot covers."""
    saved: int
    """Tokens back to the snapshot before it; 0 for a page."""


class Disk:
    """A folder of prefixes, used by one process at a time.

    Args:
        folder: Made if it is not there; only its owner can read it.
        identity: Names model, weights and layout of the bytes; entries of other identities are left alone, and go
            first when room is needed.
        most_bytes: What the folder may grow to.

    Raises:
        ConfigError: Another process uses the folder, or it cannot be written to.
    """

    def __init__(self, folder: Path | str, identity: str, most_bytes: int) -> None:
        self.folder, self.identity, self.most_bytes = Path(folder), identity, most_bytes
        try:
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._lock = (self.folder / LOCK).open("w")
        except OSError as problem:
            raise ConfigError(
                f"cache.disk.path {self.folder}: cannot be used; {problem.strerror}; name a folder that can be written"
            ) from None
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            self._lock.close()
            raise ConfigError(
                f"cache.disk.path {self.folder}: another process uses it; found its lock; give each engine its own"
            ) from None
        for left in self.folder.glob("*.part"):
            left.unlink()
        self.is_full = False
        self.counts = {"saved": 0, "loaded": 0, "damaged": 0, "removed": 0}
        self._sizes = {path.name: path.stat().st_size for path in self._files()}
        self._parents: dict[str, str] = {}
        self._parents = {path.name: entry.parent for path in self._files() if (entry := self._header(path)) is not None}

    @property
    def used_bytes(self) -> int:
        """Bytes of all entries."""
        return sum(self._sizes.values())

    def close(self) -> None:
        """Let other processes use the folder."""
        self._lock.close()

    # saving

    def save(self, manager: Manager, memory: Bytes, most: int | None = None) -> int:
        """Write snapshots that are not here yet, each with the pages before it; call it between steps.

        Args:
            manager: Whose prefixes.
            memory: Where their bytes are.
            most: Snapshots to write in this call, of those taken since the last one; None looks at all that are known.

        Returns:
            Snapshots written. A full disk ends saving with a warning, not with an error.
        """
        queue: deque[Snapshot] = manager.unsaved
        if most is None:
            queue = deque(one for node in manager.tree.nodes() for one in node.snapshots.values())
            manager.unsaved.clear()
        names: dict[Node, str] = {}
        count = 0
        for _ in range(len(queue)):
            if self.is_full or count == most:
                break
            snapshot = queue.popleft()
            if not manager.tiers.is_known(snapshot):
                continue
            try:
                count += self._save(snapshot, manager, memory, names)
            except OSError as problem:
                self.is_full = True
                logger("serve").warning(
                    "cache.disk.path %s: prefixes are no longer saved; %s", self.folder, problem.strerror
                )
        return count

    def _save(self, snapshot: Snapshot, manager: Manager, memory: Bytes, names: dict[Node, str]) -> bool:
        path, node = [], snapshot.node
        while node.parent is not None:
            path.append(node)
            node = node.parent
        if snapshot.is_pending or any(one.is_pending for one in path):
            manager.unsaved.append(snapshot)  # later, when its bytes have arrived
            return False
        name = ""
        for one in reversed(path):
            entry = _Entry(self.identity, node.salt, "page", name, one.tokens, 0)
            name = names.get(one) or self._name(entry)
            names[one] = name
            if name not in self._sizes:
                place, index = _where(one.page, one.host)
                self._write(name, entry, memory.read("page", place, index))
        covered = snapshot.node.tokens[: snapshot.offset]
        entry = _Entry(self.identity, node.salt, "slot", name, covered, snapshot.saved)
        name = self._name(entry)
        if name in self._sizes:
            os.utime(self.folder / name)
            return False
        place, index = _where(snapshot.slot, snapshot.host)
        self._write(name, entry, memory.read("slot", place, index))
        self.counts["saved"] += 1
        return True

    def _name(self, entry: _Entry) -> str:
        text = json.dumps([entry.identity, entry.salt, entry.parent, entry.tokens]).encode()
        return f"{hashlib.sha256(text).hexdigest()}.{entry.kind}"

    def _write(self, name: str, entry: _Entry, data: bytes) -> None:
        header = json.dumps(vars(entry)).encode()
        content = b"".join((FORMAT, len(header).to_bytes(8, "little"), header, data))
        self._make_room(len(content) + 32, {name, entry.parent})
        part = self.folder / f"{name}.part"
        with part.open("wb") as file:
            os.fchmod(file.fileno(), 0o600)
            file.write(content)
            file.write(hashlib.sha256(content).digest())
            file.flush()
            os.fsync(file.fileno())
        part.replace(self.folder / name)
        self._sizes[name] = len(content) + 32
        self._parents[name] = entry.parent

    def _make_room(self, wanted: int, keep: set[str]) -> None:
        """Remove the oldest snapshots, then pages that no entry needs any more, until there is room."""
        if self.used_bytes + wanted <= self.most_bytes:
            return
        slots = [path for path in self._files() if path.suffix == ".slot" and path.name not in keep]
        slots.sort(key=lambda path: path.stat().st_mtime)
        for path in slots:
            self._remove(path.name)
            self._remove_orphans(keep)
            if self.used_bytes + wanted <= self.most_bytes:
                return
        raise OSError(28, "the pool is full and holds nothing that can go")

    def _remove_orphans(self, keep: set[str]) -> None:
        needed, queue = set(), [name for name in self._parents if name.endswith(".slot")] + [*keep]
        while queue:
            name = queue.pop()
            if name and name not in needed:
                needed.add(name)
                queue.append(self._parents.get(name, ""))
        for name in list(self._parents):
            if name not in needed:
                self._remove(name)

    def _remove(self, name: str) -> None:
        (self.folder / name).unlink(missing_ok=True)
        self._sizes.pop(name, None)
        self._parents.pop(name, None)
        self.counts["removed"] += 1

    # loading

    def load(self, manager: Manager, memory: Bytes) -> int:
        """Take in the newest prefixes of this identity, as many as fit; damaged entries are removed, not used.

        Returns:
            Snapshots taken in.
        """
        entries = {path.name: (path, entry) for path in self._files() if (entry := self._header(path)) is not None}
        slots = [(path, e) for path, e in entries.values() if e.kind == "slot" and e.identity == self.identity]
        slots.sort(key=lambda item: -item[0].stat().st_mtime)
        count = 0
        for path, entry in slots:
            chain: list[tuple[Path, _Entry]] = []
            name = entry.parent
            while name in entries and entries[name][1].kind == "page":
                chain.append(entries[name])
                name = entries[name][1].parent
            if name or not chain or chain[0][1].tokens[: len(entry.tokens)] != entry.tokens:
                continue
            count += self._load(manager, memory, path, entry, chain[::-1])
        self.counts["loaded"] += count
        return count

    def _load(
        self, manager: Manager, memory: Bytes, path: Path, entry: _Entry, chain: list[tuple[Path, _Entry]]
    ) -> bool:
        contents = [self._content(one) for one, _ in chain]
        state = self._content(path)
        if state is None or any(content is None for content in contents):
            return False
        pages = [one.tokens for _, one in chain]
        installed = install(manager, entry.salt, pages, len(entry.tokens), entry.saved)
        if installed is None:
            return False
        nodes, snapshot = installed
        for node, content in zip(nodes, contents[len(contents) - len(nodes) :], strict=True):
            assert content is not None
            memory.write("page", *_where(node.page, node.host), content)
        memory.write("slot", *_where(snapshot.slot, snapshot.host), state)
        return True

    def _files(self) -> Iterator[Path]:
        yield from (path for path in self.folder.iterdir() if path.suffix in {".page", ".slot"})

    def _header(self, path: Path) -> _Entry | None:
        """Read what a file says of itself; a file that cannot be read is removed."""
        try:
            with path.open("rb") as file:
                if file.read(len(FORMAT)) != FORMAT:
                    raise CheckpointError("no header")
                size = int.from_bytes(file.read(8), "little")
                if size > path.stat().st_size:
                    raise CheckpointError("no header")
                fields = json.loads(file.read(size))
            entry = _Entry(**fields | {"tokens": tuple(fields["tokens"])})
            if self._name(entry) != path.name:
                raise CheckpointError("another name")
            return entry
        except (OSError, ValueError, TypeError, KeyError, CheckpointError):
            self.counts["damaged"] += 1
            self._remove(path.name)
            return None

    def _content(self, path: Path) -> bytes | None:
        """Return the bytes of an entry; one whose checksum is wrong is removed."""
        try:
            content = path.read_bytes()
        except OSError:
            return None
        if hashlib.sha256(content[:-32]).digest() != content[-32:]:
            self.counts["damaged"] += 1
            self._remove(path.name)
            return None
        start = len(FORMAT) + 8
        return content[start + int.from_bytes(content[len(FORMAT) : start], "little") : -32]


def _where(device: int | None, host: int | None) -> tuple[Place, int]:
    if device is not None:
        return "device", device
    assert host is not None
    return "host", host
