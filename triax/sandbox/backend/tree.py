"""Files of a sandbox as its host reaches them: no name and no symlink leads out of the sandbox's own root."""

import ctypes
import errno
import os
import posixpath
import shutil
import stat
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

from triax.errors import SandboxError
from triax.sandbox.command import sane_path, sane_range
from triax.sandbox.errnos import file_refusal
from triax.sandbox.protocol import Entry

OPENAT2 = 437  # the same on every architecture, as all calls since 2019
RESOLVE_NO_MAGICLINKS = 0x02
RESOLVE_IN_ROOT = 0x10

# what lies there is the kernel's, and the host reading it as root would see or change more than the guest may
KERNEL_FILESYSTEMS = {
    0x9FA0: "proc",
    0x62656572: "sysfs",
    0x27E0EB: "cgroup",
    0x63677270: "cgroup2",
    0x1CD1: "devpts",
    0x64626720: "debugfs",
    0x74726163: "tracefs",
    0xCAFE4A11: "bpf",
    0x73636673: "securityfs",
}

_libc = ctypes.CDLL(None, use_errno=True)


class _How(ctypes.Structure):
    _fields_ = (("flags", ctypes.c_uint64), ("mode", ctypes.c_uint64), ("resolve", ctypes.c_uint64))


def _open_below(root: int, path: str, flags: int, mode: int = 0) -> int:
    how = _How(flags | os.O_CLOEXEC, mode, RESOLVE_IN_ROOT | RESOLVE_NO_MAGICLINKS)
    for _ in range(64):
        fd = _libc.syscall(OPENAT2, root, os.fsencode(path), ctypes.byref(how), ctypes.sizeof(how))
        if fd >= 0:
            return fd
        code = ctypes.get_errno()
        # a rename beside the walk makes the kernel ask for another try; a guest that renames all day is its own fault
        if code not in (errno.EAGAIN, errno.EINTR):
            break
    raise OSError(code, os.strerror(code), path)


def _filesystem(fd: int) -> int:
    answer = (ctypes.c_long * 32)()
    if _libc.fstatfs(fd, ctypes.byref(answer)):
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    return answer[0] & 0xFFFFFFFF


@dataclass(frozen=True, slots=True)
class Tree:
    """Everything below one folder of the host, which the tree takes for its root.

    Args:
        root: The folder, such as `/proc/123/root`.
        home: Where relative paths start, inside.
        owner: User and group of the host that new files belong to; none for the caller.
    """

    root: str
    home: str = "/"
    owner: int | None = None

    def read(self, path: str, offset: int = 0, limit: int | None = None) -> bytes:
        """Return bytes of a regular file, from `offset` on and at most `limit`."""
        sane_range(path, offset, limit)
        with self._errors(path), self._open(path, os.O_RDONLY) as fd:
            os.lseek(fd, offset, os.SEEK_SET)
            parts: list[bytes] = []
            left = limit
            while left is None or left > 0:
                part = os.read(fd, 2**20 if left is None else min(left, 2**20))
                if not part:
                    break
                parts.append(part)
                left = None if left is None else left - len(part)
            return b"".join(parts)

    def write(self, path: str, data: bytes, mode: int = 0o644) -> None:
        """Replace a file's bytes, or make it and its folders; `mode` is for a new one."""
        with self._errors(path):
            self._make(posixpath.dirname(self._inside(path)))
            with self._root() as root:
                self._refuse_kernel(root, posixpath.dirname(self._inside(path)))
                try:
                    made = _open_below(root, self._inside(path), os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode & 0o7777)
                except FileExistsError:
                    made = -1
                if made >= 0:
                    try:
                        self._own(made)
                        os.fchmod(made, mode & 0o7777)
                        _write_all(made, data)
                    finally:
                        os.close(made)
                    return
            with self._open(path, os.O_WRONLY, create=mode) as fd:
                os.ftruncate(fd, 0)
                _write_all(fd, data)

    def list(self, path: str) -> list[Entry]:
        """Return what a folder holds, by name; symlinks are told, not followed."""
        with self._errors(path), self._root() as root:
            folder = _open_below(root, self._inside(path), os.O_RDONLY | os.O_DIRECTORY)
            try:
                above = self._inside(path)
                names = sorted(os.listdir(folder))
                found = (_entry(name, posixpath.join(above, name), folder) for name in names)
                return [entry for entry in found if entry is not None]
            finally:
                os.close(folder)

    def stat(self, path: str) -> Entry:
        """Return one entry."""
        with self._errors(path), self._root() as root:
            fd = _open_below(root, self._inside(path), os.O_PATH | os.O_NOFOLLOW)
            try:
                target = os.readlink("", dir_fd=fd) if stat.S_ISLNK(os.fstat(fd).st_mode) else None
                return _described(self._inside(path), os.fstat(fd), target)
            finally:
                os.close(fd)

    def remove(self, path: str) -> None:
        """Remove a file, a symlink itself, or a folder with all it holds."""
        with self._errors(path), self._parent(path) as (folder, name):
            if stat.S_ISDIR(os.stat(name, dir_fd=folder, follow_symlinks=False).st_mode):
                shutil.rmtree(name, dir_fd=folder)
            else:
                os.unlink(name, dir_fd=folder)

    def rename(self, source: str, destination: str) -> None:
        """Move a file or folder, and make the folders above; what is there is replaced as `rename(2)` does."""
        with self._errors(f"{source} to {destination}"), self._parent(source) as (old, name):
            os.stat(name, dir_fd=old, follow_symlinks=False)
            self._make(posixpath.dirname(self._inside(destination)))
            with self._parent(destination) as (new, other):
                os.rename(name, other, src_dir_fd=old, dst_dir_fd=new)

    def make_directory(self, path: str) -> None:
        """Make a folder and those above it."""
        with self._errors(path):
            self._make(self._inside(path))

    def _inside(self, path: str) -> str:
        return posixpath.join(self.home, sane_path(path))

    @contextmanager
    def _root(self) -> Generator[int]:
        fd = os.open(self.root, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            yield fd
        finally:
            os.close(fd)

    @contextmanager
    def _errors(self, path: str) -> Generator[None]:
        try:
            yield
        except OSError as error:
            if not os.path.isdir(self.root):
                raise SandboxError(f"file {path!r}: the sandbox has ended", "infrastructure") from error
            raise file_refusal(error, path) from error

    @contextmanager
    def _open(self, path: str, flags: int, create: int | None = None) -> Generator[int]:
        with self._root() as root:
            if create is not None:
                # a symlink whose target is missing: the kernel makes the target, inside the root
                try:
                    held = _open_below(root, self._inside(path), os.O_PATH)
                except FileNotFoundError:
                    held = _open_below(root, self._inside(path), os.O_WRONLY | os.O_CREAT, create & 0o7777)
                    self._own(held)
            else:
                held = _open_below(root, self._inside(path), os.O_PATH)
            try:
                kind = os.fstat(held).st_mode
                if stat.S_ISDIR(kind):
                    raise IsADirectoryError(errno.EISDIR, "is a folder")
                if not stat.S_ISREG(kind):
                    # opening a pipe would wait, and opening a device would act
                    raise SandboxError(f"file {path!r}: is no regular file; read it with a command", "refused")
                self._refuse_kernel_fd(held, path)
                fd = os.open(f"/proc/self/fd/{held}", flags | os.O_CLOEXEC)
            finally:
                os.close(held)
        try:
            yield fd
        finally:
            os.close(fd)

    @contextmanager
    def _parent(self, path: str) -> Generator[tuple[int, str]]:
        whole = posixpath.normpath(self._inside(path))
        above, name = posixpath.split(whole)
        if not name or name in (".", ".."):
            raise SandboxError(f"file {path!r}: the root itself stays where it is", "refused")
        with self._root() as root:
            self._refuse_kernel(root, above)
            folder = _open_below(root, above, os.O_RDONLY | os.O_DIRECTORY)
            try:
                yield folder, name
            finally:
                os.close(folder)

    def _refuse_kernel(self, root: int, path: str) -> None:
        fd = _open_below(root, path or "/", os.O_PATH)
        try:
            self._refuse_kernel_fd(fd, path)
        finally:
            os.close(fd)

    def _refuse_kernel_fd(self, fd: int, path: str) -> None:
        name = KERNEL_FILESYSTEMS.get(_filesystem(fd))
        if name:
            raise SandboxError(f"file {path!r}: lies in `{name}`, the kernel's own; use a command inside", "refused")

    def _make(self, path: str) -> None:
        with self._root() as root:
            reached = "/"
            for part in [part for part in path.split("/") if part and part != "."]:
                following = posixpath.join(reached, part)
                try:
                    fd = _open_below(root, following, os.O_PATH | os.O_DIRECTORY)
                except FileNotFoundError:
                    self._refuse_kernel(root, reached)
                    above = _open_below(root, reached, os.O_RDONLY | os.O_DIRECTORY)
                    try:
                        os.mkdir(part, dir_fd=above)
                        if self.owner is not None:
                            os.chown(part, self.owner, self.owner, dir_fd=above, follow_symlinks=False)
                    finally:
                        os.close(above)
                else:
                    os.close(fd)
                reached = following

    def _own(self, fd: int) -> None:
        if self.owner is not None:
            os.fchown(fd, self.owner, self.owner)


def _write_all(fd: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]


def _entry(name: str, path: str, folder: int) -> Entry | None:
    try:
        found = os.stat(name, dir_fd=folder, follow_symlinks=False)
        target = os.readlink(name, dir_fd=folder) if stat.S_ISLNK(found.st_mode) else None
    except FileNotFoundError:
        return None  # gone since the folder was read
    return _described(path, found, target)


def _described(path: str, found: os.stat_result, target: str | None) -> Entry:
    kind: Literal["file", "directory", "symlink", "other"] = "other"
    if stat.S_ISREG(found.st_mode):
        kind = "file"
    elif stat.S_ISDIR(found.st_mode):
        kind = "directory"
    elif stat.S_ISLNK(found.st_mode):
        kind = "symlink"
    return Entry(posixpath.normpath(path), kind, found.st_size, stat.S_IMODE(found.st_mode), found.st_mtime, target)
