"""The service `filesystem.Filesystem`: folders and names of a sandbox's files, over Connect."""

import posixpath
import stat
from collections.abc import AsyncGenerator, Callable
from typing import Any

from triax.errors import SandboxError
from triax.sandbox.command import shown
from triax.sandbox.protocol import Entry
from triax.sandbox.server.connect import Call, Fault, Kind, Method
from triax.sandbox.server.messages import message
from triax.sandbox.server.processes import check_text
from triax.sandbox.server.watch import Change, Watcher

PREFIX = "/filesystem.Filesystem/"
LONGEST_PATH = 4096
DEEPEST_LIST = 32
MOST_ENTRIES = 20_000

_KINDS = {"file": "FILE_TYPE_FILE", "directory": "FILE_TYPE_DIRECTORY", "symlink": "FILE_TYPE_SYMLINK"}
_FORMATS = {"file": stat.S_IFREG, "directory": stat.S_IFDIR, "symlink": stat.S_IFLNK}


def methods() -> dict[str, Method]:
    """Return the methods of the service by path; each expects a `Session` as the call's target."""
    table: dict[str, tuple[Callable[..., Any], Kind]] = {
        "Stat": (_stat, "unary"),
        "MakeDir": (_make_directory, "unary"),
        "Move": (_move, "unary"),
        "ListDir": (_list, "unary"),
        "Remove": (_remove, "unary"),
        "WatchDir": (_watch, "server"),
        "CreateWatcher": (_create_watcher, "unary"),
        "GetWatcherEvents": (_watcher_events, "unary"),
        "RemoveWatcher": (_remove_watcher, "unary"),
    }
    return {
        PREFIX + name: Method(f"filesystem.{name}Request", f"filesystem.{name}Response", handler, kind)
        for name, (handler, kind) in table.items()
    }


def checked(path: str) -> str:
    """Return a path as a machine takes it; relative ones begin at the home of the sandbox's user, as `~` does.

    Args:
        path: As the client wrote it.

    Raises:
        Fault: The path is empty, too long or holds NUL.
    """
    check_text("a path", path)
    if not path:
        raise Fault("invalid_argument", "path must not be empty")
    if len(path.encode(errors="surrogatepass")) > LONGEST_PATH:
        raise Fault("invalid_argument", f"path must not be longer than {LONGEST_PATH} bytes; found {len(path)}")
    if path == "~" or path.startswith("~/"):
        path = path[2:] or "."
    return posixpath.normpath(path) if path.startswith("/") else path


def described(entry: Entry) -> Any:
    """Return a `filesystem.EntryInfo`; owner and group are left out, since no backend tells them."""
    kind = _KINDS.get(entry.kind, "FILE_TYPE_UNSPECIFIED")
    extra = {} if entry.target is None else {"symlink_target": shown(entry.target)}
    info = message(
        "filesystem.EntryInfo",
        name=shown(posixpath.basename(entry.path)),
        path=shown(entry.path),
        type=kind,
        size=entry.size,
        mode=entry.mode & 0o7777,
        permissions=stat.filemode(_FORMATS.get(entry.kind, 0) | entry.mode & 0o7777),
        is_symlink=entry.kind == "symlink",
        **extra,
    )
    info.modified_time.FromNanoseconds(int(entry.modified_s * 1e9))
    return info


async def _stat(request: Any, call: Call) -> Any:
    entry = await call.target.sandbox.stat(checked(request.path))
    return message("filesystem.StatResponse", entry=described(entry))


async def _make_directory(request: Any, call: Call) -> Any:
    sandbox, path = call.target.sandbox, checked(request.path)
    found = await lookup(sandbox, path)
    if found is not None:
        raise Fault("already_exists", f"{path} exists already; found a {found.kind}")
    await sandbox.make_directory(path)
    return message("filesystem.MakeDirResponse", entry=described(await sandbox.stat(path)))


async def lookup(sandbox: Any, path: str) -> Entry | None:
    """Return what lies at a path of a sandbox, None for nothing."""
    try:
        return await sandbox.stat(path)
    except SandboxError as problem:
        if problem.status == 404:
            return None
        raise


async def _move(request: Any, call: Call) -> Any:
    sandbox, target = call.target.sandbox, checked(request.destination)
    await sandbox.rename(checked(request.source), target)
    return message("filesystem.MoveResponse", entry=described(await sandbox.stat(target)))


async def _list(request: Any, call: Call) -> Any:
    path = checked(request.path)
    if request.depth > DEEPEST_LIST:
        raise Fault("invalid_argument", f"depth must not be above {DEEPEST_LIST}; found {request.depth}")
    top = await call.target.sandbox.stat(path)
    if top.kind == "file":
        raise Fault("invalid_argument", f"{path} is no folder; found a file")
    entries = await tree(call.target.sandbox, path, request.depth or 1)
    return message("filesystem.ListDirResponse", entries=[described(entry) for entry in entries])


async def tree(sandbox: Any, path: str, depth: int) -> list[Entry]:
    """Return what lies below a folder down to some depth, each folder before its contents.

    Raises:
        Fault: There is more than one answer should hold.
    """
    found: list[Entry] = []
    for entry in sorted(await sandbox.list(path), key=lambda entry: entry.path):
        found.append(entry)
        if entry.kind == "directory" and depth > 1:
            found += await tree(sandbox, entry.path, depth - 1)
        if len(found) > MOST_ENTRIES:
            raise Fault(
                "resource_exhausted", f"{path} holds more than {MOST_ENTRIES} entries; list its folders one by one"
            )
    return found


async def _remove(request: Any, call: Call) -> Any:
    await call.target.sandbox.remove(checked(request.path))
    return message("filesystem.RemoveResponse")


async def _open(request: Any, call: Call) -> Watcher:
    sandbox = call.target.sandbox
    top = await sandbox.stat(checked(request.path))
    if top.kind != "directory":
        raise Fault("invalid_argument", f"{top.path} is no folder and cannot be watched")
    depth = DEEPEST_LIST if request.recursive else 1
    return await Watcher.open(lambda: tree(sandbox, top.path, depth), top.path)


def _told(change: Change, with_entry: bool) -> Any:
    extra = {"entry": described(change.entry)} if with_entry and change.entry is not None else {}
    return message(
        "filesystem.FilesystemEvent", name=shown(change.name), type=f"EVENT_TYPE_{change.kind.upper()}", **extra
    )


async def _watch(request: Any, call: Call) -> AsyncGenerator[Any, None]:
    watcher = await _open(request, call)
    call.target.watchers[watcher.id] = watcher
    try:
        yield message("filesystem.WatchDirResponse", start=message("filesystem.WatchDirResponse.StartEvent"))
        async for change in watcher.follow(call.keepalive_s):
            if change is None:
                alive = message("filesystem.WatchDirResponse.KeepAlive")
                yield message("filesystem.WatchDirResponse", keepalive=alive)
            else:
                yield message("filesystem.WatchDirResponse", filesystem=_told(change, request.include_entry))
    finally:
        call.target.watchers.pop(watcher.id, None)
        await watcher.close()


async def _create_watcher(request: Any, call: Call) -> Any:
    watcher = await _open(request, call)
    watcher.with_entry = request.include_entry
    call.target.watchers[watcher.id] = watcher
    return message("filesystem.CreateWatcherResponse", watcher_id=watcher.id)


async def _watcher_events(request: Any, call: Call) -> Any:
    watcher = _watcher(request, call)
    events = [_told(change, watcher.with_entry) for change in watcher.take()]
    return message("filesystem.GetWatcherEventsResponse", events=events)


async def _remove_watcher(request: Any, call: Call) -> Any:
    watcher = _watcher(request, call)
    del call.target.watchers[watcher.id]
    await watcher.close()
    return message("filesystem.RemoveWatcherResponse")


def _watcher(request: Any, call: Call) -> Watcher:
    watcher = call.target.watchers.get(request.watcher_id)
    if watcher is None:
        raise Fault("not_found", f"watcher `{request.watcher_id[:64]}` is not known")
    return watcher
