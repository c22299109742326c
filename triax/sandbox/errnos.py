"""What an error number of Linux says of a file or a program: whose fault it is, and what to do."""

import errno
import os

from triax.errors import SandboxError

REFUSED: dict[int, tuple[int, str]] = {
    errno.ENOENT: (404, "there is no such file or folder"),
    errno.ENODATA: (404, "there is no such attribute"),
    errno.ENOTDIR: (400, "a part of it is no folder"),
    errno.EISDIR: (400, "it is a folder"),
    errno.EEXIST: (409, "it is there already"),
    errno.ENOTEMPTY: (409, "the folder there is not empty"),
    errno.EACCES: (403, "the sandbox does not allow it"),
    errno.EPERM: (403, "the sandbox does not allow it"),
    errno.EROFS: (403, "that part of the sandbox is read-only"),
    errno.ELOOP: (400, "its symlinks go round in circles or leave the sandbox"),
    errno.ENAMETOOLONG: (400, "its name is too long"),
    errno.EILSEQ: (400, "its name holds bytes that its disk cannot"),
    errno.ENOSPC: (507, "the disk of the sandbox is full; raise `disk_mib` or remove files"),
    errno.EDQUOT: (507, "the disk of the sandbox is full; raise `disk_mib` or remove files"),
    errno.EXDEV: (400, "source and destination lie on different disks"),
    errno.EBUSY: (409, "it is in use, as a mount is"),
    errno.ETXTBSY: (409, "a program runs from it; end that, or write a new file and move it there"),
    errno.EINVAL: (400, "it is no regular file, no such place in one, or a folder that would move into itself"),
    errno.EFBIG: (413, "it would become larger than a file may be"),
    errno.EOVERFLOW: (400, "it is larger than can be told"),
    errno.EMLINK: (409, "it has as many links or folders as it may have"),
    errno.ESPIPE: (400, "it is a pipe, which has no places"),
    errno.ENXIO: (400, "it is a pipe, socket or device with nobody behind it"),
    errno.ENODEV: (400, "it is a device with nobody behind it"),
    errno.ENOTBLK: (400, "it is no disk"),
    errno.ENOTTY: (400, "it is no file that takes this"),
    errno.ENOTSUP: (400, "its disk cannot do this"),
    errno.ENOEXEC: (400, "it is no program"),
    errno.E2BIG: (413, "it is more than Linux takes"),
    errno.ERANGE: (400, "it is more than fits"),
    errno.EDOM: (400, "it is a number out of range"),
    errno.EAGAIN: (409, "it is locked or not ready now; try again"),
    errno.EDEADLK: (409, "it is locked by who waits for it"),
    errno.ENOLCK: (409, "there are no more locks"),
    errno.EUSERS: (409, "it has as many users as it may have"),
}
"""What the caller, or a command of the sandbox, brought about: HTTP status, and the reason in words."""

FAULTS = frozenset(
    {
        errno.EIO, errno.EUCLEAN, errno.EREMOTEIO, errno.ESTALE, errno.ENOMEDIUM, errno.EMEDIUMTYPE, errno.EBADF,
        errno.EFAULT, errno.ENOSYS, errno.EMFILE, errno.ENFILE, errno.EINTR, errno.ESRCH, errno.ECHILD, errno.EPIPE,
        errno.ENOTCONN, errno.ESHUTDOWN, errno.ETIMEDOUT, errno.ECANCELED, errno.ERESTART, errno.ESTRPIPE,
        errno.EOWNERDEAD, errno.ENOTRECOVERABLE, errno.ERFKILL,
    }
)  # fmt: skip
"""What the host or the sandbox's own disk and kernel brought about; so does any number of networks, keys and the like,
which no file gives."""


def file_refusal(error: OSError, path: str) -> SandboxError:
    """Turn what a file system said into what a caller may read."""
    if error.errno in REFUSED:
        status, reason = REFUSED[error.errno]
        return SandboxError(f"file {path!r}: {reason}", "refused", status=status)
    if error.errno == errno.ENOMEM:
        return SandboxError(f"file {path!r}: the sandbox has no memory for it; raise `memory_mib`", "out_of_memory")
    return SandboxError(f"file {path!r}: {error.strerror or error}", "infrastructure")


def folder_refusal(code: int, folder: str | None) -> SandboxError:
    """Tell why a command cannot start in a folder."""
    told = file_refusal(OSError(code, os.strerror(code)), "")
    if told.kind == "infrastructure":
        return SandboxError(f"cwd {folder!r}: cannot start there, {os.strerror(code)}")
    reason = f"cannot start there, {os.strerror(code)}; make it first, or name another"
    return SandboxError(f"cwd {folder!r}: {reason}", "refused", status=told.status)


def start_refusal(code: int) -> SandboxError:
    """Tell why no process could be started, before it was to become a program."""
    words = os.strerror(code)
    if code in (errno.EAGAIN, errno.EMFILE, errno.ENFILE, errno.ENOSPC):
        words = f"exec: no process could be started, {words}; end some or raise `processes`"
        return SandboxError(words, "refused", status=429)
    if code == errno.ENOMEM:
        return SandboxError("exec: there is no memory for another process; raise `memory_mib`", "out_of_memory")
    return SandboxError(f"exec: no process could be started, {words}")


def exit_code(code: int) -> int:
    """Return the exit code by which shells tell that a program did not start."""
    return 127 if code in (errno.ENOENT, errno.ENOTDIR) else 126
