"""What outlives the owner of sandboxes: who they are and what was snapshotted, on disk and never half written."""

import dataclasses
import errno
import fcntl
import json
import os
import re
import secrets
import shutil
import time
from collections.abc import Container, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from triax.errors import SandboxError
from triax.log import logger
from triax.sandbox.protocol import SNAPSHOT_VERSION, Network, Resources, Spec, Status

MANIFEST = "manifest.json"
PARENTS = "parents.json"
PARTIAL = ".partial-"
FULL: dict[int | None, int] = {errno.ENOSPC: 507, errno.EDQUOT: 507}
ID = re.compile(r"[a-z0-9][a-z0-9-]{0,62}")


def backend_of(root: Path) -> str | None:
    """Return the name of the backend whose sandboxes a folder holds; none where it holds none that can be read."""
    for path in sorted((root / "sandboxes").glob("*.json")):
        with suppress(OSError, ValueError, TypeError, KeyError):
            return str(json.loads(path.read_text())["backend"])
    return None


def new_id() -> str:
    """Return an id that was never used, fit for a host name."""
    return secrets.token_hex(10)


@dataclass(slots=True)
class Record:
    """What is known of a sandbox without its machine.

    Args:
        id: Its id.
        backend: Which backend made it.
        spec: What was asked for.
        status: Where it is in its life.
        generation: How often it was restored or forked from.
        created_s: When it was made, seconds since 1970.
        expires_s: When `on_timeout` happens; none for never.
        snapshot: The snapshot that a suspended one resumes from.
        origin: The snapshot that the present machine was started from, which must stay.
        latest: The last snapshot of it or its source, to build the next upon.
        reason: Why it is lost, failed or dead, in words.
    """

    id: str
    backend: str
    spec: Spec
    status: Status = "creating"
    generation: int = 0
    created_s: float = field(default_factory=time.time)
    expires_s: float | None = None
    snapshot: str | None = None
    origin: str | None = None
    latest: str | None = None
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A frozen copy that sandboxes start from.

    Args:
        id: Its id, and the name of its folder.
        backend: Which backend can read it.
        spec: The sandbox it was taken of.
        source: Id of that sandbox.
        generation: Generation of that sandbox.
        kind: `kept` until it is removed, `suspended` while its sandbox needs it.
        created_s: When it was taken, seconds since 1970.
        size_bytes: What it takes on disk.
        parents: Snapshots that it cannot be read without.
        version: Layout of its folder.
    """

    id: str
    backend: str
    spec: Spec
    source: str
    generation: int
    kind: Literal["kept", "suspended"]
    created_s: float
    size_bytes: int
    parents: tuple[str, ...] = ()
    version: int = SNAPSHOT_VERSION


class Store:
    """One folder with all records and snapshots; at most one process owns it at a time.

    Args:
        root: The folder; made if it is not there.

    Raises:
        SandboxError: Another process owns it, or it cannot be written.
    """

    def __init__(self, root: Path) -> None:
        self.root = root = root.absolute()  # machines run elsewhere and are told of folders in it
        self.records_folder = root / "sandboxes"
        self.snapshots_folder = root / "snapshots"
        try:
            for folder in (root, self.records_folder, self.snapshots_folder):
                folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            self._lock = os.open(root / "owner.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise SandboxError(
                f"sandboxes {root}: cannot be written; {error.strerror}; choose another folder"
            ) from error
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            owner = os.read(self._lock, 32).decode(errors="replace").strip() or "unknown"
            os.close(self._lock)
            raise SandboxError(
                f"sandboxes {root}: another process owns them; found process `{owner}`; "
                "speak to its server, end it, or choose another folder",
                "refused",
                status=409,
            ) from error
        os.ftruncate(self._lock, 0)
        os.pwrite(self._lock, f"{os.getpid()}\n".encode(), 0)

    def close(self) -> None:
        """Give the folder up."""
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    def records(self) -> list[Record]:
        """Return every record; one that cannot be read is set aside, with a warning."""
        found = []
        for path in sorted(self.records_folder.glob("*.json")):
            try:
                tree = json.loads(path.read_text())
                found.append(Record(**tree | {"spec": spec_from(tree["spec"])}))
            except (ValueError, TypeError, KeyError) as error:
                logger("sandbox").warning("record %s cannot be read and is set aside: %s", path, error)
                path.rename(path.with_suffix(".unreadable"))
        return found

    def save(self, record: Record, *, durable: bool = False) -> None:
        """Replace a record as a whole.

        Args:
            record: What is known now.
            durable: Whether it must survive a loss of power too.

        Raises:
            SandboxError: The disk does not take it.
        """
        tree = _shallow(record) | {"spec": spec_tree(record.spec)}
        self._replace(self.records_folder / f"{record.id}.json", tree, durable=durable)

    def forget(self, id: str) -> None:
        """Remove a record."""
        (self.records_folder / f"{id}.json").unlink(missing_ok=True)

    def snapshots(self) -> list[Snapshot]:
        """Return all snapshots that are complete."""
        names = sorted(path.parent.name for path in self.snapshots_folder.glob(f"[!.]*/{MANIFEST}"))
        found = []
        for name in names:
            with suppress(SandboxError):
                found.append(self.snapshot(name))
        return found

    def snapshot(self, id: str) -> Snapshot:
        """Return one snapshot.

        Raises:
            SandboxError: There is none with this id (status 404), or this version of triax cannot read it.
        """
        if not ID.fullmatch(id):
            raise SandboxError(f"snapshot {id[:80]!r}: is no id; list what there is", "refused", status=404)
        path = self.snapshots_folder / id / MANIFEST
        try:
            return _read_snapshot(path)
        except FileNotFoundError as error:
            raise SandboxError(f"snapshot {id}: there is none; list what there is", "refused", status=404) from error

    def folder(self, id: str) -> Path:
        """Return the folder of a snapshot."""
        return self.snapshots_folder / id

    def begin(self, id: str, record: Record, kind: Literal["kept", "suspended"]) -> Path:
        """Return a folder in which a snapshot is written; it has only our manifest.

        The manifest comes first, so that a full disk is found out while the machine still runs.

        Raises:
            SandboxError: The disk does not take it.
        """
        folder = self.snapshots_folder / f"{PARTIAL}{id}"
        try:
            folder.mkdir(mode=0o700)
        except OSError as error:
            raise SandboxError(
                f"snapshot {id}: cannot be begun; {error.strerror}; free some disk", status=FULL.get(error.errno)
            ) from error
        snapshot = Snapshot(id, record.backend, record.spec, record.id, record.generation, kind, time.time(), 0)
        self._replace(folder / MANIFEST, _snapshot_tree(snapshot), durable=True)
        return folder

    def commit(self, id: str) -> Snapshot:
        """Make a snapshot that was begun one that exists: it does so as a whole, by one rename.

        Raises:
            SandboxError: The disk does not take it; the folder is as it was.
        """
        folder = self.snapshots_folder / f"{PARTIAL}{id}"
        draft = _read_snapshot(folder / MANIFEST)
        parents: tuple[str, ...] = ()
        with suppress(FileNotFoundError):
            parents = tuple(json.loads((folder / PARENTS).read_text()))
        snapshot = dataclasses.replace(draft, size_bytes=disk_bytes(folder), parents=parents)
        try:
            self._replace(folder / MANIFEST, _snapshot_tree(snapshot), durable=True)
        except SandboxError:
            if parents:
                raise
            snapshot = draft  # its size is not worth a snapshot
        try:
            folder.rename(self.snapshots_folder / id)
            _sync(self.snapshots_folder)
        except OSError as error:
            raise SandboxError(f"snapshot {id}: cannot be completed; {error.strerror}") from error
        return snapshot

    def retire(self, id: str) -> None:
        """Let a snapshot go as soon as no sandbox and no other snapshot needs it."""
        snapshot = dataclasses.replace(self.snapshot(id), kind="suspended")
        self._replace(self.folder(id) / MANIFEST, _snapshot_tree(snapshot), durable=True)

    def copy(self, id: str, new: str, record: Record) -> Snapshot:
        """Make another snapshot with the same content, which takes no more disk: files are shared by hard links."""
        folder = self.begin(new, record, "kept")
        try:
            own = shutil.ignore_patterns(MANIFEST)
            shutil.copytree(
                self.folder(id), folder, ignore=own, copy_function=os.link, dirs_exist_ok=True, symlinks=True
            )
            return self.commit(new)
        except OSError as error:
            raise SandboxError(f"snapshot {id}: cannot be copied; {error.strerror}; free some disk") from error
        finally:
            self.discard(new)

    def discard(self, id: str) -> None:
        """Remove what was begun and not completed."""
        shutil.rmtree(self.snapshots_folder / f"{PARTIAL}{id}", ignore_errors=True)

    def exists(self, id: str) -> bool:
        """Tell whether a snapshot is complete."""
        return bool(ID.fullmatch(id)) and (self.snapshots_folder / id / MANIFEST).is_file()

    def needed(self, records: Iterable[Record]) -> set[str]:
        """Return ids of snapshots that records or kept snapshots cannot do without."""
        every = {snapshot.id: snapshot for snapshot in self.snapshots()}
        wanted = {id for record in records for id in (record.snapshot, record.origin) if id}
        wanted |= {snapshot.id for snapshot in every.values() if snapshot.kind == "kept"}
        reached: set[str] = set()
        while wanted:
            id = wanted.pop()
            if id not in reached:
                reached.add(id)
                wanted |= set(every[id].parents if id in every else ())
        return reached

    def sweep(self, records: Iterable[Record], active: Container[str] = ()) -> tuple[list[str], list[Path]]:
        """Put aside snapshots that nobody needs and what was left half written.

        Args:
            records: All sandboxes.
            active: Ids of snapshots that are being written now.

        Returns:
            What was put aside, in words, and the folders that `empty` removes.
        """
        words, doomed = [], []
        needed = self.needed(records)
        for snapshot in self.snapshots():
            if snapshot.id not in needed:
                aside = self.snapshots_folder / f"{PARTIAL}gone-{snapshot.id}"
                (self.snapshots_folder / snapshot.id).rename(aside)
                words.append(f"snapshot {snapshot.id} of {snapshot.source}, which no sandbox resumes from")
        for path in sorted(self.snapshots_folder.iterdir()):
            name = path.name.removeprefix(PARTIAL)
            if path.name.startswith(PARTIAL) and name not in active:
                doomed.append(path)
                if not name.startswith("gone-"):
                    words.append(f"half-written snapshot {name}")
        for path in self.root.glob("*/*.writing"):
            path.unlink(missing_ok=True)
        return words, doomed

    def empty(self, doomed: Iterable[Path]) -> None:
        """Remove folders that were put aside; may run in another thread."""
        for folder in doomed:
            shutil.rmtree(folder, ignore_errors=True)

    def _replace(self, path: Path, tree: Mapping[str, Any], *, durable: bool) -> None:
        draft = path.with_suffix(".writing")
        try:
            with open(draft, "w", encoding="utf-8") as file:
                json.dump(tree, file)
                if durable:
                    file.flush()
                    os.fsync(file.fileno())
            draft.replace(path)
            if durable:
                _sync(path.parent)
        except OSError as error:
            with suppress(OSError):
                draft.unlink(missing_ok=True)
            raise SandboxError(
                f"record {path}: cannot be written; {error.strerror}; free some disk", status=FULL.get(error.errno)
            ) from error


def _shallow(data: Record | Snapshot) -> dict[str, Any]:
    return {field.name: getattr(data, field.name) for field in dataclasses.fields(data)}


def _snapshot_tree(snapshot: Snapshot) -> dict[str, Any]:
    return _shallow(snapshot) | {"spec": spec_tree(snapshot.spec)}


def _read_snapshot(path: Path) -> Snapshot:
    id = path.parent.name
    try:
        tree = json.loads(path.read_text())
        version = tree.get("version")
        if version != SNAPSHOT_VERSION:
            raise SandboxError(
                f"snapshot {id}: has version `{version}`; this triax reads `{SNAPSHOT_VERSION}`; "
                "restore it with the release that wrote it",
                "refused",
                status=409,
            )
        return Snapshot(**tree | {"spec": spec_from(tree["spec"]), "parents": tuple(tree["parents"])})
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise SandboxError(f"snapshot {id}: its manifest cannot be read; {error}; remove it") from error


def spec_tree(spec: Spec) -> dict[str, Any]:
    """Return a spec as plain values."""
    return {
        "image": spec.image,
        "resources": dataclasses.asdict(spec.resources),
        "network": dataclasses.asdict(spec.network),
        "env": dict(spec.env),
        "metadata": dict(spec.metadata),
        "timeout_s": spec.timeout_s,
        "on_timeout": spec.on_timeout,
        "user": spec.user,
        "cwd": spec.cwd,
    }


def spec_from(tree: Mapping[str, Any]) -> Spec:
    """Return the spec that plain values describe."""
    network = Network(tuple(tree["network"]["allow_out"]), tree["network"]["allow_internet"])
    return Spec(**dict(tree) | {"resources": Resources(**tree["resources"]), "network": network})


def disk_bytes(folder: Path) -> int:
    """Return what a folder takes on disk: holes in files take nothing, and links count once."""
    seen: set[int] = set()
    total = 0
    for above, _, names in os.walk(folder):
        for name in names:
            found = os.lstat(os.path.join(above, name))
            if found.st_ino not in seen:
                seen.add(found.st_ino)
                total += found.st_blocks * 512
    return total


def _sync(folder: Path) -> None:
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
