"""What may be run: commands, variables and paths, checked before any sandbox sees them."""

import posixpath
from collections.abc import Mapping, Sequence

from triax.errors import SandboxError
from triax.sandbox.protocol import ARGUMENT_LIMIT

COMMAND_LIMIT = 2**21 - 2**12
"""Bytes of all arguments and variables together: a quarter of an 8 MiB stack, less what the kernel adds."""

PATH_LIMIT = 4095
"""Bytes of a path (`PATH_MAX` without its end)."""


LAST_SIGNAL = 64
"""The highest signal of Linux (`SIGRTMAX`)."""


def words(argv: Sequence[str] | str) -> list[str]:
    """Return the arguments of a command; a text is handed to the shell.

    Raises:
        SandboxError: It is empty, or no Linux would start it; kind `refused`.
    """
    parts = ["/bin/sh", "-c", argv] if isinstance(argv, str) else list(argv)
    if not parts or not parts[0]:
        raise SandboxError("exec: there is no command; found nothing to run; name a program", "refused")
    _fits("exec: argument", parts)
    return parts


def variables(env: Mapping[str, str] | None) -> dict[str, str]:
    """Return variables that a process may have.

    Raises:
        SandboxError: A name is empty or has `=`, or a value no process may hold; kind `refused`.
    """
    pairs = dict(env or {})
    for name in pairs:
        if not name or "=" in name:
            raise SandboxError(f"env: {name!r} is no name of a variable; give one without `=`", "refused")
    _fits("env: variable", [f"{name}={value}" for name, value in pairs.items()])
    return pairs


def sane_path(path: str) -> str:
    """Return a path that a kernel takes.

    Raises:
        SandboxError: It is empty, has a NUL or is too long; kind `refused`.
    """
    if not path or "\0" in path:
        raise SandboxError(f"path {path[:80]!r}: a path has at least one byte and no NUL; correct it", "refused")
    if (size := len(_encoded("path", path))) > PATH_LIMIT:
        raise SandboxError(f"path: has {size} bytes; Linux takes at most {PATH_LIMIT}", "refused")
    return path


def sane_range(path: str, offset: int, limit: int | None) -> None:
    """Refuse a part of a file that no file has.

    Raises:
        SandboxError: It begins before the file or beyond what a file may hold; kind `refused`.
    """
    if not 0 <= offset < 2**63 or (limit is not None and limit < 0):
        raise SandboxError(f"file {path!r}: offset and limit are at least 0 and below 2**63", "refused")


def _encoded(what: str, text: str) -> bytes:
    try:
        return text.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError:
        raise SandboxError(f"{what}: {text[:80]!r} is no text; remove its lone surrogates", "refused") from None


def shown(path: str) -> str:
    r"""Return a path as text that every client can read; bytes that are no UTF-8 are written `\xNN`."""
    return path.encode("utf-8", "surrogateescape").decode(errors="backslashreplace")


def start_folder(cwd: str | None, own: str | None, home: str) -> str:
    """Return where a command starts: a relative folder begins where the sandbox's commands do, `~` is the home.

    Args:
        cwd: What is asked for this command.
        own: Where the sandbox's commands start; none for the home.
        home: Home of the user who runs it; empty for a path that is relative to that home.
    """
    above = _below(home, own or "~")
    if not cwd:
        return above
    return _below(home if cwd == "~" or cwd.startswith("~/") else above, cwd)


def _below(folder: str, path: str) -> str:
    if path == "~" or path.startswith("~/"):
        path = path[2:].lstrip("/")
    return posixpath.join(folder, path) if path else folder


def positive(name: str, value: float | int | None) -> None:
    """Refuse a number of seconds or things that is not above 0; none is fine.

    Raises:
        SandboxError: It is 0, negative or no number; kind `refused`.
    """
    if value is not None and not value > 0:
        raise SandboxError(f"{name}: must be above 0; found `{value}`; leave it out for no limit", "refused")


def signal_number(number: int) -> int:
    """Return the number of a signal.

    Raises:
        SandboxError: Linux has none with it; kind `refused`.
    """
    if not 1 <= number <= LAST_SIGNAL:
        raise SandboxError(f"signal: is 1 to {LAST_SIGNAL}; found `{number}`; 15 asks to end, 9 ends", "refused")
    return number


def window(rows: int, columns: int) -> tuple[int, int]:
    """Return the size of a terminal.

    Raises:
        SandboxError: No terminal can have it; kind `refused`.
    """
    if not (0 <= rows < 2**16 and 0 <= columns < 2**16):
        raise SandboxError(
            f"terminal: rows and columns are 0 to 65535; found `{rows}` and `{columns}`; give fewer", "refused"
        )
    return rows, columns


def _fits(what: str, parts: Sequence[str]) -> None:
    total = 0
    for place, part in enumerate(parts):
        if "\0" in part:
            raise SandboxError(f"{what} {place}: has a NUL, which ends text in Linux; remove it", "refused")
        size = len(_encoded(f"{what} {place}", part))
        if size > ARGUMENT_LIMIT:
            raise SandboxError(
                f"{what} {place}: has {size} bytes; Linux takes at most {ARGUMENT_LIMIT}; "
                "write it to a file or send it to standard input",
                "refused",
            )
        total += size + 9
    if total > COMMAND_LIMIT:
        raise SandboxError(
            f"{what}: all have {total} bytes; Linux takes at most {COMMAND_LIMIT}; use a file", "refused"
        )
